"""A step's lists, against what they must add up to, counted one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from kvattention.batch import RaggedBatch
from kvattention.cases import CASES, Playback
from kvattention.gpu import schedule
from kvattention.gpu.schedule import DIRECT, Schedule, make_schedule, pad_schedule, partial_rows, workspace_bytes

G = 32


def batch(past: list[int], new: list[int], **cold: list[int]) -> RaggedBatch:
    total = [p + n for p, n in zip(past, new, strict=True)]
    columns = -(-max(total) // G)
    fields: dict[str, Any] = {name: [0] * len(past) for name in ("cold_begin", "cold_end", "direct_end")} | cold
    table = np.arange(len(past) * columns).reshape(len(past), columns)
    return RaggedBatch(np.cumsum([0, *new]), np.array(past), table, *(np.array(x) for x in fields.values()))


def real(items: np.ndarray) -> np.ndarray:
    return items[items[:, 0] >= 0]


def tiles(made: Schedule) -> np.ndarray:
    return np.concatenate([real(made.narrow), real(made.wide)])


BATCHES = {
    "decode": batch([31, 32, 33, 5000, 100000], [1] * 5),
    "prefill": batch([0, 0], [1, 700]),
    "chunks": batch([3000, 64, 257], [300, 40, 16]),
    "mixed": batch([9000, 0, 640, 31], [1, 100, 5, 2]),
}


@pytest.mark.parametrize("gqa", [1, 3, 4, 8, 24, 80])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("part_tokens", [32, 256])
def test_every_token_meets_every_key_once(name: str, gqa: int, part_tokens: int) -> None:
    step = BATCHES[name]
    made = make_schedule(step, 2 * gqa, 2, G, part_tokens)
    blocks: Counter[tuple[int, int, int]] = Counter()
    own: Counter[tuple[int, int]] = Counter()
    for items, limit in (
        (real(made.narrow), schedule.narrow_rows(gqa)),
        (real(made.wide), schedule.wide_rows(gqa)),
    ):
        for s, first, count, begin, end, with_own, _, zero in items:
            assert 0 < count * gqa <= limit
            assert zero == 0
            for token in range(first, first + count):
                own[s, token] += with_own
                blocks.update((s, token, block) for block in range(begin, end))
    expected = {(s, token) for s in range(step.sequences) for token in range(step.lengths[s])}
    assert own == Counter(expected)
    stored = -(-step.past // G)
    assert blocks == Counter((s, token, block) for s, token in expected for block in range(stored[s]))


@pytest.mark.parametrize("gqa", [1, 3, 24])
@pytest.mark.parametrize("name", BATCHES)
def test_partial_rows_are_apart_and_merged_once(name: str, gqa: int) -> None:
    step = BATCHES[name]
    made = make_schedule(step, 2 * gqa, 2, G)
    split = [tile for tile in tiles(made) if tile[6] >= 0]
    written = Counter(int(row) + r for _, _, count, _, _, _, row, _ in split for r in range(count * gqa))
    assert set(written.values()) <= {1}
    assert sorted(written) == list(range(made.rows))
    assert made.rows <= partial_rows(len(made.narrow), len(made.wide), gqa)
    merged = Counter(
        int(row) + part * int(stride) + r
        for _, row, parts, stride in real(made.merges)
        for part in range(parts)
        for r in range(gqa)
    )
    assert merged == written
    tokens = {int(step.query_start[s]) + t for s, first, count, *_ in split for t in range(first, first + count)}
    assert sorted(real(made.merges)[:, 0]) == sorted(tokens)


def test_a_token_is_merged_from_its_own_rows() -> None:
    """Two tiles in three parts: rows of the second token of the second tile, by hand."""
    made = make_schedule(batch([300], [30]), 4, 1, G, 100)  # 16 tokens a wide tile
    assert made.wide.tolist() == [
        [0, 0, 16, 0, 4, 0, 0, 0],
        [0, 0, 16, 4, 8, 0, 64, 0],
        [0, 0, 16, 8, 10, 1, 128, 0],
        [0, 16, 14, 0, 4, 0, 192, 0],
        [0, 16, 14, 4, 8, 0, 248, 0],
        [0, 16, 14, 8, 10, 1, 304, 0],
    ]
    assert made.merges[17].tolist() == [17, 196, 3, 56]
    assert made.rows == 360


def test_splitting_is_bounded() -> None:
    made = make_schedule(BATCHES["decode"], 8, 2, G)
    parts = Counter(tiles(made)[:, 0].tolist())
    assert parts == {0: 1, 1: 1, 2: 1, 3: 18, 4: 32}  # 5000 // 256 = 19 parts of 9 blocks: 18 suffice
    long_chunk = make_schedule(batch([100000], [1000]), 8, 2, G)
    assert len(long_chunk.wide) == -(-1000 // 16)  # many tiles are work enough


@pytest.mark.parametrize("name", BATCHES)
def test_company_does_not_change_how_a_sequence_is_cut(name: str) -> None:
    step = BATCHES[name]
    together = tiles(make_schedule(step, 6, 2, G))
    for s in range(step.sequences):
        alone = tiles(make_schedule(batch([int(step.past[s])], [int(step.lengths[s])]), 6, 2, G))
        np.testing.assert_array_equal(together[together[:, 0] == s][:, 1:6], alone[:, 1:6])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_appends_are_the_references_blocks(case: Any) -> None:
    for step in Playback(case):
        made = make_schedule(step.batch, case.heads, case.kv_heads, case.group_size)
        wanted = []
        for s in range(step.batch.sequences):
            past, total, group = int(step.batch.past[s]), int(step.batch.total[s]), case.group_size
            for block in range(past // group, -(-total // group)):
                begin, end = max(past, block * group), min(total, (block + 1) * group)
                direct = step.batch.is_direct(s, block, group)
                wanted.append([s, block, begin - past, (end - begin) + direct * DIRECT])
        assert made.appends.tolist() == wanted
        np.testing.assert_array_equal(
            made.sequences,
            np.stack(
                [step.batch.past, step.batch.cold_begin, step.batch.cold_end, step.batch.query_start[:-1]], axis=1
            ),
        )
        assert all(getattr(made, n).dtype == np.int32 for n in ("sequences", "table", "appends", "narrow", "wide"))


def test_empty_lists_are_one_null_item_long() -> None:
    made = make_schedule(batch([10], [1]), 4, 2, G)
    for items in (made.wide, made.merges):
        assert items.shape[0] == 1
        assert items[0, 0] == -1
    assert made.rows == 0


def test_padding_keeps_the_work_and_adds_null_items() -> None:
    made = make_schedule(BATCHES["mixed"], 8, 2, G)
    padded = pad_schedule(made, S=8, B=300, A=20, W=90, P=30, C=50)
    shapes = [getattr(padded, n).shape for n in ("sequences", "table", "appends", "narrow", "wide", "merges")]
    assert shapes == [(8, 4), (8, 300), (20, 4), (90, 8), (30, 8), (50, 4)]
    for name in ("appends", "narrow", "wide", "merges"):
        np.testing.assert_array_equal(real(getattr(padded, name)), real(getattr(made, name)))
    np.testing.assert_array_equal(padded.table[:4, : made.table.shape[1]], made.table)
    assert (padded.table[:, made.table.shape[1] :] == -1).all()
    assert not padded.sequences[4:].any()
    assert padded.rows == made.rows
    with pytest.raises(ValueError, match="appends is"):
        pad_schedule(made, S=8, B=300, A=1, W=90, P=30, C=50)


def test_workspace_holds_every_row() -> None:
    assert workspace_bytes(3, 2, heads=8, kv_heads=2, head_dim=64) == 4 * (3 * 16 + 2 * 64) * 2 * (64 + 2)
    assert workspace_bytes(1, 1, heads=160, kv_heads=2, head_dim=64) == 4 * (128 + 128) * 2 * (64 + 2)


def test_heads_must_divide() -> None:
    with pytest.raises(ValueError, match="7 query heads over 2 KV heads"):
        make_schedule(BATCHES["mixed"], 7, 2, G)
