"""Files that are no Python modules of ours but go with them: inside the installed package, or in the checkout."""

from __future__ import annotations

from pathlib import Path

from lowkv.errors import LowkvError


def asset(name: str) -> Path:
    """The path of `name` (`loadtest/locustfile.py`): in `lowkv/_data` of an installed package, else in the checkout.

    Raises LowkvError when it is in neither.
    """
    package = Path(__file__).parent
    for folder in (package / "_data", package.parent):
        path = folder / name
        if path.exists():
            return path
    raise LowkvError(f"lowkv is not installed whole: {name} is missing", fix="install lowkv again")
