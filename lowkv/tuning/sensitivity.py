"""What each layer loses in each format, measured one layer at a time; K and V told apart.

For layer l and format f, all other layers in the model's precision:

    D(l, f) = mean KL divergence from the model with 16-bit KV to the one with l in f

The other way round (all layers in the small format, one raised) asks the question nearer to where the answer lies, but
every figure is then a small difference of two large divergences, and whatever one layer changes makes codes of all
later layers round otherwise: the noise of all of them is in it. One layer alone is measured against silence.

What makes sums of D predict whole plans: for small errors the divergence is a quadratic form, 1/2 d'Fd with d the sum
of the layers' effects on the logits, and effects of rounding in different layers hardly correlate, so that the cross
terms average out. `search` measures whole plans to see how far that holds.

K's and V's shares come from formats that differ in one of the two only: D(l, kivi2) - D(l, k4v2) is what K of layer l
loses from 4 bits to 2, V being the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lowkv.evaluation.intervals import Interval
from lowkv.kvcache.formats import FORMATS, KVFormat

if TYPE_CHECKING:
    from lowkv.tuning.plans import Space
    from lowkv.tuning.texts import Windows
    from lowkv.tuning.trials import Loss, Trials


@dataclass(frozen=True)
class Step:
    """From a format to one that differs in one part and has fewer bits there."""

    part: Literal["K", "V"]
    rich: str
    poor: str

    @property
    def drop(self) -> int:
        """Bits that the part loses."""
        rich, poor = FORMATS[self.rich], FORMATS[self.poor]
        return rich.k.bits - poor.k.bits if self.part == "K" else rich.v.bits - poor.v.bits

    def __str__(self) -> str:
        rich, poor = FORMATS[self.rich], FORMATS[self.poor]
        bits = (rich.k.bits, poor.k.bits) if self.part == "K" else (rich.v.bits, poor.v.bits)
        return f"{self.part} {bits[0]} > {bits[1]} bit"


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """D(l, f) of every layer that may change."""

    space: Space
    losses: Mapping[tuple[int, str], Loss]

    def cost(self, layer: int, name: str) -> float:
        """D, in nats."""
        return self.losses[layer, name].divergence.value

    def predicted(self, assignment: Sequence[str]) -> float:
        """Divergence of a plan, if layers did not act on each other."""
        return sum(self.cost(layer, name) for layer, name in zip(self.space.layers, assignment, strict=True))

    def share(self, layer: int, step: Step) -> Interval:
        """What a part of a layer loses by a step."""
        return self.losses[layer, step.poor].less(self.losses[layer, step.rich])

    @property
    def steps(self) -> list[Step]:
        """One for K and one for V, as far as the formats have such pairs: the largest, of equal ones the last."""
        found: dict[str, Step] = {}
        for rich in self.space.formats:
            for poor in self.space.formats:
                step = _step(FORMATS[rich], FORMATS[poor])
                if step is not None and step.drop >= (found[step.part].drop if step.part in found else 1):
                    found[step.part] = step
        return [found[part] for part in ("K", "V") if part in found]


def _step(rich: KVFormat, poor: KVFormat) -> Step | None:
    """None unless they differ in one part only; a basis of V is V's."""
    if (rich.v, rich.rotate_values) == (poor.v, poor.rotate_values) and rich.k.bits > poor.k.bits:
        return Step("K", rich.name, poor.name)
    if rich.k == poor.k and rich.v.bits > poor.v.bits:
        return Step("V", rich.name, poor.name)
    return None


def measured(space: Space, windows: Windows, trials: Trials) -> Sensitivity:
    """Measures every layer in every format."""
    pairs = [(layer, name) for name in space.formats for layer in space.layers]
    plans = [space.alone(layer, name) for layer, name in pairs]
    losses = trials.losses(plans, windows, f"measuring {len(space.layers)} layers in {len(space.formats)} formats")
    return Sensitivity(space, dict(zip(pairs, losses, strict=True)))
