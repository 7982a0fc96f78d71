"""The serving engine: requests in, pieces of text out, one step at a time. No Triton in it.

    engine = ServingEngine.load("engines/smollm2-kivi2")
    for completion in engine.generate(["The sky is"], SamplingParams(max_tokens=16)):
        print(completion.text)

`ServingEngine` is single-threaded: `submit`, `cancel` and `step` belong to one thread. A server uses
`EngineLoop` (loop.py), which owns such a thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from lowkv.errors import LowkvError
from lowkv.serving.detokenizer import IncrementalDetokenizer
from lowkv.serving.sampler import Sampler
from lowkv.serving.scheduler import Scheduler
from lowkv.serving.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lowkv.engine.directory import EngineDir
    from lowkv.models.tokenizer import Tokenizer
    from lowkv.recipe import ServingConfig
    from lowkv.serving.executor import Executor
    from lowkv.serving.params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Request:
    """A prompt (text, or token ids used as they are) and how to continue it."""

    request_id: str
    prompt: str | list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Delta:
    """What one step added to one request. The last one has `finish_reason` set."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_input_tokens: int
    num_output_tokens: int  # so far, this delta included
    finish_reason: FinishReason | None = None
    error: LowkvError | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class Completion:
    """A whole answer, as `ServingEngine.generate` returns it."""

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_input_tokens: int = 0
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class EngineStats:
    """The engine's state and counters since it was made. Bytes and seconds."""

    running: int  # sequences that hold KV blocks
    running_peak: int
    waiting: int
    preempted_total: int
    kv_bytes_used: int
    kv_bytes_total: int
    hot_blocks: int
    cold_blocks: int
    moved_blocks_total: int
    tokens_in_total: int  # prompt tokens of admitted requests
    tokens_out_total: int
    steps_total: int
    step_seconds: float  # of the last step
    step_seconds_total: float
    model_seconds_total: float  # the part of it inside the model and attention


