"""A Hugging Face folder whose matrices are quantized, or that carries scales of keys and values.

To whoever asks for tensors it is a checkpoint like any other: matrices come decoded, under their usual names. Whoever
can hold quantized matrices asks for `matrix` instead, and gets the file's own codes in the decoder's layout: nothing is
rounded a second time. Where that cannot be, `kept_forms` says why, and the matrix is decoded to the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from lowkv.errors import LowkvError
from lowkv.models.imports.kv_scales import FoundScales, find_scales, kv_scales, scale_names
from lowkv.models.imports.scheme import Layout, Scheme, contradiction
from lowkv.models.safetensors_checkpoint import FLOATS, SafetensorsCheckpoint

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lowkv.calibration.scales import KVScales
    from lowkv.models.config import ModelConfig
    from lowkv.models.quantized import Fp8Matrix, Int4Matrix, MatrixForm, Quantization

_LM_HEAD = "lm_head"


class QuantizedCheckpoint:
    """Implements `lowkv.models.checkpoint.Checkpoint`."""

    def __init__(self, files: SafetensorsCheckpoint, scheme: Scheme) -> None:
        self._files = files
        self.scheme = scheme

    @property
    def config(self) -> ModelConfig:
        return self._files.config

    @property
    def files(self) -> tuple[Path, ...]:
        return (*(self._files.folder / name for name in self.scheme.files), *self._files.files)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """As if nothing were quantized. Raises LowkvError where a quantized matrix's parts do not fit together."""
        hidden = scale_names(self._files, self.config.layers)
        shapes = {name: shape for name, (shape, _) in self._files.stored().items() if name not in hidden}
        for linear, layout in self.linears.items():
            for part in layout.parts(self._files, linear):
                shapes.pop(part, None)
            shape = layout.shape(self._files, linear)
            assert shape is not None
            shapes[f"{linear}.weight"] = shape
        return shapes

    def tensor(self, name: str) -> Tensor:
        linear = name.removesuffix(".weight")
        if name == linear or linear not in self.linears:
            return self._files.tensor(name)
        matrix = self._matrix(linear)
        return self._decoded(matrix).t()

    def write_tokenizer(self, folder: Path) -> tuple[str, ...]:
        return self._files.write_tokenizer(folder)

    def kv_scales(self) -> KVScales | None:
        return kv_scales(self.found_scales, self.config, self.scheme.kv)

    @cached_property
    def found_scales(self) -> FoundScales:
        """The scales of keys and values. Raises LowkvError for ones that cannot be used."""
        return find_scales(self._files, self.config, self.scheme.kv)

    @cached_property
    def linears(self) -> Mapping[str, Layout]:
        """Every quantized matrix of the model. Raises LowkvError where config and files disagree about one."""
        from lowkv.models.checkpoint import tensor_shapes

        found = {}
        for name in tensor_shapes(self.config):
            linear = name.removesuffix(".weight")
            if linear != name and (linear.endswith("_proj") or linear == _LM_HEAD):
                layout = self._layout(linear)
                if layout is not None:
                    found[linear] = layout
        return found

    @property
    def kind(self) -> str | None:
        """int4 or fp8; None when the layers' matrices are in floating point."""
        kinds = sorted({layout.kind for linear, layout in self.linears.items() if linear != _LM_HEAD})
        return " and ".join(kinds) or None

    # -- keeping what is quantized ---------------------------------------------------------------------------

    def check(self, quantization: Quantization) -> None:
        """Raises LowkvError for a recipe that asks for another form than the weights have."""
        if quantization.kind != "none" and self.kind not in (None, quantization.kind):
            keep = "" if self.kind not in ("int4", "fp8") else f"{self.kind} (kept as they are) or "
            raise LowkvError(
                "the checkpoint's weights are already quantized, in another form than the recipe's",
                got=f"weights.quantization {quantization.kind}; {self.kind} by {self.scheme.library}",
                expected=f"weights.quantization {keep}none (decoded to weights.dtype)",
                fix="lowkv does not round twice; for that form use the unquantized checkpoint",
            )

    def kept_form(self, linears: Sequence[str]) -> MatrixForm | str:
        """The form of matrices side by side, or why they are decoded: a sentence's end."""
        from lowkv.models.quantized import MatrixForm

        forms = []
        for linear in linears:
            if linear not in self.linears:
                return "it is in floating point in the checkpoint"
            form = self.linears[linear].form(self._files, linear)
            if isinstance(form, str):
                return form
            forms.append(form)
        if len({(form.kind, form.group_size) for form in forms}) > 1:
            return "its parts have different groups"
        if len(forms) > 1 and any(form.smoothing for form in forms):
            return "its parts scale their inputs apart"
        first = forms[0]
        return MatrixForm(
            first.kind,
            first.group_size,
            zeros=any(form.zeros for form in forms),
            smoothing=first.smoothing,
            columns=any(form.columns for form in forms) or (first.kind == "fp8" and not self._one_scale(linears)),
            rounds_inputs=all(form.rounds_inputs for form in forms),
        )

    def matrix(self, linears: Sequence[str], dtype: torch.dtype) -> Int4Matrix | Fp8Matrix | None:
        """The matrices side by side, [in, sum of out], codes as they are in the file; None where that cannot be."""
        import torch

        from lowkv.models.quantized import fused

        form = self.kept_form(linears)
        if isinstance(form, str):
            return None
        parts = [self._matrix(linear) for linear in linears]
        return fused([part for part in parts if not isinstance(part, torch.Tensor)], form, dtype)

    def _one_scale(self, linears: Sequence[str]) -> bool:
        return len({self._files.raw(f"{linear}.weight_scale").float().item() for linear in linears}) == 1

    def _matrix(self, linear: str) -> Int4Matrix | Fp8Matrix | Tensor:
        self.linears[linear].parts(self._files, linear)
        return self.linears[linear].matrix(self._files, linear)

    def _decoded(self, matrix: Int4Matrix | Fp8Matrix | Tensor) -> Tensor:
        """[in, out] float32."""
        import torch

        return matrix if isinstance(matrix, torch.Tensor) else matrix.to(torch.float32).dequantize()

    def _layout(self, linear: str) -> Layout | None:
        """Where config and file agree that the matrix is quantized: how."""
        stored = self._files.stored()
        layout = self.scheme.layout(linear)
        weight = stored.get(f"{linear}.weight")
        if layout is None:
            strange = [name for name in (f"{linear}.weight_packed", f"{linear}.qweight") if name in stored]
            if strange or (weight is not None and weight[1] not in FLOATS):
                raise contradiction(
                    f"its config leaves {linear} in floating point",
                    strange[0] if strange or weight is None else f"{weight[1]} in {linear}.weight",
                    "a tensor in floating point",
                )
            return None
        if layout.shape(self._files, linear) is not None:
            return layout
        if weight is not None and weight[1] in FLOATS:
            if linear == _LM_HEAD:
                return None
            raise contradiction(
                f"its config says that {linear} is {layout.words}", f"{weight[1]} in the file", layout.words
            )
        if any(name.startswith(f"{linear}.") for name in stored):
            layout.parts(self._files, linear)  # says which part is missing
        return None
