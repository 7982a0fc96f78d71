"""Section `attention`: one decode step of one layer, paged and quantized, against Torch's on a contiguous cache.

Every sequence has its whole context stored and gets one token. Our side reads blocks scattered over an arena (all cold
but the newest, in `fp16` all hot), Torch's side `scaled_dot_product_attention` over contiguous fp16 K and V, in the
faster of its two formulations: the query heads of a KV head as rows of one query, or enable_gqa. Both are captured as
CUDA graphs, so that what is timed is the device's work and not Python. Sides alternate, the L2 cache is overwritten
before each, medians are compared. `bytes` are those of K and V that a step must read, `share` is their rate over that
of a large copy on the same card (bytes read and written).

What is read is checked too: fp16 against Torch's result, the other formats against what their blocks decode to.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpu.report import Section, table
from kvattention import CODECS, LayerSpec, RaggedBatch, RecordLayout
from kvattention.gpu.attention import Arena, GpuAttention
from kvattention.gpu.torch_device import TorchDevice
from kvattention.layout import UNIT_WORDS
from kvattention.reference import attention as formula

FORMATS = {
    "fp16": ("f16", "f16"),
    "fp8": ("e4m3", "e4m3"),
    "fp8, FP8 query": ("e4m3", "e4m3"),
    "kivi4": ("int4", "int4"),
    "k4v2": ("int4", "int2"),
    "kivi2": ("int2", "int2"),
}
SDPA = ("sdpa grouped", "sdpa enable_gqa")
GROUP = 32
TOLERANCE = {"fp8, FP8 query": 0.1}
"""|out - expected| / |expected|: 1 % where only fp16 rounds, e4m3 rounds queries and weights by up to 6 %."""


@dataclass(frozen=True)
class Sizes:
    kv_heads: int
    head_dim: int
    gqas: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    unique: int
    """Different blocks; caches are filled with copies of them."""
    checked: int
    """Longest context whose quantized result is compared (decoded on the CPU)."""
    rounds: int
    copy_bytes: int


FULL = Sizes(8, 128, (4, 8), (1, 16, 64, 256), (1024, 4096, 16384, 32768), 1024, 4096, 15, 2 << 30)
TOY = Sizes(1, 16, (4,), (2,), (64,), 2, 64, 1, 1 << 20)


def run(section: Section, device: str, fp8: bool, rehearse: bool) -> None:
    sizes = TOY if rehearse else FULL
    clock = Clock(device)
    copied = copy_rate(clock, sizes.copy_bytes)
    section.note(f"a copy reads and writes {copied / 1e9:.0f} GB/s")
    formats = {name: pair for name, pair in FORMATS.items() if fp8 or "query" not in name}
    # Few bytes first: were the time to run out, it would be at the cases that are alike.
    cases = [(batch, context) for batch in sizes.batches for context in sizes.contexts]
    done = 0
    for batch, context in sorted(cases, key=lambda case: case[0] * case[1]):
        if section.left < 5 and not rehearse:
            section.note(f"out of time: {len(cases) - done} of {len(cases)} caches were not measured")
            return
        done += 1
        needed = _bytes_needed(sizes, formats, batch, context)
        free = torch.cuda.mem_get_info()[0] if device == "cuda" else 1 << 40
        if needed > 0.9 * free:
            section.note(f"batch {batch}, context {context}: skipped, takes {needed} bytes and {free} are free")
            continue
        _measure_case(section, clock, sizes, formats, batch, context, copied)
        if device == "cuda":
            torch.cuda.empty_cache()


def _measure_case(
    section: Section,
    clock: Clock,
    sizes: Sizes,
    formats: dict[str, tuple[str, str]],
    batch: int,
    context: int,
    copied: float,
) -> None:
    contents = Contents(sizes, batch, context, clock.device)
    caches = {name: PagedCache(sizes, contents, pair, "query" in name) for name, pair in formats.items()}
    keys, values = contents.contiguous()
    for gqa in sizes.gqas:
        q = contents.queries(gqa)
        sides: dict[str, Callable[[], torch.Tensor]] = {
            name: _sdpa(q, keys, values, grouped=name == SDPA[0]) for name in SDPA
        }
        sides |= {name: cache.step(q) for name, cache in caches.items()}
        where = f"batch {batch}, context {context}, GQA {gqa}"
        for name in formats:
            error = _error(sides, name, caches[name], q, context <= sizes.checked)
            if error is not None and not error < TOLERANCE.get(name, 0.01):
                section.fail(f"{where}: {name} differs from what it should be by {error:.3g} of it")
        seconds = clock.medians(sides, sizes.rounds)
        sdpa = min(seconds[name] for name in SDPA)
        for name, taken in seconds.items():
            read = keys.nbytes + values.nbytes if name in SDPA else caches[name].bytes_read
            section.row(
                batch=batch,
                context=context,
                gqa=gqa,
                side=name,
                us=round(1e6 * taken, 1),
                bytes=read,
                share=round(read / taken / copied, 3),
                over_sdpa=round(sdpa / taken, 2),
            )


class Contents:
    """What a step's caches hold: `unique` blocks of random keys and values, and which of them stands where."""

    def __init__(self, sizes: Sizes, batch: int, context: int, device: str) -> None:
        self.sizes, self.batch, self.blocks, self.device = sizes, batch, context // GROUP, device
        generator = torch.Generator(device).manual_seed(1)
        shape = (2, sizes.unique, GROUP, sizes.kv_heads, sizes.head_dim)
        self.k, self.v = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).half()
        self._generator = generator
        slots = np.random.default_rng(2).permutation(batch * self.blocks)
        self.slots = slots.reshape(batch, self.blocks)
        """Slot of every block; slot i holds copy i % unique."""
        self.copies = self.slots % sizes.unique

    def queries(self, gqa: int) -> torch.Tensor:
        shape = (self.batch, self.sizes.kv_heads * gqa, self.sizes.head_dim)
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=torch.float32).half()

    def last(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The step's own k, v [S, Hkv, D]: the last token of the last block."""
        index = torch.from_numpy(self.copies[:, -1]).to(self.device)
        return self.k[index, -1].contiguous(), self.v[index, -1].contiguous()

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as [S, Hkv, T, D]."""
        sizes = self.sizes
        shape = (self.batch, sizes.kv_heads, self.blocks * GROUP, sizes.head_dim)
        both = []
        for unique in (self.k, self.v):
            whole = torch.empty(shape, dtype=torch.float16, device=self.device)
            for row, copies in zip(whole, self.copies, strict=True):
                blocks = unique[torch.from_numpy(copies).to(self.device)]  # [B, G, Hkv, D]
                row.copy_(blocks.permute(2, 0, 1, 3).reshape(row.shape))
            both.append(whole)
        return both[0], both[1]


class PagedCache:
    """The contents in an arena, in one format: cold slots, then a hot slot for each sequence's newest block."""

    def __init__(self, sizes: Sizes, contents: Contents, pair: tuple[str, str], fp8_query: bool) -> None:
        self.contents = contents
        hot = RecordLayout(CODECS["f16"], CODECS["f16"], sizes.kv_heads, sizes.head_dim, GROUP)
        cold = RecordLayout(CODECS[pair[0]], CODECS[pair[1]], sizes.kv_heads, sizes.head_dim, GROUP)
        scales = np.full(sizes.kv_heads, 1 / 64, np.float32)
        self.layer = LayerSpec(hot, cold, softmax_scale=sizes.head_dim**-0.5, k_scales=scales, v_scales=scales)
        self.attention = GpuAttention(TorchDevice(contents.device), fp8_query=fp8_query)
        self.sealed = pair != ("f16", "f16")
        count, unit = contents.batch * contents.blocks, cold.words // UNIT_WORDS
        self._hot_start = count * unit
        hot_slots = contents.batch if self.sealed else 0
        self.arena: Arena = self.attention.allocate(count * cold.words + hot_slots * hot.words)
        first = min(sizes.unique, count)
        self._write(contents.k[:first], contents.v[:first], np.arange(first) * unit, self.sealed)
        slots = self.arena.words[: count * cold.words].view(count, cold.words)
        for begin in range(first, count, first):
            slots[begin : begin + first] = slots[: min(first, count - begin)]
        self.table = contents.slots * unit
        if self.sealed:
            newest = torch.from_numpy(contents.copies[:, -1]).to(contents.device)
            self.table[:, -1] = self._hot_start + np.arange(contents.batch) * (hot.words // UNIT_WORDS)
            self._write(contents.k[newest], contents.v[newest], self.table[:, -1], False)
        cold_blocks = contents.blocks - 1 if self.sealed else 0
        self._decoded: tuple[np.ndarray, np.ndarray] | None = None
        self.bytes_read = contents.batch * (cold_blocks * cold.bytes + (contents.blocks - cold_blocks) * hot.bytes)

    def step(self, q: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The decode step over it; every call appends the same token again."""
        contents = self.contents
        cold_end = contents.blocks - 1 if self.sealed else 0
        batch = _batch(contents.batch, 1, contents.blocks * GROUP - 1, self.table, cold_end, cold_end)
        k, v = contents.last()
        out = torch.empty_like(q)
        return lambda: self.attention.paged_attention(q, k, v, self.arena, batch, self.layer, out)

    def decoded(self) -> tuple[np.ndarray, np.ndarray]:
        """k, v [T, Hkv, D] of the last sequence, decoded on the CPU as the reference does; once a step has run."""
        if self._decoded is not None:
            return self._decoded
        pieces = []
        for block, offset in enumerate(self.table[-1]):
            cold = self.sealed and block < self.contents.blocks - 1
            layout = self.layer.cold if cold else self.layer.hot
            start = int(offset) * UNIT_WORDS
            record = self.arena.words[start : start + layout.words].cpu().numpy()
            pieces.append(layout.decode(record, self.layer.k_scales, self.layer.v_scales))
        k, v = (np.concatenate(part, axis=1).swapaxes(0, 1) for part in zip(*pieces, strict=True))
        self._decoded = k, v
        return self._decoded

    def _write(self, k: torch.Tensor, v: torch.Tensor, offsets: np.ndarray, cold: bool) -> None:
        """Blocks [N, G, Hkv, D] into slots, each as a sequence of its own: what is stored is the same."""
        rows = [x.reshape(-1, *x.shape[2:]).contiguous() for x in (k, v)]
        batch = _batch(len(k), GROUP, 0, offsets[:, None], 0, int(cold))
        self.attention.paged_attention(rows[0], rows[0], rows[1], self.arena, batch, self.layer)


class Clock:
    """Times work on the device: by events around a captured graph, or, on the CPU, by the clock on the wall."""

    def __init__(self, device: str) -> None:
        self.device = device
        size = 1 << 10
        if device == "cuda":
            size = max(1 << 28, 2 * torch.cuda.get_device_properties(0).L2_cache_size)
        self._flush = torch.empty(size, dtype=torch.int8, device=device)

    def medians(self, sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
        """Median seconds of each side; they take turns."""
        runs = {name: self._prepared(side) for name, side in sides.items()}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                times[name].append(self._once(run))
        return {name: statistics.median(values) for name, values in times.items()}

    def _prepared(self, side: Callable[[], Any]) -> Callable[[], Any]:
        if self.device == "cpu":
            return side
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                side()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            side()
        return graph.replay

    def _once(self, run: Callable[[], Any]) -> float:
        self._flush.zero_()
        if self.device == "cpu":
            began = time.perf_counter()
            run()
            return time.perf_counter() - began
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def copy_rate(clock: Clock, size: int) -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.ones(size, dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    return 2 * size / clock.medians({"copy": lambda: target.copy_(source)}, 9)["copy"]


def render(section: Section) -> list[str]:
    """A line per case: microseconds and share of the copy's rate of every side, and the ratio to Torch's best."""
    cases: dict[tuple[int, int, int], dict[str, Any]] = {}
    for row in section.rows:
        cases.setdefault((row["batch"], row["context"], row["gqa"]), {})[row["side"]] = row
    if not cases:
        return []
    names = list(next(iter(cases.values())))
    lines = [
        [*key, *(f"{sides[name]['us']:g} ({sides[name]['share']:.0%})" if name in sides else "" for name in names)]
        for key, sides in cases.items()
    ]
    ratios = [
        [*key, *(f"{sides[name]['over_sdpa']:.2f}x" for name in names if name in sides and name not in SDPA)]
        for key, sides in cases.items()
    ]
    own = [name for name in names if name not in SDPA]
    return [
        "Microseconds (share of the copy's rate):",
        "",
        *table(["batch", "context", "GQA", *names], lines),
        "Speed over the faster SDPA, which reads fp16:",
        "",
        *table(["batch", "context", "GQA", *own], ratios),
    ]


def _sdpa(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, grouped: bool) -> Callable[[], torch.Tensor]:
    from torch.nn.functional import scaled_dot_product_attention

    batch, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    if grouped:
        rows = q.view(batch, kv_heads, heads // kv_heads, head_dim)
        return lambda: scaled_dot_product_attention(rows, keys, values)
    single = q.view(batch, heads, 1, head_dim)
    return lambda: scaled_dot_product_attention(single, keys, values, enable_gqa=True)


def _error(
    sides: dict[str, Callable[[], torch.Tensor]], name: str, cache: PagedCache, q: torch.Tensor, decode: bool
) -> float | None:
    """|out - expected| / |expected| of a side; None where it is not compared."""
    if name == "fp16":
        out, expected = sides[name]().float(), sides[SDPA[0]]().reshape(q.shape).float()
        return float((out - expected).norm() / expected.norm())
    if not decode:
        return None
    found = sides[name]()[-1].float().cpu().numpy()
    k, v = cache.decoded()
    wanted = formula(q[-1:].float().cpu().numpy(), k, v, softmax_scale=cache.layer.softmax_scale)
    return float(np.linalg.norm(found - wanted[0]) / np.linalg.norm(wanted))


def _batch(count: int, new: int, past: int, table: np.ndarray, cold_end: int, direct_end: int) -> RaggedBatch:
    """A step in which all sequences are alike."""

    def same(value: int) -> np.ndarray:
        return np.full(count, value, np.int32)

    starts = np.arange(count + 1) * new
    return RaggedBatch(starts, same(past), table.astype(np.int32), same(0), same(cold_end), same(direct_end))


def _bytes_needed(sizes: Sizes, formats: dict[str, tuple[str, str]], batch: int, context: int) -> int:
    """Of all caches of a case together, Torch's and a working copy among them."""
    hot = 4 * sizes.kv_heads * sizes.head_dim  # bytes of a token
    total = 0
    for k, v in formats.values():
        layout = RecordLayout(CODECS[k], CODECS[v], sizes.kv_heads, sizes.head_dim, GROUP)
        total += batch * (context * layout.bytes // GROUP + GROUP * hot)
    return total + batch * context * hot + context * hot + 4 * sizes.unique * GROUP * hot
