"""The plans that a search looks at: a recipe's cache, with other formats in the layers that may change.

Layers that the recipe skips keep the model's precision in all of them. Everything else (group size, residual, sink) is
the recipe's; where it leaves residual and sink to the format, they are the format's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from lowkv.errors import LowkvError
from lowkv.kvcache import CachePlan
from lowkv.kvcache.formats import FORMATS, kv_format
from lowkv.kvcache.plan import MODEL_DTYPES
from lowkv.models.rotation import rotated_layers

if TYPE_CHECKING:
    from lowkv.kvcache.plan import ModelGeometry
    from lowkv.recipe import KVCacheConfig, Recipe


@dataclass(frozen=True)
class Space:
    """All plans of one model that mix `formats`."""

    kv: KVCacheConfig
    model: ModelGeometry
    formats: tuple[str, ...]

    @property
    def hot(self) -> str:
        """The model's precision: what nothing is lost in."""
        return MODEL_DTYPES[self.kv.model_dtype]

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers that may have any of the formats."""
        plan = CachePlan.from_config(self.model, self.kv)
        return tuple(index for index, layer in enumerate(plan.layers) if layer.reason == "default")

    @cached_property
    def baseline(self) -> CachePlan:
        """Every layer in the model's precision."""
        return CachePlan.from_config(self.model, replace(self.kv, format=self.hot, residual="window", skip_layers=()))

    def alone(self, layer: int, name: str) -> CachePlan:
        """One layer in a format, all others in the model's precision."""
        others = {other: self.hot for other in range(self.model.layers) if other != layer}
        return CachePlan.from_config(self.model, replace(self.kv, format=name, skip_layers=(), overrides=others))

    def settings(self, assignment: Sequence[str]) -> KVCacheConfig:
        """The recipe's section in which `layers` have these formats: the most frequent one, and the exceptions."""
        # One in model precision brings no residual: it is the default only where there is no other.
        default = max(assignment, key=lambda name: (not FORMATS[name].model_precision, assignment.count(name)))
        exceptions = {layer: name for layer, name in zip(self.layers, assignment, strict=True) if name != default}
        return replace(self.kv, format=default, overrides=exceptions)

    def mixed(self, assignment: Sequence[str]) -> CachePlan:
        """`layers` in these formats."""
        return CachePlan.from_config(self.model, self.settings(assignment))

    def uniform(self, name: str) -> CachePlan:
        """All of `layers` in one format."""
        return self.mixed([name] * len(self.layers))

    def sizes(self, layer: int) -> list[int]:
        """Bytes of a layer's share of a sealed block, by format."""
        return [plan.cold_records[layer].bytes for plan in self._uniform]

    def budget(self, bits: float) -> int:
        """Bytes that `layers` may take in a sealed block if the whole plan has at most so many bits per value.

        Raises LowkvError when the smallest format takes more, or every layer may have the largest.
        """
        low, high = (find(self._uniform, key=CachePlan.effective_bits) for find in (min, max))
        if not bits >= low.effective_bits():  # nor is nan
            raise LowkvError(
                "no plan of these formats is so small",
                got=f"--bits {bits:g}",
                expected=f"at least {low.effective_bits():.2f}, which {low.summary()} takes",
                fix="give more bits, or --formats with a smaller one",
            )
        if bits > high.effective_bits():
            raise LowkvError(
                "there is nothing to choose: every layer can have the largest format",
                got=f"--bits {bits:g}",
                expected=f"at most {high.effective_bits():.2f}, which {high.summary()} takes",
                fix=f"set kv_cache.format: {high.default}, or give --formats with a larger one",
            )
        values = low.values_per_token * low.group_size
        fixed = low.cold_block_bytes - sum(low.cold_records[layer].bytes for layer in self.layers)
        # The bits of a plan are a fraction that a decimal number may just miss.
        return int(bits * values / 8 + 1e-6) - fixed

    @cached_property
    def _uniform(self) -> tuple[CachePlan, ...]:
        return tuple(map(self.uniform, self.formats))


def space_of(recipe: Recipe, model: ModelGeometry, formats: Sequence[str] | None) -> Space:
    """What may be chosen for a recipe; `formats` None are those of 2 and 4 bits.

    Raises:
        LowkvError: the recipe has overrides, a format is not known, not in the target's kernels, or needs static
            scales, there are fewer than two, or the recipe skips every layer.
    """
    kv = recipe.kv_cache
    if kv.overrides:
        raise LowkvError(
            "the recipe has a plan already",
            got=f"kv_cache.overrides of {len(kv.overrides)} layers",
            expected="a recipe without overrides",
            fix="remove kv_cache.overrides; layers that must stay in 16 bit are named by kv_cache.skip_layers",
        )
    formats = tuple(dict.fromkeys(_candidates(model) if formats is None else formats))
    hot = MODEL_DTYPES[kv.model_dtype]
    for name in formats:
        row = kv_format(name)
        if row.needs_scales or (row.model_precision and name != hot):
            raise LowkvError(
                f"{name} is not searched",
                got=f"--formats with {name}",
                expected=f"formats that carry their own scales, and {hot}",
                fix="choose formats of 2 and 4 bits; those of 8 bits need static scales and lose next to nothing",
            )
        replace(recipe, kv_cache=replace(kv, format=name))  # refuses what the target's kernels lack
    if len(formats) < 2:
        raise LowkvError("there is nothing to choose from", got=list(formats), expected="two formats or more")
    space = Space(replace(kv, format=formats[0]), model, formats)
    if not space.layers:
        raise LowkvError("there is nothing to choose: kv_cache.skip_layers names every layer", fix="name fewer layers")
    for name in formats:
        rotated_layers(space.uniform(name))  # refuses heads that have no such basis
    return space


def _candidates(model: ModelGeometry) -> list[str]:
    """Grouped formats that the model's heads allow; every target's kernels have them.

    Of those with as many bits for K and for V as each other, the last in the table: a format stands there below another
    of its bytes only because it was measured to be better, and the fewer there are to choose from, the less of the
    choice is chance.
    """
    able = [row for row in FORMATS.values() if row.k.grouped and row.v.grouped]
    if model.head_dim & (model.head_dim - 1):
        able = [row for row in able if not row.rotate_values]
    return list({(row.k.bits, row.v.bits): row.name for row in able}.values())
