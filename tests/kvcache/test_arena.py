"""The arena's bookkeeping under random load, and its promise that `fits` is exact."""

from __future__ import annotations

import itertools
import random

import pytest

from lowkv.errors import LowkvError
from lowkv.kvcache.arena import Arena, Cut, SlabGeometry


def _geometry(*cuts: tuple[int, int]) -> SlabGeometry:
    return SlabGeometry(tuple(Cut(*cut) for cut in cuts))


GEOMETRIES = [
    _geometry((16, 3), (3, 16)),  # KIVI-2
    _geometry((2, 1), (1, 2)),  # FP8
    _geometry((16, 5), (5, 16)),  # KIVI-4
    _geometry((7, 3), (3, 7)),
    _geometry((80, 3), (15, 16), (16, 15), (3, 80)),  # KIVI-2, five layers of six with a window
    _geometry((10, 1), (10, 1), (2, 5), (1, 10)),  # those five in model precision, the sixth in FP8
    _geometry((7, 3), (5, 4), (3, 7), (11, 2)),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_fits_is_exact_and_nothing_overlaps(geometry: SlabGeometry) -> None:
    rng = random.Random(7)
    arena = Arena(geometry, geometry.bytes * 5)
    kinds = range(len(geometry.cuts))
    held: dict[int, tuple[int, int]] = {}  # offset -> (kind, tag): a model of who owns what
    tag = compactions = 0
    for _ in range(4000):
        if held and rng.random() < 0.5:
            arena.free(offset := rng.choice(list(held)))
            del held[offset]
        else:
            kind = rng.choice(kinds)
            one = tuple(int(each == kind) for each in kinds)
            if not arena.fits(one):
                assert not arena.has_room(one)
                continue
            while not arena.has_room(one):
                moved_kind, moves = arena.compact(one)
                compactions += 1
                assert not {new for _, new, _ in moves} & {old for old, _, _ in moves}
                for old, new, owner in moves:
                    assert held.pop(old) == (moved_kind, owner)
                    held[new] = (moved_kind, owner)
            held[arena.allocate(kind, tag)] = (kind, tag)
            tag += 1
        arena.check_integrity()
        assert dict(arena.owners()) == {offset: owner for offset, (_, owner) in held.items()}
        spans = sorted((offset, offset + geometry.cuts[kind].units) for offset, (kind, _) in held.items())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert not spans or spans[-1][1] <= arena.slabs * geometry.units
    # With one hot block a slab, cold slabs that are not full can always be merged and hot ones never need to be.
    assert compactions > 0


def test_blocks_of_every_group_make_room_for_another() -> None:
    """Three slabs of three kinds, each with a block or two, and a block of the fourth kind that needs a slab."""
    geometry = GEOMETRIES[4]
    arena = Arena(geometry, geometry.bytes * 6)
    offsets = {kind: [arena.allocate(kind, None) for _ in range(geometry.cuts[kind].slots + 2)] for kind in range(3)}
    for kind in range(3):
        for offset in offsets[kind][2:-1]:
            arena.free(offset)
    assert not arena.has_room((0, 0, 0, 1))
    assert arena.fits((0, 0, 0, 3 * 80))
    assert not arena.fits((0, 0, 0, 3 * 80 + 1))
    moved = []
    while not arena.has_room((0, 0, 0, 3 * 80)):
        moved.append(arena.compact((0, 0, 0, 3 * 80))[0])
    assert sorted(moved) == [0, 1, 2]
    arena.check_integrity()


def test_an_emptied_arena_is_wholly_free() -> None:
    geometry = GEOMETRIES[0]
    arena = Arena(geometry, geometry.bytes * 4)
    offsets = [arena.allocate(1, index) for index in range(4 * 16)]
    assert not arena.fits((1, 0))
    assert not arena.fits((0, 1))
    for offset in offsets:
        arena.free(offset)
    assert arena.bytes_used == 0
    assert arena.fits((4 * 3, 0))
    assert arena.has_room((4 * 3, 0))
    arena.check_integrity()


def test_double_free_is_an_error() -> None:
    arena = Arena(GEOMETRIES[0], GEOMETRIES[0].bytes)
    offset = arena.allocate(0, None)
    arena.free(offset)
    with pytest.raises(KeyError):
        arena.free(offset)


def test_integrity_check_sees_a_lost_block() -> None:
    arena = Arena(GEOMETRIES[0], GEOMETRIES[0].bytes * 2)
    offset = arena.allocate(0, None)
    del arena._owners[offset]
    with pytest.raises(AssertionError, match="owners"):
        arena.check_integrity()


def test_a_budget_below_one_slab_is_refused() -> None:
    with pytest.raises(LowkvError, match=r"not even one slab.*got '3071 bytes'.*at least 3072 bytes"):
        Arena(GEOMETRIES[0], 3071)
