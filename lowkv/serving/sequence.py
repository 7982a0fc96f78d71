"""One request on its way through the engine: its tokens, its cache, what is still to be computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowkv.kvcache import SequenceCache
    from lowkv.serving.detokenizer import IncrementalDetokenizer
    from lowkv.serving.params import SamplingParams
    from lowkv.serving.sampler import SamplerState


@dataclass(eq=False)
class Sequence:
    """A request's prompt and output tokens.

    The cache holds the first `stored` tokens. `pending` tokens are to be fed: many in prefill (or after a
    preemption, when prompt and output are recomputed), exactly one in decode.

        token_ids   [ prompt ............ | output ...... ]
        stored      ----------------------------->|
        pending                                    -------
    """

    request_id: str
    token_ids: list[int]
    prompt_length: int
    params: SamplingParams
    sampler: SamplerState
    detokenizer: IncrementalDetokenizer
    cache: SequenceCache | None = None
    logprobs: list[float] = field(default_factory=list)
    preemptions: int = 0

    @property
    def stored(self) -> int:
        return self.cache.tokens if self.cache is not None else 0

    @property
    def pending(self) -> int:
        return len(self.token_ids) - self.stored

    @property
    def output_length(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def final_stored(self) -> int:
        """Tokens stored when the last one has been chosen: that one is returned, never stored."""
        return self.prompt_length + self.params.max_tokens - 1
