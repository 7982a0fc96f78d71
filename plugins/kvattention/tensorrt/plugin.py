"""The plugin `lowkv::PagedAttention` as TensorRT sees it: `IPluginV3` with core, build and runtime in one class.

One node is one layer's paged attention. The arena comes as the address of its address, since TensorRT has no tensors
beyond 2^31 elements; the plugin writes into the arena in place, which TensorRT is not told (no aliased output): order
within a step comes from the layers' data flow, and steps run one after the other on a stream.

`tensorrt` and `tensorrt_rtx` have the same API in separate modules, so the classes are made for the module at hand.
Enqueueing asks `kvattention.gpu.launches` for the launches and puts them on TensorRT's stream: nothing is allocated,
nothing waits, and a CUDA graph can capture it. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from kvattention.gpu.launches import AttentionInputs, Launch, attention_launches
from kvattention.gpu.schedule import LISTS, workspace_bytes
from kvattention.gpu.variants import Variant, layer_variants
from kvattention.tensorrt.fields import (
    PLUGIN_NAME,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
    PluginFields,
    declared_fields,
    fields_from_collection,
    fields_to_collection,
)

INPUTS = ("q", "k", "v", "arena", "scales", *LISTS)
"""Names of the plugin's inputs, in order. Its one output has q's shape and type."""


class Launcher(Protocol):
    """`kvattention.gpu.driver.CubinLauncher`, or a recorder in tests."""

    def prepare(self, variants: Iterable[Variant]) -> None: ...

    def launch(self, launch: Launch, stream: int) -> None: ...


OpenLauncher = Callable[[], Launcher]
"""Gives the launcher of the current CUDA context."""

# TensorRT's registry keeps plain pointers to creators: they must live as long as the process.
_registered: dict[str, Any] = {}


def register(trt: ModuleType, kernels: Path | None, launcher: Launcher | None = None) -> None:
    """Make the plugin known to the TensorRT module ``trt``; plugins made from now on use these kernels.

    May be called again, with other kernels too: an engine that is already loaded keeps those it was loaded with.

    Args:
        trt: the module `tensorrt` or `tensorrt_rtx`, from `libraries.import_tensorrt`.
        kernels: folder of cubins; None where engines are only built.
        launcher: used instead of the folder's.

    Raises:
        RuntimeError: the registry holds a plugin of this name and version that is not ours.
    """
    creator = _registered.get(trt.__name__)
    if creator is None:
        creator = creator_class(trt)()
        if not trt.get_plugin_registry().register_creator(creator, PLUGIN_NAMESPACE):
            raise RuntimeError(
                f"TensorRT already has a plugin {PLUGIN_NAMESPACE}::{PLUGIN_NAME} of version {PLUGIN_VERSION} "
                "that is not this one; remove the library that registers it"
            )
        _registered[trt.__name__] = creator
    creator.open_launcher = _opener(kernels, launcher)


def _opener(kernels: Path | None, launcher: Launcher | None) -> OpenLauncher | None:
    if launcher is not None:
        return lambda: launcher
    if kernels is None:
        return None
    from kvattention.gpu.driver import ContextLaunchers

    return ContextLaunchers(kernels)


def input_shapes(fields: PluginFields) -> tuple[tuple[int, ...], ...]:
    """Dimensions of each input, then of the output; -1 for those that vary."""
    q = (-1, fields.heads, fields.head_dim)
    kv = (-1, fields.kv_heads, fields.head_dim)
    return (
        q,
        kv,
        kv,
        (1,),
        (fields.kv_heads, fields.head_dim + 1),
        (-1, 4),
        (-1, -1),
        (-1, 4),
        (-1, 8),
        (-1, 8),
        (-1, 4),
        q,
    )


def check_shapes(fields: PluginFields, shapes: Sequence[Sequence[int]]) -> None:
    """Refuse tensors that the kernels would misread; -1 in ``shapes`` may become anything.

    Raises ValueError naming the tensor.
    """
    expected = input_shapes(fields)
    if len(shapes) != len(expected):
        raise ValueError(f"{PLUGIN_NAME} has {len(shapes)} tensors, expected {', '.join(INPUTS)} and one output")
    for name, shape, want in zip((*INPUTS, "the output"), shapes, expected, strict=True):
        fits = len(shape) == len(want) and all(-1 in (a, b) or a == b for a, b in zip(shape, want, strict=True))
        if not fits:
            raise ValueError(f"{PLUGIN_NAME} of layer {fields.layer}: {name} is {tuple(shape)}, expected {want}")


def attention_inputs(
    shapes: Sequence[Sequence[int]], inputs: Sequence[int], output: int, workspace: int
) -> AttentionInputs:
    """TensorRT's addresses and dimensions as the launches take them."""
    tensors = dict(zip(INPUTS, map(int, inputs), strict=True))
    dims = dict(zip(INPUTS, shapes, strict=True))
    return AttentionInputs(
        **tensors,
        out=int(output),
        workspace=int(workspace),
        S=dims["sequences"][0],
        B=dims["table"][1],
        A=dims["appends"][0],
        W=dims["narrow"][0],
        P=dims["wide"][0],
        C=dims["merges"][0],
        T=dims["q"][0],
    )


