"""Finds a tritonserver on this machine, and lays out the one in nvidia-pytriton so that it runs.

Looked for in this order: the path given, `tritonserver` on PATH, /opt/tritonserver (NVIDIA's images), and the
server bundled in the `nvidia-pytriton` package, which is a complete Triton with the Python backend.

The bundled one cannot run where pip puts it: the Python backend wants the stub of one Python version beside it, and
the stub wants a libpython that it does not bring. So a small copy is laid out in the user's cache folder:

    ROOT/pytriton/tritonserver/bin/tritonserver
    ROOT/pytriton/tritonserver/backends/python/{libtriton_python.so, triton_python_backend_stub, ...}
    ROOT/nvidia_pytriton.libs/             links to the package's libraries, and to this Python's libpython

All three binaries look for their libraries relative to themselves ($ORIGIN, DT_RPATH), so that no LD_LIBRARY_PATH
is needed, which the model and every program it starts would inherit.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path

from lowkv.errors import LowkvError
from lowkv.models.sources import cache_folder

_INSTALLED = Path("/opt/tritonserver")
_BUNDLE = "nvidia-pytriton"
_STUB = "triton_python_backend_stub"


@dataclass(frozen=True)
class TritonDistribution:
    """A tritonserver that can be started.

    `backends` is None for a server that knows its own backend folder.
    """

    binary: Path
    backends: Path | None
    source: str
    """Where it was found, for the user."""

    @cached_property
    def flags(self) -> frozenset[str]:
        """The options that this server has, by its own `--help`: they differ between releases."""
        try:
            done = subprocess.run([self.binary, "--help"], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LowkvError(f"cannot run {self.binary}: {error}", fix="choose another with --tritonserver") from error
        text = done.stdout + done.stderr
        found = {line.split()[0] for line in text.splitlines() if line.startswith("  --")}
        if "--model-repository" not in found:
            raise LowkvError(
                f"{self.binary} does not run as a Triton server",
                got=text.strip()[-500:],
                expected="its --help",
                fix="choose another with --tritonserver",
            )
        return frozenset(found)


def find_tritonserver(path: Path | None = None) -> TritonDistribution:
    """The tritonserver to use: `path` (the binary, or an installation's folder) or the first one found.

    Raises:
        LowkvError: there is none, or the one named cannot be run.
    """
    if path is not None:
        return _at(path)
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return _at(Path(on_path))
    if (_INSTALLED / "bin" / "tritonserver").exists():
        return _at(_INSTALLED)
    return bundled_tritonserver()


def _at(path: Path) -> TritonDistribution:
    binary = path / "bin" / "tritonserver" if path.is_dir() else path
    if not os.access(binary, os.X_OK) or not binary.is_file():
        raise LowkvError(
            f"no tritonserver at {path}",
            expected="the program, or a folder with bin/tritonserver",
            fix="correct --tritonserver, or leave it out to use the one found on this machine",
        )
    backends = binary.resolve().parent.parent / "backends"
    return TritonDistribution(binary.absolute(), backends if backends.is_dir() else None, str(binary))


def bundled_tritonserver(cache: Path | None = None) -> TritonDistribution:
    """The server inside nvidia-pytriton, laid out under `cache` (the user's cache folder by default).

    Raises:
        LowkvError: the package is not installed, or does not fit this Python.
    """
    try:
        package = metadata.distribution(_BUNDLE)
    except metadata.PackageNotFoundError:
        raise LowkvError(
            "no tritonserver on this machine",
            expected=f"tritonserver on PATH, {_INSTALLED}, or the Python package {_BUNDLE}",
            fix="install it: pip install 'lowkv[triton]'",
        ) from None
    site = Path(str(package.locate_file("")))
    libpython = _libpython()
    key = hashlib.sha256(f"{site}\0{package.version}\0{libpython}".encode()).hexdigest()[:12]
    root = (cache or _cache_folder()) / f"tritonserver-{package.version}-{_python()}-{key}"
    if not root.exists():
        _lay_out(site, libpython, root)
    server = root / "pytriton" / "tritonserver"
    return TritonDistribution(
        server / "bin" / "tritonserver", server / "backends", f"{_BUNDLE} {package.version} ({root})"
    )


def _lay_out(site: Path, libpython: Path, root: Path) -> None:
    bundle = site / "pytriton" / "tritonserver"
    stub = bundle / "python_backend_stubs" / _python() / _STUB
    if not stub.exists():
        found = sorted(folder.name for folder in stub.parent.parent.glob("*"))
        raise LowkvError(
            f"{_BUNDLE} has no Python backend for this Python",
            got=_python(),
            expected=f"one of {', '.join(found)}" if found else "its python_backend_stubs folder",
            fix="use another Python, or an installed tritonserver",
        )
    root.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
    try:
        server, libraries = new / "pytriton" / "tritonserver", new / "nvidia_pytriton.libs"
        backend = server / "backends" / "python"
        for folder in (server / "bin", backend, libraries):
            folder.mkdir(parents=True)
        for source, folder in (
            (bundle / "bin" / "tritonserver", server / "bin"),
            (bundle / "backends" / "python" / "libtriton_python.so", backend),
            (bundle / "backends" / "python" / "triton_python_backend_utils.py", backend),
            (stub, backend),
        ):
            # pip may have dropped the executable bit.
            Path(shutil.copy2(source, folder)).chmod(0o755)
        for library in (site / "nvidia_pytriton.libs").iterdir():
            (libraries / library.name).symlink_to(library)
        (libraries / libpython.name).symlink_to(libpython)
        try:
            new.rename(root)
        except OSError:
            if not root.exists():  # else another process was faster
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _libpython() -> Path:
    """This interpreter's shared library, which the stub is linked against."""
    name = f"libpython{_python()}.so.1.0"
    folders = [sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib64"]
    for folder in folders:
        if folder and (Path(folder) / name).exists():
            return Path(folder) / name
    raise LowkvError(
        f"this Python has no shared library {name}, which Triton's Python backend needs",
        got=sys.version.split()[0],
        expected=f"{name} in {sysconfig.get_config_var('LIBDIR')}",
        fix=f"install it (Debian: apt-get install libpython{_python()}), or use a Python built with --enable-shared",
    )


def _cache_folder() -> Path:
    """The user's cache folder for lowkv; a temporary one where there is no writable home."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        pass
    else:
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.gettempdir()) / f"lowkv-{os.getuid()}"
