"""`config.pbtxt` from data.

The file is written from dataclasses, never from a template: a placeholder that was not filled in is the most
reported way for a Triton repository not to load. `check` reads the text back with tritonclient's protobuf
definitions and compares every field, so that what is written is what Triton will see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lowkv.errors import LowkvError
from lowkv.triton.fields import INPUTS, OUTPUTS, Field


@dataclass(frozen=True)
class TritonModelConfig:
    """A decoupled Python-backend model with one instance, or one on each of some GPUs.

    `max_batch_size` is 1: TensorRT-LLM's clients send shapes with a batch dimension, and the engine does its own
    batching, so that Triton must hand over each request as it comes. `parameters` can be read by anybody at
    `/v2/models/NAME/config`.
    """

    name: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[Field, ...] = INPUTS
    outputs: tuple[Field, ...] = OUTPUTS
    backend: str = "python"
    max_batch_size: int = 1
    decoupled: bool = True
    gpus: tuple[int, ...] = ()
    """Ids of the GPUs that get an instance each; empty: one instance on the CPU."""

    @property
    def instance_kind(self) -> str:
        return "KIND_GPU" if self.gpus else "KIND_CPU"

    def to_pbtxt(self) -> str:
        """The text of config.pbtxt."""
        lines = [
            f"name: {_quoted(self.name)}",
            f"backend: {_quoted(self.backend)}",
            f"max_batch_size: {self.max_batch_size}",
            f"model_transaction_policy {{ decoupled: {_boolean(self.decoupled)} }}",
        ]
        lines += [_tensor("input", tensor) for tensor in self.inputs]
        lines += [_tensor("output", tensor) for tensor in self.outputs]
        gpus = f" gpus: [ {', '.join(map(str, self.gpus))} ]" if self.gpus else ""
        lines.append(f"instance_group [ {{ count: 1 kind: {self.instance_kind}{gpus} }} ]")
        lines += [
            f"parameters {{ key: {_quoted(key)} value: {{ string_value: {_quoted(value)} }} }}"
            for key, value in self.parameters.items()
        ]
        return "\n".join(lines) + "\n"

    def check(self, text: str) -> None:
        """Parse `text` as Triton does and compare it with this object.

        Raises:
            LowkvError: it does not parse, says something else, or tritonclient is not installed.
        """
        if "${" in text:
            raise LowkvError("config.pbtxt holds a placeholder that was not filled in", got="${")
        read = config_from_pbtxt(text)
        if read != self:
            raise LowkvError(
                f"config.pbtxt of {self.name} does not say what was meant",
                got=_first_difference(read, self),
                fix="report this: the writer and Triton's own parser disagree",
            )


def config_from_pbtxt(text: str) -> TritonModelConfig:
    """The inverse of `TritonModelConfig.to_pbtxt`, through Triton's own protobuf definitions.

    Raises:
        LowkvError: `text` is not a model configuration, or tritonclient is not installed.
    """
    try:
        from google.protobuf import text_format  # type: ignore[import-untyped]
        from tritonclient.grpc import model_config_pb2 as pb
    except ImportError as error:
        raise LowkvError(
            "reading a Triton model configuration needs tritonclient",
            fix="install it: pip install 'lowkv[triton]'",
        ) from error
    try:
        message: Any = text_format.Parse(text, pb.ModelConfig())
    except text_format.ParseError as error:
        raise LowkvError(f"config.pbtxt does not parse: {error}") from error
    if len(message.instance_group) != 1 or message.instance_group[0].count != 1:
        raise LowkvError("config.pbtxt must have one instance group with one instance")
    group = message.instance_group[0]
    kind = pb.ModelInstanceGroup.Kind.Name(group.kind)
    if (kind == "KIND_GPU") != bool(group.gpus) or kind not in ("KIND_CPU", "KIND_GPU"):
        raise LowkvError(
            "config.pbtxt has an instance group that is neither on the CPU nor on named GPUs",
            got=f"{kind}, gpus {list(group.gpus)}",
            expected="KIND_CPU, or KIND_GPU with gpus",
        )
    return TritonModelConfig(
        name=message.name,
        parameters={key: value.string_value for key, value in message.parameters.items()},
        inputs=tuple(Field(t.name, pb.DataType.Name(t.data_type), tuple(t.dims), t.optional) for t in message.input),
        outputs=tuple(Field(t.name, pb.DataType.Name(t.data_type), tuple(t.dims)) for t in message.output),
        backend=message.backend,
        max_batch_size=message.max_batch_size,
        decoupled=message.model_transaction_policy.decoupled,
        gpus=tuple(group.gpus),
    )


def _tensor(kind: str, tensor: Field) -> str:
    dims = ", ".join(str(dim) for dim in tensor.dims)
    optional = " optional: true" if kind == "input" and tensor.optional else ""
    return f"{kind} {{ name: {_quoted(tensor.name)} data_type: {tensor.dtype} dims: [ {dims} ]{optional} }}"


def _quoted(text: str) -> str:
    # The text format reads C escapes; octal ones say the same to every parser.
    named = {ord('"'): '\\"', ord("\\"): "\\\\", ord("\n"): "\\n"}
    plain = (named.get(b) or (chr(b) if 32 <= b < 127 else f"\\{b:03o}") for b in text.encode())
    return '"' + "".join(plain) + '"'


def _boolean(value: bool) -> str:
    return "true" if value else "false"


def _first_difference(read: TritonModelConfig, meant: TritonModelConfig) -> str:
    for name in ("name", "backend", "max_batch_size", "decoupled", "gpus", "inputs", "outputs"):
        if getattr(read, name) != getattr(meant, name):
            return f"{name} = {getattr(read, name)!r}"
    for key in {*read.parameters, *meant.parameters}:
        if read.parameters.get(key) != meant.parameters.get(key):
            return f"parameters[{key!r}] = {read.parameters.get(key)!r}"
    return "a difference outside the compared fields"
