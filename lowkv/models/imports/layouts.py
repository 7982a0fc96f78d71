"""How quantized matrices lie in safetensors files. W is [out, in] there, the matrix read is [in, out].

    class           codes                                          scales             zero points
    PackedRows      weight_packed int32 [out, in / 8], from 8      [out, groups]      int32 [out / 8, groups], from 8
    ModelOptInt4    weight uint8 [out / 2, in], two's complement   [out, groups]      none
    AwqGemm         qweight int32 [in, out / 8], AWQ's order       [groups, out]      int32 [groups, out / 8], AWQ's
    Gptq            qweight int32 [in / 8, out]                    [groups, out]      int32 [groups, out / 8]
    Float8          weight E4M3 [out, in]                          [], [1], [out, 1]  none

"From 8": stored unsigned, the code plus 8. Eight codes to an int32, the first in the lowest bits; AWQ's order puts
outputs 0, 2, 4, 6, 1, 3, 5, 7 there. GPTQ's first format stores zero points less one, eight at a time: adding
0x11111111 to the word undoes that, borrows included; `gptq_v2` stores them as they are.

With g_idx (GPTQ's activation order) input i belongs to group g_idx[i]. When that is i // group_size it says nothing
new; any other order scatters groups over the inputs, and the matrix is decoded instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from lowkv.errors import LowkvError
from lowkv.models.imports.scheme import Tensors, contradiction
from lowkv.models.quantized import Fp8Matrix, Int4Matrix, MatrixForm, pack

if TYPE_CHECKING:
    from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FLOATS = ("F16", "BF16", "F32")
_V1_OFFSET = 0x11111111

Shapes = dict[str, tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]]
"""Suffix of a part -> (the shapes that it may have, the dtypes that it may have)."""


def check_parts(tensors: Tensors, linear: str, wanted: Shapes) -> tuple[str, ...]:
    """The parts' names. Raises LowkvError for one that is missing, or of another shape or dtype."""
    stored = tensors.stored()
    for suffix, (shapes, dtypes) in wanted.items():
        name = f"{linear}.{suffix}"
        if name not in stored:
            raise LowkvError(
                f"the checkpoint lacks tensor {name}",
                got=f"other parts of {linear}",
                expected=f"{linear}." + ", .".join(wanted),
                fix="use a complete checkpoint",
            )
        shape, dtype = stored[name]
        if shape not in shapes or dtype not in dtypes:
            raise LowkvError(
                f"tensor {name} does not fit the matrix that it belongs to",
                got=f"{dtype} {list(shape)}",
                expected=f"{' or '.join(dtypes)} {' or '.join(str(list(allowed)) for allowed in shapes)}",
                fix="use a complete checkpoint",
            )
    return tuple(f"{linear}.{suffix}" for suffix in wanted)


def _finite(tensors: Tensors, name: str) -> Tensor:
    """A part that is scales. Raises LowkvError for a number that no scale can be."""
    scales = tensors.raw(name).float()
    bad = scales[~(torch.isfinite(scales) & (scales >= 0))]
    if bad.numel():
        raise LowkvError(
            f"tensor {name} holds what is no scale",
            got=bad.flatten()[0].item(),
            expected="numbers from 0 on",
            fix="use an undamaged checkpoint",
        )
    return tensors.raw(name)


def _unpacked(words: Tensor) -> Tensor:
    """32-bit words [n, m] -> uint8 [n, m, 8]: the first of eight is in the lowest bits."""
    shifts = torch.arange(0, 32, 4, dtype=words.dtype)
    return ((words[..., None] >> shifts) & 0xF).to(torch.uint8)


def _signed(unsigned: Tensor) -> Tensor:
    """Codes of 0 to 15 that are stored "from 8" -> int8, -8 to 7."""
    return unsigned.to(torch.int8) - 8