class ServingEngine:
    """Continuous batching over one executor."""

    def __init__(
        self, executor: Executor, tokenizer: Tokenizer, config: ServingConfig, *, vocab: int, max_model_len: int
    ) -> None:
        self.executor = executor
        self.cache = executor.cache
        self.tokenizer = tokenizer
        self.config = config
        self.vocab = vocab
        self.max_model_len = max_model_len if config.max_model_len is None else min(config.max_model_len, max_model_len)
        self.scheduler = Scheduler(self.cache, config)
        self.sampler = Sampler(vocab, tokenizer.eos_ids, lambda text: tokenizer.encode(text, add_special=False))
        self._sequences: dict[str, Sequence] = {}
        self._running_peak = 0
        self._tokens_in = 0
        self._tokens_out = 0
        self._steps = 0
        self._step_seconds = 0.0
        self._step_seconds_total = 0.0
        self._model_seconds_total = 0.0

    @classmethod
    def load(
        cls, path: Path | str, *, budget: int | None = None, threads: int | None = None, device_id: int = 0
    ) -> ServingEngine:
        """Opens and verifies an engine directory and makes it ready to serve.

        `budget` (bytes) and `threads` override the recipe's; `device_id` is the GPU of an engine that needs one.
        Raises `LowkvError` as `EngineDir.open` and `open_executor` do.
        """
        from lowkv.engine.directory import EngineDir

        return cls.from_directory(EngineDir.open(Path(path)), budget=budget, threads=threads, device_id=device_id)

    @classmethod
    def from_directory(
        cls, engine: EngineDir, *, budget: int | None = None, threads: int | None = None, device_id: int = 0
    ) -> ServingEngine:
        """As `load`, for an engine directory that is open already."""
        from lowkv.serving.executor import open_executor

        return cls(
            open_executor(engine, budget=budget, threads=threads, device_id=device_id),
            engine.tokenizer(),
            engine.recipe.serving,
            vocab=engine.model_config.vocab,
            max_model_len=engine.model_config.max_positions,
        )

    # -- requests ----------------------------------------------------------------------------------------

    def sequence(self, request: Request) -> Sequence:
        """Checks and tokenizes a request; changes nothing, so any thread may call it.

        Raises `LowkvError` naming the field for an empty prompt, one that the model or the cache cannot hold
        together with max_tokens, or token ids that the model does not have.
        """
        params = request.params
        ids = request.prompt if isinstance(request.prompt, list) else self.tokenizer.encode(request.prompt)
        if not ids:
            raise LowkvError("the prompt (text_input) is empty", got=request.prompt, expected="at least one token")
        if not all(0 <= token < self.vocab for token in ids):
            raise LowkvError(
                "the prompt holds a token id that the model does not have",
                got=next(token for token in ids if not 0 <= token < self.vocab),
                expected=f"0 to {self.vocab - 1}",
            )
        if len(ids) + params.max_tokens > self.max_model_len:
            raise LowkvError(
                "prompt (text_input) and max_tokens exceed what the model can hold",
                got=f"{len(ids)} + {params.max_tokens} tokens",
                expected=f"at most {self.max_model_len}",
                fix="shorten the prompt or lower max_tokens",
            )
        sequence = Sequence(
            request_id=request.request_id,
            token_ids=list(ids),
            prompt_length=len(ids),
            params=params,
            sampler=self.sampler.admit(params, ids),
            detokenizer=IncrementalDetokenizer(self.tokenizer, ids, params.stop, min_tokens=params.min_tokens),
        )
        self.scheduler.check(sequence)
        return sequence

    def submit(self, request: Request | Sequence) -> None:
        """Queues a request (or one that `sequence` has prepared). Raises `LowkvError` as `sequence` does."""
        sequence = self.sequence(request) if isinstance(request, Request) else request
        if sequence.request_id in self._sequences:
            raise LowkvError("this request id is in use", got=sequence.request_id, expected="an id of its own")
        self._sequences[sequence.request_id] = sequence
        self.scheduler.add(sequence)
        self._tokens_in += sequence.prompt_length

    def cancel(self, request_id: str) -> Delta | None:
        """Ends a request now and frees its blocks. None when it is unknown or has ended."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._end(sequence, "cancelled")

    def abort_all(self, error: LowkvError) -> list[Delta]:
        """Ends every request with an error; the engine is idle and empty afterwards."""
        return [self._end(sequence, "error", error=error) for sequence in list(self._sequences.values())]

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def generate(self, prompts: Iterable[str | list[int]], params: SamplingParams) -> list[Completion]:
        """Runs prompts to their ends, batched; answers in the prompts' order."""
        completions = {}
        for index, prompt in enumerate(prompts):
            request_id = f"generate-{index}"
            self.submit(Request(request_id, prompt, params))
            completions[request_id] = Completion(request_id)
        while self.has_work:
            for delta in self.step():
                completion = completions[delta.request_id]
                completion.text += delta.text
                completion.token_ids += delta.token_ids
                completion.logprobs += delta.logprobs
                completion.num_input_tokens = delta.num_input_tokens
                completion.finish_reason = delta.finish_reason
        return list(completions.values())

    # -- steps -------------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """One forward pass over what the scheduler chose: one delta per sequence that got a token."""
        started = time.perf_counter()
        work = self.scheduler.schedule()
        if not work:
            return []
        self._running_peak = max(self._running_peak, len(self.scheduler.running))
        tokens: list[int] = []
        rows: list[int] = []
        sampled: list[Sequence] = []
        for sequence, count in work:
            stored = sequence.stored
            tokens += sequence.token_ids[stored : stored + count]
            if count == sequence.pending:
                rows.append(len(tokens) - 1)
                sampled.append(sequence)
        step = self.cache.prepare([(sequence.cache, count) for sequence, count in work if sequence.cache is not None])
        model_started = time.perf_counter()
        try:
            found = self.executor.execute(np.array(tokens, np.int64), step, np.array(rows, np.int64))
        except BaseException:
            self.cache.abandon(step)
            raise
        self.cache.commit(step)
        model_seconds = time.perf_counter() - model_started
        deltas = []
        if sampled:
            chosen = self.sampler.sample(found.values, found.ids, found.lse, [item.sampler for item in sampled])
            deltas = [self._advance(*item) for item in zip(sampled, *chosen, strict=True)]
        self._steps += 1
        self._step_seconds = time.perf_counter() - started
        self._step_seconds_total += self._step_seconds
        self._model_seconds_total += model_seconds
        return deltas

    def _advance(self, sequence: Sequence, token: int, logprob: float) -> Delta:
        """Books a chosen token and says what it adds to the text."""
        sequence.token_ids.append(token)
        self._tokens_out += 1
        if token in sequence.sampler.stop_ids:
            return self._end(sequence, "stop", token=token, logprob=logprob)
        text = sequence.detokenizer.push(token)
        if sequence.detokenizer.stopped is not None:
            return self._end(sequence, "stop", text=text, token=token, logprob=logprob)
        if sequence.output_length >= sequence.params.max_tokens:
            return self._end(sequence, "length", text=text, token=token, logprob=logprob)
        return _delta(sequence, text, token, logprob)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        text: str = "",
        token: int | None = None,
        logprob: float = 0.0,
        error: LowkvError | None = None,
    ) -> Delta:
        del self._sequences[sequence.request_id]
        self.scheduler.remove(sequence)
        return _delta(sequence, text + sequence.detokenizer.finish(), token, logprob, reason, error)

    def stats(self) -> EngineStats:
        """A snapshot."""
        arena = self.cache.arena
        return EngineStats(
            running=len(self.scheduler.running),
            running_peak=self._running_peak,
            waiting=len(self.scheduler.waiting),
            preempted_total=self.scheduler.preemptions,
            kv_bytes_used=arena.bytes_used,
            kv_bytes_total=arena.bytes_total,
            hot_blocks=sum(arena.used[group.hot] for group in self.cache.plan.groups),
            cold_blocks=sum(arena.used[group.cold] for group in self.cache.plan.groups),
            moved_blocks_total=self.cache.moved_blocks,
            tokens_in_total=self._tokens_in,
            tokens_out_total=self._tokens_out,
            steps_total=self._steps,
            step_seconds=self._step_seconds,
            step_seconds_total=self._step_seconds_total,
            model_seconds_total=self._model_seconds_total,
        )


def _delta(
    sequence: Sequence,
    text: str,
    token: int | None,
    logprob: float,
    reason: FinishReason | None = None,
    error: LowkvError | None = None,
) -> Delta:
    return Delta(
        request_id=sequence.request_id,
        text=text,
        token_ids=() if token is None else (token,),
        logprobs=() if token is None else (logprob,),
        num_input_tokens=sequence.prompt_length,
        num_output_tokens=sequence.output_length,
        finish_reason=reason,
        error=error,
    )
