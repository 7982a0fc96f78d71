from __future__ import annotations

import pytest

from lowkv.errors import LowkvError
from lowkv.triton.config import TritonModelConfig, config_from_pbtxt
from lowkv.triton.fields import ALIASES, INPUT_BY_NAME, INPUTS, NEUTRAL, OUTPUTS

AWKWARD = {"quote": 'a "b" \\ c', "lines": "one\ntwo\t", "unicode": "naïve – ☃ 😀", "empty": "", "dollar": "$HOME"}


@pytest.mark.parametrize("gpus", [(), (0,), (2, 0)])
def test_text_parses_back_to_the_same_object(gpus: tuple[int, ...]) -> None:
    config = TritonModelConfig("smollm2-kivi2", AWKWARD, gpus=gpus)
    assert config_from_pbtxt(config.to_pbtxt()) == config
    config.check(config.to_pbtxt())


def test_model_is_decoupled_and_auto_completion_has_nothing_to_add() -> None:
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    message = text_format.Parse(TritonModelConfig("m").to_pbtxt(), model_config_pb2.ModelConfig())
    assert message.model_transaction_policy.decoupled
    assert message.backend == "python"
    assert message.instance_group[0].count == 1
    assert {t.name for t in message.input if not t.optional} == {"text_input", "max_tokens"}


@pytest.mark.parametrize(("gpus", "kind"), [((), "KIND_CPU"), ((1, 3), "KIND_GPU")])
def test_instances_are_on_the_cpu_or_on_the_gpus_named(gpus: tuple[int, ...], kind: str) -> None:
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2 as pb

    message = text_format.Parse(TritonModelConfig("m", gpus=gpus).to_pbtxt(), pb.ModelConfig())
    (group,) = message.instance_group
    assert pb.ModelInstanceGroup.Kind.Name(group.kind) == kind
    assert tuple(group.gpus) == gpus


@pytest.mark.parametrize("group", ["kind: KIND_GPU", "kind: KIND_CPU gpus: [ 0 ]", "kind: KIND_AUTO", "gpus: [ 0 ]"])
def test_an_instance_group_left_to_triton_is_refused(group: str) -> None:
    text = TritonModelConfig("m").to_pbtxt().replace("kind: KIND_CPU", group)
    with pytest.raises(LowkvError, match="neither on the CPU nor on named GPUs"):
        config_from_pbtxt(text)


def test_a_placeholder_is_refused() -> None:
    config = TritonModelConfig("m", {"engine": "${engine_dir}"})
    with pytest.raises(LowkvError, match="placeholder"):
        config.check(config.to_pbtxt())


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("decoupled: true", "decoupled: false", "decoupled"),
        ('"max_tokens" data_type: TYPE_INT32', '"max_tokens" data_type: TYPE_INT64', "inputs"),
        ('"a"', '"b"', "parameters"),
        ("kind: KIND_CPU", "kind: KIND_GPU gpus: [ 1 ]", "gpus"),
    ],
)
def test_a_text_that_says_something_else_is_refused(old: str, new: str, named: str) -> None:
    config = TritonModelConfig("m", {"key": "a"})
    with pytest.raises(LowkvError, match=named):
        config.check(config.to_pbtxt().replace(old, new))


def test_text_that_is_no_configuration_is_refused() -> None:
    with pytest.raises(LowkvError, match="does not parse"):
        config_from_pbtxt("name: [")


def test_field_tables_agree() -> None:
    assert len(INPUT_BY_NAME) == len(INPUTS)
    assert len({field.name for field in OUTPUTS}) == len(OUTPUTS)
    assert set(ALIASES) | set(ALIASES.values()) | set(NEUTRAL) <= set(INPUT_BY_NAME)
