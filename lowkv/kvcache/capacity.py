"""How many sequences fit: the prediction (G1) that the load test checks against a running server.

The scheduler reserves with the same function (`reservation`) that the planner counts with, so the two can only
differ where the server does something else than it says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowkv.kvcache.arena import SlabGeometry

if TYPE_CHECKING:
    from lowkv.kvcache.plan import CachePlan


def reservation(plan: CachePlan, final: int, chunk: int = 0) -> tuple[int, int]:
    """(hot, cold) blocks that a sequence never exceeds on its way to `final` stored tokens.

    `chunk` > 0: prompt tokens are still to come, in steps of at most that many, onto tokens stored before. Such
    a step holds the old residual, which is sealed only when it ends, and the new one at the same time. (With a
    sliding window a first step counts too: it writes blocks that are dropped when it ends.)
    """
    blocks = plan.blocks(final)
    alive = blocks if plan.window is None else min(blocks, -(-(plan.window - 1) // plan.group_size) + 1)
    step_blocks = plan.blocks(chunk) + 1 if chunk else 0
    if not plan.seals:
        return min(blocks, alive + (step_blocks if plan.window is not None else 0)), 0
    residual_blocks = plan.residual_length // plan.group_size
    if plan.residual == "window" or residual_blocks == 0:
        residual_blocks += 1
    hot = plan.sink_blocks + residual_blocks + min(step_blocks, residual_blocks)
    cold = min(plan.cold_end(final), blocks) - plan.sink_blocks
    if plan.window is not None:
        cold = min(cold, alive + step_blocks)
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
        hot, cold = (float(count) for count in reservation(plan, final))
    else:
        ages = [plan.resident(tokens) for tokens in range(prompt_tokens, final + 1)]
        hot = sum(age[0] for age in ages) / len(ages)
        cold = sum(age[1] for age in ages) / len(ages)
    chunked = max_tokens_per_step > 0 and (max_tokens_per_step < prompt_tokens or plan.window is not None)
    last_hot, last_cold = reservation(plan, final, max_tokens_per_step if chunked else 0)

    def fits(count: int) -> bool:
        others = count - 1
        need = geometry.slabs_for(round(others * hot) + last_hot, round(others * cold) + last_cold)
        return need <= slabs

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Capacity(
        sequences=low if max_sequences is None else min(low, max_sequences),
        bytes_per_sequence=round(hot * plan.hot_block_bytes + cold * plan.cold_block_bytes),
        slabs=slabs,
        slab_bytes=geometry.bytes,
    )
