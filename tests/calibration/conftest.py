"""Plans and scales of small made-up models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from lowkv.calibration.scales import KVScales
from lowkv.kvcache.plan import CachePlan
from lowkv.recipe import KVCacheConfig

HEADS, SIZE = 2, 16


@dataclass(frozen=True)
class Geometry:
    """What a plan must know of a model."""

    layers: int
    kv_heads: int = HEADS
    head_dim: int = SIZE
    softmax_scale: float = 0.25

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (None,) * self.layers


@pytest.fixture(scope="session")
def plan_of() -> Callable[..., CachePlan]:
    """plan_of("fp8", "fp16", ...): a plan with these formats, 2 KV heads of 16 channels."""

    def make(*formats: str) -> CachePlan:
        kv = KVCacheConfig(format=formats[0], overrides=dict(enumerate(formats)))
        return CachePlan.from_config(Geometry(len(formats)), kv)

    return make


@pytest.fixture
def scales_of() -> Callable[..., KVScales]:
    """scales_of(layers, granularity): random scales of that granularity."""

    def make(layers: int, granularity: str = "head", **settings: Any) -> KVScales:
        generator = np.random.default_rng(layers)
        pairs = []
        for _ in range(layers):
            k = generator.lognormal(size=(HEADS, SIZE)).astype(np.float32)
            v = generator.lognormal(size=HEADS).astype(np.float32)
            if granularity == "head":
                k = np.repeat(k[:, :1], SIZE, axis=1)
            if granularity == "tensor":
                k, v = np.full_like(k, k[0, 0]), np.full_like(v, v[0])
            pairs.append((k, v))
        return KVScales(
            **({"source": "dataset", "granularity": granularity, "estimator": "amax"} | settings), layers=tuple(pairs)
        )

    return make
