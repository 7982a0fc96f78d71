"""One step's ragged batch: which tokens belong to which sequence, and where each sequence's blocks are.

The same object is passed to every layer of a step, so it also carries what implementations derive from it
(`derived`): a work list is built once per step, not once per layer.

    positions of sequence s:   0 ........ past ........ total = past + n
                               [ stored ]  [ this step ]
    block b covers [b*G, (b+1)*G); it is COLD during the step when
        cold_begin <= b < cold_end                          (stored cold before the step), or
        b*G >= past and cold_begin <= b < direct_end        (all new, written straight to its cold slot);
    every other block is HOT.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class RaggedBatch:
    """S sequences with T new tokens in all; every array is int32.

    table's column b holds the offset (64-byte units) of the block of positions [b*G, (b+1)*G); a column that the
    sequence does not have, or that has left the window, holds -1 and is never read.
    """

    query_start: Ints  # [S+1] first new token of each sequence in q, k, v; the last entry is T
    past: Ints  # [S] tokens stored before this step
    table: Ints  # [S, B] block offsets
    cold_begin: Ints  # [S] first cold block
    cold_end: Ints  # [S] end of the blocks stored cold before the step
    direct_end: Ints  # [S] end of the blocks cold after the step
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("query_start", "past", "table", "cold_begin", "cold_end", "direct_end"):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), dtype=np.int32))
        s = self.sequences
        if self.query_start.shape != (s + 1,) or self.table.ndim != 2 or self.table.shape[0] != s:
            raise ValueError(
                f"batch of {s} sequences needs query_start [{s + 1}] and table [{s}, B], "
                f"got {self.query_start.shape} and {self.table.shape}"
            )
        for name in ("cold_begin", "cold_end", "direct_end"):
            if getattr(self, name).shape != (s,):
                raise ValueError(f"batch of {s} sequences needs {name} [{s}], got {getattr(self, name).shape}")

    @property
    def sequences(self) -> int:
        return int(self.past.shape[0])

    @property
    def tokens(self) -> int:
        """New tokens in the step, T."""
        return int(self.query_start[-1])

    @property
    def lengths(self) -> Ints:
        """New tokens of each sequence, ``[S]``."""
        return np.diff(self.query_start)

    @property
    def total(self) -> Ints:
        """Tokens of each sequence after the step, ``[S]``."""
        return self.past + self.lengths

    def is_cold(self, sequence: int, block: int, group_size: int) -> bool:
        """Whether the block is read and written as a cold one during the step."""
        begin = int(self.cold_begin[sequence])
        stored = begin <= block < int(self.cold_end[sequence])
        return stored or self.is_direct(sequence, block, group_size)

    def is_direct(self, sequence: int, block: int, group_size: int) -> bool:
        """Whether the block is entirely new in this step and written straight to its cold slot."""
        new = block * group_size >= int(self.past[sequence])
        return new and int(self.cold_begin[sequence]) <= block < int(self.direct_end[sequence])

    def check(self, group_size: int, arena_words: int) -> None:
        """Refuse a batch a kernel would misread: for tests and debugging, too slow for every step.

        Raises ValueError naming the sequence.
        """
        if np.any(np.diff(self.query_start) < 1) or self.query_start[0] != 0:
            raise ValueError(f"query_start {self.query_start} must start at 0 and give every sequence a token")
        for s, (past, total) in enumerate(zip(self.past, self.total, strict=True)):
            blocks = -(-int(total) // group_size)
            if blocks > self.table.shape[1]:
                raise ValueError(f"sequence {s} has {total} tokens but its table only {self.table.shape[1]} columns")
            if int(self.cold_end[s]) * group_size > int(past):
                raise ValueError(f"sequence {s}: cold_end {self.cold_end[s]} lies beyond its {past} stored tokens")
            if int(self.direct_end[s]) * group_size > int(total):
                raise ValueError(f"sequence {s}: direct_end {self.direct_end[s]} lies beyond its {total} tokens")
            for b in range(int(past) // group_size, blocks):
                if not 0 <= int(self.table[s, b]) * 16 < arena_words:
                    raise ValueError(f"sequence {s}: block {b} is written to but its offset is {self.table[s, b]}")
