"""From a recipe to the scales of its engine: by the route that `kv_cache.scales.source` names.

    none         1.0; a look at a few tokens says how large keys and values are, and a warning says it on
    random       measured on random tokens
    dataset      measured on a text
    checkpoint   those that the checkpoint was calibrated with

To measure takes a run of the model. What it depends on is hashed into a key that the engine records, and an engine
beside the new one that has the same key lends its scales instead.

The model is measured as the engine will hold it (quantized weights too) and in float32, in memory as a whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import lowkv
from lowkv.calibration.scales import PARTS, KVScales, scaled_parts
from lowkv.calibration.text import (
    Dataset,
    Ids,
    bundled_dataset,
    dataset_tokens,
    random_tokens,
    read_dataset,
    windows,
)
from lowkv.errors import LowkvError

if TYPE_CHECKING:
    from lowkv.calibration.probe import LayerStatistics
    from lowkv.engine.progress import Progress
    from lowkv.kvcache.plan import CachePlan
    from lowkv.models.checkpoint import Checkpoint
    from lowkv.models.decoder import Decoder
    from lowkv.models.tokenizer import Tokenizer
    from lowkv.recipe import Recipe

LOOK_TOKENS = 256
"""Random tokens that `look` takes."""

log = logging.getLogger(__name__)


def scales_for(
    checkpoint: Checkpoint,
    recipe: Recipe,
    plan: CachePlan,
    hashes: Mapping[str, str],
    recorded: Iterable[Mapping[str, Any]],
    progress: Progress,
) -> KVScales | None:
    """The scales of the recipe's engine; None when no format of its plan takes any.

    Args:
        checkpoint: the model's.
        recipe: says the route.
        plan: the recipe's, for this model.
        hashes: SHA-256 of the checkpoint's files.
        recorded: `scales` of the manifests of other engines, which may be lent.
        progress: watches.

    Raises:
        LowkvError: the route cannot be gone: the text is missing or too short, the checkpoint has no scales, or a
            format cannot do with those it would give.
    """
    if not any(scaled_parts(plan)):
        return None
    wanted = recipe.kv_cache.scales
    if wanted.source == "none":
        _refuse_integers(plan, "source none")
    dataset = _dataset(recipe) if wanted.source == "dataset" else None
    key = _key(recipe, plan, hashes, dataset)
    lent = _lent(recorded, key, plan)
    if lent is not None:
        scales = lent
    elif wanted.source == "checkpoint":
        scales = _from_checkpoint(checkpoint, plan)
    elif wanted.source == "none":
        scales = _unit(checkpoint, recipe, plan, progress)
    else:
        scales = _measured(checkpoint, recipe, plan, dataset, progress)
    scales.check(plan)
    if wanted.source == "none":
        _warn(scales, plan, checkpoint)
    return replace(scales, details={**scales.details, "key": key})


def load_decoder(checkpoint: Checkpoint, recipe: Recipe) -> Decoder:
    """The recipe's model with its weights as the engine will hold them, computing in float32 on the CPU."""
    import torch

    from lowkv.models.checkpoint import WeightsFormat, check_tensors
    from lowkv.models.decoder import Decoder
    from lowkv.models.quantized import assembled

    check_tensors(checkpoint)
    weights = replace(WeightsFormat.from_recipe(recipe), dtype=torch.float32, head_dtype=torch.float32)
    return Decoder(checkpoint.config, assembled(dict(weights.tensors(checkpoint))))


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The checkpoint's."""
    from lowkv.models.tokenizer import Tokenizer

    with tempfile.TemporaryDirectory() as folder:
        checkpoint.write_tokenizer(Path(folder))
        return Tokenizer.load(Path(folder), checkpoint.config.eos)


def measure(
    checkpoint: Checkpoint, recipe: Recipe, tokenizer: Tokenizer, ids: Ids, progress: Progress, *, histograms: bool
) -> tuple[LayerStatistics, ...]:
    """Statistics of every layer's K and V over those tokens."""
    from lowkv.calibration.probe import WINDOW, collect

    progress.begin("loading the model to look at its keys and values")
    decoder = load_decoder(checkpoint, recipe)
    served = min(recipe.serving.max_model_len or decoder.config.max_positions, decoder.config.max_positions)
    parts = list(windows(ids, min(WINDOW, served), tokenizer.prefix))
    progress.begin("looking at keys and values", sum(len(part) for part in parts))
    return collect(
        decoder,
        parts,
        length=served,
        skip=max(1, len(tokenizer.prefix)),
        histograms=histograms,
        advance=progress.advance,
    )


def look(checkpoint: Checkpoint, recipe: Recipe, progress: Progress) -> tuple[LayerStatistics, ...]:
    """Statistics of every layer's K and V over a few random tokens, always the same."""
    tokenizer = load_tokenizer(checkpoint)
    ids = random_tokens(tokenizer, checkpoint.config.vocab, LOOK_TOKENS, 0)
    return measure(checkpoint, recipe, tokenizer, ids, progress, histograms=False)


# -- routes --------------------------------------------------------------------------------------------------


def _unit(checkpoint: Checkpoint, recipe: Recipe, plan: CachePlan, progress: Progress) -> KVScales:
    seen = look(checkpoint, recipe, progress)
    details = {"text": "random tokens", "tokens": LOOK_TOKENS, "seed": 0, **_largest(seen)}
    return KVScales.unit(len(plan.layers), plan.kv_heads, plan.head_dim, details)


