"""Which TensorRT builds and which runs, and every way in which there is none."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from kvattention.tensorrt import libraries
from lowkv.engine.tensorrt import backend
from lowkv.engine.tensorrt.backend import Backend, choose_backend, open_backend
from lowkv.errors import LowkvError
from lowkv.gpus import Gpu

H100 = Gpu(0, "NVIDIA H100", 90, 80 * 2**30)
L4 = Gpu(0, "NVIDIA L4", 89, 24 * 2**30)


def stand_in(monkeypatch: pytest.MonkeyPatch, *flavours: str, gpus: tuple[Gpu, ...] = (), version: str = "") -> None:
    """A machine with these TensorRTs and GPUs; their version is a supported one if none is given."""
    versions = {"tensorrt": version or "10.13.3", "tensorrt_rtx": version or "1.7.1.116"}
    capabilities = SimpleNamespace(NONE=0, CURRENT=1, SM75=75, SM80=80, SM86=86, SM89=89, SM120=120, SM121=121)

    def module(name: str) -> SimpleNamespace:
        return SimpleNamespace(__version__=versions[name], ComputeCapability=capabilities)

    monkeypatch.setattr(libraries, "installed", lambda: flavours)
    monkeypatch.setattr(libraries, "import_tensorrt", module)
    monkeypatch.setattr(backend, "visible_gpus", lambda: gpus)


@pytest.mark.parametrize("sm", [80, 86, 89, 120])
def test_tensorrt_for_rtx_builds_for_gpus_that_are_not_here(sm: int) -> None:
    found, chosen = choose_backend(sm)
    assert (found.flavour, chosen) == ("tensorrt_rtx", sm)
    assert found.version == found.trt.__version__
    assert found.buildable == (80, 86, 89, 120)


def test_no_tensorrt_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    for call in (lambda: choose_backend(89), lambda: open_backend("tensorrt_rtx")):
        with pytest.raises(LowkvError, match=r"not installed: got 'neither .*pip install 'lowkv\[tensorrt\]'"):
            call()


def test_another_flavour_than_the_engine_was_built_with(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "tensorrt")
    with pytest.raises(
        LowkvError, match=r"tensorrt_rtx is not installed: got 'tensorrt', .*pip install tensorrt-rtx-cu13"
    ):
        open_backend("tensorrt_rtx")


@pytest.mark.parametrize(
    ("flavour", "version", "expected"),
    [
        ("tensorrt", "8.6.1", "10.13 or later, before 12"),
        ("tensorrt", "12.0", "10.13 or later, before 12"),
        ("tensorrt_rtx", "1.2.0.54", "1.7 or later, before 2"),
        ("tensorrt_rtx", "2.0", "1.7 or later, before 2"),
    ],
)
def test_versions_that_are_not_supported(
    flavour: str, version: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, flavour, version=version)
    with pytest.raises(
        LowkvError, match=f"{flavour} has a version .*got '{version}', expected {expected}; pip install"
    ):
        open_backend(flavour)


@pytest.mark.parametrize(
    ("flavour", "version"), [("tensorrt", "10.13.0"), ("tensorrt", "11.2"), ("tensorrt_rtx", "1.9")]
)
def test_versions_that_are(flavour: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, flavour, version=version)
    assert str(open_backend(flavour)) == f"{flavour} {version}"


def test_no_gpu_named_and_none_here(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "tensorrt_rtx")
    with pytest.raises(LowkvError, match=r"no GPU here to build for: .*tensorrt\.sm: 80, 86, 89, 90, 120; set"):
        choose_backend(None)


def test_full_tensorrt_builds_for_the_gpu_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "tensorrt", "tensorrt_rtx", gpus=(H100,))
    found, sm = choose_backend(None)
    assert (found.flavour, sm, found.buildable) == ("tensorrt", 90, (90,))
    # and leaves the others to the one that builds for them
    assert choose_backend(89)[0].flavour == "tensorrt_rtx"


def test_gpus_that_what_is_here_cannot_build_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "tensorrt_rtx", gpus=(H100,))
    with pytest.raises(LowkvError, match=r"got 'SM90', expected SM80, SM86, SM89, SM120; .*pip install tensorrt-cu13"):
        choose_backend(90)
    stand_in(monkeypatch, "tensorrt", gpus=(H100,))
    with pytest.raises(LowkvError, match=r"got 'SM89', expected SM90; pip install tensorrt-rtx-cu13"):
        choose_backend(89)
    stand_in(monkeypatch, "tensorrt")
    with pytest.raises(LowkvError, match=r"got 'SM89', expected a GPU in this machine; pip install tensorrt-rtx-cu13"):
        choose_backend(89)
    stand_in(monkeypatch, "tensorrt", gpus=(Gpu(0, "Tesla V100", 70, 1),))
    with pytest.raises(LowkvError, match=r"generation is not supported: got 'SM70', expected SM80, "):
        choose_backend(None)


def test_only_tensorrt_for_rtx_is_told_the_gpu() -> None:
    config = SimpleNamespace(num_compute_capabilities=0, set_compute_capability=lambda *told: tolds.append(told))
    tolds: list[tuple[object, ...]] = []
    capabilities = SimpleNamespace(SM89="the enum's")
    Backend("tensorrt", "10.13", SimpleNamespace()).build_for(config, 89)
    assert (config.num_compute_capabilities, tolds) == (0, [])
    Backend("tensorrt_rtx", "1.7", SimpleNamespace(ComputeCapability=capabilities)).build_for(config, 89)
    assert (config.num_compute_capabilities, tolds) == (1, [("the enum's", 0)])


def test_messages_go_to_the_log_and_errors_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    found, _ = choose_backend(89)
    messages, severity = found.messages, found.trt.ILogger.Severity
    assert messages is choose_backend(80)[0].messages  # TensorRT takes one for the whole process
    messages.clear()
    seen: list[str] = []
    messages.watch = seen.append
    try:
        with caplog.at_level(logging.DEBUG, "lowkv.tensorrt"):
            for kind in ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"):
                messages.log(getattr(severity, kind), kind.lower())
    finally:
        messages.watch = None
    assert messages.errors == ["internal_error", "error"]
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("ERROR", "internal_error"),
        ("ERROR", "error"),
        ("WARNING", "warning"),
        ("DEBUG", "info"),
    ]
    assert seen == ["verbose"]
    messages.clear()
    assert messages.errors == []
