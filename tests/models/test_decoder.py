"""The decoder against transformers on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lowkv.errors import LowkvError
from lowkv.models.checkpoint import check_tensors, decoder_weights, open_checkpoint
from lowkv.models.config import ModelConfig, RopeConfig
from lowkv.models.decoder import Decoder, candidates, weight_shapes
from lowkv.models.dense import DenseAttention

TinyModels = Callable[[str], Any]

NAMES = [
    "llama",
    "llama-untied",
    "llama-rope-llama3",
    "llama-rope-linear",
    "llama-wide-heads",
    "mistral",
    "qwen2",
    "qwen2-windows",
    "qwen3",
    "gemma3",
]
PROMPT = [5, 9, 120, 33, 7, 7, 64, 2, 88, 101, 13, 3, 47, 60, 18, 99, 4, 71, 25, 110, 6, 30, 81, 12]  # 24 > window 16


def load(tiny: Any, dtype: torch.dtype = torch.float32, head: torch.dtype = torch.float32) -> Decoder:
    checkpoint = open_checkpoint(tiny.folder)
    check_tensors(checkpoint)
    return Decoder(checkpoint.config, dict(decoder_weights(checkpoint, dtype, head)))


def step(decoder: Decoder, attention: DenseAttention, parts: list[tuple[int, list[int], int]]) -> torch.Tensor:
    """Runs one ragged step of (sequence, tokens, past) parts; logits of every token."""
    attention.begin_step([(sequence, len(tokens)) for sequence, tokens, _ in parts])
    tokens = torch.tensor([token for _, part, _ in parts for token in part])
    positions = torch.cat([torch.arange(past, past + len(part)) for _, part, past in parts])
    with torch.inference_mode():
        return decoder.forward(tokens, positions, attention, torch.arange(len(tokens)))


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_equal_those_of_transformers(tiny_model: TinyModels, name: str) -> None:
    tiny = tiny_model(name)
    decoder = load(tiny)
    attention = DenseAttention(decoder.config)
    with torch.inference_mode():
        expected = tiny.reference(torch.tensor([PROMPT])).logits[0]
        answer = tiny.reference.generate(
            torch.tensor([PROMPT]), max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None
        )[0, len(PROMPT) :].tolist()
    logits = step(decoder, attention, [(0, PROMPT, 0)])
    # Both compute in float32; only the order of additions differs.
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)
    tokens: list[int] = []
    for _ in range(64):
        tokens.append(int(logits[-1].argmax()))
        logits = step(decoder, attention, [(0, tokens[-1:], len(PROMPT) + len(tokens) - 1)])
    assert tokens == answer


@pytest.mark.parametrize("name", NAMES)
def test_with_fp16_kv_greedy_tokens_equal_those_of_transformers(
    tiny_model: TinyModels, serve: Callable[[Decoder], Any], rounded_cache: Callable[[], Any], name: str
) -> None:
    """The serving executor's path: keys and values are rounded to 16 bit, everything else is float32."""
    tiny = tiny_model(name)
    with torch.inference_mode():
        answer = tiny.reference.generate(
            torch.tensor([PROMPT]), max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None
        )[0]
        expected = tiny.reference(answer[None], cache=rounded_cache()).logits[0]
    served = serve(load(tiny))
    logits = [served.feed(PROMPT)]
    for _ in range(64):
        logits.append(served.feed([int(logits[-1][-1].argmax())]))
    got = torch.cat(logits)
    assert got[len(PROMPT) - 1 : -1].argmax(-1).tolist() == answer[len(PROMPT) :].tolist()
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_ragged_step_gives_each_sequence_what_it_gets_alone(tiny_model: TinyModels, name: str) -> None:
    decoder = load(tiny_model(name))
    alone = [step(decoder, DenseAttention(decoder.config), [(0, part, 0)]) for part in (PROMPT, PROMPT[5:13])]
    attention = DenseAttention(decoder.config, sequences=2)
    step(decoder, attention, [(0, PROMPT[:20], 0)])
    mixed = step(decoder, attention, [(1, PROMPT[5:13], 0), (0, PROMPT[20:], 20)])  # a prompt beside a continuation
    torch.testing.assert_close(mixed[:8], alone[1], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(mixed[8:], alone[0][20:], atol=2e-5, rtol=1e-5)


def test_only_the_wanted_rows_get_logits(tiny_model: TinyModels) -> None:
    decoder = load(tiny_model("llama"))
    every = step(decoder, DenseAttention(decoder.config), [(0, PROMPT, 0)])
    attention = DenseAttention(decoder.config)
    attention.begin_step([(0, len(PROMPT))])
    rows = torch.tensor([23, 3])
    some = decoder.forward(torch.tensor(PROMPT), torch.arange(len(PROMPT)), attention, rows)
    torch.testing.assert_close(some, every[rows], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in ("llama", "qwen3") for dtype in (torch.bfloat16, torch.float16)]
    + [("gemma3", torch.bfloat16)],
)
def test_half_precision_stays_close_to_single(tiny_model: TinyModels, name: str, dtype: torch.dtype) -> None:
    tiny = tiny_model(name)
    exact = step(load(tiny), DenseAttention(load(tiny).config), [(0, PROMPT, 0)])
    decoder = load(tiny, dtype, torch.float32)
    assert decoder.dtype == dtype
    rounded = step(decoder, DenseAttention(decoder.config), [(0, PROMPT, 0)])
    assert rounded.dtype == torch.float32
    # A rounding step is 2^-8 (bfloat16) or 2^-11 (float16) of a value; a few dozen of them add up along 3 layers.
    assert (rounded - exact).abs().max() < (0.15 if dtype == torch.bfloat16 else 0.02) * exact.abs().max()


