"""What Triton loads. Everything it does is in `lowkv.triton.model`, which is tested and typed with the rest.

Triton starts this file with the Python that its stub finds first on PATH; `lowkv serve` sees to it that this is the
one that lowkv is installed in.
"""

import sys

try:
    from lowkv.triton.model import TritonPythonModel
except ImportError as error:
    raise ImportError(
        f"cannot import lowkv ({error}) with {sys.executable}; put the bin folder of the environment that has "
        "lowkv first on PATH, or start the server with `lowkv serve`"
    ) from error

__all__ = ["TritonPythonModel"]
