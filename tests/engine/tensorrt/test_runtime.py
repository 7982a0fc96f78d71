"""Whether an engine can run where it is: every refusal comes before the plan is touched, which here does not exist."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvattention.tensorrt import PLUGIN_VERSION, libraries
from lowkv.engine.directory import FileRecord, Manifest
from lowkv.engine.targets import find_decoder_target, find_target
from lowkv.engine.tensorrt.backend import open_backend
from lowkv.engine.tensorrt.target import TensorRTTarget
from lowkv.errors import LowkvError
from lowkv.kvcache.plan import CachePlan
from lowkv.models.config import ModelConfig, RopeConfig
from lowkv.recipe import KVCacheConfig, ModelSource, Recipe, TensorRTConfig, WeightsConfig

CONFIG = ModelConfig("llama", 2, 64, 4, 2, 16, 128, 257, 1e-5, RopeConfig(), 2048, True, False, False, (None, None))
KERNELS = (
    "append-f16-int2-int2-d16-g32",
    "attend-f16-int2-int2-d16-g32-m16",
    "attend-f16-int2-int2-d16-g32-m64",
    "merge-f16-d16-m16",
    "seal-f16-d16-g32",
    "move",
)


@pytest.fixture
def manifest() -> Manifest:
    """As `lowkv build` writes it for a KIVI-2 engine on this machine."""
    recipe = Recipe(
        "tiny",
        ModelSource("folder", "tiny"),
        WeightsConfig("float16"),
        KVCacheConfig(format="kivi2"),
        target="tensorrt",
        tensorrt=TensorRTConfig(89),
    )
    target = TensorRTTarget()
    plan = CachePlan.from_config(CONFIG, recipe.kv_cache)
    return Manifest(
        created_by="lowkv",
        target="tensorrt",
        requires={**target.requires, **target.built_with(recipe)},
        recipe=recipe.to_mapping(),
        model=CONFIG.to_mapping(),
        cache_plan=plan.to_mapping(),
        scales={},
        source={},
        payload_inputs=target.payload_inputs(recipe, plan, None),
        files={f"kernels/{name}.cubin": FileRecord(1, "") for name in KERNELS},
        varying=target.varying,
    )


def with_required(manifest: Manifest, **values: str) -> Manifest:
    return replace(manifest, requires={**manifest.requires, **values})


def test_what_the_manifest_notes(manifest: Manifest) -> None:
    version = open_backend("tensorrt_rtx").version
    assert manifest.requires == {
        "tensorrt_layout": "2",
        "flavour": "tensorrt_rtx",
        "tensorrt": version,
        "sm": "89",
        "plugin": PLUGIN_VERSION,
    }


def test_an_engine_of_this_machine_runs_on_its_gpu(manifest: Manifest) -> None:
    assert TensorRTTarget().check_runtime(manifest, 89) == open_backend("tensorrt_rtx")


def test_another_gpu(manifest: Manifest) -> None:
    with pytest.raises(LowkvError, match=r"another GPU generation: got 'SM120', expected SM89; set tensorrt\.sm: 120"):
        TensorRTTarget().check_runtime(manifest, 120)


def test_another_tensorrt(manifest: Manifest) -> None:
    with pytest.raises(
        LowkvError, match=r"another TensorRT: got 'tensorrt_rtx 1\.\S+', expected tensorrt_rtx 1\.6\.0; build .* again"
    ):
        TensorRTTarget().check_runtime(with_required(manifest, tensorrt="1.6.0"), 89)


def test_another_flavour(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "installed", lambda: ("tensorrt_rtx",))
    with pytest.raises(LowkvError, match=r"tensorrt is not installed: got 'tensorrt_rtx', .*pip install tensorrt-cu13"):
        TensorRTTarget().check_runtime(with_required(manifest, flavour="tensorrt"), 89)


def test_no_tensorrt(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "installed", tuple)
    with pytest.raises(LowkvError, match=r"TensorRT is not installed: .*pip install 'lowkv\[tensorrt\]'"):
        TensorRTTarget().check_runtime(manifest, 89)


def test_another_plugin(manifest: Manifest) -> None:
    with pytest.raises(LowkvError, match=rf"version of the plugin PagedAttention: got '{PLUGIN_VERSION}', expected 0;"):
        TensorRTTarget().check_runtime(with_required(manifest, plugin="0"), 89)


@pytest.mark.parametrize("missing", KERNELS)
def test_a_kernel_that_is_not_there(manifest: Manifest, missing: str) -> None:
    files = {name: record for name, record in manifest.files.items() if name != f"kernels/{missing}.cubin"}
    with pytest.raises(LowkvError, match=rf"lacks kernels .*: got '5 of 6', expected kernels/{missing}\.cubin"):
        TensorRTTarget().check_runtime(replace(manifest, files=files), 89)


def test_torch_runs_no_tensorrt_engine() -> None:
    with pytest.raises(LowkvError, match=r"Torch could load: got 'target tensorrt', expected cpu or cuda"):
        find_decoder_target("tensorrt")
    assert find_decoder_target("cuda") is find_target("cuda")


def test_fp8_arithmetic_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe that names the GPU is refused when it is read, for its queries; one that leaves it to the machine,
    here."""
    from lowkv.engine.tensorrt import backend
    from lowkv.gpus import Gpu

    monkeypatch.setattr(backend, "visible_gpus", lambda: (Gpu(0, "NVIDIA A100", 80, 1),))
    recipe = Recipe(
        "r",
        ModelSource("folder", str(Path("m"))),
        WeightsConfig("float16"),
        KVCacheConfig(format="fp8", fp8_query=True),
        target="tensorrt",
    )
    with pytest.raises(LowkvError, match=r"fp8_query needs FP8 tensor cores: got 'SM80', expected SM89 or later"):
        TensorRTTarget().built_with(recipe)
    weights = replace(recipe, weights=WeightsConfig("float16", "fp8"), kv_cache=KVCacheConfig(format="kivi2"))
    with pytest.raises(LowkvError, match=r"weights\.quantization: fp8 needs FP8 tensor cores: got 'SM80'"):
        TensorRTTarget().built_with(replace(weights, tensorrt=TensorRTConfig(80)))
