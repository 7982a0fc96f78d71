"""Which TensorRT is used, and the differences between the two that there are.

`tensorrt` is NVIDIA's full TensorRT: it needs a GPU, and builds for that one. `tensorrt_rtx` is TensorRT for RTX: it
builds for any GPU on its list, on a machine without one. What an engine was built with is what runs it, to the last
digit of the version; `open_backend` is told which, `choose_backend` picks one to build with.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

from lowkv.errors import LowkvError
from lowkv.gpus import visible_gpus
from lowkv.recipe import SMS

PACKAGES = {"tensorrt": "tensorrt-cu13", "tensorrt_rtx": "tensorrt-rtx-cu13"}
"""Flavour (the module's name) -> the package that has it."""

_SUPPORTED = {"tensorrt": ((10, 13), 11), "tensorrt_rtx": ((1, 7), 1)}
"""Flavour -> (first version, last major version): Python plugins of the third kind on strongly typed networks."""

_log = logging.getLogger("lowkv.tensorrt")
# Without this, Python prints warnings of a program that has set up no logging onto its standard error.
_log.addHandler(logging.NullHandler())


@dataclass(frozen=True)
class Backend:
    """One installed TensorRT."""

    flavour: str
    version: str
    trt: Any = field(repr=False, compare=False)
    """The module itself."""

    def __str__(self) -> str:
        return f"{self.flavour} {self.version}"

    @property
    def messages(self) -> Any:
        """The logger to give to TensorRT, one for all: `clear()` it before a job, read `errors` after."""
        return _messages(self.trt)

    @property
    def buildable(self) -> tuple[int, ...]:
        """Compute capabilities, times ten, that it builds for on this machine."""
        if self.flavour == "tensorrt":
            return tuple(gpu.sm for gpu in visible_gpus()[:1])
        names = (re.fullmatch(r"SM([0-9]+)", name) for name in dir(self.trt.ComputeCapability))
        return tuple(sorted(int(name[1]) for name in names if name and int(name[1]) in SMS))

    def build_for(self, config: Any, sm: int) -> None:
        """Tells a builder's config which GPU the plan is for."""
        if self.flavour == "tensorrt_rtx":
            config.num_compute_capabilities = 1
            config.set_compute_capability(getattr(self.trt.ComputeCapability, f"SM{sm}"), 0)


def choose_backend(sm: int | None) -> tuple[Backend, int]:
    """What builds an engine here for that compute capability (None: this machine's GPU), and which that is.

    Raises `LowkvError`: nothing is installed, in a version that is not supported, or it cannot build for that GPU.
    """
    gpus = visible_gpus()
    here = gpus[0].sm if gpus else None
    wanted = here if sm is None else sm
    if wanted is None:
        raise LowkvError(
            "there is no GPU here to build for",
            got="tensorrt.sm not set, and no NVIDIA driver that answers",
            expected="tensorrt.sm: " + ", ".join(map(str, SMS)),
            fix="set tensorrt.sm in the recipe to the GPU that will run the engine",
        )
    if wanted not in SMS:
        raise LowkvError("this GPU generation is not supported", got=f"SM{wanted}", expected=_sms(SMS))
    flavours = _installed()
    full = "tensorrt" in flavours and (wanted == here or "tensorrt_rtx" not in flavours)
    backend = open_backend("tensorrt" if full else "tensorrt_rtx")
    if wanted not in backend.buildable:
        raise LowkvError(
            f"{backend} cannot build for this GPU on this machine",
            got=f"SM{wanted}",
            expected=_sms(backend.buildable) or "a GPU in this machine",
            fix=_how_to_build(wanted, backend.flavour),
        )
    return backend, wanted


def open_backend(flavour: str) -> Backend:
    """That TensorRT. Raises `LowkvError`: it is not installed, or in a version that is not supported."""
    from kvattention.tensorrt.libraries import import_tensorrt

    flavours = _installed()
    if flavour not in flavours:
        raise LowkvError(
            f"{flavour} is not installed",
            got=", ".join(flavours),
            expected=flavour,
            fix=f"pip install {PACKAGES.get(flavour, flavour)}",
        )
    module = import_tensorrt(flavour)
    return Backend(flavour, _check_version(flavour, module), module)


def _installed() -> tuple[str, ...]:
    from kvattention.tensorrt.libraries import installed

    flavours = installed()
    if not flavours:
        raise LowkvError(
            "TensorRT is not installed",
            got="neither tensorrt nor tensorrt_rtx",
            expected="one of them",
            fix="pip install 'lowkv[tensorrt]'",
        )
    return flavours


def _check_version(flavour: str, module: ModuleType) -> str:
    version = str(module.__version__)
    first, last = _SUPPORTED[flavour]
    numbers = tuple(int(number) for number in re.findall(r"[0-9]+", version)[:2])
    if not (first <= numbers and numbers[0] <= last):
        raise LowkvError(
            f"{flavour} has a version that is not supported",
            got=version,
            expected=f"{first[0]}.{first[1]} or later, before {last + 1}",
            fix=f"pip install '{PACKAGES[flavour]}>={first[0]}.{first[1]},<{last + 1}'",
        )
    return version


def _how_to_build(sm: int, flavour: str) -> str:
    if flavour == "tensorrt":
        return f"pip install {PACKAGES['tensorrt_rtx']}, which builds for other GPUs, or build where the GPU is"
    return f"build on a machine that has such a GPU, with pip install {PACKAGES['tensorrt']}; or choose another sm"


def _sms(sms: tuple[int, ...]) -> str:
    return ", ".join(f"SM{sm}" for sm in sms)


@cache
def _messages(trt: Any) -> Any:
    """One logger for the whole process: TensorRT keeps the first that it is given, and complains about a second."""
    severity = trt.ILogger.Severity
    levels = {
        severity.INTERNAL_ERROR: logging.ERROR,
        severity.ERROR: logging.ERROR,
        severity.WARNING: logging.WARNING,
        severity.INFO: logging.DEBUG,
    }

    class Messages(trt.ILogger):  # type: ignore[misc]
        """TensorRT's messages, in Python's log; errors are also kept, and `watch` sees the finest ones."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.watch: Callable[[str], None] | None = None

        def log(self, kind: Any, message: str) -> None:
            if kind in levels:
                _log.log(levels[kind], message)
            elif self.watch is not None:
                self.watch(message)
            if kind in (severity.INTERNAL_ERROR, severity.ERROR):
                self.errors.append(message)

        def clear(self) -> None:
            self.errors = []

    return Messages()
