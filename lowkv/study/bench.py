"""The loaded model, and the two ways of measuring a configuration on it: simulated, and with the serving kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvattention.codec import CODECS
from lowkv.calibration.estimate import k_scales, v_scales
from lowkv.calibration.probe import WINDOW, LayerStatistics, collect
from lowkv.calibration.routes import load_decoder
from lowkv.calibration.scales import KVScales
from lowkv.calibration.text import windows
from lowkv.evaluation.feeding import Run
from lowkv.evaluation.subjects import Subject
from lowkv.models.rotation import with_rotated_values
from lowkv.study import trace as looking
from lowkv.study.configurations import baseline
from lowkv.study.outcomes import compared
from lowkv.study.simulation import Cache, SimulatedAttention

if TYPE_CHECKING:
    from lowkv.models.checkpoint import Checkpoint
    from lowkv.models.decoder import Decoder
    from lowkv.recipe import Recipe
    from lowkv.study.configurations import Configuration, ModelDtype

Ids = NDArray[np.int64]


@dataclass(eq=False)
class Bench:
    """A recipe's model and a text. What several measurements need is computed when the first asks for it.

    Attributes:
        recipe: says the weights, their precision and the longest sequence.
        checkpoint: the recipe's model.
        ids: the text, [T] token ids.
        calibration: token ids that 8-bit scales are measured on.
        prefix: what the tokenizer puts before a text.
        advance: told of work done; a configuration, either way, is `work` of it, and so is the exact look.
    """

    recipe: Recipe
    checkpoint: Checkpoint
    ids: Ids
    calibration: Ids
    prefix: tuple[int, ...]
    advance: Callable[[int], None]

    @property
    def work(self) -> int:
        return len(self.ids) * self.checkpoint.config.layers

    @property
    def model_dtype(self) -> ModelDtype:
        return self.recipe.kv_cache.model_dtype

    @cached_property
    def decoder(self) -> Decoder:
        return load_decoder(self.checkpoint, self.recipe)

    @cached_property
    def rotated(self) -> Decoder:
        """The same model with V in the rotated basis in every layer."""
        from lowkv.study.configurations import of_format

        plan = of_format("kivi2plus").plan(self.checkpoint.config, self.model_dtype)
        return load_decoder(with_rotated_values(self.checkpoint, plan), self.recipe)

    @cached_property
    def seen(self) -> looking.Trace:
        exact = baseline(self.model_dtype)
        return looking.trace(self.decoder, self._cache(exact), self.ids, self.advance)

    def statistics(self) -> dict[str, Any]:
        return looking.statistics(self.seen)

    def simulate(self, configuration: Configuration) -> dict[str, Any]:
        """Errors by layer, and the outcome on the text."""
        cache, seen = self._cache(configuration), self.seen
        hidden = seen.hidden
        if configuration.exact:
            self.advance(self.work)
        else:
            attention = SimulatedAttention(self.decoder.config, cache, self.advance)
            hidden = looking.run(self.decoder, self.ids, attention)
        outcome = compared(self.decoder, seen.hidden, hidden, self.ids)
        return {"errors": looking.errors(seen, cache), **outcome}

    def serve(self, configuration: Configuration) -> dict[str, Any]:
        """The outcome on the text, with the kernels and block rules that serve."""
        cache, seen = self._cache(configuration), self.seen
        decoder = self.rotated if configuration.rotate_values else self.decoder
        running = Run(Subject(configuration.name, decoder, cache.plan, cache.scales), 1, len(self.ids))
        states = []
        for begin in range(0, len(self.ids), running.step):
            part = self.ids[begin : begin + running.step].tolist()
            states.append(running.feed([(0, part)]))
            self.advance(len(part) * self.decoder.config.layers)
        return compared(self.decoder, seen.hidden, torch.cat(states), self.ids)

    def _cache(self, configuration: Configuration) -> Cache:
        plan = configuration.plan(self.checkpoint.config, self.model_dtype)
        return Cache(configuration, plan, self._scales(configuration))

    def _scales(self, configuration: Configuration) -> KVScales | None:
        if not configuration.scaled:
            return None
        config, granularity = self.checkpoint.config, configuration.granularity
        unit = KVScales.unit(config.layers, config.kv_heads, config.head_dim)
        if granularity == "" or granularity == "none":
            return unit
        k, v = CODECS[configuration.k.codec], CODECS[configuration.v.codec]
        layers = tuple(
            (k_scales(layer.k, k, granularity, "amax"), v_scales(layer.v, v, granularity, "amax"))
            for layer in self._magnitudes
        )
        return replace(unit, source="dataset", granularity=granularity, estimator="amax", layers=layers)

    @cached_property
    def _magnitudes(self) -> tuple[LayerStatistics, ...]:
        config = self.decoder.config
        served = min(self.recipe.serving.max_model_len or config.max_positions, config.max_positions)
        parts = list(windows(self.calibration, min(WINDOW, served), self.prefix))
        return collect(self.decoder, parts, length=served, skip=max(1, len(self.prefix)), histograms=False)
