"""The search: measure every layer, choose, and judge the choice on text that had no part in it.

A plan that was chosen as the best of very many on some text looks better there than it is. It is therefore held, on
held-out text, against the uniform plans at the budget (or next to it on either side; of those of one size, the one that
the measurements prefer) and against a plan of exactly its size, the same formats spread over the layers evenly: only
what it gains on the latter did measuring buy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from lowkv.calibration.modelopt import open_model
from lowkv.engine.directory import checkpoint_hashes
from lowkv.engine.progress import NoProgress, Progress
from lowkv.errors import LowkvError
from lowkv.evaluation.records import Records
from lowkv.kvcache.formats import FORMATS
from lowkv.tuning.plans import Space, space_of
from lowkv.tuning.selection import cheapest, interleaved
from lowkv.tuning.sensitivity import Sensitivity, measured
from lowkv.tuning.texts import Texts, Windows
from lowkv.tuning.trials import Loss, Trials

if TYPE_CHECKING:
    from lowkv.evaluation.intervals import Interval
    from lowkv.kvcache import CachePlan
    from lowkv.models.checkpoint import Checkpoint
    from lowkv.recipe import KVCacheConfig, Recipe


@dataclass(frozen=True)
class Request:
    """What to search for, and how hard.

    Attributes:
        bits: of sealed blocks per K or V value, parameters included, on average at most.
        formats: to choose from; None is all that carry their own scales and that the target has.
        tokens: of text that every layer is measured on in every format, about.
        held_out: tokens of text that plans are judged on, about.
        window: tokens read in one go.
        seed: which text is taken.
        texts: documents by name; None is Wikipedia.
    """

    bits: float
    formats: tuple[str, ...] | None = None
    tokens: int = 1024
    held_out: int = 8192
    window: int = 1024
    seed: int = 0
    texts: Mapping[str, str] | None = None

    @property
    def options(self) -> str:
        """As on a command line, what is not the default."""
        found = [f"--bits {self.bits:g}"]
        for field in fields(self)[1:-1]:
            value = getattr(self, field.name)
            if value != field.default:
                shown = ",".join(value) if isinstance(value, tuple) else value
                found.append(f"--{field.name.replace('_', '-')} {shown}")
        return " ".join(found + [f"--text {name}" for name in self.texts or ()])


@dataclass(frozen=True, eq=False)
class Judged:
    """A plan, what the layers' measurements predict of it, and what it was measured to lose."""

    name: str
    assignment: tuple[str, ...]
    plan: CachePlan
    predicted: float
    calibration: Loss
    held_out: Loss

    @property
    def bits(self) -> float:
        return self.plan.effective_bits()


@dataclass(frozen=True, eq=False)
class Tuning:
    """The plan that was found, and all that speaks for and against it."""

    request: Request
    space: Space
    sensitivity: Sensitivity
    source: str
    calibration: Windows
    held_out: Windows
    tuned: Judged
    rivals: tuple[Judged, ...]

    @property
    def settings(self) -> KVCacheConfig:
        """The `kv_cache` section of the recipe with this plan."""
        return self.space.settings(self.tuned.assignment)

    def gain(self, rival: Judged) -> Interval:
        """Divergence of the tuned plan less a rival's, on held-out text."""
        return self.tuned.held_out.less(rival.held_out)

    def to_mapping(self) -> dict[str, Any]:
        """Plain data for a report; divergences in nats."""
        sensitivity, layers = self.sensitivity, self.space.layers
        return {
            "method": "mean KL divergence to 16-bit KV, teacher-forced, history read as the KV cache stores it",
            "bits": self.request.bits,
            "formats": list(self.space.formats),
            "text": self.source,
            "seed": self.request.seed,
            "calibration": {"windows": str(self.calibration), "sha256": self.calibration.sha256},
            "held_out": {"windows": str(self.held_out), "sha256": self.held_out.sha256},
            "sensitivity": [
                {
                    "layer": layer,
                    "kl": {name: asdict(sensitivity.losses[layer, name].divergence) for name in self.space.formats},
                }
                | {
                    step.part.lower(): {
                        "from": step.rich,
                        "to": step.poor,
                        "kl": asdict(sensitivity.share(layer, step)),
                    }
                    for step in sensitivity.steps
                }
                for layer in layers
            ],
            "plans": [
                {
                    "name": judged.name,
                    "formats": [layer.format for layer in judged.plan.layers],
                    "bits": judged.bits,
                    "predicted": judged.predicted,
                    "calibration": asdict(judged.calibration.divergence),
                    "held_out": {
                        "kl": asdict(judged.held_out.divergence),
                        "ratio": asdict(judged.held_out.ratio),
                        "top1": asdict(judged.held_out.top1),
                        "tuned_less_this": asdict(self.gain(judged)),
                    },
                }
                for judged in (self.tuned, *self.rivals)
            ],
        }