def _measured(
    checkpoint: Checkpoint, recipe: Recipe, plan: CachePlan, dataset: Dataset | None, progress: Progress
) -> KVScales:
    from lowkv.calibration.estimate import k_scales, v_scales

    wanted = recipe.kv_cache.scales
    tokenizer = load_tokenizer(checkpoint)
    if dataset is None:
        ids = random_tokens(tokenizer, checkpoint.config.vocab, wanted.tokens, wanted.seed)
        details: dict[str, Any] = {"text": "random tokens"}
    else:
        ids = dataset_tokens(dataset, tokenizer, wanted.tokens, wanted.seed)
        details = {"text": dataset.name, "text_sha256": dataset.sha256}
    seen = measure(checkpoint, recipe, tokenizer, ids, progress, histograms=wanted.estimator != "amax")
    layers = _ones(plan)
    for layer, part, codec in scaled_parts(plan):
        if part == "k":
            layers[layer][0][...] = k_scales(seen[layer].k, codec, wanted.granularity, wanted.estimator)
        else:
            layers[layer][1][...] = v_scales(seen[layer].v, codec, wanted.granularity, wanted.estimator)
    return KVScales(
        source=wanted.source,
        granularity=wanted.granularity,
        estimator=wanted.estimator,
        layers=tuple(layers),
        details={**details, "tokens": wanted.tokens, "seed": wanted.seed, **_largest(seen)},
    )


def _from_checkpoint(checkpoint: Checkpoint, plan: CachePlan) -> KVScales:
    """The checkpoint's, for the plan's codecs: a scale is a largest magnitude over its own codec's largest value."""
    from kvattention import CODECS

    scales = checkpoint.kv_scales()
    if scales is None:
        raise LowkvError(
            "the checkpoint carries no scales of keys and values",
            got="kv_cache.scales.source checkpoint",
            expected="a checkpoint that was calibrated with a KV cache scheme",
            fix="set kv_cache.scales.source to dataset or random",
        )
    scales.check(plan)
    for warning in scales.details.get("warnings", ()):
        log.warning("scales of the checkpoint: %s", warning)
    if all(np.all(part == 1) for pair in scales.layers for part in pair):
        _refuse_integers(plan, "source checkpoint, whose scales are all 1.0,")
    theirs = CODECS[scales.details.get("codec", "e4m3")]
    layers = _ones(plan)
    for layer, part, codec in scaled_parts(plan):
        index = PARTS.index(part)
        layers[layer][index][...] = scales.layers[layer][index] * np.float32(theirs.maximum / codec.maximum)
    return replace(scales, source="checkpoint", layers=tuple(layers))


def _ones(plan: CachePlan) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    shape = (plan.kv_heads, plan.head_dim)
    return [(np.ones(shape, np.float32), np.ones(shape[:1], np.float32)) for _ in plan.layers]


def _refuse_integers(plan: CachePlan, source: str) -> None:
    for layer, part, codec in scaled_parts(plan):
        if codec.name == "int8":
            raise LowkvError(
                f"kv_cache.scales: {source} leaves int8 without scales ({part.upper()} of layer {layer})",
                got="1.0, which would round keys and values to whole numbers",
                expected="measured ones",
                fix="set kv_cache.scales.source: dataset",
            )


def _warn(scales: KVScales, plan: CachePlan, checkpoint: Checkpoint) -> None:
    parts = list(scaled_parts(plan))
    said = []
    for part in PARTS:
        largest: Sequence[float] = scales.details[f"largest_{part}"]
        layers = [layer for layer, its, _ in parts if its == part]
        if layers:
            layer = max(layers, key=lambda index: largest[index])
            said.append(f"|{part.upper()}| {largest[layer]:.4g} (layer {layer})")
    holds = ", ".join(sorted({f"{codec.name} holds up to {codec.maximum:g}" for _, _, codec in parts}))
    better = "random or dataset" if checkpoint.kv_scales() is None else "checkpoint, which has them,"
    log.warning(
        "kv_cache.scales.source is none: keys and values are stored with scale 1.0. Largest in %s random tokens: %s; "
        "%s. Set the source to %s to have them scaled.",
        scales.details["tokens"],
        ", ".join(said),
        holds,
        better,
    )


# -- what scales depend on -----------------------------------------------------------------------------------


def _dataset(recipe: Recipe) -> Dataset:
    text = recipe.kv_cache.scales.text
    if text is None:
        return bundled_dataset()
    path = Path(text).expanduser()
    return read_dataset(path if recipe.model.base is None else recipe.model.base / path)


def _key(recipe: Recipe, plan: CachePlan, hashes: Mapping[str, str], dataset: Dataset | None) -> str:
    depends: dict[str, Any] = {
        "lowkv": lowkv.__version__,
        "model": dict(hashes),
        "weights": asdict(recipe.weights),
        "calibration": recipe.calibration,
        "scales": asdict(recipe.kv_cache.scales),
        "max_model_len": recipe.serving.max_model_len,
        "text": None if dataset is None else dataset.sha256,
        "codecs": [(layer, part, codec.name) for layer, part, codec in scaled_parts(plan)],
    }
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()


def _lent(recorded: Iterable[Mapping[str, Any]], key: str, plan: CachePlan) -> KVScales | None:
    for plain in recorded:
        details = plain.get("details")
        if isinstance(details, Mapping) and details.get("key") == key:
            try:
                return KVScales.from_mapping(plain, plan)
            except LowkvError:  # another's damage is no reason not to build: measure instead
                continue
    return None


def _largest(seen: Sequence[LayerStatistics]) -> dict[str, list[float]]:
    return {
        "largest_k": [_shortest(layer.k.largest) for layer in seen],
        "largest_v": [_shortest(layer.v.largest) for layer in seen],
    }


def _shortest(value: float) -> float:
    return float(str(np.float32(value)))
