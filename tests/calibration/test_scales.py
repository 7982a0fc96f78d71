"""Scales as engines record them: exact on file, and refused by layer and part when they are not what they should be."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowkv.calibration.scales import KVScales, scaled_parts
from lowkv.errors import LowkvError
from lowkv.kvcache.plan import CachePlan

PlanOf = Callable[..., CachePlan]
ScalesOf = Callable[..., KVScales]


def as_read(scales: KVScales, plan: CachePlan) -> dict[str, Any]:
    """The mapping as it comes out of a JSON file."""
    plain: dict[str, Any] = json.loads(json.dumps(scales.to_mapping(plan)))
    return plain


@pytest.mark.parametrize("granularity", ["tensor", "head", "channel"])
def test_scales_come_back_from_a_file_as_they_were(plan_of: PlanOf, scales_of: ScalesOf, granularity: str) -> None:
    plan, scales = plan_of("fp8", "fp8"), scales_of(2, granularity, details={"text": "a text", "largest_k": [1.5, 2.5]})
    read = KVScales.from_mapping(as_read(scales, plan), plan)
    for ours, theirs in zip(scales.layers, read.layers, strict=True):
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_array_equal(ours[1], theirs[1])
    for name in ("source", "granularity", "estimator", "details"):
        assert getattr(read, name) == getattr(scales, name)


@pytest.mark.parametrize(("granularity", "k", "v"), [("tensor", 1, 1), ("head", 2, 2), ("channel", 32, 2)])
def test_each_number_is_written_once(plan_of: PlanOf, scales_of: ScalesOf, granularity: str, k: int, v: int) -> None:
    layer = scales_of(1, granularity).to_mapping(plan_of("fp8"))["layers"][0]
    assert (np.size(layer["k"]), np.size(layer["v"])) == (k, v)


@given(bits=st.integers(1, 0x7F7FFFFF))
def test_every_float_is_written_exactly(plan_of: PlanOf, bits: int) -> None:
    value = np.array([bits, bits], np.uint32).view(np.float32)
    plan = plan_of("fp8")
    scales = KVScales("random", "tensor", "amax", ((np.full((2, 16), value[0], np.float32), value),))
    read = KVScales.from_mapping(as_read(scales, plan), plan)
    assert read.layers[0][0][0, 0] == value[0]
    assert read.layers[0][1][0] == value[0]


def test_only_parts_that_take_scales_are_kept(plan_of: PlanOf, scales_of: ScalesOf) -> None:
    plan = plan_of("fp16", "fp8", "kivi2")
    assert [(layer, part, codec.name) for layer, part, codec in scaled_parts(plan)] == [
        (1, "k", "e4m3"),
        (1, "v", "e4m3"),
    ]
    plain = as_read(scales_of(3), plan)
    assert [layer == {"k": None, "v": None} for layer in plain["layers"]] == [True, False, True]
    read = KVScales.from_mapping(plain, plan)
    assert np.all(read.layers[0][0] == 1)
    assert not np.any(read.layers[1][0] == 1)


def test_unit_scales_are_ones(plan_of: PlanOf) -> None:
    plan = plan_of("fp8", "fp8")
    scales = KVScales.unit(2, plan.kv_heads, plan.head_dim)
    scales.check(plan)
    assert scales.source == "none"
    assert all(np.all(part == 1) for pair in scales.layers for part in pair)


def test_scales_that_a_granularity_cannot_hold_are_not_written(plan_of: PlanOf, scales_of: ScalesOf) -> None:
    with pytest.raises(LowkvError, match="finer than granularity head"):
        replace(scales_of(1, "channel"), granularity="head").to_mapping(plan_of("fp8"))


BAD_VALUES = [0.0, -1.0, float("nan"), float("inf"), 1e300, 1e-300, None]


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("value", BAD_VALUES)
def test_a_value_that_is_no_scale_is_refused(plan_of: PlanOf, scales_of: ScalesOf, part: str, value: Any) -> None:
    plan = plan_of("fp8", "fp8")
    plain = as_read(scales_of(2), plan)
    plain["layers"][1][part][1] = value
    with pytest.raises(LowkvError, match=f"the scale of {part.upper()} of layer 1 is not usable: got .*positive"):
        KVScales.from_mapping(plain, plan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layers: layers.pop(), r"not complete: got '1 layers"),
        (lambda layers: layers[1].pop("k"), "no scale for K of layer 1"),
        (lambda layers: layers[1].update(v=None), "no scale for V of layer 1"),
        (lambda layers: layers.__setitem__(0, None), "no scale for K of layer 0"),
        (lambda layers: layers[0].update(k=[1.0]), r"scales of K of layer 0 have the wrong shape: got \[1\]"),
        (lambda layers: layers[0].update(v=[1.0, 2.0, 3.0]), "scales of V of layer 0 have the wrong shape"),
        (lambda layers: layers[0].update(v=1.0), "scales of V of layer 0 have the wrong shape"),
        (lambda layers: layers[0].update(k=[[1.0], [1.0, 2.0]]), "scales of K of layer 0 have the wrong shape"),
        (lambda layers: layers[0].update(v="none"), "scales of V of layer 0 have the wrong shape"),
        (lambda layers: layers[0].update(v=[{}, 1.0]), "scales of V of layer 0 have the wrong shape"),
    ],
)
def test_damage_is_refused_by_layer_and_part(
    plan_of: PlanOf, scales_of: ScalesOf, change: Callable[[list[Any]], object], message: str
) -> None:
    plan = plan_of("fp8", "fp8")
    plain = as_read(scales_of(2), plan)
    change(plain["layers"])
    with pytest.raises(LowkvError, match=message):
        KVScales.from_mapping(plain, plan)


@pytest.mark.parametrize("key", ["source", "granularity", "layers"])
def test_a_record_that_is_not_whole_is_refused(plan_of: PlanOf, scales_of: ScalesOf, key: str) -> None:
    plan = plan_of("fp8", "fp8")
    plain = as_read(scales_of(2), plan)
    del plain[key]
    with pytest.raises(LowkvError, match=r"not complete|unknown source"):
        KVScales.from_mapping(plain, plan)


@pytest.mark.parametrize("value", BAD_VALUES[:4])
@pytest.mark.parametrize(("part", "where"), [(0, (1, 3)), (1, (1,))])
def test_scales_made_in_python_are_checked_too(
    scales_of: ScalesOf, part: int, where: tuple[int, ...], value: float
) -> None:
    layers = list(scales_of(2, "channel").layers)
    layers[1][part][where] = value
    with pytest.raises(LowkvError, match=f"the scale of {'KV'[part]} of layer 1 is not usable"):
        KVScales("random", "channel", "amax", tuple(layers))


def test_shapes_made_in_python_are_checked_too(plan_of: PlanOf, scales_of: ScalesOf) -> None:
    k, v = scales_of(1).layers[0]
    for pair, message in (
        ((k, k), r"V of layer 0 have the wrong shape: got 'float32 \[2, 16\]', expected float32 \[2\]"),
        ((v, v), "K of layer 0 have the wrong shape"),
        ((k.astype(np.float64), v), "K of layer 0 have the wrong shape: got 'float64"),
    ):
        with pytest.raises(LowkvError, match=message):
            KVScales("random", "channel", "amax", (pair,))
    narrow = KVScales("random", "channel", "amax", ((np.ones((2, 8), np.float32), v),))
    with pytest.raises(LowkvError, match=r"K of layer 0 have the wrong shape: got \[2, 8\], expected \[2, 16\]"):
        narrow.check(plan_of("fp8"))
    with pytest.raises(LowkvError, match="of another model: got '1 layers', expected 2"):
        scales_of(1).check(plan_of("fp8", "fp8"))


def test_a_layer_that_the_source_has_no_scale_for_is_refused_only_if_it_needs_one(
    plan_of: PlanOf, scales_of: ScalesOf
) -> None:
    scales = scales_of(2, missing=frozenset({(1, "v")}))
    scales.check(plan_of("fp8", "fp16"))
    with pytest.raises(LowkvError, match=r"layer 1 has no scale for V.*fp8 needs it.*skip_layers"):
        scales.check(plan_of("fp8", "fp8"))
