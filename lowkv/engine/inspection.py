"""What is in an engine, for a person or a program: formats and precisions as they are, not as they were asked for.

A TensorRT engine is described by the report that its build kept, read back from the network that TensorRT parsed; an
engine of weights by the header of its weights file. Neither needs a GPU, TensorRT or Torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowkv.calibration.scales import PARTS, scaled_parts
from lowkv.engine.tensorrt.network import effective_precision
from lowkv.errors import LowkvError
from lowkv.kvcache.formats import FORMATS
from lowkv.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from lowkv.engine.directory import EngineDir

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_LAYER = re.compile(r"layers\.([0-9]+)\.")
"""How the names of a layer's operators begin (see `export`)."""


def inspect_engine(engine: EngineDir) -> dict[str, Any]:
    """Plain values: the engine, its layers, lm_head, and for TensorRT its bindings, profiles and what it reports."""
    manifest, report = engine.manifest, engine.report
    plain: dict[str, Any] = {
        "engine": {
            "path": str(engine.path),
            "target": manifest.target,
            "created_by": manifest.created_by,
            "model": f"{engine.model_config.architecture}, {engine.model_config.layers} layers",
            "requires": dict(manifest.requires),
            "kv_cache": engine.cache_plan.summary(),
            "chosen": list((manifest.chosen or {}).get("why", ())),
            "scales": _scales(engine),
            "payload_bytes": engine.weight_bytes,
            "files": {name: record.bytes for name, record in sorted(engine.files.items())},
        }
    }
    if report is None:
        weights, head = _stored_weights(engine.path / "weights.safetensors")
        return plain | {"layers": _layers(engine, weights), "lm_head": {"stored": head, "effective": head}}
    head = report["lm_head"]
    plain["layers"] = _layers(engine, _by_layer(report["matrices"]))
    plain["lm_head"] = {"name": head["name"], "stored": head["weights"], "effective": effective_precision(head)}
    plain["plugins"] = [{"name": layer["name"], **layer["fields"]} for layer in report["attention"]]
    for key in ("inputs", "outputs", "profiles", "builder"):
        plain[key] = report[key]
    plain["engine_inspector"] = _information(engine)
    return plain


def _layers(engine: EngineDir, weights: Mapping[int, str]) -> list[dict[str, Any]]:
    return [
        {
            "layer": index,
            "format": layer.format,
            "k": FORMATS[layer.format].k.name,
            "v": FORMATS[layer.format].v.name,
            "scales": _extremes(engine, index),
            "reason": layer.reason,
            "window": layer.window,
            "weights": weights.get(index, ""),
        }
        for index, layer in enumerate(engine.cache_plan.layers)
    ]


def _scales(engine: EngineDir) -> dict[str, Any] | None:
    """Where the scales of 8-bit keys and values come from; None where there are none."""
    scales = engine.scales
    if scales is None:
        return None
    named = {name: scales.details[name] for name in ("text", "tokens", "seed") if name in scales.details}
    return {"source": scales.source, "granularity": scales.granularity, "estimator": scales.estimator, **named}


def _extremes(engine: EngineDir, layer: int) -> dict[str, list[float]]:
    """The smallest and the largest scale of a layer's K and V, as far as they have any."""
    if engine.scales is None:
        return {}
    parts = [part for index, part, _ in scaled_parts(engine.cache_plan) if index == layer]
    values = dict(zip(PARTS, engine.scales.layers[layer], strict=True))
    return {part: [float(values[part].min()), float(values[part].max())] for part in parts}


def _by_layer(matrices: list[dict[str, Any]]) -> dict[int, str]:
    """Layer -> how the weights of its matrices are stored."""
    found: dict[int, dict[str, None]] = {}
    for matrix in matrices:
        if match := _LAYER.match(matrix["name"]):
            found.setdefault(int(match[1]), {})[_stored(matrix)] = None
    return {layer: ", ".join(kinds) for layer, kinds in found.items()}


def _stored(matrix: Mapping[str, Any]) -> str:
    grouped = "" if matrix["group_size"] is None else f" (groups of {matrix['group_size']})"
    return f"{matrix['weights']}{grouped}"


