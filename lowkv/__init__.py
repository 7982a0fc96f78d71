"""lowkv: serve more users per GPU by keeping the KV cache in FP8, 4 or 2 bits.

Importing this package is free: it loads nothing heavy and changes nothing. Each room is its own
subpackage; `docs/structure.md` says what each is for.
"""

__version__ = "0.1.0"
