"""A study from beginning to end: what is not recorded yet is measured, and all of it becomes one report of plain data.

Every finished measurement is recorded before the next begins (`lowkv.evaluation.records`): a study that was stopped
goes on, and one that changes nothing loads no model.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import lowkv
from lowkv.calibration.modelopt import open_model
from lowkv.calibration.routes import load_tokenizer
from lowkv.calibration.text import bundled_dataset, dataset_tokens, read_dataset
from lowkv.engine.directory import checkpoint_hashes
from lowkv.errors import LowkvError
from lowkv.evaluation.intervals import CONFIDENCE
from lowkv.evaluation.quality import Documents, windows_of
from lowkv.evaluation.records import Records, key_of
from lowkv.study.configurations import Configuration, baseline, every, sections
from lowkv.study.outcomes import figures
from lowkv.study.verdict import Plan, choose, orderings, remarks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lowkv.engine.progress import Progress
    from lowkv.models.checkpoint import Checkpoint
    from lowkv.models.tokenizer import Tokenizer
    from lowkv.recipe import Recipe

TOKENS = 2048
SHORTEST = 256
LIMIT = 1.02
"""Perplexity over the baseline's that a plan may cost, where the recipe does not say."""
METHOD = 1
"""Raised whenever figures would come out differently: older records do not count then."""

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Request:
    """What to study: a text of `tokens` tokens, and what a plan may cost.

    `documents` None is Wikipedia; `limit` None is the recipe's `quality.perplexity_ratio`, or LIMIT.
    """

    tokens: int = TOKENS
    documents: Documents | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.tokens < SHORTEST:
            raise LowkvError("the text is too short to show anything", got=self.tokens, expected=f"{SHORTEST} or more")
        if self.limit is not None and self.limit < 1:
            raise LowkvError("the limit is less than the baseline itself", got=self.limit, expected="1.0 or more")


