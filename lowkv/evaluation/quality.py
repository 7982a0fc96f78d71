"""What a KV format costs in quality: perplexity, KL divergence and top-1 agreement against FP16 KV.

Everything that is measured runs on the kernels and block rules that serve: a plan's KV cache is filled token by
token as decoding fills it, and every query reads the history as that cache stores it at that moment (older tokens
quantized, the residual and the sink not). A prompt prefilled in one step would see itself in full precision and
show nothing.

Feeding one token at a time would take hours, and is not needed. Which blocks are cold for the query at position p
is `plan.cold_end(p)`, constant while p stays inside one block of G positions:

    position   aG ................. aG+G-1 | (a+1)G
    cold_end   c                         c | c or more

so one step of the G tokens of a whole block (or an aligned part of it), all reading the cache as it stood at aG,
computes what G single steps compute. tests/evaluation holds the two against each other.

All engines advance through the same windows side by side, so that the divergence from the baseline is exact, over
the whole vocabulary, without keeping any distribution.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lowkv.errors import LowkvError

if TYPE_CHECKING:
    from torch import Tensor

    from kvattention import Attention
    from lowkv.engine import EngineDir
    from lowkv.kvcache import CachePlan
    from lowkv.models.decoder import Decoder
    from lowkv.models.tokenizer import Tokenizer

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all), every format's tokens counted."""

TOKENS = 4096
WINDOW = 1024
BASELINE = "fp16"
CONFIDENCE = 0.95
BOOTSTRAP_BLOCK = 64  # consecutive positions resampled together: neighbours are not independent
BOOTSTRAP_ROUNDS = 2000
_ROWS = 128  # logits rows in memory at a time
_BATCH = 8  # windows advanced in one step


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95% confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


@dataclass(frozen=True)
class Quality:
    """One engine's figures.

    Attributes:
        name: the engine, as it was named.
        plan: its formats, with layer counts.
        bits: effective bits per stored value at the window's length, residual and sink included.
        positions: tokens predicted.
        perplexity: exp of the mean negative log-likelihood.
        ratio: perplexity over the baseline's on the same positions (1 is no loss).
        kl: mean KL(baseline || this) over the vocabulary, in nats.
        top1: share of positions whose most likely token is the baseline's.
    """

    name: str
    plan: str
    bits: float
    positions: int
    perplexity: Interval
    ratio: Interval
    kl: Interval
    top1: Interval


