"""Paged attention on the CPU."""

from __future__ import annotations

import numpy as np

from kvattention.reference import ReferenceAttention


class CpuAttention(ReferenceAttention):
    """The specification in float32, until the compiled kernel takes its place."""

    name = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        super().__init__(np.float32)
        self.threads = threads
