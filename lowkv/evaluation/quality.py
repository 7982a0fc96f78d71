"""`text`: perplexity, KL divergence and top-1 agreement on real text, against FP16 KV.

Over the positions t of windows of text, p the probabilities with the KV format and q those with the baseline's:

    perplexity  exp(mean over t of -log p(x_t | x_<t))
    ratio       exp(mean over t of log q(x_t | x_<t) - log p(x_t | x_<t)): perplexity over the baseline's
    KL          mean over t of sum over the vocabulary of q log(q / p), in nats
    top-1       share of positions where p and q have the same most likely token

Text is teacher-forced as decoding would read it (`lowkv.evaluation.feeding`). All subjects advance through the same
windows side by side, so that the divergence is exact, over the whole vocabulary, without keeping any distribution.
Intervals are block bootstraps: neighbouring positions are not independent.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from lowkv.errors import LowkvError
from lowkv.evaluation.feeding import BATCH, ROWS, Run
from lowkv.evaluation.intervals import CONFIDENCE, Interval, block_sizes, block_sums, exponential, of_blocks
from lowkv.evaluation.measure import Advance, Figures, Measure

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from lowkv.engine import EngineDir
    from lowkv.evaluation.subjects import Subject
    from lowkv.kvcache import CachePlan
    from lowkv.models.tokenizer import Tokenizer

TOKENS = 4096
WINDOW = 1024


@dataclass(frozen=True)
class Documents:
    """Text that a user gives, and what it is called in a report."""

    texts: tuple[str, ...]
    source: str = "text given by the caller"

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256("\0".join(self.texts).encode()).hexdigest()


@dataclass(frozen=True)
class Scores:
    """Per predicted position, [W, N - 1] float64: of a subject against the baseline."""

    nll: npt.NDArray[np.float64]
    kl: npt.NDArray[np.float64]
    agree: npt.NDArray[np.float64]


@dataclass(frozen=True)
class TextMeasure(Measure):
    """Perplexity, KL and top-1 on `tokens / window` windows (at least one) of `window` tokens each.

    `documents` None is an excerpt of Wikipedia (`lowkv.wikipedia`).
    """

    name: ClassVar[str] = "text"
    beside_baseline: ClassVar[bool] = True

    tokens: int = TOKENS
    window: int = WINDOW
    documents: Documents | None = None

    @property
    def windows(self) -> int:
        return max(1, self.tokens // self.window)

    @property
    def source(self) -> str:
        from lowkv.wikipedia import SOURCE

        return SOURCE if self.documents is None else self.documents.source

    @property
    def settings(self) -> dict[str, Any]:
        digest = None if self.documents is None else self.documents.sha256
        return {"windows": self.windows, "window": self.window, "source": self.source, "text_sha256": digest}

    @property
    def parts(self) -> int:
        return -(-self.windows // BATCH)

    def prepare(self, engine: EngineDir) -> list[TextPart]:
        """Raises LowkvError for a window beyond the model's positions, or too little text."""
        tokenizer = engine.tokenizer()
        ids, bos = self.read(engine, tokenizer), bool(beginning(tokenizer))
        return [TextPart(ids[first : first + BATCH], bos) for first in range(0, len(ids), BATCH)]

    def read(self, engine: EngineDir, tokenizer: Tokenizer, room: int = 0) -> npt.NDArray[np.int64]:
        """The windows, [W, N] token ids. Raises LowkvError as `prepare` does; `room` more positions are needed."""
        from lowkv.wikipedia import wikipedia

        longest = engine.model_config.max_positions
        if self.window + room > longest:
            raise LowkvError(
                "the window is longer than the model's positions",
                got=self.window + room,
                expected=f"at most {longest}",
            )
        texts = (text for _, text in wikipedia()) if self.documents is None else self.documents.texts
        return windows_of(tokenizer, texts, self.windows, self.window)

    def figures(self, plan: CachePlan, outcomes: Sequence[Any], baseline: Sequence[Any]) -> Figures:
        nll, kl, agree, base = (
            np.concatenate([np.ravel(outcome[key]) for outcome in chosen])
            for key, chosen in (("nll", outcomes), ("kl", outcomes), ("agree", outcomes), ("nll", baseline))
        )
        sizes = np.tile(block_sizes(self.window - 1), self.windows)
        found = {
            "perplexity": exponential(of_blocks(nll, sizes)),
            "ratio": exponential(of_blocks(nll - base, sizes)),
            "kl": of_blocks(kl, sizes),
            "top1": of_blocks(agree, sizes),
        }
        return {
            "bits": plan.effective_bits(self.window),
            "positions": self.windows * (self.window - 1),
            "bos": outcomes[0]["bos"],  # every window begins with the model's BOS token
            **{key: asdict(interval) for key, interval in found.items()},
        }

    def tables(self, results: dict[str, Figures], baseline: str) -> list[Table]:
        from rich.table import Table

        start = "each after a BOS token" if next(iter(results.values()))["bos"] else "no BOS token"
        windows = f"{self.windows} window{'s' * (self.windows > 1)} of {self.window} tokens, {start}"
        table = Table(title="text", caption=f"{windows}; [{CONFIDENCE:.0%} interval]; {self.source}")
        for column in ("engine", "formats", "bits", "perplexity", f"/ {baseline}", "KL (nats)", "top-1"):
            table.add_column(column)
        for name, found in results.items():
            intervals = [str(Interval.from_mapping(found[key])) for key in ("ratio", "kl", "top1")]
            perplexity = f"{found['perplexity']['value']:.3f}"
            table.add_row(name, found["plan"], f"{found['bits']:.2f}", perplexity, *intervals)
        return [table]


