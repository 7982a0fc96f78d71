"""`kv_cache.format: auto`: the format of a recipe that leaves the choice to lowkv.

Chosen is the smallest at the length that is served, of the formats whose cost on every model of docs/quality.md stays
under `LIMIT`, among those that the model's heads can have. Short sequences are mostly sink and residual,
so that an 8-bit format can be smaller than one of 4 bits.

What outliers in K change (channels far above their head's others, as in Qwen2): formats with a scale per channel,
which the 2- and 4-bit ones have in every block, do not notice. FP8's error is relative, so it hardly does either, until
keys pass the 448 that E4M3 holds and scale 1.0 cuts them off. So the model is looked at over a few random tokens, and
where a channel stands out an 8-bit format gets static scales per channel, measured on text. The choice says what was
seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import lowkv
from lowkv.kvcache.formats import AUTO, FORMATS
from lowkv.kvcache.plan import CachePlan, ModelGeometry

if TYPE_CHECKING:
    from lowkv.engine.progress import Progress
    from lowkv.models.checkpoint import Checkpoint
    from lowkv.recipe import KVCacheConfig, Recipe

LIMIT = 1.01
"""Perplexity over FP16's that a format may cost on the models of docs/quality.md."""

COSTS: Mapping[str, float] = {
    "kivi4": 1.0021,
    "k4v2": 1.0108,
    "k4v2plus": 1.0046,
    "kivi2plus": 1.0203,
    "fp8": 1.0018,
}
"""The worst such ratio of each candidate in docs/quality.md, outlier twin included."""

OUTLIER = 16.0
"""A channel of K stands out when its largest magnitude is this many times that of its head's median channel."""


@dataclass(frozen=True)
class Choice:
    """What `auto` stands for in one recipe.

    Attributes:
        kv_cache: the recipe's section with the format, and the scales if it needs any other than the recipe's.
        why: sentences for a person.
    """

    kv_cache: KVCacheConfig
    why: tuple[str, ...]


def choose(model: ModelGeometry, kv: KVCacheConfig, length: int, outliers: Mapping[int, float] | None = None) -> Choice:
    """What `kv_cache.format: auto` stands for.

    Args:
        model: its geometry.
        kv: the section, format auto; whatever else it sets is kept.
        length: tokens of a sequence, prompt and answer.
        outliers: `Magnitudes.outlier` of K by layer; None where the model was not looked at.
    """
    bits: dict[str, float] = {}
    for name in COSTS:
        if FORMATS[name].rotate_values and model.head_dim & (model.head_dim - 1):
            continue
        bits[name] = CachePlan.from_config(model, replace(kv, format=name)).effective_bits(length)
    allowed = [name for name in bits if COSTS[name] <= LIMIT]
    best = min(allowed, key=lambda name: (bits[name], COSTS[name]))
    why = [
        f"{best}: {bits[best]:.2f} bits a value at {length:,} tokens, at {_percent(COSTS[best])} of perplexity; "
        + ", ".join(f"{name} {bits[name]:.2f} at {_percent(COSTS[name])}" for name in bits if name != best)
        + f" (worst of the models in docs/quality.md; limit {_percent(LIMIT)})"
    ]
    section = replace(kv, format=best)
    if outliers is not None:
        section, seen = _minding(section, outliers)
        why.append(seen)
    return Choice(section, tuple(why))


def _minding(kv: KVCacheConfig, outliers: Mapping[int, float]) -> tuple[KVCacheConfig, str]:
    """The section with scales that bear the outliers, and what to say of them."""
    from lowkv.recipe import ScalesConfig

    worst = max(outliers, key=lambda layer: outliers[layer])
    many = sum(outlier > OUTLIER for outlier in outliers.values())
    ratio = f"the largest channel of a head is at most {outliers[worst]:.0f} times the median one (layer {worst})"
    if not many:
        return kv, f"K has no outliers: {ratio}"
    seen = f"K has outliers in {many} of {len(outliers)} layers: {ratio}"
    if not FORMATS[kv.format].needs_scales:
        return kv, f"{seen}; {kv.format} has a scale for every channel of K and does not mind"
    if kv.scales != ScalesConfig():
        return kv, f"{seen}; the recipe's own scales are kept"
    scales = ScalesConfig(source="dataset", granularity="channel")
    return replace(kv, scales=scales), f"{seen}; K gets static scales per channel, measured on text"


def settled(
    recipe: Recipe,
    checkpoint: Checkpoint,
    hashes: Mapping[str, str],
    recorded: Iterable[Mapping[str, Any] | None],
    progress: Progress,
) -> tuple[Recipe, Mapping[str, Any] | None]:
    """The recipe with `auto` replaced, and what its engine records of the choice; a recipe that says more as it is.

    Args:
        recipe: says auto or not.
        checkpoint: the model's.
        hashes: SHA-256 of the checkpoint's files.
        recorded: what other engines record of theirs; one that looked at the same model lends what it saw.
        progress: watches.
    """
    if recipe.kv_cache.format != AUTO:
        return recipe, None
    key = hashlib.sha256(
        json.dumps(
            [lowkv.__version__, dict(hashes), asdict(recipe.weights), recipe.serving.max_model_len], sort_keys=True
        ).encode()
    ).hexdigest()
    seen = next((dict(other["outliers"]) for other in recorded if other and other.get("key") == key), None)
    outliers = seen or {str(layer): value for layer, value in _look(checkpoint, recipe, progress).items()}
    longest = checkpoint.config.max_positions
    length = min(recipe.serving.max_model_len or longest, longest)
    choice = choose(
        checkpoint.config,
        recipe.kv_cache,
        length,
        {int(layer): value for layer, value in outliers.items()},
    )
    return replace(recipe, kv_cache=choice.kv_cache), {"key": key, "why": list(choice.why), "outliers": outliers}


def _look(checkpoint: Checkpoint, recipe: Recipe, progress: Progress) -> dict[int, float]:
    """`Magnitudes.outlier` of every layer's K."""
    from lowkv.calibration.routes import look

    return {layer: round(seen.k.outlier, 2) for layer, seen in enumerate(look(checkpoint, recipe, progress))}


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):.1f} %"
