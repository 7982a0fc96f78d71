"""`agreement`: for how long does a greedy answer stay the baseline's?

Prompts (beginnings of the text's documents) are continued greedily by `N` tokens in a `ServingEngine`, batched, prefill
in chunks, as a server does it, with the format and with the baseline's. Of a prompt, a and b those answers:

    until  number of leading tokens that are equal (N when all are); reported: median over prompts
    equal  share of positions i < N with a_i = b_i; reported: mean over prompts

with bootstraps over prompts. Once two answers differ they read different texts, so this says where a format first
changes a choice, not how bad that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from lowkv.evaluation.feeding import cache_for
from lowkv.evaluation.intervals import CONFIDENCE, Interval, of_items
from lowkv.evaluation.measure import Advance, Figures, Measure
from lowkv.evaluation.quality import Documents, TextMeasure

if TYPE_CHECKING:
    from rich.table import Table

    from lowkv.engine import EngineDir
    from lowkv.evaluation.subjects import Subject
    from lowkv.kvcache import CachePlan
    from lowkv.models.tokenizer import Tokenizer

PROMPTS = 8
PROMPT_TOKENS = 384
OUTPUT_TOKENS = 64
BATCH = 8  # prompts answered together
CHUNK = 256  # tokens of a step at most


@dataclass(frozen=True)
class AgreementMeasure(Measure):
    """`prompts` prompts of `prompt_tokens` tokens, each continued by `output_tokens`."""

    name: ClassVar[str] = "agreement"

    prompts: int = PROMPTS
    prompt_tokens: int = PROMPT_TOKENS
    output_tokens: int = OUTPUT_TOKENS
    documents: Documents | None = None

    @property
    def _text(self) -> TextMeasure:
        return TextMeasure(self.prompts * self.prompt_tokens, self.prompt_tokens, self.documents)

    @property
    def settings(self) -> dict[str, Any]:
        return {"output_tokens": self.output_tokens} | self._text.settings

    @property
    def parts(self) -> int:
        return -(-self.prompts // BATCH)

    def prepare(self, engine: EngineDir) -> list[AgreementPart]:
        """Raises LowkvError for prompts and answers beyond the model's positions, or too little text."""
        tokenizer = engine.tokenizer()
        ids = self._text.read(engine, tokenizer, room=self.output_tokens)
        return [
            AgreementPart(
                tokenizer, ids[at : at + BATCH].tolist(), self.output_tokens, engine.model_config.max_positions
            )
            for at in range(0, len(ids), BATCH)
        ]

    def figures(self, plan: CachePlan, outcomes: Sequence[Any], baseline: Sequence[Any]) -> Figures:
        mine, base = (np.array([answer for outcome in chosen for answer in outcome]) for chosen in (outcomes, baseline))
        equal = mine == base  # [prompts, N]
        until = np.where(equal.all(axis=1), self.output_tokens, equal.argmin(axis=1)).astype(np.float64)
        return {
            "agreement": asdict(of_items(equal.mean(axis=1), np.mean)),
            "agreement_until": asdict(of_items(until, np.median)),
        }

    def tables(self, results: dict[str, Figures], baseline: str) -> list[Table]:
        from rich.table import Table

        table = Table(
            title=f"agreement with {baseline}, greedy",
            caption=f"{self.prompts} prompts of {self.prompt_tokens} tokens, {self.output_tokens} tokens each; "
            f"[{CONFIDENCE:.0%} interval]",
        )
        for column in ("engine", "equal tokens", "tokens until the first difference (median)"):
            table.add_column(column)
        for name, found in results.items():
            until = Interval.from_mapping(found["agreement_until"])
            table.add_row(
                name,
                str(Interval.from_mapping(found["agreement"])),
                f"{until.value:g} [{until.low:g}, {until.high:g}]",
            )
        return [table]


@dataclass(frozen=True)
class AgreementPart:
    """Some prompts, as token ids, answered together."""

    tokenizer: Tokenizer
    prompts: list[list[int]]
    output_tokens: int
    max_positions: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.prompts)) + len(self.prompts) * self.output_tokens

    def run(self, subjects: Sequence[Subject], advance: Advance) -> list[Any]:
        """The answers of each subject, [prompts, N] token ids."""
        return [self._answer(subject, advance) for subject in subjects]

    def _answer(self, subject: Subject, advance: Advance) -> list[list[int]]:
        from kvattention import select
        from lowkv.recipe import ServingConfig
        from lowkv.serving.engine import Request, ServingEngine
        from lowkv.serving.params import SamplingParams
        from lowkv.serving.torch_executor import TorchExecutor

        final = max(map(len, self.prompts)) + self.output_tokens
        cache = cache_for(subject, select("cpu"), len(self.prompts), final, CHUNK)
        serving = ServingEngine(
            TorchExecutor(subject.decoder, cache),
            self.tokenizer,
            ServingConfig(max_sequences=BATCH, max_tokens_per_step=CHUNK),
            vocab=subject.decoder.config.vocab,
            max_model_len=self.max_positions,
        )
        params = SamplingParams(max_tokens=self.output_tokens, ignore_eos=True)
        answers: dict[str, list[int]] = {str(index): [] for index in range(len(self.prompts))}
        for index, prompt in enumerate(self.prompts):
            serving.submit(Request(str(index), prompt, params))
        while serving.has_work:
            deltas = serving.step()
            for delta in deltas:
                if delta.num_output_tokens == 1:
                    advance(delta.num_input_tokens)
                answers[delta.request_id] += delta.token_ids
            advance(len(deltas))
        return list(answers.values())
