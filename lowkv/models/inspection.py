"""What was understood of a checkpoint, before anything is built from it.

Everything that a build would refuse of the files is refused here too, with the same words; what it would leave out is
listed. Reads headers, scales and group orders, not weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowkv.models.checkpoint import check_tensors, matrix_parts
from lowkv.models.gguf_checkpoint import GgufCheckpoint
from lowkv.models.quantized_checkpoint import QuantizedCheckpoint

if TYPE_CHECKING:
    from rich.table import Table

    from lowkv.models.checkpoint import Checkpoint

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def inspect_checkpoint(checkpoint: Checkpoint, path: Path) -> dict[str, Any]:
    """Plain values: the model, its weights by kind of matrix, its KV scales by layer, and what is ignored.

    Raises:
        LowkvError: the checkpoint is not one that lowkv builds engines from.
    """
    check_tensors(checkpoint)
    config = checkpoint.config
    quantized = checkpoint if isinstance(checkpoint, QuantizedCheckpoint) else None
    return {
        "checkpoint": {
            "path": str(path),
            "library": quantized.scheme.library if quantized else None,
            "model": f"{config.architecture}, {config.layers} layers, {config.weight_count():,} weights",
            "weights": _weights(checkpoint),
            "recipe": _advice(quantized),
            "files": {file.name: file.stat().st_size for file in checkpoint.files},
        },
        "matrices": _matrices(quantized) if quantized and quantized.kind else [],
        "kv": _kv(quantized) if quantized else None,
        "ignored": list(quantized.found_scales.ignored) if quantized else [],
        "warnings": list(quantized.found_scales.warnings) if quantized else [],
    }


def _weights(checkpoint: Checkpoint) -> str:
    if isinstance(checkpoint, GgufCheckpoint):
        return f"GGUF {', '.join(checkpoint.types)}: decoded to floating point"
    kind = checkpoint.kind if isinstance(checkpoint, QuantizedCheckpoint) else None
    return kind or "floating point"


def _advice(checkpoint: QuantizedCheckpoint | None) -> str:
    kind = checkpoint.kind if checkpoint else None
    if kind is None:
        return "weights.quantization none, int4 or fp8 (rounded at build)"
    if kind not in ("int4", "fp8"):
        return "weights.quantization none (decoded to weights.dtype)"
    return f"weights.quantization {kind} (kept as they are) or none (decoded to weights.dtype)"


def _matrices(checkpoint: QuantizedCheckpoint) -> list[dict[str, Any]]:
    """A row for every matrix of a layer and every way in which it is stored, with the layers that have it."""
    rows: dict[tuple[str, str, str], list[int]] = {}
    for layer in range(checkpoint.config.layers):
        for linears in matrix_parts(layer).values():
            form = checkpoint.kept_form(linears)
            becomes = f"decoded, because {form}" if isinstance(form, str) else f"kept: {form}"
            for linear in linears:
                layout = checkpoint.linears.get(linear)
                stored = "floating point" if layout is None else layout.words
                kept = becomes if layout is not None else "as it is"
                rows.setdefault((linear.rpartition(".")[2], stored, kept), []).append(layer)
    ordered = sorted(rows.items(), key=lambda row: (MATRICES.index(row[0][0]), row[1]))
    return [
        {"matrix": matrix, "stored": stored, "becomes": becomes, "layers": layers}
        for (matrix, stored, becomes), layers in ordered
    ]


def _kv(checkpoint: QuantizedCheckpoint) -> dict[str, Any] | None:
    found, scheme = checkpoint.found_scales, checkpoint.scheme.kv
    if scheme is None and not found.any:
        return None
    layers = []
    for layer, pair in enumerate(found.layers):
        row: dict[str, Any] = {"layer": layer}
        for part, scales in zip("kv", pair, strict=True):
            row[part] = None if scales is None else [float(np.min(scales)), float(np.max(scales))]
            row[f"{part}_count"] = 0 if scales is None else int(scales.size)
        layers.append(row)
    return {
        "scheme": scheme.words if scheme else "not in the config",
        "codec": scheme.codec if scheme else "e4m3",
        "layers": layers,
    }


def render(plain: Mapping[str, Any]) -> list[Table | str]:
    """The same for a terminal."""
    parts: list[Table | str] = [_summary(plain)]
    if plain["matrices"]:
        parts.append(_matrix_table(plain["matrices"]))
    if plain["kv"] is not None:
        parts.append(_kv_table(plain["kv"]))
    if plain["ignored"]:
        names = plain["ignored"]
        more = f" and {len(names) - 1} more" if names[1:] else ""
        parts.append(f"ignored: {names[0]}{more} (changes nothing that lowkv computes)")
    parts += [f"warning: {text}" for text in plain["warnings"]]
    return parts


def _summary(plain: Mapping[str, Any]) -> Table:
    from lowkv.units import format_bytes

    checkpoint = plain["checkpoint"]
    table = _table("checkpoint", checkpoint["path"])
    table.add_row("written by", checkpoint["library"] or "no quantizer")
    table.add_row("model", checkpoint["model"])
    table.add_row("weights", checkpoint["weights"])
    table.add_row("recipe", checkpoint["recipe"])
    kv = plain["kv"]
    carries = "none" if kv is None else f"{kv['scheme']}; kv_cache.scales.source: checkpoint reads them"
    table.add_row("KV scales", carries)
    table.add_row("files", f"{format_bytes(sum(checkpoint['files'].values()))} in {len(checkpoint['files'])} files")
    return table


def _matrix_table(rows: list[dict[str, Any]]) -> Table:
    table = _table("matrix", "stored as", "in an engine", "layers")
    for row in rows:
        table.add_row(row["matrix"], row["stored"], row["becomes"], _ranges(row["layers"]))
    return table


def _kv_table(kv: Mapping[str, Any]) -> Table:
    table = _table("layer", "scales of K", "of V")
    for row in kv["layers"]:
        table.add_row(str(row["layer"]), _span(row["k"], row["k_count"]), _span(row["v"], row["v_count"]))
    return table


def _span(span: list[float] | None, count: int) -> str:
    if span is None:
        return "none"
    return f"{span[0]:.4g}" if count == 1 else f"{span[0]:.4g} to {span[1]:.4g} ({count} heads)"


def _ranges(layers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ", ".join(str(part[0]) if part[0] == part[-1] else f"{part[0]}-{part[-1]}" for part in parts)


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table
