"""Which sequences run in the next step, and how many of their tokens.

Continuous batching with chunked prefill: every decoding sequence gets its one token first, what is left of the
step's token budget goes to prompts, oldest first. Chunks that do not finish a prompt end at a block border, so
that whole blocks can be written straight to cold.

Two policies decide who may come in, both with `reservation` as their measure:

- `guaranteed_no_evict` reserves every sequence's blocks up to prompt + max_tokens; nobody is ever preempted.
- `max_utilization` counts what sequences hold now. When decoding outgrows the cache, the youngest sequence is
  preempted: its blocks are freed and it goes back to the head of the queue, to be recomputed.

Admission is first come, first served: a request that does not fit holds up those behind it, so that no large
one starves.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from lowkv.errors import LowkvError
from lowkv.kvcache import added, reservation

if TYPE_CHECKING:
    from lowkv.kvcache import Counts, KVCache
    from lowkv.recipe import ServingConfig
    from lowkv.serving.sequence import Sequence


class Scheduler:
    """Owns the queue (`waiting`) and the running sequences, oldest admission first.

    Raises `LowkvError` for a cache that could not hold a single sequence with anything in it that is sealed.
    """

    def __init__(self, cache: KVCache, config: ServingConfig) -> None:
        self.cache = cache
        self.config = config
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._check_arena()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def check(self, sequence: Sequence) -> None:
        """Raises `LowkvError` when a sequence could not run even alone. Changes nothing."""
        # A preempted sequence is recomputed, prompt and output, so all of it may come in chunks.
        fed = sequence.prompt_length if self.config.policy == "guaranteed_no_evict" else sequence.final_stored
        arena = self.cache.arena
        needed = arena.geometry.slabs_for(self._reservation(sequence.final_stored, fed, 0))
        if needed > arena.slabs:
            raise LowkvError(
                "prompt (text_input) and max_tokens need more KV cache than there is",
                got=f"{sequence.prompt_length} + {sequence.params.max_tokens} tokens, which take "
                f"{needed * arena.geometry.bytes} bytes",
                expected=f"at most {arena.bytes_total} bytes",
                fix="shorten the prompt, lower max_tokens, or raise kv_cache.budget",
            )

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence that `check` has passed."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a finished or cancelled sequence out and frees its blocks."""
        if sequence.cache is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._free(sequence)

    def schedule(self) -> list[tuple[Sequence, int]]:
        """(sequence, tokens to feed) of the next step; what they need fits in the cache.

        Empty only when nothing is waiting or running.
        """
        work, needed = self._decodes()
        budget = self.config.max_tokens_per_step - len(work)
        for sequence in self.running:
            if sequence.pending > 1 and budget > 0:
                count = self._count(sequence, budget)
                more = added(needed, self._need(sequence, count))
                if not self.cache.fits(more):
                    continue
                work.append((sequence, count))
                budget, needed = budget - count, more
        while self.waiting and budget > 0 and len(self.running) < self.config.max_sequences:
            sequence = self.waiting[0]
            count = self._count(sequence, budget)
            if not self._admits(sequence, count):
                break
            sequence.cache = self.cache.add()
            more = added(needed, self._need(sequence, count))
            if not self.cache.fits(more):
                self._free(sequence)
                break
            self.running.append(self.waiting.popleft())
            work.append((sequence, count))
            budget, needed = budget - count, more
        if not work and self.running:  # only prompts are running, and none of their chunks fits beside the others
            self._preempt(self.running[-1])
            return self.schedule()
        return work

    # -- inside ------------------------------------------------------------------------------------------

    def _check_arena(self) -> None:
        """Sink, residual, one block beyond them and one to decode into: less is no cache of this format."""
        plan, arena = self.cache.plan, self.cache.arena
        tokens = plan.sink_tokens + plan.residual_length + 2 * plan.group_size
        needed = arena.geometry.slabs_for(self._reservation(tokens, tokens, 0))
        if needed > arena.slabs:
            raise LowkvError(
                "kv_cache.budget holds not even one short sequence",
                got=f"{arena.budget} bytes",
                expected=f"at least {needed * arena.geometry.bytes} bytes, for {tokens} tokens in {plan.summary()}",
                fix="raise kv_cache.budget",
            )

    def _decodes(self) -> tuple[list[tuple[Sequence, int]], Counts]:
        """Every decoding sequence with its one token, preempting the youngest while that does not fit.

        Returns the work and the blocks it needs.
        """
        while True:
            work = [(sequence, 1) for sequence in self.running if sequence.pending == 1]
            needed = added(self.cache.plan.no_blocks, *(self._need(sequence, count) for sequence, count in work))
            if self.cache.fits(needed):
                return work, needed
            self._preempt(self.running[-1])

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        self.waiting.appendleft(sequence)
        sequence.preemptions += 1
        self.preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        assert sequence.cache is not None
        self.cache.release(sequence.cache)
        sequence.cache = None

    def _admits(self, newcomer: Sequence, count: int) -> bool:
        """True when the reservations of all running sequences and the newcomer's fit together."""
        needs = [self._reserve(sequence, sequence.stored) for sequence in self.running]
        arena = self.cache.arena
        return arena.geometry.slabs_for(added(self._reserve(newcomer, count), *needs)) <= arena.slabs

    def _reserve(self, sequence: Sequence, stored: int) -> Counts:
        final = sequence.final_stored
        if self.config.policy == "max_utilization":  # what it holds once prefilled, and room to grow by a block
            final = min(final, len(sequence.token_ids) + self.cache.plan.group_size)
        return self._reservation(final, len(sequence.token_ids), stored)

    def _reservation(self, final: int, tokens: int, stored: int) -> Counts:
        """Blocks up to `final` stored tokens, while `tokens` are being fed and `stored` of them are in the cache."""
        if tokens <= stored + 1:  # only decoding is left
            return reservation(self.cache.plan, final)
        limit = self.config.max_tokens_per_step
        first = stored == 0 and tokens <= limit
        return reservation(self.cache.plan, final, tokens if first else limit, first=first)

    def _count(self, sequence: Sequence, budget: int) -> int:
        """Tokens of a prompt chunk: all that is pending, or as many as end at a block border."""
        if sequence.pending <= budget:
            return sequence.pending
        past, group = sequence.stored, self.cache.plan.group_size
        aligned = (past + budget) // group * group - past
        return aligned if aligned > 0 else budget

    def _need(self, sequence: Sequence, count: int) -> Counts:
        assert sequence.cache is not None
        return self.cache.need(sequence.cache, count)
