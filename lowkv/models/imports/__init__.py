"""Checkpoints that come quantized: which library wrote them, and what their tensors mean.

`detect` tells one from another by the config; each ecosystem has its module, which reads the config into a `Scheme`;
`layouts` knows how matrices lie in files, `kv_scales` how scales of keys and values are named. What is not known, or
cannot be read exactly, is refused by name: nothing here guesses, requantizes, or runs code of a checkpoint.
"""