def _stored_weights(path: Path) -> tuple[dict[int, str], str]:
    """Layer -> how its matrices are stored, and how lm_head is; from the file's header."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    found: dict[int, dict[str, None]] = {}
    for name, entry in header.items():
        parts = name.split(".")
        if parts[0] == "layers" and parts[2] in ("qkv", "output", "gate_up", "down") and parts[3:] in ([], ["codes"]):
            found.setdefault(int(parts[1]), {})[_form(header, name, entry["dtype"])] = None
    return {layer: ", ".join(kinds) for layer, kinds in found.items()}, _DTYPES[header["lm_head"]["dtype"]]


def _form(header: Mapping[str, Any], name: str, dtype: str) -> str:
    if not name.endswith(".codes"):
        return _DTYPES[dtype]
    base = name.removesuffix(".codes")
    if dtype == "F8_E4M3":
        return "fp8"
    rows, groups = header[name]["shape"][0], header[f"{base}.scales"]["shape"][0]
    return f"int4 (groups of {rows // groups})"


def _information(engine: EngineDir) -> dict[str, Any]:
    from lowkv.engine.tensorrt.inspect import engine_information

    try:
        return {"available": True, "information": engine_information(engine)}
    except LowkvError as error:
        return {"available": False, "reason": str(error)}


def render(plain: Mapping[str, Any]) -> list[Table | str]:
    """The same for a terminal."""
    parts: list[Table | str] = [_engine_table(plain), _layers_table(plain)]
    if "inputs" in plain:
        parts.append(_bindings_table(plain))
        inspector = plain["engine_inspector"]
        if inspector["available"]:
            layers = inspector["information"].get("Layers", [])
            parts.append(f"TensorRT's engine inspector: {len(layers)} layers; --json shows them")
        else:
            parts.append(f"TensorRT's engine inspector: {inspector['reason']}")
    return parts


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table


def _engine_table(plain: Mapping[str, Any]) -> Table:
    engine, head = plain["engine"], plain["lm_head"]
    table = _table("engine", engine["path"])
    rows = {
        "target": engine["target"],
        "built by": engine["created_by"],
        "model": engine["model"],
        "payload": f"{format_bytes(engine['payload_bytes'])} in {len(engine['files'])} files",
        "KV cache": engine["kv_cache"],
        "lm_head": f"{head['effective']}, stored as {head['stored']}",
    }
    if engine["chosen"]:
        rows["chosen by auto"] = "\n".join(engine["chosen"])
    if scales := engine["scales"]:
        rows["KV scales"] = ", ".join(f"{name} {value}" for name, value in scales.items() if value != "")
    if "builder" in plain:
        requires, kernels = engine["requires"], [name for name in engine["files"] if name.endswith(".cubin")]
        rows |= {
            "GPU": f"SM{requires['sm']}",
            "TensorRT": f"{requires['flavour']} {requires['tensorrt']}",
            "plugin": f"PagedAttention version {requires['plugin']}, {len(plain['plugins'])} instances, "
            f"{len(kernels)} kernels",
            "built layers": ", ".join(_built(layer) for layer in plain["builder"]["layers"]),
        }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _built(layer: Mapping[str, Any]) -> str:
    from rich.markup import escape

    return escape(f"{layer['name']}: {format_bytes(layer['scratch_bytes'])} of workspace")


def _layers_table(plain: Mapping[str, Any]) -> Table:
    table = _table(
        "layer", "KV format", "K", "V", "scales of K, V", "because of", "window", "weights", "plugin instance"
    )
    plugins = {plugin["layer"]: plugin for plugin in plain.get("plugins", [])}
    for row in plain["layers"]:
        plugin = plugins.get(row["layer"])
        k, v = (plugin["k_codec"], plugin["v_codec"]) if plugin else (row["k"], row["v"])
        query = ", FP8 queries" if plugin and plugin["fp8_query"] else ""
        table.add_row(
            str(row["layer"]),
            row["format"],
            k,
            v,
            ", ".join(_range(*extremes) for extremes in row["scales"].values()),
            row["reason"],
            "" if row["window"] is None else str(row["window"]),
            row["weights"],
            f"{plugin['name']}{query}" if plugin else "",
        )
    return table


def _range(low: float, high: float) -> str:
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _bindings_table(plain: Mapping[str, Any]) -> Table:
    profiles = plain["profiles"]
    table = _table("binding", "", "type", "dimensions", *(f"{profile['name']}, at most" for profile in profiles))
    for way in ("inputs", "outputs"):
        for binding in plain[way]:
            most = [profile["shapes"].get(binding["name"], {}).get("max") for profile in profiles]
            table.add_row(
                binding["name"],
                way[:-1],
                binding["type"],
                _dims(binding["dims"]),
                *("" if shape is None else _dims(shape) for shape in most),
            )
    return table


def _dims(dims: list[int]) -> str:
    return " x ".join("?" if size < 0 else str(size) for size in dims)