def _in_order(g_idx: Tensor, group_size: int) -> bool:
    return torch.equal(g_idx.long(), torch.arange(g_idx.numel()) // group_size)


def _groups(group_size: int | None, size: int, linear: str) -> int:
    """Inputs that share a scale; all of them where the config has no groups."""
    group = size if group_size is None else group_size
    if group < 1 or size % group:
        raise LowkvError(
            f"groups do not divide the inputs of {linear}",
            got=f"{size} inputs, groups of {group}",
            expected="whole groups",
            fix="quantize the model again with a group size that divides its widths",
        )
    return group


@dataclass(frozen=True)
class _Ordered:
    """INT4 whose groups may be scattered over the inputs."""

    group_size: int | None

    kind: ClassVar[str] = "int4"

    def _scattered(self, codes: Tensor, scales: Tensor, zeros: Tensor | None, g_idx: Tensor, linear: str) -> Tensor:
        """[in, out] float32 from signed codes [in, out], scales and zeros [groups, out] and each input's group."""
        group = g_idx.long()
        if group.min() < 0 or group.max() >= scales.shape[0]:
            raise LowkvError(
                f"tensor {linear}.g_idx names groups that are not there",
                got=f"{int(group.min())} to {int(group.max())}",
                expected=f"0 to {scales.shape[0] - 1}",
                fix="use an undamaged checkpoint",
            )
        values = codes.float() if zeros is None else codes.float() - zeros.float()[group]
        return values * scales.float()[group]


ACTIVATION_ORDER = "its groups are scattered over the inputs (activation order)"


@dataclass(frozen=True)
class PackedRows(_Ordered):
    """compressed-tensors' `pack-quantized`."""

    symmetric: bool

    @property
    def words(self) -> str:
        groups = "a scale per output" if self.group_size is None else f"groups of {self.group_size}"
        return f"INT4 (pack-quantized, {groups}, {'symmetric' if self.symmetric else 'zero points'})"

    def shape(self, tensors: Tensors, linear: str) -> tuple[int, int] | None:
        packed = tensors.stored().get(f"{linear}.weight_packed")
        return (packed[0][0], 8 * packed[0][1]) if packed and len(packed[0]) == 2 else None

    def parts(self, tensors: Tensors, linear: str) -> tuple[str, ...]:
        shape = self.shape(tensors, linear)
        if shape is None:
            return check_parts(tensors, linear, {"weight_packed": (((0, 0),), ("I32",))})
        rows, size = shape
        groups = size // _groups(self.group_size, size, linear)
        wanted: Shapes = {
            "weight_packed": (((rows, size // 8),), ("I32",)),
            "weight_scale": (((rows, groups),), _FLOATS),
        }
        if f"{linear}.weight_shape" in tensors.stored():
            wanted["weight_shape"] = (((2,),), ("I64", "I32"))
        if not self.symmetric:
            wanted["weight_zero_point"] = (((rows // 8, groups),), ("I32",))
        if f"{linear}.weight_g_idx" in tensors.stored():
            wanted["weight_g_idx"] = (((size,),), ("I32", "I64"))
        names = check_parts(tensors, linear, wanted)
        if f"{linear}.weight_shape" in names:
            said = tuple(tensors.raw(f"{linear}.weight_shape").tolist())
            if said != shape:
                raise contradiction(f"{linear}.weight_shape is not the shape of its codes", said, shape)
        return names

    def form(self, tensors: Tensors, linear: str) -> MatrixForm | str:
        shape = self.shape(tensors, linear)
        assert shape is not None
        group = _groups(self.group_size, shape[1], linear)
        g_idx = self._g_idx(tensors, linear)
        if g_idx is not None and not _in_order(g_idx, group):
            return ACTIVATION_ORDER
        return MatrixForm("int4", group, zeros=not self.symmetric)

    def matrix(self, tensors: Tensors, linear: str) -> Int4Matrix | Tensor:
        packed = tensors.raw(f"{linear}.weight_packed")
        codes = _signed(_unpacked(packed).flatten(1)).t().contiguous()  # [in, out]
        scales = _finite(tensors, f"{linear}.weight_scale").t().contiguous()
        zeros = None
        if not self.symmetric:
            words = tensors.raw(f"{linear}.weight_zero_point").t().contiguous()  # [groups, out / 8]
            zeros = _signed(_unpacked(words).flatten(1))
        group, g_idx = _groups(self.group_size, codes.shape[0], linear), self._g_idx(tensors, linear)
        if g_idx is not None and not _in_order(g_idx, group):
            return self._scattered(codes, scales, zeros, g_idx, linear)
        return Int4Matrix(pack(codes), scales, None if zeros is None else pack(zeros), group)

    def _g_idx(self, tensors: Tensors, linear: str) -> Tensor | None:
        name = f"{linear}.weight_g_idx"
        if name not in tensors.stored():
            return None
        g_idx = tensors.raw(name)
        return None if bool((g_idx == -1).all()) else g_idx  # the library's own "not set"


@dataclass(frozen=True)
class ModelOptInt4:
    """ModelOpt's `W4A16_AWQ`."""

    group_size: int

    kind: ClassVar[str] = "int4"

    @property
    def words(self) -> str:
        return f"INT4 (ModelOpt AWQ, groups of {self.group_size}, symmetric)"

    def shape(self, tensors: Tensors, linear: str) -> tuple[int, int] | None:
        packed = tensors.stored().get(f"{linear}.weight")
        return (2 * packed[0][0], packed[0][1]) if packed and packed[1] == "U8" and len(packed[0]) == 2 else None

    def parts(self, tensors: Tensors, linear: str) -> tuple[str, ...]:
        shape = self.shape(tensors, linear)
        rows, size = shape or (0, 0)
        wanted: Shapes = {
            "weight": (((rows // 2, size),), ("U8",)),
            "weight_scale": (((rows, size // _groups(self.group_size, size, linear)),), _FLOATS),
        }
        if f"{linear}.pre_quant_scale" in tensors.stored():
            wanted["pre_quant_scale"] = (((size,),), _FLOATS)
        return check_parts(tensors, linear, wanted)

    def form(self, tensors: Tensors, linear: str) -> MatrixForm | str:
        smoothing = f"{linear}.pre_quant_scale" in tensors.stored()
        return MatrixForm("int4", self.group_size, smoothing=smoothing)

    def matrix(self, tensors: Tensors, linear: str) -> Int4Matrix:
        # Two outputs to a byte, the even one in the low half: transposed, it is the packing of `Int4Matrix`.
        codes = tensors.raw(f"{linear}.weight").t().contiguous()
        scales = _finite(tensors, f"{linear}.weight_scale").t().contiguous()
        smooth = f"{linear}.pre_quant_scale"
        smoothing = tensors.raw(smooth) if smooth in tensors.stored() else None
        return Int4Matrix(codes, scales, None, self.group_size, smoothing)


@dataclass(frozen=True)
class AwqGemm:
    """AutoAWQ's `gemm` version."""

    group_size: int | None

    kind: ClassVar[str] = "int4"

    @property
    def words(self) -> str:
        groups = "a scale per output" if self.group_size is None else f"groups of {self.group_size}"
        return f"INT4 (AWQ, {groups}, zero points)"

    def shape(self, tensors: Tensors, linear: str) -> tuple[int, int] | None:
        packed = tensors.stored().get(f"{linear}.qweight")
        return (8 * packed[0][1], packed[0][0]) if packed and len(packed[0]) == 2 else None

    def parts(self, tensors: Tensors, linear: str) -> tuple[str, ...]:
        rows, size = self.shape(tensors, linear) or (0, 0)
        groups = size // _groups(self.group_size, size, linear) if size else 0
        return check_parts(
            tensors,
            linear,
            {
                "qweight": (((size, rows // 8),), ("I32",)),
                "scales": (((groups, rows),), _FLOATS),
                "qzeros": (((groups, rows // 8),), ("I32",)),
            },
        )

    def form(self, tensors: Tensors, linear: str) -> MatrixForm | str:
        shape = self.shape(tensors, linear)
        assert shape is not None
        return MatrixForm("int4", _groups(self.group_size, shape[1], linear), zeros=True)

    def matrix(self, tensors: Tensors, linear: str) -> Int4Matrix:
        codes = _signed(_outputs(tensors.raw(f"{linear}.qweight")))
        zeros = _signed(_outputs(tensors.raw(f"{linear}.qzeros")))
        scales = _finite(tensors, f"{linear}.scales")
        return Int4Matrix(pack(codes), scales, pack(zeros), _groups(self.group_size, codes.shape[0], linear))


def _outputs(words: Tensor) -> Tensor:
    """int32 [n, out / 8] in AWQ's order -> uint8 [n, out]."""
    nibbles = _unpacked(words)
    ordered = torch.empty_like(nibbles)
    ordered[..., list(AWQ_ORDER)] = nibbles
    return ordered.flatten(1)


@dataclass(frozen=True)
class Gptq(_Ordered):
    """GPTQ in the layout of AutoGPTQ and GPTQModel."""

    symmetric: bool
    offset: bool
    """Zero points are stored less one: format `gptq`, not `gptq_v2`."""

    @property
    def words(self) -> str:
        groups = "a scale per output" if self.group_size is None else f"groups of {self.group_size}"
        version = "GPTQ" if self.offset else "GPTQ v2"
        return f"INT4 ({version}, {groups}, {'symmetric' if self.symmetric else 'zero points'})"

    def shape(self, tensors: Tensors, linear: str) -> tuple[int, int] | None:
        packed = tensors.stored().get(f"{linear}.qweight")
        return (packed[0][1], 8 * packed[0][0]) if packed and len(packed[0]) == 2 else None

    def parts(self, tensors: Tensors, linear: str) -> tuple[str, ...]:
        rows, size = self.shape(tensors, linear) or (0, 0)
        groups = size // _groups(self.group_size, size, linear) if size else 0
        wanted: Shapes = {
            "qweight": (((size // 8, rows),), ("I32",)),
            "scales": (((groups, rows),), _FLOATS),
            "qzeros": (((groups, rows // 8),), ("I32",)),
        }
        if f"{linear}.g_idx" in tensors.stored():
            wanted["g_idx"] = (((size,),), ("I32", "I64"))
        return check_parts(tensors, linear, wanted)

    def form(self, tensors: Tensors, linear: str) -> MatrixForm | str:
        shape = self.shape(tensors, linear)
        assert shape is not None
        group, name = _groups(self.group_size, shape[1], linear), f"{linear}.g_idx"
        if name in tensors.stored() and not _in_order(tensors.raw(name), group):
            return ACTIVATION_ORDER
        return MatrixForm("int4", group, zeros=not self.symmetric)

    def matrix(self, tensors: Tensors, linear: str) -> Int4Matrix | Tensor:
        words = tensors.raw(f"{linear}.qweight")  # [in / 8, out]
        codes = _signed(_unpacked(words).transpose(1, 2).flatten(0, 1))  # [in, out]
        scales = _finite(tensors, f"{linear}.scales")
        zeros: Tensor | None = _signed(_unpacked(self._zero_words(tensors, linear)).flatten(1))
        if self.symmetric:
            assert zeros is not None
            if zeros.any():
                raise contradiction(
                    f"its config says sym: true, and {linear}.qzeros is not the middle of the codes",
                    f"zero point {int(zeros[zeros != 0][0]) + 8}",
                    "8 everywhere",
                )
            zeros = None
        group, name = _groups(self.group_size, codes.shape[0], linear), f"{linear}.g_idx"
        if name in tensors.stored() and not _in_order(tensors.raw(name), group):
            return self._scattered(codes, scales, zeros, tensors.raw(name), linear)
        return Int4Matrix(pack(codes), scales, None if zeros is None else pack(zeros), group)

    def _zero_words(self, tensors: Tensors, linear: str) -> Tensor:
        words = tensors.raw(f"{linear}.qzeros")
        return words.long() + _V1_OFFSET if self.offset else words


@dataclass(frozen=True)
class Float8:
    """E4M3 weights of compressed-tensors, ModelOpt and AutoFP8."""

    per_output: bool
    static_inputs: bool
    """The file says how inputs are rounded; otherwise they are not: lowkv computes no scales while it serves."""

    kind: ClassVar[str] = "fp8"

    @property
    def words(self) -> str:
        scales = "a scale per output" if self.per_output else "one scale"
        return f"FP8 (E4M3, {scales}, inputs {'rounded by a static scale' if self.static_inputs else 'not rounded'})"

    def shape(self, tensors: Tensors, linear: str) -> tuple[int, int] | None:
        weight = tensors.stored().get(f"{linear}.weight")
        if weight is None or weight[1] != "F8_E4M3" or len(weight[0]) != 2:
            return None
        return weight[0][0], weight[0][1]

    def parts(self, tensors: Tensors, linear: str) -> tuple[str, ...]:
        rows, size = self.shape(tensors, linear) or (0, 0)
        scalar = ((), (1,), (1, 1))
        wanted: Shapes = {
            "weight": (((rows, size),), ("F8_E4M3",)),
            "weight_scale": (((rows,), (rows, 1)) if self.per_output else scalar, _FLOATS),
        }
        if self.static_inputs:
            wanted["input_scale"] = (scalar, _FLOATS)
        return check_parts(tensors, linear, wanted)

    def form(self, tensors: Tensors, linear: str) -> MatrixForm | str:
        return MatrixForm("fp8", columns=self.per_output, rounds_inputs=self.static_inputs)

    def matrix(self, tensors: Tensors, linear: str) -> Fp8Matrix:
        codes = tensors.raw(f"{linear}.weight").view(torch.uint8).t().contiguous().view(torch.float8_e4m3fn)
        scale = _finite(tensors, f"{linear}.weight_scale").float().reshape(-1)
        input_scale = None
        if self.static_inputs:
            input_scale = _finite(tensors, f"{linear}.input_scale").float().reshape(1)
            if not input_scale.item():
                raise LowkvError(
                    f"tensor {linear}.input_scale is zero",
                    expected="what inputs are rounded with",
                    fix="calibrate the checkpoint again",
                )
        return Fp8Matrix(codes, scale, input_scale, torch.float32)