def test_scaled_embeddings_are_scaled_as_transformers_does(tiny_model: TinyModels) -> None:
    """The scale is rounded to the body's dtype first: the square root of 72 is 8.5 there."""
    checkpoint = open_checkpoint(tiny_model("gemma3").folder)
    config = replace(checkpoint.config, embedding_scale=72**0.5)
    decoder = Decoder(config, dict(decoder_weights(checkpoint, torch.bfloat16, torch.float32)))
    embedding = checkpoint.tensor("model.embed_tokens.weight").bfloat16()
    assert torch.equal(decoder._embedded(torch.tensor(PROMPT)), embedding[PROMPT] * torch.tensor(72**0.5).bfloat16())


def test_a_float32_head_does_not_round_the_logits(tiny_model: TinyModels) -> None:
    tiny = tiny_model("llama-untied")
    hidden = torch.randn(4, 64, dtype=torch.bfloat16)
    exact = load(tiny, torch.bfloat16, torch.float32).logits(hidden)
    rounded = load(tiny, torch.bfloat16, torch.bfloat16).logits(hidden)
    assert (exact.bfloat16().float() != exact).any()
    assert (rounded.bfloat16().float() == rounded).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("layers.1.down"), "layers.1.down is missing"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "extra is not one of this model"),
        (lambda weights: weights.update(norm=torch.zeros(3)), r"norm has the wrong shape: got \(3,\)"),
        (
            lambda weights: weights.update({"layers.0.qkv": weights["layers.0.qkv"].half()}),
            "layers.0.qkv has the wrong dtype",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(change: Callable[[dict[str, torch.Tensor]], object], message: str) -> None:
    config = ModelConfig("llama", 2, 32, 2, 1, 16, 64, 50, 1e-5, RopeConfig(), 64, True, False, False, (None, None))
    weights = {name: torch.zeros(shape) for name, shape in weight_shapes(config).items()}
    Decoder(config, weights)
    change(weights)
    with pytest.raises(LowkvError, match=message):
        Decoder(config, weights)


def test_candidates_are_the_largest_logits_with_the_log_sum_exp_of_all() -> None:
    logits = torch.randn(3, 1000)
    values, ids, lse = candidates(logits)
    assert values.shape == ids.shape == (3, 256)
    assert ids.dtype == torch.int32
    assert (values.diff(dim=-1) <= 0).all()
    torch.testing.assert_close(logits.gather(1, ids.long()), values)
    torch.testing.assert_close(lse, logits.exp().sum(-1).log())
    assert candidates(logits[:, :100])[0].shape == (3, 100)


def test_the_decoder_can_be_exported(tiny_model: TinyModels) -> None:
    """Engines of other targets are made by tracing it, with any number of tokens and rows."""
    decoder = load(tiny_model("qwen3"))

    class Traced(torch.nn.Module):
        def forward(self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return decoder.forward(tokens, positions, lambda layer, q, k, v: q, rows)

    tokens, rows = torch.export.Dim("tokens", min=2, max=512), torch.export.Dim("rows", min=2, max=64)
    arguments = (torch.arange(5), torch.arange(5), torch.arange(2))
    exported = torch.export.export(Traced(), arguments, dynamic_shapes=({0: tokens}, {0: tokens}, {0: rows}))
    other = (torch.arange(9), torch.arange(9), torch.arange(3))
    torch.testing.assert_close(exported.module()(*other), Traced()(*other), atol=1e-5, rtol=1e-5)
