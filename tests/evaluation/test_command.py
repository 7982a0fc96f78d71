"""`lowkv eval` as a user calls it: exit codes, files, resuming, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lowkv.cli import main
from lowkv.evaluation.subjects import Loader
from lowkv.recipe import QualityConfig

from .conftest import TEXT

TEXT_ONLY = ["--measures", "text", "--tokens", "256", "--window", "256"]
CACHE = {"residual_length": 32, "sink_tokens": 0}


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    path = tmp_path / "prose.txt"
    path.write_text(TEXT[0])
    return ["--text", str(path)]


def run(*arguments: str | Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["eval", *map(str, arguments)])
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, captured.out, captured.err


def test_a_table_and_a_file(
    build_tiny: Callable[..., Path],
    text: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = build_tiny({"format": "kivi2"} | CACHE)
    code, out, err = run(engine, *TEXT_ONLY, *text, capsys=capsys)
    path = Path("reports/eval") / f"{engine.name}.json"
    assert code == 0
    assert "kivi2 x2" in out
    assert f"written: {path}" in out
    assert "measuring text" in err
    plain = json.loads(path.read_text())
    assert plain["text"] == "prose.txt"
    assert plain["measures"]["text"]["window"] == 256
    assert set(plain["results"]) == {"fp16", engine.name}

    monkeypatch.setattr(Loader, "load", lambda *_: pytest.fail("a model was loaded"))
    code, again, err = run(engine, *TEXT_ONLY, *text, capsys=capsys)
    assert (code, again) == (0, out)
    assert "measuring" not in err
    with pytest.raises(pytest.fail.Exception):
        main(["eval", str(engine), *TEXT_ONLY, *text, "--fresh"])


def test_several_measures_and_their_settings(
    build_tiny: Callable[..., Path], text: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, path = build_tiny({"format": "kivi2"} | CACHE), tmp_path / "figures.json"
    settings = ["--measures", "passkey, text", "--lengths", "200", "--depths", "0.25,0.75", "--repeats", "1"]
    code, _, _ = run(engine, *settings, "--tokens", "256", "--window", "256", *text, "--out", path, capsys=capsys)
    assert code == 0
    plain = json.loads(path.read_text())
    assert plain["measures"]["passkey"] == {"lengths": [200], "depths": [0.25, 0.75], "repeats": 1}
    assert {"perplexity", "ratio", "kl", "top1", "passkey", "passkey_cells"} <= set(plain["results"]["fp16"])


def test_the_gate_needs_no_naming_of_measures(
    build_tiny: Callable[..., Path], text: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    measure = ["--tokens", "256", "--window", "256", *text, "--gate", "--out", str(path)]
    good = build_tiny({"format": "kivi4"} | CACHE, quality=QualityConfig(perplexity_ratio=100.0))
    code, out, _ = run(good, *measure, capsys=capsys)
    assert (code, "surely held" in out) == (0, True)
    assert list(json.loads(path.read_text())["measures"]) == ["text"]
    bad = build_tiny({"format": "kivi2"} | CACHE, quality=QualityConfig(kl=0.0, top1=0.0))
    code, out, _ = run(good, bad, *measure, capsys=capsys)
    assert code == 1
    assert "broken" in out
    judged = json.loads(path.read_text())["gate"]
    assert [(row["limit"], row["allowed"], row["broken"]) for row in judged[bad.name]] == [
        ("kl", 0.0, True),
        ("top1", 0.0, False),
    ]


def test_a_gate_without_limits_is_misuse(build_tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    engine = build_tiny({"format": "kivi2"} | CACHE)
    code, out, err = run(engine, "--gate", capsys=capsys)
    assert (code, out) == (2, "")
    assert f"the recipe of engine {engine.name} sets no limits" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--measures", "text,taste"], "no such measure: got 'taste', expected text, passkey, task, agreement"),
        (["--lengths", "512,long"], "--lengths is not a list of numbers: got '512,long'"),
        (["--depths", ""], "--depths is not a list of numbers"),
        (["--measures", "passkey", "--depths", "2"], "depth is out of range: got 2.0"),
        (["--baseline", "other"], "no engine has the baseline's name"),
    ],
)
def test_refusals(
    arguments: list[str], message: str, build_tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(build_tiny({"format": "kivi2"} | CACHE), *arguments, capsys=capsys)
    assert code == 2
    assert message in err


def test_two_engines_of_one_name(
    build_tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    engine = build_tiny({"format": "kivi2"} | CACHE)
    (tmp_path / engine.name).symlink_to(engine)
    code, _, err = run(engine, tmp_path / ".." / tmp_path.name / engine.name, capsys=capsys)
    assert code == 2
    assert "two engines have the same name" in err


def test_a_load_test_wants_figures_of_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], root: Path) -> None:
    path = tmp_path / "figures.json"
    path.write_text('{"measures": {"passkey": {}}, "results": {}}')
    with pytest.raises(SystemExit) as ended:
        main(["loadtest", str(root / "loadtest/workloads/quick.yaml"), str(tmp_path), "--quality", str(path)])
    assert ended.value.code == 2
    assert "holds no figures of text" in capsys.readouterr().err
