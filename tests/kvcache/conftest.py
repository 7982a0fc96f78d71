"""A small model geometry and the plans made from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from lowkv.kvcache import CachePlan
from lowkv.recipe import KVCacheConfig


@dataclass(frozen=True)
class Geometry:
    """What a plan must know of a model; SmolLM2-135M's shape unless said otherwise."""

    layers: int = 30
    kv_heads: int = 3
    head_dim: int = 64
    window: int | tuple[int | None, ...] | None = None
    """Of all layers, or a pattern that repeats."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        pattern = self.window if isinstance(self.window, tuple) else (self.window,)
        return tuple(pattern[layer % len(pattern)] for layer in range(self.layers))

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)


@pytest.fixture
def make_plan() -> Any:
    """make_plan(format, layers=..., window=..., **kv_cache settings) -> CachePlan."""

    def make(name: str = "kivi2", *, model: Geometry | None = None, **settings: Any) -> CachePlan:
        shape = {key: settings.pop(key) for key in ("layers", "kv_heads", "head_dim", "window") if key in settings}
        return CachePlan.from_config(model or Geometry(**shape), KVCacheConfig(format=name, **settings))

    return make
