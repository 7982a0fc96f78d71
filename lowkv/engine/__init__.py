"""Engine directories: what `lowkv build` writes and the server loads. Verified before use, built whole or not
at all.
"""
