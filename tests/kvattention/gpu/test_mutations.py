"""Breaks one line of the kernels at a time: the case table must notice each."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kvattention.cases import CASES, Case
from kvattention.gpu.attention import GpuAttention


@dataclass(frozen=True)
class Mutation:
    name: str
    line: str
    broken: str
    case: str
    fp8_query: bool = False


SMALL = {
    f"{k}-small": Case(f"{k}-small", ((k, v),), ((33,), (1,)), residual=0, gqa=2, scales="channel")
    for k, v in (("int8", "int8"), ("e5m2", "e5m2"), ("int2c", "int2"))
}

MUTATIONS = (
    Mutation("none", "", "", "k4v2-border-33"),
    Mutation(
        "unpack-order",
        "codes = tl.join(codes, codes >> (16 >> level))",
        "codes = tl.join(codes >> (16 >> level), codes)",
        "k4v2-border-33",
    ),
    Mutation(
        "pack-order",
        "return tl.sum(codes << shifts[None, None, :], 2)",
        "return tl.sum(codes << (32 - BITS - shifts)[None, None, :], 2)",
        "k4v2-border-33",
    ),
    Mutation("k-scale", "cold_scale *= highest * _bias", "cold_scale *= tl.load(scales) * _bias", "int8-small"),
    Mutation(
        "k-channels",
        "tl.load(scales + d, mask=d < HEAD_DIM",
        "tl.load(scales + (d ^ 1), mask=d < HEAD_DIM",
        "int8-small",
    ),
    Mutation(
        "k-channels-written",
        "tl.load(scales + d, mask=inside",
        "tl.load(scales + (d ^ 1), mask=inside",
        "int8-small",
    ),
    Mutation("v-scale", "total *= tl.load(scales + HEAD_DIM)", "total *= tl.load(scales + HEAD_DIM - 1)", "int8-small"),
    Mutation("int8-offset", "values = values - 1152.0", "values = values - 1151.0", "int8-small"),
    Mutation("e5m2-bits", "bits = codes << 8", "bits = codes << 7", "e5m2-small"),
    Mutation("narrowed-range", "low + margin, span - 2.0 * margin", "low + margin, span - margin", "int2c-small"),
    Mutation(
        "params-swapped",
        "return scale.to(tl.float32), minimum.to(tl.float32)",
        "return minimum.to(tl.float32), scale.to(tl.float32)",
        "k4v2-border-33",
    ),
    Mutation("rounding", "codes = (ratio + INTEGERS)", "codes = (ratio + 0.25 + INTEGERS)", "k4v2-border-33"),
    Mutation("stored-mask", "stored = (key < past)", "stored = (key <= past)", "k4v2-border-33"),
    Mutation("causal-mask", "(key[None, :] <= token[:, None])", "(key[None, :] <= token[:, None] + 1)", "int2-alone-5"),
    Mutation(
        "window-mask",
        "(key[None, :] > (token - reach)[:, None])",
        "(key[None, :] >= (token - reach)[:, None])",
        "int2-window",
    ),
    Mutation(
        "residual-boundary",
        "resume = tl.maximum(begin, tl.maximum(cold_begin, cold_end))",
        "resume = tl.maximum(begin, tl.maximum(cold_begin, cold_end - 1))",
        "k4v2-border-33",
    ),
    Mutation("append-slot", "token = block * GROUP + g - past", "token = block * GROUP + g - past - 1", "int2-alone-5"),
    Mutation("gqa", "q_head = head * gqa + r % gqa", "q_head = r % gqa", "int2-gqa3"),
    Mutation("merge-rows", "slots = (row + part * stride + r)", "slots = (row + part + r)", "int2-together"),
    Mutation(
        "fp8-fit", "cold_scale = cold_scale / fit", "cold_scale = cold_scale * fit", "e4m3-constant", fp8_query=True
    ),
)


def broken_kernels(mutation: Mutation, folder: Path) -> ModuleType:
    """kernels.py with one line replaced, as another module."""
    from kvattention.gpu import kernels

    source = Path(kernels.__file__).read_text()
    if mutation.line:
        assert source.count(mutation.line) == 1, f"{mutation.line!r} must occur once in kernels.py"
        source = source.replace(mutation.line, mutation.broken)
    path = folder / f"kernels_{mutation.name.replace('-', '_')}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_table_notices(
    mutation: Mutation, tmp_path: Path, new_attention: Callable[..., GpuAttention], stage: SimpleNamespace
) -> None:
    attention = new_attention(mutation.fp8_query, kernels=broken_kernels(mutation, tmp_path))
    case = (CASES | SMALL)[mutation.case]
    if mutation.name == "none":
        stage.check(attention, case)
        return
    with pytest.raises(AssertionError):
        stage.check(attention, case)
