"""The list of kernels: names, arguments and constants that fit the kernels themselves."""

from __future__ import annotations

import re

import pytest

from kvattention import CODECS
from kvattention.cases import CASES
from kvattention.gpu.variants import MOVE, SMS, VARIANTS, Variant, layer_variants, needed


def test_names_are_unique_and_fit_for_files() -> None:
    names = [variant.name for variant in VARIANTS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in names)
    assert Variant("attend", "f16", "int4", "int2", 128, 32, 16).name == "attend-f16-int4-int2-d128-g32-m16"


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_arguments_and_constants_are_the_kernels(variant: Variant) -> None:
    from kvattention.gpu import kernels

    kernel = getattr(kernels, variant.kernel)
    assert [name for name, _ in variant.arguments] + list(variant.constants) == list(kernel.arg_names)


def test_the_list_covers_formats_precisions_and_shapes() -> None:
    attend = [v for v in VARIANTS if v.kernel == "attend" and not v.fp8_query]
    for hot in ("f16", "bf16"):
        same = (hot, "e4m3", "e5m2", "int8", "int4", "int2")
        pairs = {(codec, codec) for codec in same} | {("int4", "int2")}
        for head_dim, rows in ((64, 16), (64, 64), (128, 16), (128, 64), (256, 16)):
            assert {(v.k, v.v) for v in attend if (v.hot, v.head_dim, v.rows) == (hot, head_dim, rows)} == pairs
    assert {v.kernel for v in VARIANTS} == {"append", "attend", "merge", "seal", "move"}


def test_fp8_queries_need_fp8_tensor_cores() -> None:
    fp8 = [v for v in VARIANTS if v.fp8_query]
    assert fp8
    assert all(v.k == v.v == "e4m3" and v.min_sm == 89 for v in fp8)
    assert all(v.min_sm == min(SMS) for v in VARIANTS if not v.fp8_query)


def test_an_engine_needs_each_kernel_once() -> None:
    case = CASES["plan-mixed"]
    variants = needed(case.layers(), case.heads)
    assert len(set(variants)) == len(variants)
    # Four formats of (append, narrow, wide); merge, seal and move are the same for all.
    assert len(variants) == 4 * 3 + 3
    assert MOVE in variants
    quantized = [v for v in needed(case.layers(), case.heads, fp8_query=True) if v.fp8_query]
    assert {(v.k, v.v, v.rows) for v in quantized} == {("e4m3", "e4m3", 16), ("e4m3", "e4m3", 64)}


def test_layers_find_listed_variants() -> None:
    """A listed shape makes no kernel beyond the list."""
    case = CASES["k4v2-d128"]
    assert set(needed(case.layers(), case.heads)) <= set(VARIANTS)


def test_wide_groups_of_heads_get_wider_tiles() -> None:
    layer = CASES["int2-gqa1"].layers()[0]
    append, narrow, wide, merge = layer_variants(layer, heads=2 * 40)
    assert (narrow.rows, wide.rows, merge.rows) == (64, 64, 64)
    assert append.kernel == "append"


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_shapes_are_ones_that_triton_takes(head_dim: int, group_size: int) -> None:
    for rows in (16, 64):
        constants = Variant("attend", "f16", "int2", "int2", head_dim, group_size, rows).constants
        for name in ("BLOCK_D", "BLOCKS", "OWN", "ROWS"):
            value = int(constants[name])
            assert value & (value - 1) == 0
        assert int(constants["BLOCK_D"]) >= head_dim
        assert int(constants["OWN"]) >= 16  # what tensor cores multiply at least
    channels = Variant("seal", "f16", head_dim=head_dim, group_size=group_size).channels
    assert channels % 16 == 0
    assert channels * group_size <= 4096
    assert channels == head_dim or channels % 32 == 0  # a program never cuts a V group
    assert all(channels % codec.per_word == 0 for codec in CODECS.values())


def test_a_narrowed_range_is_written_by_a_kernel_of_its_own_and_read_as_any_other() -> None:
    case = CASES["int2c-mixture"]
    variants = needed(case.layers(), case.heads)
    assert {(v.kernel, v.k, v.v) for v in variants if v.k} == {("append", "int2c", "int2"), ("attend", "int2", "int2")}
    assert set(variants) <= set(VARIANTS)
