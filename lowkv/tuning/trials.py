"""What plans cost: each run over windows of text on the serving kernels, beside 16-bit KV over the same weights.

Plans are measured as `lowkv eval` measures engines, some side by side (`side_by_side`). No engine is built: the model
is held in memory, as the engine would hold it. Formats that rotate values need rotated weights, and rotation does not
change what the model computes, so layers in the model's precision may stand in either basis: two models, one with no
layer rotated and one with all, serve every plan that does not itself mix the two. One is in memory at a time.

A finished part is recorded before the next begins, under a key of everything that it depends on. A search that was
stopped goes on there, and one with another budget finds all of its measurements made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lowkv.evaluation.feeding import BATCH
from lowkv.evaluation.intervals import Interval, block_sums, exponential, of_blocks
from lowkv.evaluation.records import Records, key_of
from lowkv.models.rotation import RotatedCheckpoint, rotated_layers

if TYPE_CHECKING:
    from lowkv.engine.progress import Progress
    from lowkv.kvcache import CachePlan
    from lowkv.models.checkpoint import Checkpoint
    from lowkv.models.decoder import Decoder
    from lowkv.recipe import Recipe
    from lowkv.tuning.texts import Windows

MEMORY = 2**30
"""Bytes of KV cache that plans measured side by side may take together (at least one is measured)."""
SIDE_BY_SIDE = 15
"""Plans measured together at most: what is lost when a search is stopped."""

Ids = npt.NDArray[np.int64]
Sums = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Loss:
    """What a plan loses against the model's precision: sums over blocks of positions, [W, B] each.

    The same windows have the same blocks, so that differences of two plans can be taken block by block.
    """

    sizes: Sums
    """Positions of each block."""
    kl: Sums
    nll: Sums
    """Negative log-likelihood, less the baseline's."""
    agree: Sums

    @property
    def divergence(self) -> Interval:
        """Mean KL divergence, in nats."""
        return _mean(self.kl, self.sizes)

    @property
    def ratio(self) -> Interval:
        """Perplexity over the baseline's."""
        return exponential(_mean(self.nll, self.sizes))

    @property
    def top1(self) -> Interval:
        """Share of positions with the baseline's most likely token."""
        return _mean(self.agree, self.sizes)

    def less(self, other: Loss) -> Interval:
        """This divergence less another's on the same text."""
        return _mean(self.kl - other.kl, self.sizes)

    @classmethod
    def nothing(cls, windows: Windows) -> Loss:
        """That of the model's precision itself."""
        sizes = _sizes(windows.ids)
        return cls(sizes, np.zeros_like(sizes), np.zeros_like(sizes), sizes)


class Trials:
    """Measures plans of one recipe's model."""

    def __init__(
        self,
        recipe: Recipe,
        checkpoint: Checkpoint,
        model: Mapping[str, str],
        baseline: CachePlan,
        records: Records,
        progress: Progress,
    ) -> None:
        """`model`: SHA-256 of the checkpoint's files; `baseline`: what every plan is compared with."""
        self._recipe = recipe
        self._checkpoint = checkpoint
        self._model = dict(model)
        self._baseline = baseline
        self._records = records
        self._progress = progress

    def losses(self, plans: Sequence[CachePlan], windows: Windows, stage: str) -> list[Loss]:
        """Of each plan on the windows, from the records as far as they go; `stage` names the work."""
        parts = [windows.ids[first : first + BATCH] for first in range(0, len(windows.ids), BATCH)]
        keys = [self._key(plan, windows) for plan in plans]
        missing = {
            key: plan
            for key, plan in zip(keys, plans, strict=True)
            if plan.seals and any(self._records.get(key, part) is None for part in range(len(parts)))
        }
        if missing:
            self._measure(missing, parts, stage)
        return [self._loss(key, plan, windows, len(parts)) for key, plan in zip(keys, plans, strict=True)]

    def _measure(self, missing: Mapping[str, CachePlan], parts: Sequence[Ids], stage: str) -> None:
        from lowkv.tuning.side_by_side import compare

        bases: dict[tuple[int, ...], list[str]] = {}
        for key, plan in missing.items():
            bases.setdefault(self._basis(plan), []).append(key)
        decoder = None
        for number, (rotated, keys) in enumerate(bases.items(), 1):
            work = [
                (part, ids, batch)
                for part, ids in enumerate(parts)
                for batch in _batches([key for key in keys if self._records.get(key, part) is None], self._room(ids))
            ]
            which = f" ({number} of {len(bases)} bases)" if len(bases) > 1 else ""
            self._progress.begin(f"loading the model{which}")
            del decoder  # before the next is loaded
            decoder = self._decoder(rotated)
            self._progress.begin(f"{stage}{which}", sum(ids.size * (1 + len(batch)) for _, ids, batch in work))
            for part, ids, batch in work:
                plans = [missing[key] for key in batch]
                found = compare(decoder, self._baseline, plans, ids, self._progress.advance)
                for key, plan, columns in zip(batch, plans, found, strict=True):
                    outcome = dict(zip(("kl", "nll", "agree"), block_sums(columns).tolist(), strict=True))
                    self._records.add(key, part, outcome, {"measure": "tune", "plan": plan.summary()})

    def _room(self, ids: Ids) -> int:
        """Plans that may be measured side by side on these windows."""
        rows, length = ids.shape
        return max(1, min(SIDE_BY_SIDE, MEMORY // (rows * self._baseline.bytes_at(length)) - 1))

    def _basis(self, plan: CachePlan) -> tuple[int, ...]:
        """Layers whose values the weights rotate: all, if the plan minds none of them."""
        rotated = rotated_layers(plan)
        quantized = sum(layer.format != plan.hot for layer in plan.layers)
        return tuple(range(len(plan.layers))) if rotated and len(rotated) == quantized else rotated

    def _decoder(self, rotated: tuple[int, ...]) -> Decoder:
        from lowkv.calibration.routes import load_decoder

        checkpoint = RotatedCheckpoint(self._checkpoint, frozenset(rotated)) if rotated else self._checkpoint
        return load_decoder(checkpoint, self._recipe)

    def _key(self, plan: CachePlan, windows: Windows) -> str:
        return key_of(
            measure="tune",
            model=self._model,
            weights=asdict(self._recipe.weights),
            plan=plan.to_mapping(),
            baseline=self._baseline.to_mapping(),
            text=windows.sha256,
        )

    def _loss(self, key: str, plan: CachePlan, windows: Windows, parts: int) -> Loss:
        if not plan.seals:
            return Loss.nothing(windows)
        outcomes = [self._records.get(key, part) for part in range(parts)]
        columns = (np.concatenate([outcome[name] for outcome in outcomes]) for name in ("kl", "nll", "agree"))
        return Loss(_sizes(windows.ids), *columns)


def _batches(keys: Sequence[str], count: int) -> Iterator[Sequence[str]]:
    for first in range(0, len(keys), count):
        yield keys[first : first + count]


def _sizes(ids: Ids) -> Sums:
    return block_sums(np.ones((len(ids), ids.shape[1] - 1)))


def _mean(sums: Sums, sizes: Sums) -> Interval:
    return of_blocks(sums.ravel(), sizes.ravel())
