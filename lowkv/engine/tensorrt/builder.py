"""ONNX file to plan: TensorRT's parser and builder, with our plugin, our profiles, our progress and our errors."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowkv.engine.tensorrt.network import check_network, describe
from lowkv.engine.tensorrt.profiles import ARENA, Profile, engine_inputs, engine_profiles
from lowkv.errors import LowkvError

if TYPE_CHECKING:
    from lowkv.engine.progress import Progress
    from lowkv.engine.tensorrt.backend import Backend
    from lowkv.kvcache.plan import CachePlan
    from lowkv.models.config import ModelConfig
    from lowkv.models.quantized import MatrixForm
    from lowkv.recipe import Recipe


def build_plan(
    onnx: Path,
    out: Path,
    recipe: Recipe,
    config: ModelConfig,
    plan: CachePlan,
    backend: Backend,
    sm: int,
    progress: Progress,
    kept: Mapping[str, MatrixForm | str] | None = None,
) -> dict[str, Any]:
    """Builds the ONNX file into a plan for one GPU generation.

    Args:
        onnx: the exported model.
        out: the plan's path.
        recipe: its limits make the profiles; it is what the network is compared with.
        config: the model.
        plan: every layer's KV format.
        backend: the TensorRT to build with.
        sm: compute capability, times ten.
        progress: told of the builder's phases. Ctrl-C ends the build at the next step of one.
        kept: forms of matrices that came quantized in the checkpoint (`kept_forms`).

    Returns:
        The report: plain values, the same for the same input.

    Raises:
        LowkvError: with TensorRT's own words and the layer they are about; or the network is not the recipe's.
    """
    import kvattention.tensorrt

    trt, messages = backend.trt, backend.messages
    kvattention.tensorrt.register(trt, None)
    messages.clear()
    progress.begin(f"TensorRT for SM{sm}: reading the network")
    with _errors_of(backend):
        builder = trt.Builder(messages)
        network = builder.create_network(_strongly_typed(trt))
        # The network's weights are the parser's: it must live as long as the build.
        parser = trt.OnnxParser(network, messages)
    if not parser.parse_from_file(str(onnx)):
        raise _parse_error(parser, backend)
    report = describe(trt, network)
    check_network(report, recipe, config, plan, kept)
    _check_inputs(report, plan)
    profiles = engine_profiles(recipe, config, plan)
    settings = builder.create_builder_config()
    backend.build_for(settings, sm)
    settings.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    for profile in profiles:
        settings.add_optimization_profile(_profile(builder, profile))
    with _details(messages) as details:
        plan_bytes = _build(trt, builder, network, settings, f"TensorRT for SM{sm}", progress)
    if plan_bytes is None:
        raise _build_error(backend, network, sm)
    with out.open("wb") as file:
        file.write(plan_bytes)
    return {
        "builder": {"flavour": backend.flavour, "tensorrt": backend.version, "sm": sm, "layers": list(details)},
        "profiles": [_ranges(profile) for profile in profiles],
        **report,
    }


def _strongly_typed(trt: Any) -> int:
    """Flags of a network whose types are those of the ONNX file; where there is no other kind, none."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _check_inputs(report: dict[str, Any], plan: CachePlan) -> None:
    got = {binding["name"]: len(binding["dims"]) for binding in report["inputs"]}
    expected = {name: len(dims) for name, dims in engine_inputs(len(plan.groups)).items()}
    if got != expected:
        raise LowkvError("the network's inputs are not those of an engine", got=got, expected=repr(expected))


def _profile(builder: Any, profile: Profile) -> Any:
    built = builder.create_optimization_profile()
    for name, smallest, largest in profile.ranges():
        if name != ARENA:
            built.set_shape(name, smallest, largest, largest)
    return built


def _ranges(profile: Profile) -> dict[str, Any]:
    shapes = {name: {"min": smallest, "opt": largest, "max": largest} for name, smallest, largest in profile.ranges()}
    return {"name": profile.name, "shapes": shapes}


def _build(trt: Any, builder: Any, network: Any, settings: Any, title: str, progress: Progress) -> Any:
    """Builds in a thread of its own: this one stays free to take Ctrl-C. None if TensorRT gave up."""
    monitor = _monitor(trt, title, progress)
    settings.progress_monitor = monitor
    result: list[Any] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            result.append(builder.build_serialized_network(network, settings))
        except BaseException as error:
            failure.append(error)

    worker = threading.Thread(target=work, name="tensorrt-build")
    worker.start()
    try:
        worker.join()
    except BaseException:
        monitor.stop()
        worker.join()
        raise
    if failure:
        raise failure[0]
    return result[0]


def _monitor(trt: Any, title: str, progress: Progress) -> Any:
    """TensorRT's phases as stages, down to the second level: what lies below lasts milliseconds."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.depth: dict[str, int] = {}
            self.stage = ""
            self.going = True

        def stop(self) -> None:
            self.going = False

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.depth[phase] = self.depth[parent] + 1 if parent in self.depth else 0
            if 0 < self.depth[phase] <= 2:
                self.stage = phase
                progress.begin(f"{title}: {phase.lower()}", steps)

        def step_complete(self, phase: str, step: int) -> bool:
            if phase == self.stage:
                progress.advance(1)
            return self.going

        def phase_finish(self, phase: str) -> None:
            self.depth.pop(phase, None)

    return Monitor()


_LAYER = re.compile(
    r"Layer: (.+) Host Persistent: ([0-9]+) bytes Device Persistent: ([0-9]+) bytes Scratch Memory: ([0-9]+)"
)


@contextmanager
def _details(messages: Any) -> Iterator[list[dict[str, Any]]]:
    """What the builder says of the layers that it made: their names and the memory they take.

    It says so in its log only; the engine inspector, which knows more, needs a plan that a GPU has read.
    """
    found: list[dict[str, Any]] = []

    def watch(message: str) -> None:
        if match := _LAYER.match(message):
            names = ("host_bytes", "device_bytes", "scratch_bytes")
            found.append({"name": match[1], **dict(zip(names, map(int, match.groups()[1:]), strict=True))})

    messages.watch = watch
    try:
        yield found
    finally:
        messages.watch = None


@contextmanager
def _errors_of(backend: Backend) -> Iterator[None]:
    """TensorRT's Python binding raises whatever it likes where an object cannot be made."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        raise LowkvError(f"{backend} does not start here: {_words(backend) or error}") from error


def _parse_error(parser: Any, backend: Backend) -> LowkvError:
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    if not errors:
        return LowkvError(f"{backend} cannot read the exported network: {_words(backend)}")
    first = errors[0]
    where = f"layer {first.node_name()} ({first.node_operator()})" if first.node_name() else "the exported network"
    return LowkvError(f"{backend} does not take {where}: {first.desc()}")


def _build_error(backend: Backend, network: Any, sm: int) -> LowkvError:
    words = _words(backend)
    names = [network.get_layer(index).name for index in range(network.num_layers)]
    # The longest: `layers.1` is also in every message about `layers.11`.
    layer = max((name for name in names if name in words), key=len, default=None)
    where = "the network" if layer is None else f"layer {layer}"
    return LowkvError(f"{backend} cannot build {where} for SM{sm}: {words}")


def _words(backend: Backend) -> str:
    return " | ".join(backend.messages.errors)
