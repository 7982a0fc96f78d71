"""The command line: help, exit codes, errors without a traceback, and start-up that loads nothing heavy.

What a verb does is tested where it lives; here every verb is called as a user would.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowkv import __version__, doctor
from lowkv.cli import app, main
from lowkv.doctor import NEEDS, TARGETS, Finding, examine, missing_for, missing_for_targets, render, to_mapping
from lowkv.gpus import Gpu

VERBS = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
LOWKV = [sys.executable, "-m", "lowkv.cli"]


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, captured.out, captured.err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version", capsys=capsys) == (0, f"lowkv {__version__}\n", "")


def test_help_lists_every_verb_and_shows_each_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("--help", capsys=capsys)
    assert code == 0
    for verb in VERBS:
        assert re.search(rf"│ {verb} ", out), verb


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_teaches_by_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(verb, "--help", capsys=capsys)
    assert code == 0
    assert len(re.findall(rf"^ lowkv {verb}", out, re.MULTILINE)) >= 2


def test_the_readme_names_every_verb(root: Path) -> None:
    readme = (root / "README.md").read_text()
    assert [verb for verb in VERBS if f"lowkv {verb}" not in readme] == []


def test_help_loads_nothing_heavy() -> None:
    """Half a second is what a person feels; torch and numba take several."""
    heavy = ["torch", "numba", "numpy", "transformers", "locust", "tritonclient", "matplotlib", "yaml"]
    code = (
        "import sys\n"
        "from lowkv.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan"], "plan what?"),
        (["plan", "missing.yaml"], "cannot read recipe missing.yaml: No such file or directory; give the path"),
        (["build", "missing.yaml"], "cannot read recipe missing.yaml"),
        (["inspect", "missing"], "no engine at missing"),
        (["repo", "missing"], "missing"),
        (["repo", "missing", "--budget", "64M"], "did you mean MiB?"),
        (["repo", "missing", "--gpus", "all"], "--gpus is not a list of GPU ids"),
        (["serve", "missing"], "not a model repository of lowkv"),
        (["eval", "missing"], "missing"),
    ],
)
def test_what_a_user_can_mend_ends_with_2_and_no_traceback(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments, capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith("lowkv: ")
    assert says in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []  # nothing half-written


@pytest.mark.parametrize("arguments", [["plan", "--prompt", "many"], ["plan", "--nonsense"], ["nonsense"]])
def test_wrong_options_end_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(*arguments, capsys=capsys)
    assert (code, out) == (2, "")
    assert arguments[-1] in err or "--prompt" in err


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    """A recipe that is a pipe nobody writes to keeps the verb waiting until the signal comes."""
    pipe = tmp_path / "recipe.yaml"
    os.mkfifo(pipe)
    process = subprocess.Popen([*LOWKV, "plan", str(pipe)], stderr=subprocess.PIPE, text=True)
    # The open returns as soon as the verb has opened the other end; then it reads.
    with pipe.open("w"):
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_doctor_looks_at_everything_that_a_verb_needs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("doctor", "--json", capsys=capsys)
    assert code == 0
    report = json.loads(out)
    looked_at = {finding["name"] for finding in report["findings"]}
    assert {name for names in NEEDS.values() for name in names} <= looked_at
    assert set(NEEDS) | {"demo", "doctor"} == set(VERBS)
    # The tests' own environment has everything.
    assert report["missing"] == {verb: [] for verb in [*NEEDS, "demo"]}
    code, out, _ = run("doctor", capsys=capsys)
    assert code == 0
    assert "ready: plan, build" in out


def test_doctor_says_what_the_other_targets_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "visible_gpus", tuple)
    findings = examine()
    assert {name for names in TARGETS.values() for name in names} <= {finding.name for finding in findings}
    # The tests' own environment builds for TensorRT; running it takes a GPU.
    assert missing_for_targets(findings) == {
        "building for target tensorrt": (),
        "running target tensorrt": ("cuda",),
        "running target cuda": ("cuda",),
    }
    lines = [part for part in render(findings) if isinstance(part, str)]
    assert "ready: building for target tensorrt" in lines
    assert "not ready: running target cuda lacks a GPU and its driver" in lines
    assert to_mapping(findings)["missing_for_targets"]["running target cuda"] == ["cuda"]
    # None of it is in the way of the CPU's verbs.
    assert missing_for([finding for finding in findings if finding.name not in ("tensorrt", "onnx")])["build"] == ()


def test_doctor_sees_gpus_and_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "visible_gpus", lambda: (Gpu(0, "NVIDIA L4", 89, 24 * 2**30),))
    monkeypatch.setattr(doctor, "TENSORRT", {"tensorrt": ("no-such-package",)})
    findings = {finding.name: finding for finding in examine()}
    assert findings["cuda"] == Finding("cuda", "ok", "GPU 0: NVIDIA L4 (SM89)")
    assert findings["tensorrt"].state == "note"
    assert missing_for_targets(list(findings.values()))["running target tensorrt"] == ("tensorrt",)
    lines = [part for part in render(list(findings.values())) if isinstance(part, str)]
    assert r"not ready: building for target tensorrt lacks tensorrt; pip install 'lowkv\[tensorrt]'" in lines


def test_doctor_says_what_to_install() -> None:
    findings = [
        Finding("locust", "missing", "pip install 'lowkv[loadtest]'") if finding.name == "locust" else finding
        for finding in examine()
    ]
    assert missing_for(findings)["loadtest"] == ("locust",)
    assert missing_for(findings)["build"] == ()
    lines = [part for part in render(findings) if isinstance(part, str)]
    assert r"not ready: loadtest lacks locust; pip install 'lowkv\[loadtest]'" in lines