def tune(
    recipe: Recipe, request: Request, *, records: Records | None = None, progress: Progress | None = None
) -> Tuning:
    """Searches.

    Raises:
        LowkvError: the recipe has overrides, the budget is out of the formats' range, a format cannot be searched, the
            window is too short to show anything or longer than the model's positions, or there is too little text.
    """
    records, progress = records or Records(), progress or NoProgress()
    checkpoint = open_model(recipe, progress)
    space = space_of(recipe, checkpoint.config, request.formats)
    budget = space.budget(request.bits)
    _check_window(request.window, space, checkpoint)
    texts = Texts(
        max(1, request.tokens // request.window),
        max(1, request.held_out // request.window),
        request.window,
        request.seed,
        request.texts,
    )
    progress.begin("reading text")
    calibration, held_out = _cut(texts, checkpoint)
    trials = Trials(recipe, checkpoint, checkpoint_hashes(checkpoint, progress), space.baseline, records, progress)
    sensitivity = measured(space, calibration, trials)
    assignment = _chosen(sensitivity, budget)
    plans = {"tuned": assignment} | _rivals(sensitivity, assignment, request.bits)
    tuned, *rivals = _judged(plans, sensitivity, calibration, held_out, trials)
    return Tuning(request, space, sensitivity, texts.source, calibration, held_out, tuned, tuple(rivals))


def _check_window(window: int, space: Space, checkpoint: Checkpoint) -> None:
    longest = checkpoint.config.max_positions
    if window > longest:
        raise LowkvError(
            "the window is longer than the model's positions", got=window, expected=f"--window of at most {longest}"
        )
    whole = space.baseline.effective_bits(window - 1)
    for name in space.formats:
        if not FORMATS[name].model_precision and space.uniform(name).effective_bits(window - 1) >= whole:
            plan = space.uniform(name)
            raise LowkvError(
                f"the window is so short that nothing in it is stored in {name}",
                got=f"--window {window}",
                expected=f"well over {plan.sink_tokens + plan.residual_length + plan.group_size}: "
                "the sink, the residual and a block",
            )


def _cut(texts: Texts, checkpoint: Checkpoint) -> tuple[Windows, Windows]:
    from lowkv.calibration.routes import load_tokenizer

    return texts.cut(load_tokenizer(checkpoint))


def _chosen(sensitivity: Sensitivity, budget: int) -> tuple[str, ...]:
    space = sensitivity.space
    sizes = [space.sizes(layer) for layer in space.layers]
    costs = [[sensitivity.cost(layer, name) for name in space.formats] for layer in space.layers]
    return tuple(space.formats[item] for item in cheapest(sizes, costs, budget))


def _rivals(sensitivity: Sensitivity, tuned: tuple[str, ...], bits: float) -> dict[str, tuple[str, ...]]:
    """Plans to judge the tuned one by, each different from it."""
    space = sensitivity.space
    order = [space.formats.index(name) for name in tuned]
    found = {"interleaved": tuple(space.formats[item] for item in interleaved(order))}
    uniform = {name: (name,) * len(tuned) for name in space.formats if not FORMATS[name].model_precision}
    sizes = {name: space.uniform(name).effective_bits() for name in uniform}
    near = {max(size for size in sizes.values() if size <= bits)} if any(s <= bits for s in sizes.values()) else set()
    if bits not in near:
        near |= {min((size for size in sizes.values() if size > bits), default=bits)}
    for size in sorted(near):
        equal = [name for name in uniform if sizes[name] == size]
        if equal:
            best = min(equal, key=lambda name: sensitivity.predicted(uniform[name]))
            found[f"uniform {best}"] = uniform[best]
    return {name: assignment for name, assignment in found.items() if assignment != tuned}


def _judged(
    plans: Mapping[str, tuple[str, ...]],
    sensitivity: Sensitivity,
    calibration: Windows,
    held_out: Windows,
    trials: Trials,
) -> list[Judged]:
    mixed: Sequence[CachePlan] = [sensitivity.space.mixed(assignment) for assignment in plans.values()]
    seen = trials.losses(mixed, calibration, "measuring whole plans")
    judged = trials.losses(mixed, held_out, "judging whole plans on held-out text")
    return [
        Judged(name, assignment, plan, sensitivity.predicted(assignment), *losses)
        for (name, assignment), plan, *losses in zip(plans.items(), mixed, seen, judged, strict=True)
    ]
