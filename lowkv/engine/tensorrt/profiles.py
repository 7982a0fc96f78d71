"""How long the inputs of a step can get: the two optimization profiles of an engine, from its recipe and its model.

    prefill   any step: prompt chunks, decoded tokens, or both, up to max_tokens_per_step
    decode    one token of each sequence, up to max_sequences

The lists are `kvattention.gpu.schedule`'s; the bounds hold for every step within those limits, whatever is stored.
Every cache group has lists of its own where they say which blocks lie where. How long a list is depends on the lengths
of sequences alone, so all groups share the bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kvattention.gpu.schedule import MAX_PARTS, PART_TOKENS, group_heads, narrow_rows, wide_rows
from lowkv.errors import LowkvError

if TYPE_CHECKING:
    from lowkv.kvcache.plan import CachePlan
    from lowkv.models.config import ModelConfig
    from lowkv.recipe import Recipe

Shape = tuple[int, ...]
Dims = tuple[str | int, ...]

MAX_ELEMENTS = 2**31
"""Of a tensor, and one too many."""

ARENA = "arena"
"""The one input without a dynamic dimension: the arena's address."""


@dataclass(frozen=True)
class StepLimits:
    """Most of everything in one step, by the letters of the inputs' dimensions. The least is 1 of each."""

    T: int  # tokens
    R: int  # rows of logits
    S: int  # sequences
    B: int  # columns of the block table
    A: int  # appends
    W: int  # narrow tiles
    P: int  # wide tiles
    C: int  # merges

    def shapes(self, groups: int) -> dict[str, Shape]:
        """Input name -> its largest shape, of an engine with so many cache groups."""
        return {name: self._sized(dims) for name, dims in engine_inputs(groups).items()}

    def _sized(self, dims: Dims) -> Shape:
        sizes = asdict(self)
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in dims)


INPUTS: Mapping[str, Dims] = {
    "tokens": ("T",),
    "positions": ("T",),
    "rows": ("R",),
    ARENA: (1,),
    "sequences": ("S", 4),
    "table": ("S", "B"),
    "appends": ("A", 4),
    "narrow": ("W", 8),
    "wide": ("P", 8),
    "merges": ("C", 4),
}
"""The inputs of an engine with one cache group and their dimensions, in binding order."""

GROUP_LISTS = ("sequences", "table", "appends")
"""Those that differ between cache groups. The others say which tokens and blocks are read, wherever blocks lie."""


def engine_inputs(groups: int) -> Mapping[str, Dims]:
    """An engine's inputs and their dimensions, in binding order: those of further groups come last."""
    further = {group_input(name, group): INPUTS[name] for group in range(1, groups) for name in GROUP_LISTS}
    return {**INPUTS, **further}


def group_input(name: str, group: int) -> str:
    """The input that a group's layers take as list `name`."""
    return f"{name}.{group}" if group and name in GROUP_LISTS else name


@dataclass(frozen=True)
class Profile:
    """One optimization profile; its smallest shapes are 1 in every dynamic dimension."""

    name: str
    limits: StepLimits
    groups: int

    def ranges(self) -> Iterator[tuple[str, Shape, Shape]]:
        """(input, smallest shape, largest shape)."""
        inputs = engine_inputs(self.groups)
        for name, largest in self.limits.shapes(self.groups).items():
            smallest = tuple(1 if isinstance(dim, str) else dim for dim in inputs[name])
            yield name, smallest, largest


def engine_profiles(recipe: Recipe, config: ModelConfig, plan: CachePlan) -> tuple[Profile, Profile]:
    """(prefill, decode).

    Raises `LowkvError` for limits with which a tensor would have more elements than TensorRT counts.
    """
    serving = recipe.serving
    _check_elements(serving.max_tokens_per_step, serving.max_sequences, config)
    length = min(serving.max_model_len or config.max_positions, config.max_positions)
    gqa, groups = group_heads(config.heads, config.kv_heads), len(plan.groups)
    return (
        Profile(
            "prefill",
            prefill_limits(
                serving.max_sequences, serving.max_tokens_per_step, length=length, gqa=gqa, group_size=plan.group_size
            ),
            groups,
        ),
        Profile("decode", decode_limits(serving.max_sequences, length=length, group_size=plan.group_size), groups),
    )


def _check_elements(tokens: int, sequences: int, config: ModelConfig) -> None:
    """TensorRT does not refuse a tensor of 2^31 elements, it ends the process."""
    widest = max(2 * config.intermediate, config.q_width + 2 * config.kv_width)
    limits = (("max_tokens_per_step", tokens, widest), ("max_sequences", sequences, config.vocab))
    for name, value, width in limits:
        if value * width >= MAX_ELEMENTS:
            raise LowkvError(
                f"serving.{name} makes a tensor too large for TensorRT",
                got=value,
                expected=f"at most {(MAX_ELEMENTS - 1) // width} with this model, whose rows are {width} wide",
            )


def prefill_limits(sequences: int, tokens: int, *, length: int, gqa: int, group_size: int) -> StepLimits:
    """Bounds of `make_schedule`'s lists for any step.

    Args:
        sequences: most sequences of a step.
        tokens: most new tokens of a step, at least `sequences`.
        length: longest sequence, prompt and answer.
        gqa: query heads to a KV head.
        group_size: tokens of a block.
    """
    few = narrow_rows(gqa) // gqa  # tokens of a narrow tile; a sequence with more new ones gets wide tiles
    parts = _parts(length)
    long = min(sequences, tokens // (few + 1))  # sequences with wide tiles
    tiles = long + tokens // (wide_rows(gqa) // gqa)
    # A sequence's tiles times its parts is at most MAX_PARTS, or its tiles where those are more.
    wide = min(tiles * parts, tiles + long * MAX_PARTS)
    return StepLimits(
        T=tokens,
        R=sequences,
        S=sequences,
        B=-(-length // group_size),
        A=min(tokens, 2 * sequences + tokens // group_size),
        W=sequences * parts,
        P=max(1, wide),
        C=tokens,
    )


def decode_limits(sequences: int, *, length: int, group_size: int) -> StepLimits:
    """Bounds of `make_schedule`'s lists for steps of one new token a sequence."""
    return StepLimits(
        T=sequences,
        R=sequences,
        S=sequences,
        B=-(-length // group_size),
        A=sequences,
        W=sequences * _parts(length),
        P=1,
        C=sequences,
    )


def _parts(length: int) -> int:
    return max(1, min(MAX_PARTS, length // PART_TOKENS))
