"""What TensorRT's own engine inspector says of a finished plan. It needs the GPU that the plan is for.

Not run on a GPU. What a machine without one can know stands in the engine's `report.json` (see `network`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from lowkv.errors import LowkvError
from lowkv.gpus import visible_gpus

if TYPE_CHECKING:
    from lowkv.engine.directory import EngineDir


def engine_information(engine: EngineDir) -> dict[str, Any]:
    """The inspector's JSON.

    Raises `LowkvError` where the plan cannot be read: there is no GPU, or not the one, or not the TensorRT.
    """
    import kvattention.tensorrt
    from lowkv.engine.tensorrt.target import KERNELS, PLAN, TensorRTTarget

    gpus = visible_gpus()
    if not gpus:
        raise LowkvError("not available without a GPU")
    backend = TensorRTTarget().check_runtime(engine.manifest, gpus[0].sm)
    trt, messages = backend.trt, backend.messages
    messages.clear()
    kvattention.tensorrt.register(trt, engine.path / KERNELS)
    runtime = trt.Runtime(messages)
    plan = runtime.deserialize_cuda_engine((engine.path / PLAN).read_bytes())
    if plan is None:
        raise LowkvError(f"{backend} cannot read the plan: {' | '.join(messages.errors)}")
    text = plan.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    information: dict[str, Any] = json.loads(text)
    return information
