"""The search on a model whose most sensitive layer is known, and the command around it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowkv.cli import main
from lowkv.engine.build import build_engine
from lowkv.errors import LowkvError
from lowkv.evaluation.records import Records
from lowkv.kvcache import CachePlan
from lowkv.kvcache.formats import FORMATS as TABLE
from lowkv.models.checkpoint import open_checkpoint
from lowkv.recipe import load_recipe
from lowkv.tuning import Request, Tuning, side_by_side, tune
from lowkv.tuning.plans import space_of
from lowkv.tuning.report import verdicts
from lowkv.tuning.texts import Texts
from lowkv.tuning.trials import Loss

from .conftest import FORMATS, FRAGILE, LAYERS, TEXT

REQUEST = Request(4.0, FORMATS, tokens=512, held_out=512, window=256, texts={"birds.txt": TEXT})


def bits_of(checkpoint: Path, recipe: Path, names: list[str]) -> float:
    space = space_of(load_recipe(recipe), open_checkpoint(checkpoint).config, FORMATS)
    return space.mixed(names).effective_bits()


@pytest.fixture(scope="module")
def records() -> Records:
    """Measured once for all tests."""
    return Records()


@pytest.fixture
def tuned(recipe: Path, checkpoint: Path, records: Records) -> Tuning:
    """Room for one layer of four at a larger format, the others at the smallest."""
    bits = bits_of(checkpoint, recipe, ["k4v2plus", *["kivi2plus"] * (LAYERS - 1)])
    return tune(load_recipe(recipe), replace(REQUEST, bits=bits), records=records)


def test_the_fragile_layer_gets_the_bits(tuned: Tuning) -> None:
    assert tuned.tuned.assignment == ("kivi2plus", "kivi2plus", "k4v2plus", "kivi2plus")
    assert tuned.tuned.bits == pytest.approx(tuned.request.bits)
    costs = [tuned.sensitivity.cost(layer, "kivi2plus") for layer in range(LAYERS)]
    assert np.argmax(costs) == FRAGILE
    assert costs[FRAGILE] > 3 * sorted(costs)[-2]


def test_rivals_are_of_the_same_size_and_of_one_format(tuned: Tuning) -> None:
    rivals = {rival.name: rival for rival in tuned.rivals}
    assert rivals["interleaved"].bits == tuned.tuned.bits
    assert sorted(rivals["interleaved"].assignment) == sorted(tuned.tuned.assignment)
    below, above = rivals["uniform kivi2plus"], rivals["uniform k4v2plus"]
    assert below.bits < tuned.tuned.bits < above.bits
    assert tuned.gain(below).high < 0
    assert tuned.gain(rivals["interleaved"]).high < 0


def test_layers_add_up_to_the_plan(tuned: Tuning) -> None:
    assert tuned.tuned.predicted == pytest.approx(tuned.tuned.calibration.divergence.value, rel=0.5)


def test_k_and_v_apart(tuned: Tuning) -> None:
    steps = tuned.sensitivity.steps
    assert [(step.part, step.rich, step.poor) for step in steps] == [
        ("K", "k4v2plus", "kivi2plus"),
        ("V", "kivi4", "k4v2plus"),
    ]
    cost, share = tuned.sensitivity.cost, tuned.sensitivity.share
    for layer in range(LAYERS):
        whole = cost(layer, "kivi2plus") - cost(layer, "kivi4")
        assert sum(share(layer, step).value for step in steps) == pytest.approx(whole, abs=1e-9)


def test_no_text_is_both_chosen_and_judged_by(checkpoint: Path) -> None:
    from lowkv.calibration.routes import load_tokenizer

    tokenizer = load_tokenizer(open_checkpoint(checkpoint))
    texts = [Texts(3, 5, 128, seed, {"birds": TEXT}).cut(tokenizer) for seed in (0, 0, 1)]
    for calibration, held_out in texts:
        assert (calibration.ids.shape, held_out.ids.shape) == ((3, 128), (5, 128))
        assert not {tuple(row) for row in calibration.ids} & {tuple(row) for row in held_out.ids}
    assert texts[0][0].sha256 == texts[1][0].sha256 != texts[2][0].sha256


def test_a_plan_that_is_not_better_is_not_called_so(tuned: Tuning) -> None:
    same = replace(tuned.rivals[0], held_out=tuned.tuned.held_out)
    noisy = np.where(np.arange(tuned.tuned.held_out.kl.size) % 2, 1.0, -1.0).reshape(tuned.tuned.held_out.kl.shape)
    unsure = replace(same, held_out=replace(same.held_out, kl=same.held_out.kl + noisy))
    better = replace(same, held_out=Loss(*(array / 2 for array in vars(same.held_out).values())))
    better = replace(better, held_out=replace(better.held_out, sizes=same.held_out.sizes))
    said = verdicts(replace(tuned, rivals=(same, unsure, better)))
    assert "cannot be told from interleaved" in said[0]
    assert "the simpler plan is as good" in said[1]
    assert "100% more than interleaved" in said[2]


def run(recipe: Path, text: Path, *options: str) -> int:
    window = ["--tokens", "512", "--held-out", "512", "--window", "256", "--formats", ",".join(FORMATS)]
    with pytest.raises(SystemExit) as ended:
        main(["tune", str(recipe), "--text", str(text), *window, *options])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_recipe_reads_back_and_builds_to_what_was_promised(
    recipe: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = recipe.read_text().replace("folder:", f"folder:{'../' * 20}", 1)
    recipe.write_text(plain)  # relative to the recipe, and must be rewritten
    out = tmp_path / "below" / "tuned.yaml"
    assert run(recipe, text, "--bits", "4.6", "--out", str(out)) == 0
    printed = capsys.readouterr()
    assert f"next: lowkv build {out}" in printed.out
    assert "measuring 4 layers in 3 formats" in printed.err

    found, given = load_recipe(out), load_recipe(recipe)
    assert found.name == "tuned"
    assert found.model.path.resolve() == given.model.path.resolve()
    untouched = replace(found.kv_cache, format=given.kv_cache.format, overrides={})
    assert (untouched, found.serving, found.weights) == (given.kv_cache, given.serving, given.weights)

    figures = json.loads(Path("reports/tune/tuned.json").read_text())
    engine = build_engine(found, tmp_path / "engine")
    tuned = figures["plans"][0]
    assert [layer.format for layer in engine.cache_plan.layers] == tuned["formats"]
    assert engine.cache_plan.effective_bits() == tuned["bits"] <= 4.6
    assert f"{tuned['bits']:.2f} bits per K or V value" in out.read_text()
    assert f"lowkv tune {recipe} --bits 4.6" in out.read_text()

    # Again: nothing is measured, and the same is written.
    before = out.read_text()
    monkeypatch.setattr(side_by_side, "compare", lambda *_: pytest.fail("something was measured"))
    assert run(recipe, text, "--bits", "4.6", "--out", str(out)) == 0
    assert out.read_text() == before
    assert capsys.readouterr().out == printed.out


def test_a_stopped_search_goes_on(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, calls = tmp_path / "records.jsonl", 0
    compare = side_by_side.compare

    def stopped(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return compare(*arguments)

    monkeypatch.setattr("lowkv.tuning.trials.SIDE_BY_SIDE", 4)
    monkeypatch.setattr(side_by_side, "compare", stopped)
    request = replace(REQUEST, tokens=256, held_out=256, bits=5)
    with pytest.raises(KeyboardInterrupt):
        tune(load_recipe(recipe), request, records=Records(path))
    kept = len(path.read_text().splitlines())
    assert kept == 2 * 4
    tune(load_recipe(recipe), request, records=Records(path))
    keys = [json.loads(line)["key"] for line in path.read_text().splitlines()]
    assert len(keys) == len(set(keys)) > kept


def test_skipped_layers_stay_as_they_are(recipe: Path, checkpoint: Path) -> None:
    loaded = load_recipe(recipe)
    loaded = replace(loaded, kv_cache=replace(loaded.kv_cache, skip_layers=("first:1",)))
    space = space_of(loaded, open_checkpoint(checkpoint).config, FORMATS)
    assert space.layers == (1, 2, 3)
    plan = space.mixed(["kivi2plus", "kivi4", "kivi4"])
    assert [layer.format for layer in plan.layers] == ["fp16", "kivi2plus", "kivi4", "kivi4"]
    assert space.budget(plan.effective_bits()) == sum(plan.cold_records[layer].bytes for layer in space.layers)
    alone = [layer.format for layer in space.alone(2, "kivi2plus").layers]
    assert alone == ["fp16", "fp16", "kivi2plus", "fp16"]


def test_candidates_are_one_for_each_pair_of_bits(recipe: Path, checkpoint: Path) -> None:
    config = open_checkpoint(checkpoint).config
    formats = space_of(load_recipe(recipe), config, None).formats
    pairs = [(TABLE[name].k.bits, TABLE[name].v.bits) for name in formats]
    assert len(set(pairs)) == len(pairs)
    assert set(FORMATS) <= set(formats)
    odd = space_of(load_recipe(recipe), replace(config, head_dim=48), None).formats
    assert not any(TABLE[name].rotate_values for name in odd)


@pytest.mark.parametrize(
    ("cache", "request_", "message"),
    [
        ({}, {"bits": 1.5}, r"so small.*at least 3\.50"),
        ({}, {"bits": float("nan")}, r"so small.*got '--bits nan'"),
        ({}, {"bits": 9.0}, r"every layer can have the largest.*at most 5\.50"),
        ({"overrides": {1: "kivi4"}}, {}, "has a plan already"),
        ({"skip_layers": ("0-3",)}, {}, "names every layer"),
        ({}, {"formats": ("kivi4",)}, "nothing to choose from"),
        ({}, {"formats": ("kivi4", "kivi3")}, "unknown KV format"),
        ({}, {"formats": ("kivi4", "fp8")}, "fp8 is not searched"),
        ({}, {"formats": ("kivi4", "bf16")}, "bf16 is not searched"),
        ({}, {"window": 64}, "nothing in it is stored in kivi4"),
        ({}, {"window": 4096}, "longer than the model's positions"),
        ({}, {"tokens": 100_000}, "not enough text"),
    ],
)
def test_refusals(recipe: Path, cache: dict[str, Any], request_: dict[str, Any], message: str) -> None:
    loaded = load_recipe(recipe)
    loaded = replace(loaded, kv_cache=replace(loaded.kv_cache, **cache))
    with pytest.raises(LowkvError, match=message):
        tune(loaded, replace(REQUEST, **({"bits": 5.0} | request_)))


@pytest.mark.parametrize("name", ["given.yaml", "mine.yaml", "mine.txt"])
def test_files_of_others_are_not_written_over(
    recipe: Path, text: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = recipe.parent / name
    if not path.exists():
        path.write_text("mine: it is\n")
    before = path.read_text()
    assert run(recipe, text, "--bits", "5", "--out", str(path)) == 2
    assert "lowkv:" in capsys.readouterr().err
    assert path.read_text() == before


def test_a_format_of_the_models_precision_costs_nothing(recipe: Path, records: Records) -> None:
    request = replace(REQUEST, bits=8.0, formats=(*FORMATS, "fp16"))
    found = tune(load_recipe(recipe), request, records=records)
    assert found.tuned.assignment[FRAGILE] == "fp16"
    assert found.settings.format != "fp16"
    assert found.sensitivity.cost(FRAGILE, "fp16") == 0
    assert isinstance(found.tuned.plan, CachePlan)
