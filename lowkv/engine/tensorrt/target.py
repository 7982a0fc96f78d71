"""Target `tensorrt`: what is in such an engine, how it is made, and whether it can run where it is.

    model.plan              TensorRT's plan, for one GPU generation
    kernels/                the plugin's machine code for the same, and kernels.json
    report.json             what the plan was made from, layer by layer (see `network`)
    model.onnx, .onnx.data  the exported model, if asked for

Imports no TensorRT: opening, inspecting and packing an engine need none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowkv.errors import LowkvError

if TYPE_CHECKING:
    from lowkv.calibration.scales import KVScales
    from lowkv.engine.directory import Manifest
    from lowkv.engine.progress import Progress
    from lowkv.engine.tensorrt.backend import Backend
    from lowkv.kvcache.plan import CachePlan
    from lowkv.models.checkpoint import Checkpoint
    from lowkv.models.config import ModelConfig
    from lowkv.recipe import Recipe

PLAN = "model.plan"
ONNX = "model.onnx"
KERNELS = "kernels"
_REBUILD = "build the engine again with `lowkv build --force`"


@dataclass(frozen=True)
class TensorRTTarget:
    """Implements `lowkv.engine.targets.Target`."""

    keep_onnx: bool = False

    @property
    def requires(self) -> Mapping[str, str]:
        """Raised whenever the files above, the engine's inputs or outputs, or their meaning change."""
        return {"tensorrt_layout": "2"}

    @property
    def varying(self) -> tuple[str, ...]:
        """TensorRT gives a plan's dynamic dimensions numbers that depend on addresses in memory."""
        return (PLAN,)

    def built_with(self, recipe: Recipe) -> Mapping[str, str]:
        from kvattention.tensorrt import PLUGIN_VERSION
        from lowkv.engine.tensorrt.backend import choose_backend

        backend, sm = choose_backend(recipe.tensorrt.sm)
        _check_fp8(recipe, sm)
        return {
            "flavour": backend.flavour,
            "tensorrt": backend.version,
            "sm": str(sm),
            "plugin": PLUGIN_VERSION,
        }

    def payload_inputs(self, recipe: Recipe, plan: CachePlan, scales: KVScales | None) -> Mapping[str, Any]:
        from lowkv.engine.cpu import weights_inputs

        serving = recipe.serving
        return weights_inputs(recipe, plan) | {
            "cache_plan": plan.to_mapping(),
            "scales": None if scales is None else scales.digest(plan),
            "fp8_query": recipe.kv_cache.fp8_query,
            "max_sequences": serving.max_sequences,
            "max_tokens_per_step": serving.max_tokens_per_step,
            "max_model_len": serving.max_model_len,
            # What makes the kernels and the ONNX file; the engine runs without either.
            **{package: _version(package) for package in ("triton", "torch", "onnx", "onnxscript")},
        }

    def payload_bytes(self, checkpoint: Checkpoint, recipe: Recipe) -> int:
        """The ONNX file and the plan lie on the disk together."""
        from lowkv.engine.cpu import weights_bytes
        from lowkv.models.checkpoint import WeightsFormat

        return 2 * weights_bytes(checkpoint, WeightsFormat.from_recipe(recipe)) + 64 * 2**20

    def write_payload(
        self, checkpoint: Checkpoint, recipe: Recipe, scales: KVScales | None, folder: Path, progress: Progress
    ) -> tuple[str, ...]:
        from lowkv.engine.tensorrt.backend import choose_backend
        from lowkv.engine.tensorrt.builder import build_plan
        from lowkv.engine.tensorrt.export import export_onnx
        from lowkv.engine.tensorrt.profiles import engine_profiles
        from lowkv.kvcache.plan import CachePlan
        from lowkv.models.checkpoint import WeightsFormat, kept_forms

        config = checkpoint.config
        plan = CachePlan.from_config(config, recipe.kv_cache)
        backend, sm = choose_backend(recipe.tensorrt.sm)
        engine_profiles(recipe, config, plan)  # refuses what cannot be, before minutes of work
        before = set(folder.iterdir())
        layers = None if scales is None else scales.layers
        onnx = export_onnx(checkpoint, config, plan, recipe, folder / ONNX, progress, layers)
        exported = sorted(path for path in folder.iterdir() if path not in before)
        kept = kept_forms(checkpoint, WeightsFormat.from_recipe(recipe).quantization)
        report = build_plan(onnx, folder / PLAN, recipe, config, plan, backend, sm, progress, kept)
        if not self.keep_onnx:
            for path in exported:
                path.unlink()
            exported = []
        kernels = write_kernels(folder / KERNELS, recipe, config, plan, sm, progress)
        (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return (PLAN, "report.json", *(path.name for path in exported), *kernels)

    def check_runtime(self, manifest: Manifest, device_sm: int) -> Backend:
        """What runs this engine on a GPU of that compute capability. Call it before the plan is deserialized.

        Raises `LowkvError`: no TensorRT is installed, or not the one that built the plan, the plan is for another
        GPU, the plugin has another version, or a kernel is missing.
        """
        from kvattention.tensorrt import PLUGIN_VERSION
        from lowkv.engine.tensorrt.backend import open_backend

        built = manifest.requires
        if built["sm"] != str(device_sm):
            raise LowkvError(
                "this engine was built for another GPU generation",
                got=f"SM{device_sm}",
                expected=f"SM{built['sm']}",
                fix=f"set tensorrt.sm: {device_sm} in the recipe and build again",
            )
        backend = open_backend(built["flavour"])
        if backend.version != built["tensorrt"]:
            raise LowkvError(
                "this engine was built with another TensorRT",
                got=str(backend),
                expected=f"{built['flavour']} {built['tensorrt']}",
                fix=f"{_REBUILD}, or install that version",
            )
        if built["plugin"] != PLUGIN_VERSION:
            raise LowkvError(
                "this engine was built with another version of the plugin PagedAttention",
                got=PLUGIN_VERSION,
                expected=built["plugin"],
                fix=_REBUILD,
            )
        self._check_cubins(manifest)
        return backend

    def _check_cubins(self, manifest: Manifest) -> None:
        from lowkv.kvcache.plan import CachePlan
        from lowkv.models.config import ModelConfig
        from lowkv.recipe import recipe_from_mapping

        plan = CachePlan.from_mapping(dict(manifest.cache_plan))
        config = ModelConfig.from_mapping(manifest.model)
        needed = _kernel_files(recipe_from_mapping(manifest.recipe), config, plan)
        missing = [name for name in needed if name not in manifest.files]
        if missing:
            raise LowkvError(
                "this engine lacks kernels that its cache plan needs",
                got=f"{len(needed) - len(missing)} of {len(needed)}",
                expected=", ".join(missing),
                fix=_REBUILD,
            )


def write_kernels(
    folder: Path, recipe: Recipe, config: ModelConfig, plan: CachePlan, sm: int, progress: Progress
) -> tuple[str, ...]:
    """Compiles the engine's kernels into the folder; returns the file names, the folder's before them."""
    from kvattention.gpu.compile import CompileError, write_cubins
    from kvattention.gpu.variants import needed

    variants = needed(plan.layer_specs(), config.heads, recipe.kv_cache.fp8_query)
    progress.begin("compiling kernels", len(variants))
    try:
        names = write_cubins(folder, variants, sm, lambda done, total, name: progress.advance(1))
    except CompileError as error:
        raise LowkvError(f"the GPU kernels cannot be compiled for SM{sm}: {error}") from error
    return tuple(f"{folder.name}/{name}" for name in names)


def _kernel_files(recipe: Recipe, config: ModelConfig, plan: CachePlan) -> tuple[str, ...]:
    from kvattention.gpu.variants import needed

    variants = needed(plan.layer_specs(), config.heads, recipe.kv_cache.fp8_query)
    return tuple(f"{KERNELS}/{variant.name}.cubin" for variant in variants)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise LowkvError(f"{package} is not installed", fix="pip install 'lowkv[cpu,tensorrt]'") from error


def _check_fp8(recipe: Recipe, sm: int) -> None:
    """FP8 arithmetic came with SM89; FP8 keys and values are decoded to 16 bit, and need none."""
    for key, used in (
        ("kv_cache.fp8_query", recipe.kv_cache.fp8_query),
        ("weights.quantization: fp8", recipe.weights.quantization == "fp8"),
    ):
        if used and sm < 89:
            raise LowkvError(
                f"{key} needs FP8 tensor cores", got=f"SM{sm}", expected="SM89 or later", fix="leave it out"
            )
