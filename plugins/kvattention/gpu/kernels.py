"""The GPU kernels of paged attention, in Triton language: append, attend, merge, seal, move.

Layout and codecs are `kvattention.layout` and `kvattention.codec`, lists are `kvattention.gpu.schedule`, arguments and
constants are `kvattention.gpu.variants`. A process either compiles these kernels or interprets them: Triton decides
when it decorates them, that is when this module is imported, by TRITON_INTERPRET.

How `attend` reads: K lies channel-major, so that a tile of keys ``[D, N]`` is the right operand of ``q @ K`` as it
stands, and V token-major, so that ``[N, D]`` is that of ``p @ V``. A tile is unpacked once and serves all query heads
of the group. Codes of 2 and 4 bits become model precision on the way (float32 arithmetic, then one rounding). Those of
8 bits are exact in it; K's scales go onto the query, V's onto the sum. Nothing is accumulated below float32.

Written with care for: block offsets beyond 2^31 words (64 bits), poisoned memory (what is masked is never multiplied,
NaN * 0 is NaN), rows and parts that see no key at all (maximum -inf), and vector loads (`n // 16 * 16` of a multiple
of 16 tells the compiler that it is one).
"""

# Triton's functions are typed by what they are called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from kvattention.codec import CODECS, F16_MAX, VALUES_PER_PARAM
from kvattention.gpu import schedule
from kvattention.layout import UNIT_WORDS

DIRECT = tl.constexpr(schedule.DIRECT)
CODEC_COUNT = tl.constexpr(len(CODECS))
UNIT = tl.constexpr(UNIT_WORDS)
PER_PARAM = tl.constexpr(VALUES_PER_PARAM)
HALF_MAX = tl.constexpr(F16_MAX)
LOG2_E = tl.constexpr(1.4426950408889634)
P_SCALE = tl.constexpr(256.0)  # puts softmax weights, at most 1, into the upper half of e4m3's range
NO_WINDOW = tl.constexpr(1 << 30)
INTEGERS = tl.constexpr(8388608.0)  # 2^23: as float32, INTEGERS + n holds n in its lowest bits
INTEGER_BITS = tl.constexpr(0x4B000000)
SIGNED = tl.constexpr(12582912.0)  # 1.5 * 2^23: the same for n of either sign

# Values that Triton's launcher must not make variants of; pointers are 16-byte aligned everywhere.
_RUN_TIME = [
    *("gqa", "kv_heads", "q_row", "k_row", "v_row", "table_row", "partial_rows", "window", "hot_offset", "cold_offset"),
    "words",
]


@triton.constexpr_function
def _bits(codec):
    return CODECS[codec].bits


@triton.constexpr_function
def _grouped(codec):
    return CODECS[codec].grouped


@triton.constexpr_function
def _scaled(codec):
    return CODECS[codec].scaled


@triton.constexpr_function
def _cut(codec):
    return CODECS[codec].cut


@triton.constexpr_function
def _maximum(codec):
    return CODECS[codec].maximum


@triton.constexpr_function
def _mantissa(codec):
    return {"e4m3": 3, "e5m2": 2}[codec]


