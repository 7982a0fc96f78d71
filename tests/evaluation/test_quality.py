"""Scores against goldens that use no arena, one token at a time; and the statistics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvattention.reference import as_stored, attention
from lowkv.engine import EngineDir
from lowkv.errors import LowkvError
from lowkv.evaluation import evaluate
from lowkv.evaluation.feeding import Run
from lowkv.evaluation.quality import Documents, TextMeasure, TextPart, beginning, score, windows_of
from lowkv.evaluation.subjects import Subject
from lowkv.kvcache import CachePlan
from lowkv.models.config import ModelConfig
from lowkv.recipe import KVCacheConfig

if TYPE_CHECKING:
    from torch import Tensor

    from lowkv.models.decoder import Decoder

LENGTH = 256
SCALE = 0.8
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 89,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def model(**changes: Any) -> Decoder:
    """A random model, tame enough that what single and aligned steps differ in (the last bit) stays small."""
    import torch

    from lowkv.models.decoder import Decoder, weight_shapes

    config = ModelConfig.from_hf_config(CONFIG | changes)
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for name, shape in weight_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * noise if len(shape) == 1 else noise * SCALE / shape[0] ** 0.5
    return Decoder(config, weights)


def plan_of(decoder: Decoder, **cache: Any) -> CachePlan:
    return CachePlan.from_config(decoder.config, KVCacheConfig(**cache))


def windows(decoder: Decoder, count: int = 2) -> np.ndarray:
    return np.random.default_rng(1).integers(0, decoder.config.vocab, (count, LENGTH))


def golden(subject: Subject, tokens: np.ndarray) -> np.ndarray:
    """[N - 1] negative log-likelihoods, token by token, with a history in plain arrays: no blocks, no arena.

    Tokens [sink, cold_end(p)) are encoded and decoded before the query at p, the others rounded to half precision.
    """
    import torch

    decoder, plan = subject.decoder, subject.plan
    size, specs = plan.group_size, plan.layer_specs()
    shape = (len(specs), len(tokens), plan.kv_heads, plan.head_dim)
    keys, values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    nll = []
    for position in range(len(tokens) - 1):
        for group in plan.groups:
            for block in range(group.cold_end(max(0, position - 1)), group.cold_end(position)):
                at = slice(block * size, (block + 1) * size)
                for layer in group.layers:
                    k, v = keys[layer], values[layer]
                    k[at], v[at] = as_stored(specs[layer], k[at], v[at], [0])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, position: int = position) -> Tensor:
            spec, past = specs[layer], position + 1
            keys[layer, position], values[layer, position] = as_stored(spec, k.numpy(), v.numpy(), [])
            history = keys[layer, :past], values[layer, :past]
            out = attention(q.numpy(), *history, softmax_scale=spec.softmax_scale, window=spec.window)
            return torch.from_numpy(out.astype(np.float32))

        with torch.inference_mode():
            token, last = torch.tensor([tokens[position]]), torch.tensor([0])
            logits = decoder.forward(token, torch.tensor([position]), attend, last)[0]
        nll.append(float(logits.logsumexp(-1) - logits[tokens[position + 1]]))
    return np.array(nll)


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """[W, P] scores equal within 1e-4, but for what follows a code that rounded the other way.

    One token alone and 32 together go through different matrix kernels, so K and V differ in the last bit; now and
    then that decides how a value on the border of two codes rounds, and all after it differs a little. A block read
    in the wrong precision would show in every window, and more.
    """
    worst = np.abs(found - expected).max(axis=-1)
    assert worst.min() < 1e-4
    assert worst.max() < 0.02


CASES: list[dict[str, Any]] = [
    {"format": "fp16"},
    {"format": "fp8"},
    {"format": "kivi2"},
    {"format": "k4v2", "residual_length": 32, "sink_tokens": 0},
    {"format": "kivi2", "residual_length": 64, "residual": "flush", "sink_tokens": 32},
    {"format": "kivi4", "residual_length": 64, "group_size": 64, "sink_tokens": 0},
    {"format": "kivi2", "residual_length": 32, "overrides": {1: "fp8"}},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_aligned_steps_equal_decoding_token_by_token(case: dict[str, Any]) -> None:
    decoder = model()
    subject = Subject("it", decoder, plan_of(decoder, **case))
    base = Subject("base", decoder, plan_of(decoder, format="fp16"))
    tokens = windows(decoder)
    scores = score([subject, base], "base", tokens)
    assert_same(scores["it"].nll, np.array([golden(subject, window) for window in tokens]))
    if subject.plan.seals:  # the cache was really read as stored
        assert np.abs(scores["it"].nll - scores["base"].nll).max() > 0.02


def test_aligned_steps_equal_the_cache_fed_token_by_token() -> None:
    import torch

    decoder = model()
    subject = Subject("it", decoder, plan_of(decoder, format="kivi2", residual_length=32, sink_tokens=32))
    tokens = windows(decoder)
    run = Run(subject, len(tokens), LENGTH, step=1)
    nll = np.zeros((len(tokens), LENGTH - 1))
    for position in range(LENGTH - 1):
        with torch.inference_mode():
            logits = decoder.logits(run.feed(list(enumerate(tokens[:, position : position + 1]))))
        nll[:, position] = logits.logsumexp(-1) - logits[range(len(tokens)), tokens[:, position + 1]]
    assert_same(score([subject], "it", tokens)["it"].nll, nll)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": 50},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1},
    ],
)
def test_sliding_windows(changes: dict[str, Any]) -> None:
    decoder = model(**changes)
    subject = Subject("it", decoder, plan_of(decoder, format="kivi4", residual_length=32, sink_tokens=0))
    tokens = windows(decoder)
    golds = np.array([golden(subject, window) for window in tokens])
    assert_same(score([subject], "it", tokens)["it"].nll, golds)


def test_divergence_is_over_the_whole_vocabulary() -> None:
    decoder = model()
    subjects = [Subject(name, decoder, plan_of(decoder, format=name)) for name in ("fp16", "kivi2")]
    tokens = windows(decoder)
    scores = score(subjects, "fp16", tokens)
    assert (scores["fp16"].kl == 0).all()
    assert (scores["fp16"].agree == 1).all()
    assert (scores["kivi2"].kl > -1e-6).all()
    assert scores["kivi2"].kl.mean() > 1e-5
    # The first cold block is read after sink + block + residual = 32 + 32 + 128 tokens; until then nothing differs.
    assert np.abs(scores["kivi2"].kl[:, :192]).max() < 1e-6


def test_windows_do_not_touch_each_other() -> None:
    decoder = model()
    subject = Subject("it", decoder, plan_of(decoder, format="k4v2", residual_length=32))
    tokens = windows(decoder, 10)  # more than one batch
    together = score([subject], "it", tokens)["it"].nll
    alone = [score([subject], "it", tokens[row : row + 1])["it"].nll[0] for row in (0, 7, 9)]
    assert_same(together[[0, 7, 9]], np.array(alone))


def test_progress_counts_every_token() -> None:
    decoder = model()
    seen: list[int] = []
    subjects = [Subject(name, decoder, plan_of(decoder, format=name)) for name in ("fp16", "fp8")]
    score(subjects, "fp16", windows(decoder), seen.append)
    assert sum(seen) == 4 * LENGTH


class Letters:
    """A tokenizer of letters, with a BOS token or without."""

    def __init__(self, bos: bool) -> None:
        self.bos = bos

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [1] * (self.bos and add_special) + [ord(letter) for letter in text]


@pytest.mark.parametrize(
    ("bos", "count", "expected"),
    [
        (False, 2, ["abcd", "ijkl"]),
        (True, 2, ["\1abc", "\1ijk"]),
        (False, 4, ["abcd", "ijkl", "pqrs", "efgh"]),  # beginnings first
        (True, 5, ["\1abc", "\1ijk", "\1pqr", "\1def", "\1lmn"]),
    ],
)
def test_windows_are_beginnings_of_documents_first(bos: bool, count: int, expected: list[str]) -> None:
    documents = ["abcdefgh", "AB", "ijklmno", "pqrst"]
    ids = windows_of(Letters(bos), documents, count, 4)  # type: ignore[arg-type]
    assert bool(beginning(Letters(bos))) is bos  # type: ignore[arg-type]
    assert ["".join(map(chr, row)) for row in ids] == expected


def test_too_little_text_is_refused() -> None:
    with pytest.raises(LowkvError, match="2 windows of 4 tokens"):
        windows_of(Letters(False), ["abcdefghi", "ab"], 3, 4)  # type: ignore[arg-type]


def test_figures_from_kept_sums_are_those_of_the_positions() -> None:
    decoder = model()
    subjects = [Subject(name, decoder, plan_of(decoder, format=name, sink_tokens=0)) for name in ("fp16", "kivi2")]
    ids = windows(decoder, 3)
    measure = TextMeasure(3 * LENGTH, LENGTH, Documents(("some text",)))
    base, found = TextPart(ids, bos=True).run(subjects, lambda tokens: None)
    scores = score(subjects, "fp16", ids)
    figures = measure.figures(subjects[1].plan, [found], [base])
    assert figures["positions"] == scores["kivi2"].nll.size
    assert figures["perplexity"]["value"] == pytest.approx(np.exp(scores["kivi2"].nll.mean()), rel=1e-6)
    excess = scores["kivi2"].nll.mean() - scores["fp16"].nll.mean()
    assert figures["ratio"]["value"] == pytest.approx(np.exp(excess), rel=1e-6)
    assert figures["kl"]["value"] == pytest.approx(scores["kivi2"].kl.mean(), rel=1e-6)
    assert figures["top1"]["value"] == pytest.approx(scores["kivi2"].agree.mean())
    assert figures["kl"]["low"] <= figures["kl"]["value"] <= figures["kl"]["high"]
    assert figures["bos"] is True


TEXT = ("It is a truth universally acknowledged, that " * 8, "too short", "Call me Ishmael. Some years ago " * 12)


def test_engines_are_compared_with_fp16_kv_of_their_own_weights(build_tiny: Callable[..., Path]) -> None:
    cache = {"residual_length": 32, "sink_tokens": 0}
    engines = {name: EngineDir.open(build_tiny({"format": name} | cache)) for name in ("kivi4", "kivi2")}
    measures = [TextMeasure(512, 256, Documents(TEXT, "two sentences"))]
    found = evaluate(engines, measures)
    plain = found.to_mapping()
    assert list(found.results) == ["fp16", "kivi4", "kivi2"]
    assert (plain["windows"], plain["bos"], plain["text"]) == (2, False, "two sentences")
    base, kivi4, kivi2 = found.results.values()
    assert (base["ratio"]["value"], base["kl"]["value"], base["top1"]["value"]) == (1, 0, 1)
    assert 0 < kivi4["kl"]["value"] < kivi2["kl"]["value"]
    assert base["bits"] == 16 > kivi4["bits"] > kivi2["bits"]
    against = evaluate(engines, measures, baseline="kivi4")
    assert list(against.results) == ["kivi4", "kivi2"]
    assert against.baseline == "kivi4"
    assert against.results["kivi4"]["kl"]["value"] == 0


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        ({"window": 4096}, "longer than the model's positions"),
        ({"tokens": 10_000}, "not enough text"),
    ],
)
def test_refusals(build_tiny: Callable[..., Path], measure: dict[str, Any], message: str) -> None:
    given = {"tokens": 128, "window": 128, "documents": Documents(("a short text",))} | measure
    with pytest.raises(LowkvError, match=message):
        evaluate({"kivi2": EngineDir.open(build_tiny())}, [TextMeasure(**given)])
