"""The GPU check, rehearsed: the same code on the CPU, kernels interpreted, at toy sizes; and what it does on none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# What a plain CUDA and PyTorch image lacks. The check must run without.
ABSENT = (
    "numba",
    "psutil",
    "tokenizers",
    "yaml",
    "rich",
    "typer",
    "safetensors",
    "gguf",
    "cuda",
    "onnx",
    "tritonclient",
)
BLOCKED = f"""
import runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT}:
            raise ImportError(f"{{name}} is not installed")
sys.meta_path.insert(0, Absent())
sys.path.insert(0, sys.argv[1])
sys.argv = ["gpu_check.py", *sys.argv[2:]]
runpy.run_path(sys.path[0] + "/gpu_check.py", run_name="__main__")
"""


def gpu_check(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    environment |= {"PYTHONPATH": f"{root}:{root / 'plugins'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", BLOCKED, str(root / "benchmarks"), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_rehearsal_runs_every_section_and_writes_what_it_found(root: Path, tmp_path: Path) -> None:
    done = gpu_check(root, "--rehearse", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    sections = report["sections"]
    assert {name: section["status"] for name, section in sections.items()} == dict.fromkeys(
        ("kernels", "attention", "serving"), "passed"
    )
    assert all(row["ok"] and 0 < row["used"] <= 1 for row in sections["kernels"]["rows"])
    sides = [row["side"] for row in sections["attention"]["rows"]]
    assert sides == ["sdpa grouped", "sdpa enable_gqa", "fp16", "fp8", "kivi4", "k4v2", "kivi2"]
    sizes = {row["side"]: row["bytes"] for row in sections["attention"]["rows"]}
    assert sizes["fp16"] == sizes["sdpa grouped"] > sizes["fp8"] > sizes["kivi4"] > sizes["k4v2"] > sizes["kivi2"]
    for row in sections["serving"]["rows"]:
        assert row["resident"] == row["predicted"] == 2
        assert row["tokens_per_second"] > 0
    page = (tmp_path / "gpu_check.md").read_text()
    assert "a rehearsal, whose figures mean nothing" in page
    assert all(f"## {name}: passed" in page for name in sections)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu_check.json", "gpu_check.md"]


def test_a_wrong_kernel_fails_the_check(root: Path, tmp_path: Path) -> None:
    """The section's own verdict: with a tolerance that nothing meets, every case is reported, and the status is 1."""
    script = tmp_path / "benchmarks"
    script.mkdir()
    for path in (root / "benchmarks").glob("gpu*"):
        (script / path.name).symlink_to(path)
    (tmp_path / "sitecustomize.py").write_text(
        "import kvattention.gpu.goldens as goldens\n"
        "goldens.UNIT_ROUNDOFF = dict.fromkeys(goldens.UNIT_ROUNDOFF, 0.0)\n"
        "goldens.SUMS = 0.0\n"
    )
    environment = os.environ | {
        "PYTHONPATH": f"{tmp_path}:{root}:{root / 'plugins'}",
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",
    }
    command = [sys.executable, script / "gpu_check.py", "--rehearse", "--only", "kernels", "--out", tmp_path / "out"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    section = json.loads((tmp_path / "out" / "gpu_check.json").read_text())["sections"]["kernels"]
    assert section["status"] == "failed"
    assert len(section["failures"]) == len(section["rows"]) == 2
    assert "instead of" in section["failures"][0]


def test_without_a_gpu_it_says_so_and_exits_with_2(root: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = gpu_check(root, "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "no NVIDIA GPU that PyTorch" in done.stderr
    assert "--rehearse" in done.stderr
    assert not (tmp_path / "out").exists()


def test_unknown_sections_are_refused(root: Path) -> None:
    done = gpu_check(root, "--rehearse", "--only", "kernels,speed")
    assert done.returncode == 2
    assert "no section speed; there are kernels, attention, serving" in done.stderr
