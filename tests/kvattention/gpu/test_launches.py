"""Grids and argument lists, checked against the kernels' signatures and against what an interpreted run launches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvattention.cases import CASES, Case, Playback
from kvattention.gpu.attention import GpuAttention
from kvattention.gpu.launches import (
    AttentionInputs,
    Launch,
    attention_launches,
    layer_scales,
    layer_table,
    move_launch,
    seal_launch,
)
from kvattention.gpu.schedule import make_schedule, partial_rows

POINTERS = (
    *("q", "k", "v", "out", "arena", "scales", "sequences", "table", "appends", "narrow", "wide", "merges"),
    "workspace",
)
ADDRESSES: dict[str, Any] = {name: 4096 * (i + 1) for i, name in enumerate(POINTERS)}
LENGTHS = {"S": 3, "B": 7, "A": 5, "W": 6, "P": 2, "C": 4, "T": 9}


def launches(case: Case, index: int = 0, **change: int) -> dict[str, Launch]:
    layer = case.layers()[index]
    made = attention_launches(AttentionInputs(**ADDRESSES, **(LENGTHS | change)), layer, case.heads)
    return dict(zip(("append", "narrow", "wide", "merge"), made, strict=True))


def named(launch: Launch) -> dict[str, Any]:
    return dict(zip((name for name, _ in launch.variant.arguments), launch.arguments, strict=True))


def test_grids_depend_on_lengths_only() -> None:
    made = launches(CASES["plan-windows"], 1)  # head_dim 64, two KV heads
    assert [made[name].grid for name in made] == [(5, 2, 1), (6, 2, 1), (2, 2, 1), (4, 2, 1)]
    assert launches(CASES["int2-d80"])["append"].grid == (5, 2, 2)  # 64 channels a program


def test_arguments_are_where_the_kernels_read_them() -> None:
    case = CASES["plan-windows"]
    layer = case.layers()[1]
    made = launches(case, 1)
    for name, launch in made.items():
        for (argument, type_), value in zip(launch.variant.arguments, launch.arguments, strict=True):
            assert isinstance(value, float if type_ == "fp32" else int), f"{name}: {argument}"
    rows = partial_rows(6, 2, case.gqa)
    lists = {name: ADDRESSES[name] for name in ("arena", "scales", "sequences", "table")}
    offsets = {"hot_offset": layer.hot_offset, "cold_offset": layer.cold_offset}
    attend = {
        **{name: ADDRESSES[name] for name in ("q", "k", "v", "out", "workspace")},
        **lists,
        **offsets,
        "gqa": 2,
        "kv_heads": 2,
        "q_row": 4 * 64,
        "k_row": 2 * 64,
        "v_row": 2 * 64,
        "table_row": 7,
        "partial_rows": rows,
        "window": 20,
        "softmax_scale": 64**-0.5,
    }
    assert named(made["narrow"]) == attend | {"items": ADDRESSES["narrow"]}
    assert named(made["wide"]) == attend | {"items": ADDRESSES["wide"]}
    assert named(made["append"]) == {
        **{name: ADDRESSES[name] for name in ("k", "v")},
        **lists,
        **offsets,
        "items": ADDRESSES["appends"],
        "kv_heads": 2,
        "k_row": 128,
        "v_row": 128,
        "table_row": 7,
    }
    assert named(made["merge"]) == {
        "workspace": ADDRESSES["workspace"],
        "out": ADDRESSES["out"],
        "items": ADDRESSES["merges"],
        "gqa": 2,
        "kv_heads": 2,
        "partial_rows": rows,
    }


def test_no_window_is_zero_and_rows_may_be_strided() -> None:
    made = launches(CASES["plan-windows"], 0, q_row=1024, k_row=512, v_row=768)
    arguments = named(made["narrow"])
    assert [arguments[name] for name in ("window", "q_row", "k_row", "v_row")] == [0, 1024, 512, 768]
    with pytest.raises(ValueError, match="expected multiples of 16"):
        launches(CASES["plan-windows"], 0, v_row=136)


def test_seal_and_move() -> None:
    case = CASES["plan-mixed"]
    layers = case.layers()
    launch = seal_launch(1, 2, 6, 3, 4, layers)
    assert launch.grid == (6, 4, 2)
    assert launch.arguments == (1, 2, 3, 4, 2)
    table = layer_table(layers)
    assert table.dtype == np.int32
    assert table.shape == (4, 8)
    assert table[:, 2:4].tolist() == [[0, 0], [2, 2], [3, 4], [4, 4]]
    assert table[1, :2].tolist() == [layers[1].hot_offset, layers[1].cold_offset]
    layers = CASES["plan-channels"].layers()
    scales = layer_scales(layers)
    assert (scales.shape, scales.dtype) == ((4, 2, 65), np.float32)
    assert scales.flags.c_contiguous
    for layer, stored in zip(layers, scales, strict=True):
        np.testing.assert_array_equal(stored[:, :64], layer.k_scales)
        np.testing.assert_array_equal(stored[:, 64], layer.v_scales)
    launch = move_launch(1, 2, 3, 16 * 300)
    assert launch.grid == (3, 2, 1)
    assert launch.arguments == (1, 2, 16 * 300)
    with pytest.raises(ValueError, match="multiple of 16"):
        move_launch(1, 2, 3, 100)


@pytest.mark.parametrize("name", ["k4v2-sinks", "plan-all-windows", "int2-gqa12", "e4m3-d80"])
def test_an_implementation_launches_nothing_else(name: str, new_attention: Callable[..., GpuAttention]) -> None:
    """Recorded instead of run: every layer's launches are `attention_launches` of the step's lists."""
    case = CASES[name]
    playback = Playback(case)
    attention = new_attention()
    recorded: list[Launch] = []
    attention.device.launch = recorded.append  # type: ignore[method-assign]
    arena = attention.allocate(playback.arena.size)
    import torch

    for step in playback:
        schedule = make_schedule(step.batch, case.heads, case.kv_heads, case.group_size, attention.part_tokens)
        uploads = set()
        for index, layer in enumerate(playback.layers):
            recorded.clear()
            q, k, v = (torch.from_numpy(x[index]).half().to(attention.device.device) for x in (step.q, step.k, step.v))
            attention.paged_attention(q, k, v, arena, step.batch, layer)
            assert [launch.variant.kernel for launch in recorded] == ["append", "attend", "attend", "merge"]
            lengths = [len(x) for x in (schedule.appends, schedule.narrow, schedule.wide, schedule.merges)]
            assert [launch.grid[0] for launch in recorded] == lengths
            for launch, items in zip(
                recorded, (schedule.appends, schedule.narrow, schedule.wide, schedule.merges), strict=True
            ):
                arguments = named(launch)
                np.testing.assert_array_equal(arguments["items"].cpu().numpy(), items)
                assert arguments.get("q", q) is q
                assert arguments.get("k", k) is k
                assert arguments.get("arena", arena.pointer) is arena.pointer
                uploads.add(arguments["items"].data_ptr())
        assert len(uploads) == 4  # once per step, not once per layer


def test_launches_compare_by_value() -> None:
    one, two = launches(CASES["int2-d80"])["wide"], launches(CASES["int2-d80"])["wide"]
    assert one == two
    assert dataclasses.replace(one, grid=(1, 1, 1)) != two
