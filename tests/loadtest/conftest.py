"""Subjects without an engine: a plan of a small model, a repository that nobody opens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from lowkv.kvcache.plan import CachePlan
from lowkv.loadtest.campaign import Subject
from lowkv.loadtest.workload import Lengths, Slo, Warmup, Workload
from lowkv.recipe import KVCacheConfig, ServingConfig


@dataclass(frozen=True)
class Geometry:
    layers: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    windows: tuple[int | None, ...] = (None, None)
    softmax_scale: float = 0.25


class Words:
    """A tokenizer with a token per word."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return list(range(len(text.split())))

    def decode(self, ids: list[int]) -> str:
        return " ".join(str(i) for i in ids)


@pytest.fixture
def words() -> Words:
    return Words()


@pytest.fixture
def workload() -> Workload:
    """Quick, and hard on a server with 4 places: a fifth user waits for half a second or more."""
    return Workload(
        name="quick",
        prompt_tokens=Lengths(20, 30),
        output_tokens=20,
        slo=Slo(ttft_seconds=0.25, tpot_seconds=0.2),
        levels=(1,),
        saturation=8,
        window_seconds=1.5,
        time_limit_seconds=20.0,
        kv_budget=2**16,
        minimum_requests=2,
        knee_probes=2,
        warmup=Warmup(minimum_seconds=0.3, maximum_seconds=6.0),
        prompts=200,
    )


def _subject(name: str, *, budget: int = 2**16, control: bool = False) -> Subject:
    kv = KVCacheConfig(format="fp16" if control else name)
    return Subject(
        name=name,
        plan=CachePlan.from_config(Geometry(), kv),
        serving=ServingConfig(),
        budget=budget,
        identity=f"engine of {name}",
        about={"model.source": "pypi:model==1", "compute": "cpu", "serving.max_model_len": "1000"},
        repository=Path("repos") / name,
        model="fake",
        control=control,
    )


@pytest.fixture
def make_subject() -> Callable[..., Subject]:
    return _subject


@pytest.fixture
def subjects() -> list[Subject]:
    """A baseline, a quantized format and the negative control."""
    return [_subject("fp16"), _subject("kivi2"), _subject("fp16-half", budget=2**15, control=True)]
