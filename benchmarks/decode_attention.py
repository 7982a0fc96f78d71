"""KIVI-2 decode attention against Torch's fp32 SDPA on the same, dequantized, contiguous cache.

    python benchmarks/decode_attention.py [--json PATH] [--quick]

One decode step of one layer: 8 sequences, 8 KV heads of 64 channels, 2k and 8k tokens, 1, 3 and 4 query heads per
KV head. Our side reads a paged arena with shuffled blocks; Torch's side gets the faster of its two formulations (the
group as query length, and enable_gqa). The sides alternate within one run and medians are compared, so that a busy
machine slows both. Other formats are printed for context. Figures are seconds and ratios (larger is better).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SEQUENCES, KV_HEADS, HEAD_DIM, GROUP_SIZE = 8, 8, 64, 32
FORMATS = {"kivi2": ("int2", "int2"), "k4v2": ("int4", "int2"), "fp8": ("e4m3", "e4m3"), "fp16": ("f16", "f16")}
ROUNDS = 9


def run(*, lengths: tuple[int, ...] = (2048, 8192), rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure every case; returns ``{"kivi2_over_sdpa_fp32": {"gqa1_2k": ratio, ...}, "seconds": {...}, ...}``.

    The result also names the shape and thread count. Raises AssertionError when the two sides disagree.
    """
    import torch

    ratios: dict[str, float] = {}
    seconds: dict[str, dict[str, float]] = {}
    for tokens in lengths:
        for gqa in (1, 3, 4):
            key = f"gqa{gqa}_{tokens // 1024}k"
            seconds[key] = _measure(tokens, gqa, rounds)
            sdpa = min(seconds[key]["sdpa_grouped"], seconds[key]["sdpa_enable_gqa"])
            ratios[key] = sdpa / seconds[key]["kivi2"]
    return {
        "kivi2_over_sdpa_fp32": ratios,
        "seconds": seconds,
        "shape": {"sequences": SEQUENCES, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "group_size": GROUP_SIZE},
        "threads": torch.get_num_threads(),
    }


def _measure(tokens: int, gqa: int, rounds: int) -> dict[str, float]:
    """Median seconds of each side for one case."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    rng = np.random.default_rng(0)
    heads = KV_HEADS * gqa
    q = rng.standard_normal((SEQUENCES, heads, HEAD_DIM), dtype=np.float32)
    sides: dict[str, Callable[[], Any]] = {}
    for name, (k_codec, v_codec) in FORMATS.items():
        sides[name], decoded = _paged(tokens, q, k_codec, v_codec)
        if name == "kivi2":
            keys, values = (torch.from_numpy(x) for x in decoded())  # [S, Hkv, T, D]
    queries = torch.from_numpy(q)
    grouped = queries.view(SEQUENCES, KV_HEADS, gqa, HEAD_DIM)
    single = queries.view(SEQUENCES, heads, 1, HEAD_DIM)
    sides["sdpa_grouped"] = lambda: scaled_dot_product_attention(grouped, keys, values)
    sides["sdpa_enable_gqa"] = lambda: scaled_dot_product_attention(single, keys, values, enable_gqa=gqa > 1)
    expected = sides["sdpa_grouped"]().reshape(q.shape).numpy()
    error = float(np.abs(sides["kivi2"]() - expected).max())
    assert error < 1e-4, f"the two sides differ by {error}"
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            side()  # the previous side has left its own cache in the caches
            began = time.perf_counter()
            side()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def _paged(
    tokens: int, q: np.ndarray, k_codec: str, v_codec: str
) -> tuple[Callable[[], np.ndarray], Callable[[], tuple[np.ndarray, np.ndarray]]]:
    """A decode step over a filled arena, and a function that decodes the arena: k, v ``[S, Hkv, T, D]``.

    The step rewrites its own last token each time, which is the last of the ``tokens``; it alone is hot.
    """
    import kvattention

    hot = kvattention.RecordLayout(kvattention.CODECS["f16"], kvattention.CODECS["f16"], KV_HEADS, HEAD_DIM, GROUP_SIZE)
    cold = kvattention.RecordLayout(
        kvattention.CODECS[k_codec], kvattention.CODECS[v_codec], KV_HEADS, HEAD_DIM, GROUP_SIZE
    )
    ones = np.full(KV_HEADS, 1 / 64, np.float32)
    layer = kvattention.LayerSpec(hot, cold, softmax_scale=HEAD_DIM**-0.5, k_scales=ones, v_scales=ones)
    attention = kvattention.select("cpu")
    rng = np.random.default_rng(1)
    blocks = tokens // GROUP_SIZE
    slot = max(hot.words, cold.words) // 16
    arena = kvattention.arena_words(SEQUENCES * blocks * slot * 16)
    table = (rng.permutation(SEQUENCES * blocks).reshape(SEQUENCES, blocks) * slot).astype(np.int32)

    k, v = rng.standard_normal((2, SEQUENCES, blocks, GROUP_SIZE, KV_HEADS, HEAD_DIM), dtype=np.float32)
    # Fill the arena with every block as a sequence of its own: what is stored is the same, at no attention's cost.
    count = SEQUENCES * blocks
    alone = np.zeros(count, np.int32)
    is_cold = np.tile(np.arange(blocks) < blocks - 1, SEQUENCES).astype(np.int32)
    fill = kvattention.RaggedBatch(
        np.arange(count + 1) * GROUP_SIZE, alone, table.reshape(-1, 1), alone, alone, is_cold
    )
    rows = (x.reshape(-1, KV_HEADS, HEAD_DIM) for x in (k, v))
    attention.paged_attention(np.zeros((count * GROUP_SIZE, KV_HEADS, HEAD_DIM), np.float32), *rows, arena, fill, layer)

    def same(value: int) -> np.ndarray:
        return np.full(SEQUENCES, value, np.int32)

    starts = np.arange(SEQUENCES + 1)
    decode = kvattention.RaggedBatch(starts, same(tokens - 1), table, same(0), same(blocks - 1), same(blocks - 1))
    last_k, last_v = (np.ascontiguousarray(x[:, -1, -1]) for x in (k, v))
    out = np.empty_like(q)

    def step() -> np.ndarray:
        return attention.paged_attention(q, last_k, last_v, arena, decode, layer, out)

    def decoded() -> tuple[np.ndarray, np.ndarray]:
        k, v = np.empty((2, SEQUENCES, KV_HEADS, tokens, HEAD_DIM), np.float32)
        for s, b in np.ndindex(SEQUENCES, blocks):
            layout, in_cold = (cold, True) if b < blocks - 1 else (hot, False)
            here = slice(b * GROUP_SIZE, (b + 1) * GROUP_SIZE)
            record = layer.record(arena, table[s, b], cold=in_cold)
            k[s, :, here], v[s, :, here] = layout.decode(record, layer.k_scales, layer.v_scales)
        return k, v

    return step, decoded


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--quick", action="store_true", help="2k tokens only, 3 rounds")
    options = parser.parse_args()
    result = run(lengths=(2048,), rounds=3) if options.quick else run()
    columns = [*FORMATS, "sdpa_grouped", "sdpa_enable_gqa"]
    print(f"{'ms':>8}", *(f"{name:>15}" for name in columns), f"{'kivi2 / sdpa':>15}")
    for key, seconds in result["seconds"].items():
        cells = (f"{1e3 * seconds[name]:>15.2f}" for name in columns)
        print(f"{key:>8}", *cells, f"{result['kivi2_over_sdpa_fp32'][key]:>14.2f}x")
    print(f"{result['shape']}, {result['threads']} threads")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
        print(f"wrote {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