@dataclass(frozen=True)
class TextPart:
    """Some windows, [W, N] token ids, and whether each begins with a BOS token."""

    ids: npt.NDArray[np.int64] = field(repr=False)
    bos: bool

    @property
    def tokens(self) -> int:
        return self.ids.size

    def run(self, subjects: Sequence[Subject], advance: Advance) -> list[Any]:
        """Sums over blocks of positions, [W, blocks] of each kind; the baseline is the first subject."""
        scores = score(subjects, subjects[0].name, self.ids, advance)
        return [
            {"bos": self.bos}
            | {key: block_sums(getattr(scores[subject.name], key)).tolist() for key in ("nll", "kl", "agree")}
            for subject in subjects
        ]


def windows_of(tokenizer: Tokenizer, documents: Iterable[str], count: int, length: int) -> npt.NDArray[np.int64]:
    """Windows out of documents: the beginning of each one that is long enough, then its next tokens, and so on.

    Returns:
        [count, length] token ids; each window begins with what the tokenizer puts before a text (BOS, if anything).

    Raises:
        LowkvError: there is not so much text.
    """
    head = beginning(tokenizer)
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
                return np.array(found, np.int64)
        if not longer:
            break
        waiting = longer
    raise LowkvError(
        "there is not enough text to evaluate on",
        got=f"{len(found)} windows of {length} tokens",
        expected=f"{count}",
        fix="give more text, or ask for fewer tokens or a shorter window",
    )


def beginning(tokenizer: Tokenizer) -> list[int]:
    """What a tokenizer puts before a text: a BOS token, often nothing."""
    bare, full = tokenizer.encode("a", add_special=False), tokenizer.encode("a")
    return full[: next(at for at in range(len(full)) if full[at : at + len(bare)] == bare)]


def score(
    subjects: Sequence[Subject],
    baseline: str,
    windows: npt.NDArray[np.int64],
    advance: Advance | None = None,
    *,
    attention: str = "cpu",
) -> dict[str, Scores]:
    """Teacher-force every window through every subject, decode-style, and compare with the baseline's.

    Args:
        subjects: the baseline is among them.
        baseline: its name.
        windows: [W, N] token ids.
        advance: told of tokens as they are done, every subject's counted.
        attention: name of the kernels (`kvattention.select`).
    """
    import torch

    count, length = windows.shape
    step = min(subject.plan.group_size for subject in subjects)
    ordered = sorted(subjects, key=lambda subject: subject.name != baseline)  # the baseline first
    scores = {subject.name: Scores(*(np.zeros((count, length - 1)) for _ in range(3))) for subject in ordered}
    for first in range(0, count, BATCH):
        batch = windows[first : first + BATCH]
        runs = [Run(subject, len(batch), length, step=step, attention=attention) for subject in ordered]
        for begin in range(0, length, step):
            tokens = batch[:, begin : begin + step]
            targets = batch[:, begin + 1 : begin + 1 + step]  # one short at the very end
            positions = slice(begin, begin + targets.shape[1])
            hidden = []
            for run in runs:
                states = run.feed(list(enumerate(tokens))).view(*tokens.shape, -1)
                hidden.append(states[:, : targets.shape[1]].flatten(0, 1))
                if advance is not None:
                    advance(tokens.size)
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
        for begin in range(0, len(targets), ROWS):
            rows = slice(begin, begin + ROWS)
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