def plugin_class(trt: Any) -> Any:
    """The plugin's class for one TensorRT module."""
    hot = {"f16": trt.DataType.HALF, "bf16": trt.DataType.BF16}

    class PagedAttentionPlugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):  # type: ignore[misc]
        def __init__(self, fields: PluginFields, open_launcher: OpenLauncher | None) -> None:
            for base in (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
                base.__init__(self)
            self.plugin_name = PLUGIN_NAME
            self.plugin_namespace = PLUGIN_NAMESPACE
            self.plugin_version = PLUGIN_VERSION
            self.num_outputs = 1
            self.fields = fields
            self.types = (
                *(hot[fields.hot],) * 3,
                *(trt.DataType.INT64, trt.DataType.FLOAT),
                *(trt.DataType.INT32,) * 6,
                hot[fields.hot],
            )
            self._open_launcher = open_launcher
            self._launcher: Launcher | None = None
            self._serialized: list[Any] = []

        # Core and build.

        def get_capability_interface(self, kind: Any) -> Any:
            return self

        def clone(self) -> Any:
            copy = type(self)(self.fields, self._open_launcher)
            copy._launcher = self._launcher
            return copy

        def get_fields_to_serialize(self) -> Any:
            collection, self._serialized = fields_to_collection(trt, self.fields)
            return collection

        def get_output_data_types(self, input_types: Any) -> list[Any]:
            """Refuses other types here: tensorrt_rtx 1.7 crashes when no format combination is supported."""
            for name, have, want in zip(INPUTS, input_types, self.types, strict=False):
                if have != want:
                    raise ValueError(
                        f"{PLUGIN_NAME} of layer {self.fields.layer}: {name} is {have.name}, expected {want.name}"
                    )
            return [self.types[-1]]

        def get_output_shapes(self, inputs: Any, shape_inputs: Any, builder: Any) -> list[Any]:
            shapes = [[d.get_constant_value() if d.is_constant() else -1 for d in dims] for dims in inputs]
            check_shapes(self.fields, [*shapes, shapes[0]])
            out = trt.DimsExprs(len(inputs[0]))
            for axis in range(len(inputs[0])):
                out[axis] = inputs[0][axis]
            return [out]

        def supports_format_combination(self, pos: int, in_out: Any, num_inputs: int) -> bool:
            desc = in_out[pos].desc
            return bool(desc.format == trt.TensorFormat.LINEAR and desc.type == self.types[pos])

        def configure_plugin(self, inputs: Any, outputs: Any) -> None:
            check_shapes(self.fields, [tensor.desc.dims for tensor in (*inputs, *outputs)])

        def get_workspace_size(self, inputs: Any, outputs: Any) -> int:
            most = dict(zip(INPUTS, (tensor.max for tensor in inputs), strict=True))
            fields = self.fields
            return workspace_bytes(most["narrow"][0], most["wide"][0], fields.heads, fields.kv_heads, fields.head_dim)

        def get_valid_tactics(self) -> list[int]:
            return []

        # Runtime.

        def set_tactic(self, tactic: int) -> None:
            pass

        def on_shape_change(self, inputs: Any, outputs: Any) -> None:
            check_shapes(self.fields, [tensor.dims for tensor in (*inputs, *outputs)])

        def attach_to_context(self, context: Any) -> Any:
            """For an execution context: a copy whose kernels are loaded, so that enqueueing can be captured."""
            attached = self.clone()
            if self._open_launcher is not None:
                attached._launcher = self._open_launcher()
                attached._launcher.prepare(
                    layer_variants(self.fields.spec, self.fields.heads, bool(self.fields.fp8_query))
                )
            return attached

        def enqueue(
            self, input_desc: Any, output_desc: Any, inputs: Any, outputs: Any, workspace: int, stream: int
        ) -> None:
            if self._launcher is None:
                if self._open_launcher is None:
                    raise RuntimeError(
                        f"{PLUGIN_NAME} of layer {self.fields.layer} has no kernels to run: it was registered for "
                        "building only; call kvattention.tensorrt.register with the engine's folder of kernels"
                    )
                self._launcher = self._open_launcher()
            call = attention_inputs([desc.dims for desc in input_desc], inputs, outputs[0], workspace)
            fields = self.fields
            for launch in attention_launches(call, fields.spec, fields.heads, bool(fields.fp8_query)):
                self._launcher.launch(launch, int(stream))

    return PagedAttentionPlugin


def creator_class(trt: Any) -> Any:
    """The class of the plugin's creator for one TensorRT module."""
    plugin = plugin_class(trt)

    class PagedAttentionCreator(trt.IPluginCreatorV3One):  # type: ignore[misc]
        def __init__(self, version: str = PLUGIN_VERSION) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name = PLUGIN_NAME
            self.plugin_namespace = PLUGIN_NAMESPACE
            self.plugin_version = version
            self.field_names = declared_fields(trt)
            self.open_launcher: OpenLauncher | None = None

        def create_plugin(self, name: str, collection: Any, phase: Any) -> Any:
            return plugin(fields_from_collection(collection), self.open_launcher)

    return PagedAttentionCreator
