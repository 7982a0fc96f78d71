"""How many sequences fit: the prediction (G1) that the load test checks against a running server.

The scheduler reserves with the same function (`reservation`) that the planner counts with, so the two can only
differ where the server does something else than it says.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul
from typing import TYPE_CHECKING

from lowkv.kvcache.arena import SlabGeometry
from lowkv.kvcache.plan import added

if TYPE_CHECKING:
    from lowkv.kvcache.plan import CacheGroup, CachePlan, Counts


def reservation(plan: CachePlan, final: int, chunk: int = 0, *, first: bool = False) -> Counts:
    """Blocks of every kind that a sequence never exceeds on its way to `final` stored tokens.

    `chunk` > 0: prompt tokens are still to come, in steps of at most that many, onto tokens stored before. Such a step
    holds the old residual, which is sealed only when it ends, and the new one at the same time, and blocks that have
    left the window when it ends. `first`: they come in one step of `chunk` tokens, onto nothing.
    """
    return tuple(count for group in plan.groups for count in _group_reservation(group, final, chunk, first))


def _group_reservation(group: CacheGroup, final: int, chunk: int, first: bool) -> tuple[int, int]:
    blocks, step_blocks = group.blocks(final), group.blocks(chunk)
    alive = blocks if group.window is None else min(blocks, -(-(group.window - 1) // group.group_size) + 1)
    if first:
        most, step_blocks = max(alive, step_blocks), 0
    else:
        step_blocks += 1 if chunk else 0
        most = min(blocks, alive + step_blocks)
    if not group.seals:
        return most, 0
    residual_blocks = group.residual_length // group.group_size
    if group.residual == "window" or residual_blocks == 0:
        residual_blocks += 1
    hot = group.sink_blocks + residual_blocks + min(step_blocks, residual_blocks)
    cold = min(group.cold_end(final) - group.sink_blocks, most)
    return min(hot, blocks), max(0, cold)


@dataclass(frozen=True)
class Capacity:
    """The most sequences resident at once, and what the prediction rests on."""

    sequences: int
    bytes_per_sequence: int  # reserved per sequence, whole blocks
    slabs: int
    slab_bytes: int

    @property
    def bytes_total(self) -> int:
        return self.slabs * self.slab_bytes


def max_resident(
    plan: CachePlan,
    budget: int,
    prompt_tokens: int,
    output_tokens: int,
    *,
    policy: str = "guaranteed_no_evict",
    max_tokens_per_step: int = 0,
    max_sequences: int | None = None,
) -> Capacity:
    """The most sequences of one shape that the scheduler keeps resident in `budget` bytes.

    `guaranteed_no_evict` reserves each sequence's blocks up to its last stored token (prompt + output - 1: the
    last token is returned, not stored). `max_utilization` holds what sequences own now; for sequences of evenly
    spread ages that is their mean over the output's length. `max_tokens_per_step` > 0 adds what one sequence
    needs on top while its prompt is fed in chunks.
    """
    geometry = SlabGeometry.for_plan(plan)
    slabs = budget // geometry.bytes
    final = prompt_tokens + output_tokens - 1
    if policy == "guaranteed_no_evict":
        held = [float(count) for count in reservation(plan, final)]
    else:
        ages = [plan.resident(tokens) for tokens in range(prompt_tokens, final + 1)]
        held = [total / len(ages) for total in added(*ages)]
    chunk = min(prompt_tokens, max_tokens_per_step)
    last = reservation(plan, final, chunk, first=chunk == prompt_tokens)

    def fits(count: int) -> bool:
        others = [round((count - 1) * each) for each in held]
        return geometry.slabs_for(added(others, last)) <= slabs

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Capacity(
        sequences=low if max_sequences is None else min(low, max_sequences),
        bytes_per_sequence=round(sum(map(mul, held, plan.block_bytes))),
        slabs=slabs,
        slab_bytes=geometry.bytes,
    )
