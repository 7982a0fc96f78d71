"""Chooses each sequence's next token from its candidates.

The engine hands over the 256 largest logits of every sequence, their token ids, and the log-sum-exp over the
whole vocabulary, instead of all logits. One pass of NumPy over [S, N] arrays does greedy choice, temperature,
top-k, top-p, penalties and masks; only rows that ask for penalties or masks are touched one by one.

Order of operations (that of Hugging Face transformers): repetition penalty, frequency and presence penalties,
masks (min_tokens, bad words), temperature, top-k, top-p, draw.

What the candidates approximate:
- A token outside the candidates is never chosen. The draw is over the candidates, renormalized; for a usual
  temperature the rest weighs less than rounding.
- top_k above the number of candidates means all candidates.
- top_p without top_k needs the weight of the whole vocabulary. At temperature 1 it is known from the
  log-sum-exp, and top_p is exact as long as the nucleus lies within the candidates; otherwise it is all of
  them. At another temperature the weight of the unseen tokens is estimated as if all were as likely as the
  last candidate, which is never too small for a temperature below 1.
- Penalties act on candidates only. A token that a penalty pushes below unseen ones stays in its place among
  the candidates, and one that a negative penalty would lift into them is not seen.
- Masks never leave nothing: where bad words would ban every candidate left, they are allowed for that token,
  and where every candidate is a stop token, min_tokens gives way.

Draws use no generator state: the Gumbel noise of a token is a hash of (seed, output position, token id). So a
draw does not depend on the rest of the batch, on preemption, or on the order of equal candidates.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from lowkv.serving.params import SamplingParams

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # splitmix64 (Steele et al. 2014, "Fast splittable PRNGs", figure 16)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_LARGEST_EXPONENT = 700.0  # exp() of it still fits a float64


class SamplerState:
    """What the sampler remembers of one sequence; made by `Sampler.admit`, kept through preemption.

    Attributes:
        params: as requested.
        seed: the request's, or one drawn from the operating system.
        position: output tokens chosen so far.
        stop_ids: tokens that end this sequence: the model's end tokens unless ignored, and the request's own.
    """

    __slots__ = (
        "_bad",
        "_counts",
        "_reach",
        "_seen",
        "_stop_array",
        "_tail",
        "edits",
        "params",
        "position",
        "seed",
        "stop_ids",
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
        bad_sequences: Sequence[tuple[int, ...]],
    ) -> None:
        self.params = params
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self.position = 0
        self.stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_ids)
        self._stop_array = np.array(sorted(self.stop_ids), np.int32)
        self._bad = tuple(bad_sequences)
        self._reach = max((len(bad) for bad in self._bad), default=1) - 1  # tokens before the banned one
        self._tail: list[int] = list(prompt_ids[max(0, len(prompt_ids) - self._reach) :])
        self._seen: npt.NDArray[np.bool_] | None = None
        if params.repetition_penalty != 1.0:
            self._seen = np.zeros(vocab_size, np.bool_)
            self._seen[np.asarray(prompt_ids, np.int64)] = True
        self._counts: FloatArray | None = None
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self._counts = np.zeros(vocab_size, np.float32)
        self.edits = params.penalized or bool(self._bad) or (params.min_tokens > 0 and bool(self.stop_ids))

    def edit(self, scores: FloatArray, ids: IntArray) -> None:
        """Apply penalties and masks to one row of candidates, in place.

        Args:
            scores: [N] logits.
            ids: [N] token ids.
        """
        params = self.params
        if self._seen is not None:
            seen = self._seen[ids]
            penalty = np.float32(params.repetition_penalty)
            scores[:] = np.where(seen, np.where(scores > 0, scores / penalty, scores * penalty), scores)
        if self._counts is not None:
            counts = self._counts[ids]
            scores -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        if self.position < params.min_tokens and len(self._stop_array):
            _mask(scores, ids, self._stop_array)
        if self._bad:
            banned = self._banned()
            if len(banned):
                _mask(scores, ids, banned)

    def record(self, token: int) -> None:
        """The token was chosen: count it."""
        self.position += 1
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1
        if self._reach:
            self._tail.append(token)
            del self._tail[: -self._reach]

    def _banned(self) -> IntArray:
        """Tokens that would complete a bad sequence now."""
        last = len(self._tail)
        return np.array(
            [bad[-1] for bad in self._bad if tuple(self._tail[last - len(bad) + 1 :]) == bad[:-1]], np.int32
        )


class Sampler:
    """Samples for one model; holds nothing of any sequence."""

    def __init__(
        self, vocab_size: int, eos_ids: Sequence[int], encode: Callable[[str], Sequence[int]] | None = None
    ) -> None:
        """For a model.

        Args:
            vocab_size: number of logits that the model has.
            eos_ids: the model's end tokens.
            encode: text to token ids without special tokens; needed only for bad words.
        """
        self.vocab_size = vocab_size
        self.eos_ids = tuple(eos_ids)
        self._encode = encode

    def admit(self, params: SamplingParams, prompt_ids: Sequence[int]) -> SamplerState:
        """State for a new sequence.

        Raises:
            ValueError: the request has bad words and the sampler was made without `encode`.
        """
        bad: dict[tuple[int, ...], None] = {}
        if params.bad_words:
            if self._encode is None:
                raise ValueError("bad_words need a sampler that was given encode")
            for word in params.bad_words:
                # A word is other tokens at the start of a text than after a space.
                bare = word.lstrip(" ")
                for text in (word, bare, " " + bare):
                    sequence = tuple(self._encode(text))
                    if sequence:
                        bad[sequence] = None
        return SamplerState(
            params,
            prompt_ids,
            vocab_size=self.vocab_size,
            eos_ids=self.eos_ids,
            bad_sequences=tuple(bad),
        )

    def sample(
        self, values: FloatArray, ids: IntArray, lse: FloatArray, states: Sequence[SamplerState]
    ) -> tuple[list[int], list[float]]:
        """Choose one token per sequence and record it in its state.

        Args:
            values: [S, N] the largest logits in any order; N is 256, or the vocabulary if that is smaller.
            ids: [S, N] their token ids.
            lse: [S] log-sum-exp over all logits.
            states: the S sequences.

        Returns:
            The token ids, and their log-probabilities under the model's own distribution (before penalties,
            masks and temperature).
        """
        scores = values
        edited = [row for row, state in enumerate(states) if state.edits]
        if edited:
            scores = values.copy()
            for row in edited:
                states[row].edit(scores[row], ids[row])

        # Of equal logits the lowest id wins, whatever order the candidates came in.
        best = scores.max(axis=1, keepdims=True)
        columns = np.where(scores == best, ids, np.iinfo(np.int32).max).argmin(axis=1)
        drawn = [row for row, state in enumerate(states) if not state.params.greedy]
        if len(drawn) == len(states):
            columns = self._draw(scores, values, ids, lse, states)
        elif drawn:
            columns[drawn] = self._draw(
                scores[drawn], values[drawn], ids[drawn], lse[drawn], [states[row] for row in drawn]
            )

        rows = np.arange(len(states))
        tokens: list[int] = ids[rows, columns].tolist()
        logprobs: list[float] = (values[rows, columns] - lse).tolist()
        for state, token in zip(states, tokens, strict=True):
            state.record(token)
        return tokens, logprobs

    def _draw(
        self,
        scores: FloatArray,  # [R, N] after penalties and masks
        values: FloatArray,  # [R, N] as the model gave them
        ids: IntArray,
        lse: FloatArray,
        states: Sequence[SamplerState],
    ) -> npt.NDArray[np.int64]:
        """Columns drawn by the Gumbel-max trick among the candidates that top-k and top-p leave."""
        temperature = np.array([state.params.temperature for state in states], np.float32)
        scaled = scores / temperature[:, None]
        filtered = [row for row, state in enumerate(states) if state.params.top_k or state.params.top_p < 1]
        noisy = scaled + gumbel(
            np.array([state.seed for state in states], np.uint64),
            np.array([state.position for state in states], np.uint64),
            ids,
        )
        if filtered:
            floor = self._floor(
                scaled[filtered], values[filtered], lse[filtered], [states[row].params for row in filtered]
            )
            noisy[filtered] = np.where(scaled[filtered] >= floor[:, None], noisy[filtered], -np.inf)
        columns: npt.NDArray[np.int64] = noisy.argmax(axis=1)
        return columns

    def _floor(
        self, scaled: FloatArray, values: FloatArray, lse: FloatArray, params: Sequence[SamplingParams]
    ) -> FloatArray:
        """[R] the smallest scaled logit that top-k and then top-p keep; equal ones stay together."""
        count = scaled.shape[1]
        rows = np.arange(len(params))
        ordered = -np.sort(-scaled, axis=1)  # descending
        top_k = np.array([item.top_k or count for item in params]).clip(max=count)
        top_p = np.array([item.top_p for item in params])
        # float32 exponentials are enough (they order nothing); sums are in float64.
        weights = np.exp(ordered - ordered[:, :1]).astype(np.float64)
        weights *= np.arange(count) < top_k[:, None]
        reached = weights.cumsum(axis=1)
        unseen = np.array([item.top_k == 0 for item in params]) * self._unseen(
            values, lse, ordered[:, 0], np.array([item.temperature for item in params])
        )
        # A token stays if those before it weigh less than top_p of the whole (of the k kept, with top_k).
        needed = np.where(top_p < 1, top_p * (reached[:, -1] + unseen), np.inf)
        before = reached - weights
        kept = ((before < needed[:, None]) & (np.arange(count) < top_k[:, None])).sum(axis=1)
        floor: FloatArray = ordered[rows, kept - 1]
        return floor

    def _unseen(
        self, values: FloatArray, lse: FloatArray, largest: FloatArray, temperature: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """[R] estimated weight, in units of exp(largest), of the tokens that are not candidates."""
        count = self.vocab_size - values.shape[1]
        last = values.min(axis=1).astype(np.float64)
        if count <= 0 or not np.isfinite(last).all():
            return np.zeros(len(values))
        total = lse.astype(np.float64)
        rest = (1.0 - np.exp(values - total[:, None]).sum(axis=1)).clip(min=1e-30)  # share at temperature 1
        by_share = np.log(rest) + total + last * (1.0 / temperature - 1.0)
        by_count = np.log(count) + last / temperature  # none is larger than the last candidate
        exponent: npt.NDArray[np.float64] = np.minimum(by_share, by_count) - largest
        weight: npt.NDArray[np.float64] = np.exp(exponent.clip(max=_LARGEST_EXPONENT))
        return weight


def gumbel(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64], ids: IntArray) -> npt.NDArray[np.float64]:
    """Gumbel(0, 1) noise as a pure function of (seed, position, id).

    Args:
        seeds: [R] uint64.
        positions: [R] uint64.
        ids: [R, N] token ids.

    Returns:
        [R, N] float64.
    """
    rows = _mix(_mix(seeds + _GAMMA) + positions * _GAMMA)
    bits = _mix(rows[:, None] + (ids.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    uniform = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54  # strictly inside (0, 1)
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def _mask(scores: FloatArray, ids: IntArray, banned: IntArray) -> None:
    """Take the banned tokens out of a row of candidates, unless nothing would be left."""
    hit = (ids[:, None] == banned).any(axis=1)
    if hit.any() and (scores[~hit] > -np.inf).any():
        scores[hit] = -np.inf


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finalizer."""
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))