@triton.constexpr_function
def _name(index):
    return [*CODECS][index]


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@triton.constexpr_function
def _cdiv(a, b):
    return -(-a // b)


@triton.jit
def _load_arena(arena):
    """The arena's address as a pointer to its words."""
    return tl.multiple_of(tl.load(arena).to(tl.pointer_type(tl.int32)), 64)


@triton.jit
def _k_words(kv_heads, CODEC: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr):
    """Words of K codes and K params: where V begins in a record."""
    channels = kv_heads * HEAD_DIM
    words = channels * (GROUP * _bits(CODEC) // 32)
    if _grouped(CODEC):
        words += channels
    return words


@triton.jit
def _split_params(params):
    """Parameter words to (scale, minimum) in float32."""
    scale = (params & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    minimum = ((params >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def _unpack(words, BITS: tl.constexpr):
    """[NB, W] words to [NB, W, 2, 2, ...] codes, the first from the lowest bits: a word's codes stay in one thread."""
    codes = words
    for level in tl.static_range(_log2(32 // BITS)):
        codes = tl.join(codes, codes >> (16 >> level))
    return codes & ((1 << BITS) - 1)


@triton.jit
def _to_float(codes):
    """Small integers as float32, without the slow conversion of integers."""
    return (codes | INTEGER_BITS).to(tl.float32, bitcast=True) - INTEGERS


@triton.jit
def _round_to_hot(x, HOT: tl.constexpr):
    """Dequantized values in model precision: never below the group's minimum, but they may overshoot fp16 above."""
    if HOT == tl.float16:  # noqa: SIM300
        x = tl.minimum(x, HALF_MAX)
    return x.to(HOT)


@triton.jit
def _load_part(
    base, live, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """One contiguous [ROWS, COLUMNS] array of each record, as [NB, BLOCK_ROWS * BLOCK_COLUMNS]; zeros outside."""
    i = tl.arange(0, BLOCK_ROWS * BLOCK_COLUMNS)
    mask = live[:, None]
    offsets = i
    if COLUMNS < BLOCK_COLUMNS:
        offsets = i // BLOCK_COLUMNS * COLUMNS + i % BLOCK_COLUMNS
        mask = mask & (i % BLOCK_COLUMNS < COLUMNS)[None, :]
    if ROWS < BLOCK_ROWS:
        mask = mask & (i // BLOCK_COLUMNS < ROWS)[None, :]
    return tl.load(base[:, None] + offsets[None, :], mask=mask, other=0)


@triton.jit
def _load_bytes(
    base,
    live,
    CODEC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    HOT: tl.constexpr,
    FP8: tl.constexpr,
):
    """`_load_part` of 8-bit codes: as they are for FP8 tensor cores, else in model precision; exact but for `_bias`."""
    if FP8:
        codes = _load_part(base.to(tl.pointer_type(tl.uint8)), live, ROWS, COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS)
        values = codes.to(tl.float8e4nv, bitcast=True)
    else:
        codes = _unpack(_load_part(base, live, ROWS, COLUMNS // 4, BLOCK_ROWS, BLOCK_COLUMNS // 4), 8)
        if CODEC == "e4m3":
            bits = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
        elif CODEC == "e5m2":
            bits = codes << 8
        else:
            bits = (codes ^ 0x80) | 0x6400  # fp16 of 1024 + 128 + n
        values = bits.to(tl.uint16).to(tl.float16, bitcast=True)
        if CODEC == "int8":
            values = values - 1152.0
        values = values.to(HOT)
    return values


@triton.constexpr_function
def _bias(codec, fp8):
    """What values of `_load_bytes` are to be multiplied by."""
    return 256.0 if codec == "e4m3" and not fp8 else 1.0  # an e4m3 code put into fp16 bits reads 2^8 too small


@triton.jit
def _load_keys(
    records,  # [NB] pointers to int32
    live,  # [NB]
    head,
    kv_heads,
    CODEC: tl.constexpr,
    HOT: tl.constexpr,
    FP8: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Keys of NB blocks, [BLOCK_D, NB * GROUP]."""
    BITS: tl.constexpr = _bits(CODEC)
    W: tl.constexpr = GROUP * BITS // 32  # words of a channel
    codes = records + head * (HEAD_DIM * W)
    if _grouped(CODEC):
        words = _load_part(codes, live, HEAD_DIM, W, BLOCK_D, W)
        params = records + kv_heads * (HEAD_DIM * W) + head * HEAD_DIM
        scale, minimum = _split_params(_load_part(params, live, HEAD_DIM, 1, BLOCK_D, 1))
        x = _to_float(_unpack(words, BITS)).reshape(BLOCKS, BLOCK_D, GROUP)
        keys = _round_to_hot(x * scale[:, :, None] + minimum[:, :, None], HOT)
    elif _scaled(CODEC):
        keys = _load_bytes(codes, live, CODEC, HEAD_DIM, GROUP, BLOCK_D, GROUP, HOT, FP8)
        keys = keys.reshape(BLOCKS, BLOCK_D, GROUP)
    elif CODEC == "f16":
        keys = _load_part(codes.to(tl.pointer_type(tl.float16)), live, HEAD_DIM, GROUP, BLOCK_D, GROUP)
        keys = keys.to(HOT).reshape(BLOCKS, BLOCK_D, GROUP)
    else:
        keys = _load_part(codes.to(tl.pointer_type(tl.bfloat16)), live, HEAD_DIM, GROUP, BLOCK_D, GROUP)
        keys = keys.to(HOT).reshape(BLOCKS, BLOCK_D, GROUP)
    return keys.permute(1, 0, 2).reshape(BLOCK_D, BLOCKS * GROUP)


@triton.jit
def _load_values(
    parts,  # [NB] pointers to int32: where V begins in the records
    live,  # [NB]
    head,
    kv_heads,
    CODEC: tl.constexpr,
    HOT: tl.constexpr,
    FP8: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Values of NB blocks, [NB * GROUP, BLOCK_D]."""
    BITS: tl.constexpr = _bits(CODEC)
    W: tl.constexpr = HEAD_DIM * BITS // 32  # words of a token
    codes = parts + head * (GROUP * W)
    if _grouped(CODEC):
        SHARE: tl.constexpr = min(PER_PARAM, BLOCK_D)  # channels of a parameter
        words = _load_part(codes, live, GROUP, W, GROUP, BLOCK_D * BITS // 32)
        P: tl.constexpr = _cdiv(HEAD_DIM, PER_PARAM)
        params = parts + kv_heads * (GROUP * W) + head * (GROUP * P)
        scale, minimum = _split_params(_load_part(params, live, GROUP, P, GROUP, BLOCK_D // SHARE))
        x = _to_float(_unpack(words, BITS)).reshape(BLOCKS, GROUP * BLOCK_D // SHARE, SHARE)
        values = _round_to_hot(x * scale[:, :, None] + minimum[:, :, None], HOT)
    elif _scaled(CODEC):
        values = _load_bytes(codes, live, CODEC, GROUP, HEAD_DIM, GROUP, BLOCK_D, HOT, FP8)
    elif CODEC == "f16":
        values = _load_part(codes.to(tl.pointer_type(tl.float16)), live, GROUP, HEAD_DIM, GROUP, BLOCK_D).to(HOT)
    else:
        values = _load_part(codes.to(tl.pointer_type(tl.bfloat16)), live, GROUP, HEAD_DIM, GROUP, BLOCK_D).to(HOT)
    return values.reshape(BLOCKS * GROUP, BLOCK_D)


@triton.jit
def _float8_codes(x, CODEC: tl.constexpr):
    """FP8 codes of float32, saturating, ties to even: `codec._float8_codes`. Triton's interpreter casts otherwise."""
    MANTISSA: tl.constexpr = _mantissa(CODEC)
    BIAS: tl.constexpr = (1 << (6 - MANTISSA)) - 1
    DROPPED: tl.constexpr = 23 - MANTISSA
    STEP: tl.constexpr = 2.0 ** (1 - BIAS - MANTISSA)  # of subnormal codes
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), _maximum(CODEC))
    bits = magnitude.to(tl.int32, bitcast=True)
    half = (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)
    normal = ((bits + half) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    subnormal = (magnitude * (1.0 / STEP) + INTEGERS).to(tl.int32, bitcast=True) - INTEGER_BITS
    return (tl.where(magnitude < STEP * (1 << MANTISSA), subnormal, normal) | sign).to(tl.uint8)


@triton.jit
def _int8_codes(x):
    """Two's complement of float32, saturating, ties to even."""
    x = tl.minimum(tl.maximum(x, -_maximum("int8")), _maximum("int8"))
    return ((x + SIGNED).to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)


@triton.jit
def _update(scores, visible, values, total, peak, weight, FP8: tl.constexpr):
    """One step of the online softmax, base 2: scores [R, N], values [N, D], total [R, D], peak and weight [R]."""
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    anchor = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is NaN: rows that have seen nothing yet
    p = tl.exp2(scores - anchor[:, None])
    fade = tl.exp2(peak - anchor)
    weight = weight * fade + tl.sum(p, 1)
    total = total * fade[:, None]
    if FP8:
        p = _float8_codes(p * P_SCALE, "e4m3").to(tl.float8e4nv, bitcast=True)
        # Hopper sums FP8 products in less than float32 unless told to add up every 32 of them.
        total = tl.dot(p, values, total, max_num_imprecise_acc=32)
    else:
        total = tl.dot(p.to(values.dtype), values, total)
    return total, higher, weight


@triton.jit(do_not_specialize=_RUN_TIME)
def attend(
    q,  # [T, Hq, D]
    k,  # [T, Hkv, D]
    v,  # [T, Hkv, D]
    out,  # [T, Hq, D]
    arena,
    scales,  # [Hkv, D + 1]: K's of each channel, then V's
    sequences,
    table,
    items,
    workspace,
    gqa,
    kv_heads,
    q_row,
    k_row,
    v_row,
    table_row,
    partial_rows,
    window,
    hot_offset,
    cold_offset,
    softmax_scale,
    K_CODEC: tl.constexpr,
    V_CODEC: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    OWN: tl.constexpr,
    ROWS: tl.constexpr,
    FP8_QUERY: tl.constexpr,
):
    """One tile of queries over one part of the stored blocks, and over the step's own tokens if they are its part.

    Grid (items, Hkv). Writes `out`, or an unnormalized sum with its (max, weight) into the workspace.
    """
    item = items + tl.program_id(0) * 8
    head = tl.program_id(1)
    sequence = tl.load(item)
    if sequence < 0:
        return
    first, count = tl.load(item + 1), tl.load(item + 2)
    begin, end = tl.load(item + 3), tl.load(item + 4)
    own, row = tl.load(item + 5), tl.load(item + 6)
    past = tl.load(sequences + sequence * 4)
    cold_begin, cold_end = tl.load(sequences + sequence * 4 + 1), tl.load(sequences + sequence * 4 + 2)
    start = tl.load(sequences + sequence * 4 + 3)
    HOT: tl.constexpr = q.dtype.element_ty
    HOT_CODEC: tl.constexpr = "f16" if HOT == tl.float16 else "bf16"  # noqa: SIM300
    # A format that does not compress may have all its blocks hot; others have few, not worth the shared memory.
    HOT_STAGES: tl.constexpr = None if K_CODEC == HOT_CODEC else 1
    N: tl.constexpr = BLOCKS * GROUP
    q_row, k_row, v_row = q_row // 16 * 16, k_row // 16 * 16, v_row // 16 * 16
    hot_offset, cold_offset = hot_offset // UNIT * UNIT, cold_offset // UNIT * UNIT

    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    token = first + r // gqa  # within the sequence's new tokens
    used = r < count * gqa
    q_head = head * gqa + r % gqa
    q_offsets = (start + token) * q_row + q_head * HEAD_DIM
    query = tl.load(q + q_offsets[:, None] + d[None, :], mask=used[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    position = past + token
    reach = tl.where(window > 0, window, NO_WINDOW)  # keys j with position - reach < j <= position
    begin = tl.maximum(begin, (past + first - reach + 1) // GROUP)

    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    scale = softmax_scale * LOG2_E

    base = _load_arena(arena)
    columns = table + sequence * table_row
    nth = tl.arange(0, BLOCKS)
    slot = tl.arange(0, GROUP)

    # Cold blocks first: the V scale then goes onto the sum once.
    cold_query, cold_scale = query, tl.full([ROWS], 1.0, tl.float32) * scale
    scales += head * (HEAD_DIM + 1)
    if _scaled(K_CODEC):
        channels = tl.load(scales + d, mask=d < HEAD_DIM, other=0.0)
        # Relative to the largest: products are in range then, and where scales are equal the query stays as it is.
        highest = tl.max(channels, 0)
        exact = query.to(tl.float32) * tl.div_rn(channels, tl.zeros_like(channels) + highest)[None, :]
        cold_scale *= highest * _bias(K_CODEC, FP8_QUERY)
        if FP8_QUERY:
            largest = tl.max(tl.abs(exact), 1)
            largest = tl.where(largest > 0, largest, 1.0)
            fit = tl.div_rn(tl.full([ROWS], _maximum("e4m3"), tl.float32), largest)
            cold_query = _float8_codes(exact * fit[:, None], "e4m3").to(tl.float8e4nv, bitcast=True)
            cold_scale = cold_scale / fit
        else:
            cold_query = exact.to(HOT)
    v_start = _k_words(kv_heads, K_CODEC, HEAD_DIM, GROUP)
    cold_stop = tl.minimum(end, cold_end)
    for index in range(tl.maximum(begin, cold_begin), cold_stop, BLOCKS):
        block = index + nth
        live = block < cold_stop
        offset = tl.load(columns + block, mask=live, other=0).to(tl.int64) * UNIT
        records = base + (offset + cold_offset)
        keys = _load_keys(records, live, head, kv_heads, K_CODEC, HOT, FP8_QUERY, HEAD_DIM, BLOCK_D, GROUP, BLOCKS)
        values = _load_values(
            records + v_start, live, head, kv_heads, V_CODEC, HOT, FP8_QUERY, HEAD_DIM, BLOCK_D, GROUP, BLOCKS
        )
        key = (block[:, None] * GROUP + slot[None, :]).reshape(N)
        visible = (key < cold_stop * GROUP)[None, :] & (key[None, :] > (position - reach)[:, None])
        scores = tl.dot(cold_query, keys) * cold_scale[:, None]
        total, peak, weight = _update(scores, visible, values, total, peak, weight, FP8_QUERY)
    if _scaled(V_CODEC):
        total *= tl.load(scales + HEAD_DIM) * (_bias(V_CODEC, FP8_QUERY) / (P_SCALE if FP8_QUERY else 1.0))

    # Hot blocks: sinks before cold_begin and the residual after cold_end, as one run of indices.
    sinks = tl.maximum(tl.minimum(end, cold_begin) - begin, 0)
    resume = tl.maximum(begin, tl.maximum(cold_begin, cold_end))
    hot_count = sinks + tl.maximum(end - resume, 0)
    v_start = _k_words(kv_heads, HOT_CODEC, HEAD_DIM, GROUP)
    for index in tl.range(0, hot_count, BLOCKS, num_stages=HOT_STAGES):
        order = index + nth
        live = order < hot_count
        block = tl.where(order < sinks, begin + order, resume + order - sinks)
        offset = tl.load(columns + block, mask=live, other=0).to(tl.int64) * UNIT
        records = base + (offset + hot_offset)
        keys = _load_keys(records, live, head, kv_heads, HOT_CODEC, HOT, False, HEAD_DIM, BLOCK_D, GROUP, BLOCKS)
        values = _load_values(
            records + v_start, live, head, kv_heads, HOT_CODEC, HOT, False, HEAD_DIM, BLOCK_D, GROUP, BLOCKS
        )
        key = (block[:, None] * GROUP + slot[None, :]).reshape(N)
        stored = (key < past) & (live[:, None] & (slot >= 0)[None, :]).reshape(N)
        values = tl.where(stored[:, None], values, 0.0)  # the last block is not full: its rest may be NaN
        visible = stored[None, :] & (key[None, :] > (position - reach)[:, None])
        scores = tl.dot(query, keys) * scale
        total, peak, weight = _update(scores, visible, values, total, peak, weight, False)

    # The step's own tokens, from k and v: at model precision also where append writes them to a cold block.
    own_begin = tl.maximum(first - reach + 1, 0)
    own_end = tl.where(own > 0, first + count, own_begin)
    for index in range(own_begin, own_end, OWN):
        key = index + tl.arange(0, OWN)
        live = key < own_end
        offsets = (start + key) * k_row + head * HEAD_DIM
        keys = tl.load(k + d[:, None] + offsets[None, :], mask=(d < HEAD_DIM)[:, None] & live[None, :], other=0.0)
        offsets = (start + key) * v_row + head * HEAD_DIM
        values = tl.load(v + offsets[:, None] + d[None, :], mask=live[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        visible = (key[None, :] <= token[:, None]) & (key[None, :] > (token - reach)[:, None])
        scores = tl.dot(query, keys) * scale
        total, peak, weight = _update(scores, visible & live[None, :], values, total, peak, weight, False)

    mask = used[:, None] & (d < HEAD_DIM)[None, :]
    if row < 0:
        out_offsets = ((start + token) * kv_heads * gqa + q_head) * HEAD_DIM
        result = total / tl.where(weight > 0, weight, 1.0)[:, None]
        tl.store(out + out_offsets[:, None] + d[None, :], result.to(HOT), mask=mask)
    else:
        slots = (row + r).to(tl.int64) * kv_heads + head
        tl.store(workspace + slots[:, None] * HEAD_DIM + d[None, :], total, mask=mask)
        statistics = workspace + partial_rows.to(tl.int64) * kv_heads * HEAD_DIM + slots * 2
        tl.store(statistics, peak, mask=used)
        tl.store(statistics + 1, weight, mask=used)


@triton.jit(do_not_specialize=_RUN_TIME)
def merge(
    workspace,
    out,  # [T, Hq, D]
    items,
    gqa,
    kv_heads,
    partial_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Combine one token's parts, always in the same order. Grid (merges, Hkv)."""
    item = items + tl.program_id(0) * 4
    head = tl.program_id(1)
    token = tl.load(item)
    if token < 0:
        return
    row, parts, stride = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    used = r < gqa
    mask = used[:, None] & (d < HEAD_DIM)[None, :]
    statistics = workspace + partial_rows.to(tl.int64) * kv_heads * HEAD_DIM
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    for part in range(parts):
        slots = (row + part * stride + r).to(tl.int64) * kv_heads + head
        part_peak = tl.load(statistics + slots * 2, mask=used, other=float("-inf"))
        part_weight = tl.load(statistics + slots * 2 + 1, mask=used, other=0.0)
        part_total = tl.load(workspace + slots[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
        higher = tl.maximum(peak, part_peak)
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        fade, part_fade = tl.exp2(peak - anchor), tl.exp2(part_peak - anchor)
        total = total * fade[:, None] + part_total * part_fade[:, None]
        weight = weight * fade + part_weight * part_fade
        peak = higher
    offsets = ((token * kv_heads + head) * gqa + r) * HEAD_DIM
    result = total / tl.where(weight > 0, weight, 1.0)[:, None]
    tl.store(out + offsets[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _encode_group(x, valid, CODEC: tl.constexpr):
    """Codes of groups along the last axis of x [A, B, n], and parameter words [A, B]; `codec.encode_group`."""
    LEVELS: tl.constexpr = (1 << _bits(CODEC)) - 1
    low = tl.min(tl.where(valid, x, float("inf")), 2)
    span = tl.max(tl.where(valid, x, float("-inf")), 2) - low
    if _cut(CODEC):
        margin = tl.div_rn(span, tl.full(low.shape, _cut(CODEC), tl.float32))
        low, span = low + margin, span - 2.0 * margin
    scale = tl.minimum(tl.div_rn(span, tl.full(low.shape, LEVELS, tl.float32)), HALF_MAX).to(tl.float16)
    minimum = tl.minimum(tl.maximum(low, -HALF_MAX), HALF_MAX).to(tl.float16)
    step = scale.to(tl.float32)[:, :, None]
    distance = x - minimum.to(tl.float32)[:, :, None]
    ratio = tl.where(step > 0, tl.div_rn(distance, tl.broadcast_to(tl.where(step > 0, step, 1.0), x.shape)), 0.0)
    ratio = tl.minimum(tl.maximum(ratio, 0.0), LEVELS)
    codes = (ratio + INTEGERS).to(tl.int32, bitcast=True) - INTEGER_BITS  # the sum rounds to nearest even
    words = scale.to(tl.uint16, bitcast=True).to(tl.int32) | (minimum.to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    return codes, words


@triton.jit
def _pack(codes, BITS: tl.constexpr):
    """[A, W, 32 / BITS] codes to [A, W] words, the first in the lowest bits; a sum of disjoint bits."""
    shifts = tl.arange(0, 32 // BITS) * BITS
    return tl.sum(codes << shifts[None, None, :], 2)


@triton.jit
def _encode_keys(
    keys,  # [CHANNELS, GROUP] float32
    d,  # [CHANNELS]
    record,
    head,
    kv_heads,
    scales,  # [D]
    CODEC: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    BITS: tl.constexpr = _bits(CODEC)
    W: tl.constexpr = GROUP * BITS // 32
    inside = d < HEAD_DIM
    channel = head * HEAD_DIM + d
    if _grouped(CODEC):
        x = keys.reshape(CHANNELS, 1, GROUP)
        codes, params = _encode_group(x, inside[:, None, None], CODEC)
        words = _pack(codes.reshape(CHANNELS, W, 32 // BITS), BITS)
        w = tl.arange(0, W)
        tl.store(record + channel[:, None] * W + w[None, :], words, mask=inside[:, None])
        params_start = record + kv_heads * (HEAD_DIM * W)
        tl.store(params_start + channel, params.reshape(CHANNELS), mask=inside)
    else:
        g = tl.arange(0, GROUP)
        if _scaled(CODEC):
            keys = _divided(keys, tl.load(scales + d, mask=inside, other=1.0)[:, None])
        _store_plain(record, channel[:, None] * GROUP + g[None, :], keys, inside[:, None], CODEC)


@triton.jit
def _encode_values(
    values,  # [GROUP, CHANNELS] float32
    d,  # [CHANNELS]
    part,  # where V begins in the record
    head,
    kv_heads,
    scale,  # pointer to one
    CODEC: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    BITS: tl.constexpr = _bits(CODEC)
    token = head * GROUP + tl.arange(0, GROUP)
    first = tl.min(d, 0)
    if _grouped(CODEC):
        SHARE: tl.constexpr = min(PER_PARAM, CHANNELS)
        GROUPS: tl.constexpr = CHANNELS // SHARE
        PER: tl.constexpr = 32 // BITS
        W: tl.constexpr = HEAD_DIM * BITS // 32
        P: tl.constexpr = _cdiv(HEAD_DIM, PER_PARAM)
        x = values.reshape(GROUP, GROUPS, SHARE)
        codes, params = _encode_group(x, (d < HEAD_DIM).reshape(1, GROUPS, SHARE), CODEC)
        words = _pack(codes.reshape(GROUP, CHANNELS // PER, PER), BITS)
        w = first // PER + tl.arange(0, CHANNELS // PER)
        tl.store(part + token[:, None] * W + w[None, :], words, mask=(w < W)[None, :])
        p = first // PER_PARAM + tl.arange(0, GROUPS)
        params_start = part + kv_heads * (GROUP * W)
        tl.store(params_start + token[:, None] * P + p[None, :], params, mask=(p < P)[None, :])
    else:
        inside = (d < HEAD_DIM)[None, :]
        if _scaled(CODEC):
            values = _divided(values, tl.load(scale))
        _store_plain(part, token[:, None] * HEAD_DIM + d[None, :], values, inside, CODEC)


@triton.jit
def _divided(x, scale):
    return tl.div_rn(x, tl.zeros_like(x) + scale)


@triton.jit
def _store_plain(start, offsets, x, mask, CODEC: tl.constexpr):
    """Values one by one, `codec.encode_plain` once they are divided; offsets count values from `start`."""
    if _scaled(CODEC):
        codes = _int8_codes(x) if CODEC == "int8" else _float8_codes(x, CODEC)
        tl.store(start.to(tl.pointer_type(tl.uint8)) + offsets, codes, mask=mask)
    elif CODEC == "f16":
        x = tl.minimum(tl.maximum(x, -HALF_MAX), HALF_MAX)
        tl.store(start.to(tl.pointer_type(tl.float16)) + offsets, x.to(tl.float16), mask=mask)
    else:
        tl.store(start.to(tl.pointer_type(tl.bfloat16)) + offsets, x.to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=_RUN_TIME)
def append(
    k,  # [T, Hkv, D]
    v,  # [T, Hkv, D]
    arena,
    scales,  # [Hkv, D + 1]: K's of each channel, then V's
    sequences,
    table,
    items,
    kv_heads,
    k_row,
    v_row,
    table_row,
    hot_offset,
    cold_offset,
    K_CODEC: tl.constexpr,
    V_CODEC: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Store a step's tokens of one block: into its hot record, or encoded into its cold one (DIRECT: whole blocks).

    Grid (appends, Hkv, head_dim / CHANNELS).
    """
    item = items + tl.program_id(0) * 4
    head = tl.program_id(1)
    sequence = tl.load(item)
    if sequence < 0:
        return
    block, first, count = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    past, start = tl.load(sequences + sequence * 4), tl.load(sequences + sequence * 4 + 3)
    HOT_CODEC: tl.constexpr = "f16" if k.dtype.element_ty == tl.float16 else "bf16"
    k_row, v_row = k_row // 16 * 16, v_row // 16 * 16
    hot_offset, cold_offset = hot_offset // UNIT * UNIT, cold_offset // UNIT * UNIT

    d = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    g = tl.arange(0, GROUP)
    token = block * GROUP + g - past  # within the sequence's new tokens
    inside = (token >= first) & (token < first + (count & (DIRECT - 1)))
    row = start + token
    mask = inside[None, :] & (d < HEAD_DIM)[:, None]
    keys = tl.load(k + (head * HEAD_DIM + d[:, None]) + row[None, :] * k_row, mask=mask, other=0.0)
    mask = inside[:, None] & (d < HEAD_DIM)[None, :]
    values = tl.load(v + row[:, None] * v_row + (head * HEAD_DIM + d[None, :]), mask=mask, other=0.0)
    offset = tl.load(table + sequence * table_row + block).to(tl.int64) * UNIT
    record = _load_arena(arena) + offset
    if count >= DIRECT:
        record += cold_offset
        part = record + _k_words(kv_heads, K_CODEC, HEAD_DIM, GROUP)
        scales += head * (HEAD_DIM + 1)
        v_scale = scales + HEAD_DIM
        _encode_keys(keys.to(tl.float32), d, record, head, kv_heads, scales, K_CODEC, HEAD_DIM, GROUP, CHANNELS)
        _encode_values(values.to(tl.float32), d, part, head, kv_heads, v_scale, V_CODEC, HEAD_DIM, GROUP, CHANNELS)
    else:
        record += hot_offset
        part = record + _k_words(kv_heads, HOT_CODEC, HEAD_DIM, GROUP)
        k_offsets = (head * HEAD_DIM + d[:, None]) * GROUP + g[None, :]
        v_offsets = (head * GROUP + g[:, None]) * HEAD_DIM + d[None, :]
        tl.store(record.to(k.dtype) + k_offsets, keys, mask=inside[None, :] & (d < HEAD_DIM)[:, None])
        tl.store(part.to(v.dtype) + v_offsets, values, mask=mask)


@triton.jit(do_not_specialize=_RUN_TIME)
def seal(
    arena,
    pairs,  # [P, 2] of (hot, cold)
    layers,  # [L, 8] of hot_offset, cold_offset, K codec, V codec
    scales,  # [L, Hkv, D + 1]
    kv_heads,
    HOT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Encode whole hot blocks into cold ones, each layer with its own codecs. Grid (pairs, layers, Hkv * chunks)."""
    pair = pairs + tl.program_id(0) * 2
    layer = tl.program_id(1)
    CHUNKS: tl.constexpr = _cdiv(HEAD_DIM, CHANNELS)
    head = tl.program_id(2) // CHUNKS
    d = tl.program_id(2) % CHUNKS * CHANNELS + tl.arange(0, CHANNELS)
    g = tl.arange(0, GROUP)
    fields = layers + layer * 8
    hot_offset, cold_offset = tl.load(fields) // UNIT * UNIT, tl.load(fields + 1) // UNIT * UNIT
    k_codec, v_codec = tl.load(fields + 2), tl.load(fields + 3)
    k_scales = scales + (layer * kv_heads + head) * (HEAD_DIM + 1)
    v_scale = k_scales + HEAD_DIM
    base = _load_arena(arena)
    hot = base + (tl.load(pair).to(tl.int64) * UNIT + hot_offset)
    cold = base + (tl.load(pair + 1).to(tl.int64) * UNIT + cold_offset)

    ELEMENT: tl.constexpr = tl.pointer_type(tl.float16 if HOT == "f16" else tl.bfloat16)
    part = hot + _k_words(kv_heads, HOT, HEAD_DIM, GROUP)
    k_offsets = (head * HEAD_DIM + d[:, None]) * GROUP + g[None, :]
    v_offsets = (head * GROUP + g[:, None]) * HEAD_DIM + d[None, :]
    keys = tl.load(hot.to(ELEMENT) + k_offsets, mask=(d < HEAD_DIM)[:, None], other=0.0).to(tl.float32)
    values = tl.load(part.to(ELEMENT) + v_offsets, mask=(d < HEAD_DIM)[None, :], other=0.0).to(tl.float32)

    part = cold
    for CODEC in tl.static_range(CODEC_COUNT):
        if k_codec == CODEC:
            part = cold + _k_words(kv_heads, _name(CODEC), HEAD_DIM, GROUP)
            _encode_keys(keys, d, cold, head, kv_heads, k_scales, _name(CODEC), HEAD_DIM, GROUP, CHANNELS)
    for CODEC in tl.static_range(CODEC_COUNT):
        if v_codec == CODEC:
            _encode_values(values, d, part, head, kv_heads, v_scale, _name(CODEC), HEAD_DIM, GROUP, CHANNELS)


@triton.jit(do_not_specialize=_RUN_TIME)
def move(
    arena,
    moves,  # [M, 2] of (from, to)
    words,
    WORDS: tl.constexpr,
):
    """Copy blocks. Grid (moves, words / WORDS)."""
    pair = moves + tl.program_id(0) * 2
    i = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    base = _load_arena(arena)
    source, target = tl.load(pair).to(tl.int64) * UNIT, tl.load(pair + 1).to(tl.int64) * UNIT
    tl.store(base + target + i, tl.load(base + source + i, mask=i < words), mask=i < words)