@dataclass(frozen=True, eq=False)
class _Inputs:
    """What figures depend on, read before any weight is."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    ids: Ids
    calibration: Ids
    source: str
    calibration_source: str
    identity: Mapping[str, Any]


def study(recipe: Recipe, request: Request, records: Records, progress: Progress) -> dict[str, Any]:
    """The report, plain data.

    Raises:
        LowkvError: the model cannot be had, the text is too short or longer than the model's positions.
    """
    inputs = _inputs(recipe, request, progress)
    config, dtype = inputs.checkpoint.config, recipe.kv_cache.model_dtype
    everything = every(config, dtype)
    _measure(recipe, inputs, everything, records, progress)

    def outcome(one: Configuration, way: str) -> Any:
        return records.get(_key(inputs, one, way), 0)

    base, tokens = baseline(dtype), request.tokens
    length = min(recipe.serving.max_model_len or config.max_positions, config.max_positions)
    limit = request.limit or recipe.quality.perplexity_ratio or LIMIT
    entries, plans = {}, []
    for one in everything:
        simulated, served = outcome(one, "simulated"), outcome(one, "served")
        entry = _entry(one, config.head_dim, simulated["errors"]) | {
            "simulated": figures(simulated, outcome(base, "simulated"), tokens),
            "served": None,
            "bits_at_length": None,
        }
        if one.row is not None:
            entry["served"] = figures(served, outcome(base, "served"), tokens)
            entry["bits_at_length"] = one.plan(config, dtype).effective_bits(length)
            refusal = None if one.exact else _refusal(recipe, one)
            plans.append(Plan(one.name, one.label, entry["bits_at_length"], entry["served"]["ratio"], refusal))
        entries[one.name] = entry
    by_name = {one.name: outcome(one, "simulated") for one in everything}
    ordered = orderings(by_name, tokens)
    statistics = records.get(_key(inputs, None, "statistics"), 0)
    choice = choose(plans, limit, length, base.row.name if base.row else "")
    chosen = next(one for one in everything if one.name == choice["name"])
    return {
        "lowkv": lowkv.__version__,
        "created": time.strftime("%Y-%m-%d %H:%M"),
        "recipe": recipe.name,
        "model": {
            "source": str(recipe.model),
            "architecture": config.architecture,
            "layers": config.layers,
            "heads": config.heads,
            "kv_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "windows": list(config.windows),
            "weights": recipe.weights.quantization if recipe.weights.quantization != "none" else recipe.weights.dtype,
        },
        "machine": {"cores": len(os.sched_getaffinity(0))},
        "text": {"source": inputs.source, "tokens": tokens, "scales": inputs.calibration_source},
        "confidence": CONFIDENCE,
        "limit": limit,
        "length": length,
        "target": recipe.target,
        "baseline": base.name,
        "sections": {name: [one.name for one in chosen] for name, chosen in sections(config, dtype).items()},
        "configurations": entries,
        "orderings": ordered,
        "statistics": statistics,
        "choice": choice | {"kv_cache": _yaml(chosen, recipe)},
        "remarks": remarks(statistics, ordered, entries),
    }


def _measure(
    recipe: Recipe, inputs: _Inputs, everything: tuple[Configuration, ...], records: Records, progress: Progress
) -> None:
    """Does what is not recorded yet: the most telling first, one configuration both ways before the next."""
    wanted: list[tuple[Configuration | None, str]] = [(None, "statistics")]
    for one in everything:
        wanted += [(one, "simulated")] + ([(one, "served")] if one.row is not None else [])
    missing = [item for item in wanted if records.get(_key(inputs, *item), 0) is None]
    if not missing:
        return
    from lowkv.study.bench import Bench

    bench = Bench(
        recipe, inputs.checkpoint, inputs.ids, inputs.calibration, tuple(inputs.tokenizer.prefix), progress.advance
    )
    progress.begin("loading the model")
    bench.decoder  # noqa: B018
    measured = sum(one is not None for one, _ in missing)
    progress.begin(f"measuring {measured} of {len(wanted) - 1} figures", bench.work * (1 + measured))
    for item, way in missing:
        if item is None:
            records.add(_key(inputs, None, way), 0, bench.statistics(), {"study": way})
            continue
        outcome = bench.simulate(item) if way == "simulated" else bench.serve(item)
        records.add(_key(inputs, item, way), 0, outcome, {"study": item.name, "way": way})


def _inputs(recipe: Recipe, request: Request, progress: Progress) -> _Inputs:
    checkpoint = open_model(recipe, progress)
    longest = checkpoint.config.max_positions
    if request.tokens > longest:
        raise LowkvError(
            "the text is longer than the model's positions", got=request.tokens, expected=f"at most {longest}"
        )
    files = checkpoint_hashes(checkpoint, progress)
    progress.begin("reading the text")
    tokenizer = load_tokenizer(checkpoint)
    if request.documents is None:
        from lowkv.wikipedia import SOURCE, wikipedia

        source, texts = SOURCE, (text for _, text in wikipedia())
        ids = windows_of(tokenizer, texts, 1, request.tokens)[0]
    else:
        source = request.documents.source
        ids = windows_of(tokenizer, request.documents.texts, 1, request.tokens)[0]
    wanted = recipe.kv_cache.scales
    if wanted.text is None:
        dataset = bundled_dataset()
    else:
        path = Path(wanted.text).expanduser()
        dataset = read_dataset(path if recipe.model.base is None else recipe.model.base / path)
    calibration = dataset_tokens(dataset, tokenizer, wanted.tokens, wanted.seed)
    identity = {
        "method": METHOD,
        "files": files,
        "weights": asdict(recipe.weights),
        "calibration": recipe.calibration,
        "model_dtype": recipe.kv_cache.model_dtype,
        "text": hashlib.sha256(ids.tobytes()).hexdigest(),
    }
    return _Inputs(checkpoint, tokenizer, ids, calibration, source, dataset.name, identity)


def _key(inputs: _Inputs, one: Configuration | None, way: str) -> str:
    extra: dict[str, Any] = {}
    if one is not None:
        extra["configuration"] = one.to_mapping()
        if one.scaled and one.granularity != "none":
            extra["scales"] = hashlib.sha256(inputs.calibration.tobytes()).hexdigest()
    return key_of(study=dict(inputs.identity), way=way, **extra)


def _entry(one: Configuration, head_dim: int, errors: Mapping[str, list[float]]) -> dict[str, Any]:
    return {
        "label": one.label,
        "format": one.row.name if one.row else None,
        "settings": one.to_mapping(),
        "bits": one.bits(head_dim),
        "errors": {part: float(np.mean(layers)) for part, layers in errors.items()},
        "errors_by_layer": {part: [float(f"{error:.4g}") for error in layers] for part, layers in errors.items()},
    }


def _refusal(recipe: Recipe, one: Configuration) -> str | None:
    """Why the recipe's target does not serve it, or None."""
    try:
        replace(recipe, kv_cache=replace(one.settings(recipe.kv_cache.model_dtype), budget=recipe.kv_cache.budget))
    except LowkvError as error:
        return str(error)
    return None


def _yaml(one: Configuration, recipe: Recipe) -> str:
    """The lines of a recipe that ask for it."""
    kv = one.settings(recipe.kv_cache.model_dtype)
    lines = ["kv_cache:", f"  format: {kv.format}"]
    if not one.exact and not one.scaled:
        lines += [f"  {key}: {getattr(kv, key)}" for key in ("group_size", "residual_length", "sink_tokens")]
    if kv.scales.source != "none":
        lines += ["  scales:", f"    source: {kv.scales.source}", f"    granularity: {kv.scales.granularity}"]
    return "\n".join(lines)
