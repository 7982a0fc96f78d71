"""A real model as TensorRT engines: thirty layers, each in its own format; 4-bit weights under single-precision logits.

`make engine-check` builds more of them, kernels included, and measures.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lowkv.engine.tensorrt.network import effective_precision

if TYPE_CHECKING:
    from tests.engine.tensorrt.conftest import Exported

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_mixed_plan(export_smollm2: Callable[..., Exported], tmp_path: Path) -> None:
    network = export_smollm2("smollm2-kivi2-tensorrt", skip_layers=(0, "28-29"), overrides={1: "kivi4", 2: "fp8"})
    report = network.build(tmp_path / "model.plan", sm=120)
    formats = [("f16", "f16"), ("int4", "int4"), ("e4m3", "e4m3"), *[("int2", "int2")] * 25, *[("f16", "f16")] * 2]
    fields = [layer["fields"] for layer in report["attention"]]
    assert [(f["layer"], f["k_codec"], f["v_codec"]) for f in fields] == [
        (index, *codecs) for index, codecs in enumerate(formats)
    ]
    # Where a layer's record lies in a cold block: behind those before it, whatever their formats.
    sizes = [record.words for record in network.plan.cold_records]
    assert [f["cold_offset"] for f in fields] == [sum(sizes[:index]) for index in range(30)]
    assert {(f["heads"], f["kv_heads"], f["head_dim"]) for f in fields} == {(9, 3, 64)}
    assert {matrix["weights"] for matrix in report["matrices"]} == {"float16"}
    size = (tmp_path / "model.plan").stat().st_size
    assert 250e6 < size < 400e6  # 106 M parameters in 16 bit, and lm_head in 32


def test_int4_weights_kivi2_and_single_precision_logits(
    export_smollm2: Callable[..., Exported], tmp_path: Path
) -> None:
    network = export_smollm2("smollm2-int4-kivi2-tensorrt")
    report = network.build(tmp_path / "model.plan", sm=89)
    assert [layer["fields"]["k_codec"] for layer in report["attention"]] == ["int2"] * 30
    matrices = report["matrices"]
    assert {(matrix["weights"], matrix["group_size"]) for matrix in matrices} == {("int4", 64)}
    assert len(matrices) == 4 * 30
    assert {matrix["output"] for matrix in matrices} == {"float16"}
    assert report["lm_head"]["weights"] == "float32"
    assert effective_precision(report["lm_head"]) == "float32"
    assert (tmp_path / "model.plan").stat().st_size < 220e6
