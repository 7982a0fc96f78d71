"""The sections of `gpu_check.py`; each writes rows into a `Report` as they come."""
