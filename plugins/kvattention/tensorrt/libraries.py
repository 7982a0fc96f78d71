"""Importing TensorRT so that its ONNX parser finds plugins; nothing about engines or plugins themselves.

Two modules offer the same API: `tensorrt` (NVIDIA's full TensorRT) and `tensorrt_rtx` (TensorRT for RTX, whose wheels
build engines on a machine without a GPU). The second needs help. When its parser meets an operator that is a plugin,
libtensorrt_rtx.so.1 calls ``dlopen("libtensorrt_rtx.so")``; the wheel has no file of that name, and the process ends
with "terminate called without an active exception".

What works, seen with tensorrt_rtx 1.7.1 and glibc:

* A folder of links, used here. The library carries ``RPATH $ORIGIN``: it searches the folder that it was *loaded
  from*, and for a library loaded through a link that is the link's folder. So a temporary folder gets links under
  both names, and the libraries are loaded through it before the module is imported, which then finds them loaded.
  No environment variable, no second process, nothing written into site-packages.
* ``LD_LIBRARY_PATH`` on a folder with such links, set before the process starts. Not needed.

What does not: setting ``LD_LIBRARY_PATH`` from within the process (the loader has read it), loading
libtensorrt_rtx.so.1 with RTLD_GLOBAL, or doing any of it after ``import tensorrt_rtx``.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

MODULES = ("tensorrt", "tensorrt_rtx")
"""Module names, in order of preference."""

_RTX_LIBRARIES = ("libtensorrt_rtx", "libtensorrt_onnxparser_rtx")
_loaded: list[ctypes.CDLL] = []


def installed() -> tuple[str, ...]:
    """Which of MODULES are installed; imports none of them."""
    return tuple(name for name in MODULES if importlib.util.find_spec(name) is not None)


def import_tensorrt(name: str | None = None) -> ModuleType:
    """The module called ``name`` (None: the first one installed), with its libraries in reach of its ONNX parser.

    Always import TensorRT through this function, first. Raises ImportError when the module is not installed, or
    when tensorrt_rtx was imported by other means before.
    """
    found = installed()
    if name is None and not found:
        raise ImportError(f"TensorRT is not installed; got none of {', '.join(MODULES)}; pip install tensorrt-rtx-cu13")
    chosen = name or found[0]
    if chosen not in MODULES:
        raise ImportError(f"TensorRT module {chosen!r} is not known; use one of {', '.join(MODULES)}")
    if chosen not in found:
        raise ImportError(f"TensorRT module {chosen} is not installed; installed: {', '.join(found) or 'none'}")
    if chosen == "tensorrt_rtx":
        _load_rtx()
    return importlib.import_module(chosen)


def _load_rtx() -> None:
    """Load tensorrt_rtx's libraries through a folder of links; once per process."""
    folder = _rtx_folder()
    if _loaded or folder is None:
        return
    if "tensorrt_rtx" in sys.modules:
        if _unversioned_in_reach(folder):
            return
        raise ImportError(
            "tensorrt_rtx is already imported, and its ONNX parser would end this process at the first plugin; "
            "import it with kvattention.tensorrt.libraries.import_tensorrt instead"
        )
    links = Path(tempfile.mkdtemp(prefix="tensorrt-rtx-"))
    atexit.register(shutil.rmtree, links, ignore_errors=True)
    for library in _RTX_LIBRARIES:
        versioned = sorted(folder.glob(f"{library}.so.*"))[0]
        for link in (versioned.name, f"{library}.so"):
            (links / link).symlink_to(versioned)
        _loaded.append(ctypes.CDLL(str(links / versioned.name)))


def _rtx_folder() -> Path | None:
    """Where the wheel keeps its libraries; None when TensorRT was installed by other means (from an archive)."""
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0])
    return folder if any(folder.glob("libtensorrt_rtx.so.*")) else None


def _unversioned_in_reach(folder: Path) -> bool:
    """Whether the loader finds libtensorrt_rtx.so by itself: someone has made the link already."""
    searched = [folder, *map(Path, filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")))]
    return any((place / "libtensorrt_rtx.so").exists() for place in searched)
