"""Importing TensorRT: in processes of their own, since what a process has loaded cannot be taken back.

That the parser finds plugins is in test_plugin.py, which builds engines.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from kvattention.tensorrt.libraries import import_tensorrt, installed

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_libs") is None, reason="the wheels of tensorrt_rtx are not installed"
)


def run(code: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


@needs_rtx
def test_the_links_are_gone_when_the_process_ends():
    done = run(
        "from kvattention.tensorrt import libraries; libraries.import_tensorrt('tensorrt_rtx');"
        "libraries.import_tensorrt('tensorrt_rtx'); print(libraries._loaded[0]._name)"
    )
    assert done.returncode == 0, done.stderr
    assert not os.path.lexists(done.stdout.strip())


@needs_rtx
def test_imported_by_other_means_first_is_refused():
    done = run(
        "import tensorrt_rtx; from kvattention.tensorrt.libraries import import_tensorrt as i; i('tensorrt_rtx')"
    )
    assert done.returncode != 0
    assert "already imported" in done.stderr


def test_unknown_and_missing_modules_are_named():
    with pytest.raises(ImportError, match="'tensorflow' is not known"):
        import_tensorrt("tensorflow")
    if "tensorrt" not in installed():
        with pytest.raises(ImportError, match="tensorrt is not installed"):
            import_tensorrt("tensorrt")