@dataclass(frozen=True)
class Evaluation:
    """Figures of several engines on the same text, and how they were taken."""

    results: tuple[Quality, ...]
    baseline: str
    source: str
    windows: int
    window_tokens: int
    bos: bool  # every window begins with the model's BOS token

    def to_mapping(self) -> dict[str, Any]:
        """Plain data for a report."""
        return {
            "baseline": self.baseline,
            "text": self.source,
            "windows": self.windows,
            "window_tokens": self.window_tokens,
            "bos": self.bos,
            "method": "teacher-forced; history read as the KV cache stores it while decoding",
            "confidence": CONFIDENCE,
            "results": {result.name: asdict(result) for result in self.results},
        }

    def table(self) -> str:
        """For a terminal."""
        rows = [("engine", "formats", "bits", "perplexity", f"/ {self.baseline}", "KL (nats)", "top-1")]
        rows += [
            (
                result.name,
                result.plan,
                f"{result.bits:.2f}",
                f"{result.perplexity.value:.3f}",
                str(result.ratio),
                str(result.kl),
                str(result.top1),
            )
            for result in self.results
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        start = "each after a BOS token" if self.bos else "no BOS token"
        lines.append(
            f"{self.results[0].positions} positions: {self.windows} windows of {self.window_tokens} tokens, {start}; "
            f"[{CONFIDENCE:.0%} interval]; {self.source}"
        )
        return "\n".join(lines)


@dataclass(frozen=True)
class Subject:
    """A model with a cache plan, under a name."""

    name: str
    decoder: Decoder
    plan: CachePlan


@dataclass(frozen=True)
class Scores:
    """Per predicted position, [W, N - 1] float64: of a subject against the baseline."""

    nll: npt.NDArray[np.float64]
    kl: npt.NDArray[np.float64]
    agree: npt.NDArray[np.float64]


def evaluate(
    engines: Mapping[str, EngineDir],
    text: Iterable[str] | None = None,
    *,
    tokens: int = TOKENS,
    window: int = WINDOW,
    baseline: str | None = None,
    source: str | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure engines of one model (one tokenizer) on the same text.

    Args:
        engines: by the name they are to be reported under.
        text: documents; None is `lowkv.evaluation.text.wikipedia()`.
        tokens: about how many to use in all: `tokens / window` windows, at least one.
        window: tokens per window.
        baseline: name of the engine to compare with; None is FP16 KV over the first engine's weights, under the
            name of the first engine that is just that if there is one, else "fp16" in front of the others.
        source: what the text is, for the report.
        progress: told how far it is.

    Raises:
        LowkvError: no engines, differing vocabularies, an unknown baseline, a window beyond the model's positions,
            or not enough text.
    """
    from lowkv.evaluation.text import SOURCE, wikipedia

    if not engines:
        raise LowkvError("there is no engine to evaluate", expected="at least one")
    if text is None:
        text, source = (article for _, article in wikipedia()), SOURCE
    subjects = _subjects(engines, baseline)
    first = next(iter(engines.values()))
    if window > first.model_config.max_positions:
        raise LowkvError(
            "the window is longer than the model's positions",
            got=window,
            expected=f"at most {first.model_config.max_positions}",
        )
    ids, bos = windows_of(first.tokenizer(), text, max(1, tokens // window), window)
    name = baseline or next(s.name for s in subjects if not s.plan.seals)
    scores = score(subjects, name, ids, progress)
    return Evaluation(
        results=tuple(_quality(subject, scores[subject.name], scores[name], window) for subject in subjects),
        baseline=name,
        source=source or "text given by the caller",
        windows=len(ids),
        window_tokens=window,
        bos=bos,
    )


def windows_of(
    tokenizer: Tokenizer, documents: Iterable[str], count: int, length: int
) -> tuple[npt.NDArray[np.int64], bool]:
    """Windows out of documents: the beginning of each one that is long enough, then its next tokens, and so on.

    Returns:
        [count, length] token ids, and whether each window begins with what the tokenizer puts before a text (BOS).

    Raises:
        LowkvError: there is not so much text.
    """
    bare, full = tokenizer.encode("a", add_special=False), tokenizer.encode("a")
    head = full[: next(at for at in range(len(full)) if full[at : at + len(bare)] == bare)]
    size = length - len(head)
    found: list[list[int]] = []
    waiting: Iterable[str] = documents
    for turn in itertools.count():
        longer = []
        for document in waiting:
            # A token is hardly ever longer than 16 characters: the first turn need not read whole documents.
            text = document if turn else document[: 16 * length]
            ids = tokenizer.encode(text, add_special=False)[turn * size : (turn + 1) * size]
            if len(ids) == size:
                found.append([*head, *ids])
                longer.append(document)
            if len(found) == count:
                return np.array(found, np.int64), bool(head)
        if not longer:
            break
        waiting = longer
    raise LowkvError(
        "there is not enough text to evaluate on",
        got=f"{len(found)} windows of {length} tokens",
        expected=f"{count}",
        fix="give more text, or ask for fewer tokens or a shorter window",
    )


def score(
    subjects: Sequence[Subject],
    baseline: str,
    windows: npt.NDArray[np.int64],
    progress: Progress | None = None,
    *,
    attention: str = "cpu",
) -> dict[str, Scores]:
    """Teacher-force every window through every subject, decode-style, and compare with the baseline's.

    Args:
        subjects: the baseline is among them.
        baseline: its name.
        windows: [W, N] token ids.
        progress: told how far it is.
        attention: name of the kernels (`kvattention.select`).
    """
    import torch

    from kvattention import select

    kernels = select(attention)
    count, length = windows.shape
    step = min(subject.plan.group_size for subject in subjects)
    ordered = sorted(subjects, key=lambda subject: subject.name != baseline)  # the baseline first
    scores = {subject.name: Scores(*(np.zeros((count, length - 1)) for _ in range(3))) for subject in ordered}
    done, total = 0, len(subjects) * windows.size
    for first in range(0, count, _BATCH):
        batch = windows[first : first + _BATCH]
        runs = [_Run(subject, kernels, len(batch), length, step) for subject in ordered]
        for begin in range(0, length, step):
            tokens = batch[:, begin : begin + step]
            targets = batch[:, begin + 1 : begin + 1 + step]  # one short at the very end
            positions = slice(begin, begin + targets.shape[1])
            hidden = []
            for run in runs:
                hidden.append(run.feed(tokens)[:, : targets.shape[1]].flatten(0, 1))
                done += tokens.size
                if progress is not None:
                    progress(done, total)
            if not targets.size:
                continue
            compared = _compare(ordered, hidden, torch.from_numpy(targets.flatten()))
            for subject, columns in zip(ordered, compared, strict=True):
                for array, column in zip(
                    (scores[subject.name].nll, scores[subject.name].kl, scores[subject.name].agree),
                    columns.reshape(3, *targets.shape),
                    strict=True,
                ):
                    array[first : first + len(batch), positions] = column
    return scores


class _Run:
    """One subject's KV cache with a sequence per window, advancing in aligned steps."""

    def __init__(self, subject: Subject, kernels: Attention, windows: int, length: int, step: int) -> None:
        from lowkv.kvcache import KVCache, SlabGeometry, reservation
        from lowkv.serving.torch_executor import TorchExecutor

        plan = subject.plan
        hot, cold = reservation(plan, length, step)
        geometry = SlabGeometry.for_plan(plan)
        slabs = geometry.slabs_for(hot * windows, cold * windows)
        self._executor = TorchExecutor(subject.decoder, KVCache(plan, slabs * geometry.bytes, kernels))
        self._sequences = [self._executor.cache.add() for _ in range(windows)]

    def feed(self, tokens: npt.NDArray[np.int64]) -> Tensor:
        """Feed [W, n] tokens, the next of each window; returns the hidden states, [W, n, hidden]."""
        cache = self._executor.cache
        step = cache.prepare([(sequence, tokens.shape[1]) for sequence in self._sequences])
        hidden = self._executor.hidden(np.ascontiguousarray(tokens.flatten()), step)
        cache.commit(step)
        return hidden.view(*tokens.shape, -1)


def _compare(subjects: Sequence[Subject], hidden: Sequence[Tensor], targets: Tensor) -> npt.NDArray[np.float64]:
    """[subjects, 3, T]: negative log-likelihood of the targets, KL from the first subject, top-1 agreement.

    Args:
        subjects: S of them, the baseline first.
        hidden: [T, hidden] of each.
        targets: [T] token ids.
    """
    import torch

    parts = []
    with torch.inference_mode():
        for begin in range(0, len(targets), _ROWS):
            rows = slice(begin, begin + _ROWS)
            wanted = targets[rows, None]
            columns = []
            for index, subject in enumerate(subjects):
                logits = subject.decoder.logits(hidden[index][rows])
                lse = logits.logsumexp(-1, keepdim=True)
                nll = (lse - logits.gather(-1, wanted))[:, 0]
                best = logits.argmax(-1)
                if index == 0:
                    base, base_best = logits - lse, best
                    weight = base.exp()
                    kl = torch.zeros_like(nll)
                else:
                    kl = (weight * (base - (logits - lse))).sum(-1)
                columns.append(torch.stack((nll, kl, (best == base_best).float())))
            parts.append(torch.stack(columns))
    compared: npt.NDArray[np.float64] = torch.cat(parts, -1).double().numpy()
    return compared


def _subjects(engines: Mapping[str, EngineDir], baseline: str | None) -> list[Subject]:
    """Every engine, weights loaded once per content, and the FP16 baseline in front if it is not among them."""
    from lowkv.kvcache import CachePlan
    from lowkv.recipe import KVCacheConfig

    if baseline is not None and baseline not in engines:
        raise LowkvError("no engine has the baseline's name", got=baseline, expected=", ".join(engines))
    vocabularies = {name: engine.model_config.vocab for name, engine in engines.items()}
    if len(set(vocabularies.values())) > 1:
        raise LowkvError("the engines are not of one model: their vocabularies differ", got=vocabularies)
    decoders: dict[frozenset[Any], Decoder] = {}
    subjects = []
    for name, engine in engines.items():
        key = frozenset((file, record.sha256) for file, record in engine.manifest.files.items())
        if key not in decoders:
            decoders[key] = engine.load_decoder()
        subjects.append(Subject(name, decoders[key], engine.cache_plan))
    if baseline is None and all(subject.plan.seals for subject in subjects):
        first = next(iter(engines.values()))
        plan = CachePlan.from_config(first.model_config, KVCacheConfig(format=BASELINE))
        subjects.insert(0, Subject(BASELINE, subjects[0].decoder, plan))
    return subjects


def _quality(subject: Subject, scores: Scores, base: Scores, window: int) -> Quality:
    nll, kl, agree, excess = (
        _interval(values) for values in (scores.nll, scores.kl, scores.agree, scores.nll - base.nll)
    )
    return Quality(
        name=subject.name,
        plan=subject.plan.summary(),
        bits=subject.plan.effective_bits(window),
        positions=scores.nll.size,
        perplexity=_exp(nll),
        ratio=_exp(excess),
        kl=kl,
        top1=agree,
    )


def _exp(interval: Interval) -> Interval:
    return Interval(math.exp(interval.value), math.exp(interval.low), math.exp(interval.high))


def _interval(values: npt.NDArray[np.float64]) -> Interval:
    """Mean of [W, P] values; the interval from a bootstrap over blocks of positions, the same draws each time."""
    edges = range(0, values.shape[1], BOOTSTRAP_BLOCK)
    sums = np.add.reduceat(values, edges, axis=1).ravel()
    sizes = np.add.reduceat(np.ones_like(values), edges, axis=1).ravel()
    draws = np.random.default_rng(0).integers(0, len(sums), (BOOTSTRAP_ROUNDS, len(sums)))
    means = sums[draws].sum(axis=1) / sizes[draws].sum(axis=1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(values.mean()), float(low), float(high))
