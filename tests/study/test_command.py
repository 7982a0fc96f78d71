"""`lowkv study` as a user calls it, on a tiny model: files, words, resuming, and what is refused."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lowkv.cli import main
from lowkv.models.checkpoint import open_checkpoint
from lowkv.recipe import ModelSource, Recipe
from lowkv.study.bench import Bench
from lowkv.study.configurations import every, grouped
from lowkv.study.measuring import SHORTEST

TEXT = "It is a truth universally acknowledged, that a whale in possession of a good ship must be happy. " * 8


@pytest.fixture(scope="module")
def arguments(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A recipe over the tiny model and a text for it."""
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "prose.txt").write_text(TEXT)
    (folder / "tiny.yaml").write_text(
        f"model: folder:{tiny_checkpoint}\n"
        "kv_cache: {format: fp8, scales: {source: dataset, text: prose.txt, tokens: 256}}\n"
        "serving: {max_model_len: 1024}\n"
    )
    return [str(folder / "tiny.yaml"), "--text", str(folder / "prose.txt"), "--tokens", str(SHORTEST)]


def test_a_study_from_beginning_to_end(
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    interruptible: None,
) -> None:
    def study(*further: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["study", *arguments, *further])
        assert isinstance(ended.value.code, int)
        return ended.value.code

    monkeypatch.chdir(tmp_path)
    simulate: Callable[..., object] = Bench.simulate

    def until_the_third(self: Bench, one: object) -> object:
        if one == grouped(2, 2, "token", "token"):
            raise KeyboardInterrupt
        return simulate(self, one)

    with monkeypatch.context() as stopping:
        stopping.setattr(Bench, "simulate", until_the_third)
        assert study() == 130
    folder = Path("reports/study-tiny")
    kept = (folder / "records.jsonl").read_text()
    assert kept.count("\n") == 6  # statistics, the baseline both ways, two pairs of axes, of which one is served
    assert not (folder / "study.html").exists()

    assert study() == 0
    out = capsys.readouterr().out
    report = json.loads((folder / "study.json").read_text())
    everything = report["configurations"]
    assert set(everything) == {one.name for one in every(_Geometry(), "float16")}
    assert (folder / "records.jsonl").read_text().startswith(kept)
    for entry in everything.values():
        if entry["served"] is not None:  # one code in a few thousand may be another: a sum was rounded otherwise
            assert entry["served"]["ratio"]["value"] == pytest.approx(entry["simulated"]["ratio"]["value"], abs=2e-4)
    by_rows = list(csv.DictReader((folder / "study.csv").read_text().splitlines()))
    assert [row["name"] for row in by_rows] == list(everything)
    page = (folder / "study.html").read_text()
    assert page.count("<svg") == 6
    assert "http" not in page.replace("http://www.w3.org/", "")
    for sentence in [*report["choice"]["words"], *report["remarks"]]:
        assert sentence in out
    assert report["choice"]["kv_cache"] in out

    monkeypatch.setattr("lowkv.study.bench.load_decoder", lambda *_: pytest.fail("a model was loaded"))
    assert study() == 0
    assert capsys.readouterr().out == out
    with pytest.raises(pytest.fail.Exception):
        main(["study", *arguments, "--fresh"])


class _Geometry:
    layers, kv_heads, head_dim, windows, softmax_scale = 2, 2, 16, (None, None), 0.25


@pytest.mark.parametrize(
    ("further", "message"),
    [
        (["--tokens", "100"], "the text is too short to show anything: got 100, expected 256 or more"),
        (["--tokens", "4096"], "longer than the model's positions: got 4096, expected at most 2048"),
        (["--tokens", "2000"], "there is not enough text"),
        (["--limit", "0.9"], "the limit is less than the baseline itself"),
    ],
)
def test_refusals(
    arguments: list[str], further: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["study", *arguments, *further, "--out", str(tmp_path)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_file_in_the_folders_place(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(SystemExit):
        main(["study", *arguments, "--out", str(tmp_path / "taken")])
    assert "is not a folder" in capsys.readouterr().err


def test_sliding_windows_are_the_kernels_windows(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Both ways see the same keys: figures that differ from those without a window, and not from each other."""
    shutil.copytree(tiny_checkpoint, tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 48}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    found = []
    for source in (tiny_checkpoint, tmp_path / "model"):
        recipe = Recipe("tiny", ModelSource("folder", str(source)))
        ids = np.random.default_rng(0).integers(0, 256, SHORTEST)
        bench = Bench(recipe, open_checkpoint(source), ids, ids, (), lambda work: None)
        chosen = grouped(4, 4, residual_length=32)
        simulated, served = bench.simulate(chosen), bench.serve(chosen)
        assert served["nll"] == pytest.approx(simulated["nll"], rel=1e-5)
        found.append(simulated["nll"])
    assert found[1] != pytest.approx(found[0], rel=1e-5)
