"""The model repository of a tiny random Llama, and a real Triton server on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lowkv.recipe import WeightsConfig
from lowkv.triton.client import GenerateClient
from lowkv.triton.repository import write_repository
from lowkv.triton.server import TritonServer

MAX_WAITING = 40


@pytest.fixture(scope="session")
def engine(build_tiny: Callable[..., Path]) -> Path:
    """A context of 2048 tokens, 16 sequences, 8 MiB of KV cache in two formats."""
    return build_tiny(kv_cache={"overrides": {0: "k4v2"}})


@pytest.fixture(scope="session")
def gpu_engine(build_tiny: Callable[..., Path]) -> Path:
    """An engine of target cuda: it can be built and packed here, and served where there is a GPU."""
    return build_tiny(target="cuda", weights=WeightsConfig(dtype="float16"))


@pytest.fixture(scope="session")
def repository(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(engine, tmp_path_factory.mktemp("repos") / "tiny", max_waiting=MAX_WAITING)


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[TritonServer]:
    with TritonServer(repository, http_port=0, grpc_port=0, metrics_port=0, exit_timeout=3) as running:
        yield running


@pytest.fixture
def client(server: TritonServer) -> GenerateClient:
    return GenerateClient(server.http_url, server.model_name, timeout=60)
