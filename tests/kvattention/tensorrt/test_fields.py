"""The plugin's fields: what is refused, and that they are the layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvattention.cases import CASES
from kvattention.layout import LayerSpec
from kvattention.tensorrt import FIELDS, PluginFields


def fields(**changes: Any) -> PluginFields:
    layer = CASES["plan-windows"].layers()[3]
    return PluginFields.from_mapping(PluginFields.from_layer(3, layer, heads=4).to_mapping() | changes)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_layer_comes_back_from_its_fields(case: Any):
    for index, layer in enumerate(case.layers()):
        back = PluginFields.from_layer(index, layer, case.heads).spec
        for field in dataclasses.fields(LayerSpec):
            if field.name not in ("k_scales", "v_scales"):  # an input of the plugin
                want = getattr(layer, field.name)
                assert getattr(back, field.name) == (pytest.approx(want) if isinstance(want, float) else want)


def test_every_field_is_listed_with_its_type():
    values = fields().to_mapping()
    assert {name: type(value) for name, value in values.items()} == FIELDS
    assert list(values) == list(FIELDS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_codec": "int3"}, "field k_codec is 'int3', expected one of f16, bf16, e4m3, int4, int2"),
        ({"v_codec": ""}, "field v_codec is ''"),
        ({"hot": "int4"}, r"hot record int4/int4 must be f16/f16 or bf16/bf16"),
        ({"heads": 5}, "5 query heads over 2 KV heads: expected a multiple"),
        ({"kv_heads": 0}, "over 0 KV heads"),
        ({"head_dim": 72}, "head_dim 72 is not a multiple of 16"),
        ({"group_size": 48}, "group_size 48 is not supported"),
        ({"window": -1}, "field window is -1, expected 0 to 2147483647"),
        ({"hot_offset": 1 << 31}, "field hot_offset is 2147483648"),
        ({"softmax_scale": float("nan")}, "field softmax_scale is nan"),
        ({"softmax_scale": 0.0}, "field softmax_scale is 0.0, expected a positive number"),
        ({"fp8_query": 2}, "field fp8_query is 2, expected 0 or 1"),
    ],
)
def test_values_that_no_kernel_takes_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        fields(**changes)


def test_missing_fields_are_named():
    values = fields().to_mapping()
    del values["window"], values["hot"]
    with pytest.raises(ValueError, match="lacks the fields hot, window; expected layer, heads,"):
        PluginFields.from_mapping(values)


def test_the_scale_is_what_a_float_keeps():
    assert fields(softmax_scale=80**-0.5) == fields(softmax_scale=fields(softmax_scale=80**-0.5).softmax_scale)
