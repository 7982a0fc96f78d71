"""Matrices of a layer in 4 or 8 bits: how they are stored, made from dense ones, and multiplied.

A matrix here is [in, out] and applied as `x @ w`, like every matrix of the decoder. Two forms:

    Int4Matrix   w[i, o] = (code[i, o] - zero[g, o]) * scale[g, o]        g = i // group_size
    Fp8Matrix    w[i, o] = code[i, o] * scale, and x is rounded to FP8 as well, in steps of input_scale

INT4 rounds weights only: groups of `group_size` inputs share a scale (and a zero point, where the form has them;
what is made here is symmetric and has none). Codes are signed, -8 to 7, two to a byte with the even column in the
low half: the bytes of an ONNX INT4 tensor, so that an exporter copies them. Matrices of AWQ may want their inputs
multiplied first (`smoothing`); none that is made here does.

FP8 is E4M3 (no infinities, largest 448). What is made here has one scale for a whole matrix: floating point codes have
their own exponents, and it is what every FP8 matrix product of TensorRT takes. That scale is a power of two, so that
scaling rounds nothing, in whatever dtype it is done, and CPU and GPU compute from the same numbers. Matrices that come
quantized (`lowkv.models.imports`) have whatever scales they have: one, or one for every output; and where their inputs
are not to be rounded, no input_scale.

Rounding is to nearest and nothing else: no calibration, no error feedback. Embeddings and logits stay in floating
point.

To decode a matrix on a CPU takes longer than to multiply with it, so `prepared` decodes once and for all: a CPU
engine shows what quantized weights cost in quality, and saves disk, not memory. The exception is INT4 in bfloat16,
the one form that Torch has a fast kernel for. Elsewhere every product decodes its matrix anew.

On file (safetensors) matrix NAME is `NAME.codes`, `NAME.scales` and, by form, `NAME.zeros`, `NAME.smoothing` or
`NAME.input_scale`; `stored_tensors` and `assembled` go there and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from lowkv.errors import LowkvError

if TYPE_CHECKING:
    from torch import Tensor

    from lowkv.models.config import ModelConfig

GROUP_SIZES = (32, 64, 128)
E4M3_MAX = 448.0
UNIT_SCALE = 1.0
"""The input scale of an FP8 matrix that nothing was calibrated for (source "unit")."""

CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Shares of a group's largest magnitude that INT4 codes may end at."""

_SMALLEST_SCALE = 2.0**-15
"""Of FP8 weights: with it the smallest code, 2^-9, is still a number in float16. Also that of a matrix of zeros."""

_CPU_KERNEL_COLUMNS = 16
"""Torch's INT4 kernel for CPUs takes outputs in multiples of this."""

_CPU_KERNEL_GROUPS = (32, 64, 128, 256)


