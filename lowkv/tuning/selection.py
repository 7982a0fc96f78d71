"""Choosing one item of every layer under a budget: arithmetic only.

    minimize   sum over layers l of costs[l][i_l]
    such that  sum over layers l of sizes[l][i_l] <= budget

This is the multiple-choice knapsack. Sizes are whole bytes, so that dynamic programming over the bytes spent so far
solves it exactly; a state that costs no less than a smaller one is dropped, which leaves few of them.
"""

from __future__ import annotations

from collections.abc import Sequence


def cheapest(sizes: Sequence[Sequence[int]], costs: Sequence[Sequence[float]], budget: int) -> tuple[int, ...]:
    """The item of every layer whose costs sum to the least; of equal sums, the one of the fewest bytes.

    Args:
        sizes: bytes of every item of every layer.
        costs: what each item costs in quality, in the same order.
        budget: bytes of all chosen items together, at most.

    Raises ValueError when not even the smallest items fit.
    """
    states: dict[int, float] = {0: 0.0}  # bytes spent -> least cost
    origins: list[dict[int, tuple[int, int]]] = []  # of each layer: bytes spent -> (item, bytes spent before it)
    for layer, (layer_sizes, layer_costs) in enumerate(zip(sizes, costs, strict=True)):
        room = budget - sum(min(later) for later in sizes[layer + 1 :])
        found: dict[int, float] = {}
        origin: dict[int, tuple[int, int]] = {}
        for spent, cost in states.items():
            for item, (size, more) in enumerate(zip(layer_sizes, layer_costs, strict=True)):
                total = spent + size
                if total <= room and cost + more < found.get(total, float("inf")):
                    found[total], origin[total] = cost + more, (item, spent)
        states = _undominated(found)
        origins.append(origin)
    if not states:
        raise ValueError(f"a budget of {budget} bytes is less than the smallest items take")
    spent = max(states)  # the least cost: smaller states that cost no more have driven out the others
    chosen = []
    for origin in reversed(origins):
        item, spent = origin[spent]
        chosen.append(item)
    return tuple(reversed(chosen))


def _undominated(states: dict[int, float]) -> dict[int, float]:
    """States in ascending bytes and descending cost."""
    kept: dict[int, float] = {}
    least = float("inf")
    for spent in sorted(states):
        if states[spent] < least:
            kept[spent] = least = states[spent]
    return kept


def interleaved(items: Sequence[int]) -> tuple[int, ...]:
    """The same items, each as often as before, spread evenly: what somebody would choose who measured nothing.

    At every place stands the item that is furthest behind its share so far; of several, the lowest. The order that the
    items come in does not matter: it was measured.
    """
    counts = {item: items.count(item) for item in sorted(set(items))}
    placed = dict.fromkeys(counts, 0)
    found = []
    for place in range(1, len(items) + 1):
        item = max(counts, key=lambda one: counts[one] * place - placed[one] * len(items))
        placed[item] += 1
        found.append(item)
    return tuple(found)