class QuantizedMatrix(Protocol):
    """What the decoder asks of a matrix that is not a Tensor."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype:
        """That of its products."""
        ...

    def matmul(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        ...

    def prepared(self) -> QuantizedMatrix:
        """The form to multiply with again and again; called once, when the decoder is made."""
        ...


def matmul(x: Tensor, weight: Tensor | QuantizedMatrix) -> Tensor:
    """`x @ weight`: the one seam through which the decoder multiplies."""
    return x @ weight if isinstance(weight, torch.Tensor) else weight.matmul(x)


def add_matmul(base: Tensor, x: Tensor, weight: Tensor | QuantizedMatrix) -> Tensor:
    """`base + x @ weight`, in one pass where the matrix is dense."""
    return torch.addmm(base, x, weight) if isinstance(weight, torch.Tensor) else base + weight.matmul(x)


@dataclass(frozen=True, eq=False)
class Int4Matrix:
    """Signed 4-bit codes in groups along the inputs."""

    codes: Tensor  # [in, out / 2] uint8: column 2j in the low half of byte j, 2j + 1 in the high half
    scales: Tensor  # [in / group_size, out], dtype of the products
    zeros: Tensor | None  # [in / group_size, out / 2] uint8, packed as the codes
    group_size: int
    smoothing: Tensor | None = None  # [in], dtype of the products: what inputs are multiplied by before the product

    @classmethod
    def from_dense(cls, weight: Tensor, group_size: int, dtype: torch.dtype, name: str = "matrix") -> Int4Matrix:
        """Rounds a matrix [in, out] to nearest, without zero points.

        A group's scale is its largest magnitude / 7, or a little less where clipping a few values costs less than
        it gains the others: whichever of CLIPS leaves the smallest squared error.

        Raises LowkvError, naming it, for a matrix that groups or bytes do not divide.
        """
        size, columns = weight.shape
        check_int4_shape(name, size, columns, group_size)
        codes, scales = [], []
        for rows in torch.split(weight, group_size):  # what is in memory beside the matrix is one group of each column
            group_codes, group_scales = _rounded_groups(rows.float(), dtype)
            codes.append(pack(group_codes))
            scales.append(group_scales)
        return cls(torch.cat(codes), torch.stack(scales), None, group_size)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.scales.dtype

    def signed_codes(self) -> Tensor:
        """[in, out] int8, -8 to 7."""
        return unpack(self.codes)

    def dequantize(self) -> Tensor:
        """[in, out] in `dtype`: the definition of what the matrix is; each value is rounded once.

        Smoothing, which is no part of the codes, is multiplied in and rounds once more.
        """
        size, columns = self.shape
        codes = self.signed_codes().view(-1, self.group_size, columns)
        if self.zeros is not None:
            codes = codes - unpack(self.zeros)[:, None]
        weight = (codes.to(self.dtype) * self.scales[:, None]).view(size, columns)
        return weight if self.smoothing is None else weight * self.smoothing[:, None]

    def matmul(self, x: Tensor) -> Tensor:
        return x @ self.dequantize()

    def to(self, dtype: torch.dtype) -> Int4Matrix:
        """The same codes for products in that dtype."""
        smoothing = None if self.smoothing is None else self.smoothing.to(dtype)
        return replace(self, scales=self.scales.to(dtype), smoothing=smoothing)

    def prepared(self) -> Int4Matrix | CpuInt4Matrix | DecodedMatrix:
        if self.codes.device.type != "cpu":
            return self
        # The kernel takes float32 and float16 too, and is a hundred times slower than a dense product with them.
        fitting = self.group_size in _CPU_KERNEL_GROUPS and self.smoothing is None
        if self.dtype != torch.bfloat16 or self.shape[1] % _CPU_KERNEL_COLUMNS or not fitting:
            return DecodedMatrix(self.dequantize(), None)
        return CpuInt4Matrix.from_matrix(self)


@dataclass(frozen=True, eq=False)
class CpuInt4Matrix:
    """An Int4Matrix in the order of Torch's CPU kernel: w[i, o] = (code[i, o] - 8) * scale + zero, codes unsigned."""

    packed: Tensor  # [out, in / 2] uint8, in the kernel's own order
    scales_and_zeros: Tensor  # [in / group_size, out, 2], zeros in units of the weight
    group_size: int
    shape: tuple[int, int]

    @classmethod
    def from_matrix(cls, matrix: Int4Matrix) -> CpuInt4Matrix:
        unsigned = matrix.signed_codes().t().to(torch.int32).add_(8).contiguous()
        zeros = torch.zeros_like(matrix.scales) if matrix.zeros is None else -unpack(matrix.zeros) * matrix.scales
        return cls(
            packed=torch.ops.aten._convert_weight_to_int4pack_for_cpu(unsigned, 1),
            scales_and_zeros=torch.stack((matrix.scales, zeros), -1).contiguous(),
            group_size=matrix.group_size,
            shape=matrix.shape,
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.scales_and_zeros.dtype

    def prepared(self) -> CpuInt4Matrix:
        return self

    def matmul(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x, self.packed, self.group_size, self.scales_and_zeros
        )
        return product


@dataclass(frozen=True, eq=False)
class DecodedMatrix:
    """A matrix of either form, decoded; an FP8 one still rounds its inputs."""

    weight: Tensor  # [in, out]
    input_scale: Tensor | None  # [1]

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def prepared(self) -> DecodedMatrix:
        return self

    def matmul(self, x: Tensor) -> Tensor:
        return (x if self.input_scale is None else rounded_input(x, self.input_scale)) @ self.weight


@dataclass(frozen=True, eq=False)
class Fp8Matrix:
    """E4M3 codes with one scale or one for every output, and the scale that inputs are rounded with, if they are."""

    codes: Tensor  # [in, out] float8_e4m3fn
    scale: Tensor  # [1] or [out], float32
    input_scale: Tensor | None  # [1] float32
    dtype: torch.dtype

    @classmethod
    def from_dense(cls, weight: Tensor, dtype: torch.dtype, input_scale: float = UNIT_SCALE) -> Fp8Matrix:
        """Rounds a matrix [in, out] to nearest, by the smallest power of two that keeps every code within 448."""
        weight = weight.float()
        scale = torch.exp2(torch.ceil(torch.log2(weight.abs().amax() / E4M3_MAX)))
        scale = scale.clamp(min=_SMALLEST_SCALE).view(1)
        return cls(_to_e4m3(weight / scale), scale, torch.full((1,), input_scale), dtype)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> Tensor:
        """[in, out] in `dtype`: the definition of what the matrix is; each value is rounded once.

        Scales are often too small to be normal numbers in float16: they are multiplied in float32.
        """
        return (self.codes.float() * self.scale).to(self.dtype)

    def matmul(self, x: Tensor) -> Tensor:
        return (x if self.input_scale is None else rounded_input(x, self.input_scale)) @ self.dequantize()

    def to(self, dtype: torch.dtype) -> Fp8Matrix:
        """The same codes for products in that dtype."""
        return replace(self, dtype=dtype)

    def prepared(self) -> Fp8Matrix | DecodedMatrix:
        return DecodedMatrix(self.dequantize(), self.input_scale) if self.codes.device.type == "cpu" else self


def rounded_input(x: Tensor, scale: Tensor) -> Tensor:
    """`x` as an FP8 product sees it: rounded to the nearest E4M3 number times `scale`, saturating."""
    scale = scale.to(x.dtype)
    return _to_e4m3(x / scale).to(x.dtype) * scale


# -- whole models --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatrixForm:
    """Which tensors a matrix is stored as: all that is known of it before its values are."""

    kind: str = "none"
    """none (floating point), int4 or fp8."""
    group_size: int = 0
    """int4: inputs that share a scale."""
    zeros: bool = False
    """int4: with zero points."""
    smoothing: bool = False
    """int4: inputs are multiplied by a vector first."""
    columns: bool = False
    """fp8: a scale for every output instead of one."""
    rounds_inputs: bool = True
    """fp8: inputs are rounded too, by a scale that is stored."""

    def layout(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Names, shapes and dtypes of the tensors that a matrix [in, out] is stored as."""
        if self.kind == "none":
            return {name: (shape, dtype)}
        size, columns = shape
        layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.kind == "int4":
            groups = size // self.group_size
            layout[f"{name}.codes"] = ((size, columns // 2), torch.uint8)
            layout[f"{name}.scales"] = ((groups, columns), dtype)
            if self.zeros:
                layout[f"{name}.zeros"] = ((groups, columns // 2), torch.uint8)
            if self.smoothing:
                layout[f"{name}.smoothing"] = ((size,), dtype)
            return layout
        layout[f"{name}.codes"] = (shape, torch.float8_e4m3fn)
        layout[f"{name}.scales"] = ((columns if self.columns else 1,), torch.float32)
        if self.rounds_inputs:
            layout[f"{name}.input_scale"] = ((1,), torch.float32)
        return layout

    def __str__(self) -> str:
        if self.kind == "int4":
            extras = ", zero points" * self.zeros + ", scaled inputs" * self.smoothing
            return f"int4 (groups of {self.group_size}{extras})"
        if self.kind == "fp8":
            scales = "a scale per output" if self.columns else "one scale"
            return f"fp8 ({scales}, inputs {'rounded' if self.rounds_inputs else 'not rounded'})"
        return "floating point"


@dataclass(frozen=True)
class Quantization:
    """What a recipe asks of the layers' matrices. kind: none, int4, fp8; group_size matters to int4 only."""

    kind: str = "none"
    group_size: int = 64

    def __post_init__(self) -> None:
        if self.kind not in ("none", "int4", "fp8"):
            raise LowkvError("this weight quantization is not known", got=self.kind, expected="none, int4 or fp8")

    def check(self, config: ModelConfig) -> None:
        """Raises LowkvError when a matrix of the model does not divide into groups, naming the sizes that fit all."""
        if self.kind != "int4":
            return
        inputs = {"hidden": config.hidden, "heads x head_dim": config.q_width, "intermediate": config.intermediate}
        for name, size in inputs.items():
            if size % self.group_size:
                raise _no_group(f"the model's {name}", size, self.group_size, tuple(inputs.values()))

    def matrix(self, weight: Tensor, dtype: torch.dtype, name: str) -> Tensor | Int4Matrix | Fp8Matrix:
        """A matrix [in, out] in the form asked for."""
        if self.kind == "int4":
            return Int4Matrix.from_dense(weight, self.group_size, dtype, name)
        if self.kind == "fp8":
            return Fp8Matrix.from_dense(weight, dtype)
        return weight.to(dtype).contiguous()

    @property
    def form(self) -> MatrixForm:
        """Of the matrices that are made here."""
        return MatrixForm(self.kind, self.group_size if self.kind == "int4" else 0)


def fused(matrices: Sequence[Int4Matrix | Fp8Matrix], form: MatrixForm, dtype: torch.dtype) -> Int4Matrix | Fp8Matrix:
    """Matrices of the same inputs side by side, their codes untouched, in the form that all of them have room in."""
    int4 = [matrix for matrix in matrices if isinstance(matrix, Int4Matrix)]
    fp8 = [matrix for matrix in matrices if isinstance(matrix, Fp8Matrix)]
    if int4:
        assert not fp8
        return _fused_int4(int4, form, dtype)
    codes = torch.cat([matrix.codes.view(torch.uint8) for matrix in fp8], 1).view(torch.float8_e4m3fn)
    scales = [matrix.scale.expand(matrix.shape[1]) if form.columns else matrix.scale for matrix in fp8]
    # What rounds least of what saturates nothing, should parts have been calibrated apart.
    inputs = [matrix.input_scale for matrix in fp8 if matrix.input_scale is not None and form.rounds_inputs]
    input_scale = torch.stack(inputs).amax(0) if inputs else None
    return Fp8Matrix(codes, torch.cat(scales) if form.columns else scales[0], input_scale, dtype)


def _fused_int4(matrices: Sequence[Int4Matrix], form: MatrixForm, dtype: torch.dtype) -> Int4Matrix:
    zeros = None
    if form.zeros:
        zeros = torch.cat([_zeros(matrix) for matrix in matrices], 1)
    return Int4Matrix(
        codes=torch.cat([matrix.codes for matrix in matrices], 1),
        scales=torch.cat([matrix.scales.to(dtype) for matrix in matrices], 1),
        zeros=zeros,
        group_size=form.group_size,
        smoothing=None if matrices[0].smoothing is None else matrices[0].smoothing.to(dtype),
    )


def _zeros(matrix: Int4Matrix) -> Tensor:
    if matrix.zeros is not None:
        return matrix.zeros
    return torch.zeros((matrix.scales.shape[0], matrix.codes.shape[1]), dtype=torch.uint8)


def stored_tensors(name: str, weight: Tensor | Int4Matrix | Fp8Matrix) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a weight is stored as, in the order of `MatrixForm.layout`."""
    if isinstance(weight, torch.Tensor):
        yield name, weight
    elif isinstance(weight, Int4Matrix):
        yield f"{name}.codes", weight.codes
        yield f"{name}.scales", weight.scales
        if weight.zeros is not None:
            yield f"{name}.zeros", weight.zeros
        if weight.smoothing is not None:
            yield f"{name}.smoothing", weight.smoothing
    else:
        yield f"{name}.codes", weight.codes
        yield f"{name}.scales", weight.scale
        if weight.input_scale is not None:
            yield f"{name}.input_scale", weight.input_scale


def assembled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor | Int4Matrix | Fp8Matrix]:
    """Inverse of `stored_tensors` over all weights of a model; FP8 products get the dtype of `norm`."""
    weights: dict[str, Tensor | Int4Matrix | Fp8Matrix] = {}
    for name, tensor in tensors.items():
        base, dot, part = name.rpartition(".")
        if not dot or part not in ("codes", "scales", "zeros", "smoothing", "input_scale"):
            weights[name] = tensor
        elif part == "codes":
            scales = _part(tensors, base, "scales")
            if tensor.dtype == torch.float8_e4m3fn:
                input_scale = tensors.get(f"{base}.input_scale")
                weights[base] = Fp8Matrix(tensor, scales, input_scale, tensors["norm"].dtype)
            else:
                zeros, smoothing = tensors.get(f"{base}.zeros"), tensors.get(f"{base}.smoothing")
                weights[base] = Int4Matrix(tensor, scales, zeros, tensor.shape[0] // scales.shape[0], smoothing)
    return weights


def check_int4_shape(name: str, size: int, columns: int, group_size: int) -> None:
    """Raises LowkvError for a matrix [size, columns] that does not divide into groups and bytes."""
    if size % group_size:
        raise _no_group(f"the inputs of {name}", size, group_size, (size,))
    if columns % 2:
        raise LowkvError(f"{name} cannot be packed to 4 bits", got=f"{columns} outputs", expected="an even number")


def _no_group(what: str, size: int, group_size: int, sizes: tuple[int, ...]) -> LowkvError:
    fitting = [str(group) for group in GROUP_SIZES if all(size % group == 0 for size in sizes)]
    return LowkvError(
        f"INT4 groups do not divide {what}",
        got=f"{size} inputs, weights.group_size {group_size}",
        expected="whole groups",
        fix=f"use weights.group_size {' or '.join(fitting)}" if fitting else "use weights.quantization fp8 or none",
    )


def _part(tensors: Mapping[str, Tensor], base: str, part: str) -> Tensor:
    try:
        return tensors[f"{base}.{part}"]
    except KeyError:
        raise LowkvError(
            f"tensor {base}.{part} is missing", got=f"{base}.codes alone", fix="build the engine again"
        ) from None


def _rounded_groups(group: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One group of every column, [group_size, out] -> codes [group_size, out] int8, scales [out]."""
    largest = group.abs().amax(0)
    error = torch.full_like(largest, torch.inf)
    codes, scales = torch.empty_like(group), torch.empty_like(largest)
    for clip in CLIPS:
        # A scale below the dtype's normal numbers would be all rounding error (or zero, for a group of zeros).
        scale = (largest * (clip / 7)).clamp(min=torch.finfo(dtype).tiny).to(dtype).float()
        rounded = (group / scale).round_().clamp_(-8, 7)
        new_error = (rounded * scale - group).square_().sum(0)
        better = new_error < error
        codes = torch.where(better, rounded, codes)
        scales = torch.where(better, scale, scales)
        error = torch.minimum(error, new_error)
    return codes.to(torch.int8), scales.to(dtype)


def pack(codes: Tensor) -> Tensor:
    """[n, out] int8 of -8 to 7 -> [n, out / 2] uint8."""
    nibbles = codes.view(torch.uint8) & 0xF
    return nibbles[:, ::2] | (nibbles[:, 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Inverse of `pack`."""
    nibbles = torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2).view(torch.int8)
    return (nibbles ^ 8) - 8


def _to_e4m3(x: Tensor) -> Tensor:
    # Torch's conversion makes NaN of what lies beyond the largest number; QuantizeLinear saturates.
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
