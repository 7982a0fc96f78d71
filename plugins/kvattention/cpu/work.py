"""What one thread does: take items from the shared list until none is left.

A call is described by two arrays of int64, filled by `kvattention.cpu`: the *call* (addresses of inputs, batch and
work list) and the *layer* (codecs, shape, offsets). Passing numbers and addresses instead of arrays keeps one
compiled function for every layer, format and layout. The names below are their indices.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import carray, cfunc, njit, types

from kvattention.codec import CODECS, F16_MAX, e4m3, e5m2, f16, int2, int4, int8
from kvattention.cpu.microkernels import (
    F32_CODEC,
    MAX_PARAM_GROUPS,
    MAX_ROWS,
    Q_STRIDE,
    S_STRIDE,
    accumulate,
    call_accumulate,
    call_scores,
    dequantize,
    fetch_add,
    float_bits,
    float_value,
    half_bits,
    half_value,
    pointer,
    prefetch,
    premultiply,
    scores,
    softmax,
    split_params,
    weigh,
)
from kvattention.layout import MAX_HEAD_DIM, UNIT_WORDS

# The call.
(
    MODE,
    NEXT_ITEM,  # shared counter
    NEXT_THREAD,  # shared counter
    ITEMS,
    ITEM_COUNT,
    SCRATCH,
    ARENA,
    LAYER,
    Q,
    K,
    V,
    OUT,
    Q_ROW,  # floats between tokens
    K_ROW,
    V_ROW,
    HEADS,
    QUERY_START,
    PAST,
    TABLE,
    COLUMNS,
    COLD_BEGIN,
    COLD_END,
    DIRECT_END,
    CALL_WORDS,
) = range(24)

ATTEND, APPEND, SEAL = range(3)

# The layer.
(
    HOT,  # numbers of the codecs that read
    COLD_K,
    COLD_V,
    K_CUT,  # of the codecs that write
    V_CUT,
    KV_HEADS,
    HEAD_DIM,
    GROUP,
    HOT_OFFSET,  # words
    COLD_OFFSET,
    HOT_V,
    K_PARAMS,
    V_CODES,
    V_PARAMS,
    WINDOW,  # 0: none
    K_SCALES,
    V_SCALES,
    SOFTMAX_SCALE,  # bits of a float32, times log2(e)
    HOT_SCORES,  # addresses of compiled loops
    HOT_ACCUMULATE,
    COLD_SCORES,
    COLD_ACCUMULATE,
    F32_SCORES,
    F32_ACCUMULATE,
    LAYER_WORDS,
) = range(25)

ITEM_WORDS = 4  # int32: sequence, head, first token, tokens; or layer, head, hot, cold
MAX_TILE = 64
"""Query rows (tokens x heads of the group) an item may have."""

TILE = 48
"""Query rows an item aims at."""
MAX_FUSED = MAX_ROWS
PREFETCH_BLOCKS = 2
"""How far ahead a block's lines are asked for: its work takes some 0.2 us, a miss of memory and page table longer."""

# Scratch of one thread, in floats.
_QUERIES = 0
_OUTPUTS = _QUERIES + MAX_TILE * Q_STRIDE
_SCALED = _OUTPUTS + MAX_TILE * Q_STRIDE
_SCORES = _SCALED + MAX_TILE * Q_STRIDE
_WEIGHTS = _SCORES + MAX_ROWS * S_STRIDE
_V_SCALES = _WEIGHTS + MAX_PARAM_GROUPS * MAX_ROWS * S_STRIDE
_V_MINIMA = _V_SCALES + MAX_PARAM_GROUPS * S_STRIDE
_REST = _V_MINIMA + MAX_PARAM_GROUPS * S_STRIDE
_INIT = _REST + MAX_ROWS * MAX_PARAM_GROUPS * 16
_CORR = _INIT + 16
_LO = _CORR + 16
_HI = _LO + 16
_M = _HI + 16
_L = _M + MAX_TILE
_KEYS = _L + MAX_TILE
_VALUES = _KEYS + MAX_HEAD_DIM * 128
SCRATCH_FLOATS = _VALUES + MAX_HEAD_DIM * 128 + 1024

_BITS_OF = tuple(codec.bits for codec in sorted(CODECS.values(), key=lambda codec: codec.index))
_F16, _E4M3, _E5M2, _INT8 = f16.index, e4m3.index, e5m2.index, int8.index
_INT4, _INT2 = int4.index, int2.index
_INT8_MAX = int8.maximum

_options = {"nogil": True, "error_model": "numpy", "cache": True}


@njit(**_options)
def _bits(codec):
    return _BITS_OF[codec]


@njit(**_options)
def _grouped(codec):
    return codec in (_INT4, _INT2)


@njit(**_options)
def _scaled(codec):
    return codec in (_E4M3, _E5M2, _INT8)


@njit(**_options)
def _mult(codec, scale):
    """What the value that is read of a plain codec is multiplied by; e4m3 is read as fp16, 2^8 too small."""
    if not _scaled(codec):
        return np.float32(1.0)
    return np.float32(256.0) * scale if codec == _E4M3 else scale


@njit(**_options)
def _clamp(x, limit):
    return min(max(x, np.float32(-limit)), np.float32(limit))


@njit(**_options)
def _code16(codec, x):
    """16-bit code of a float32 in model precision (f16 saturates)."""
    if codec == _F16:
        return half_bits(_clamp(x, F16_MAX))
    bits = float_bits(x)
    return np.int16(np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@njit(**_options)
def _round16(codec, x):
    if codec == _F16:
        return half_value(half_bits(_clamp(x, F16_MAX)))
    return float_value(np.uint32(np.uint32(np.uint16(_code16(codec, x))) << np.uint32(16)))


@njit(**_options)
def _round_small(x):
    """A float32 of a magnitude below 2^22 rounded to an integer, ties to even."""
    shift = np.float32(1.5 * 2**23)
    return np.int32((x + shift) - shift)


def _float8_encoder(maximum, mantissa, bias):
    """FP8 code of a float32, saturating, as `codec._float8_codes` has it."""
    largest, smallest_normal = np.float32(maximum), np.float32(2.0 ** (1 - bias))
    subnormals = np.float32(2.0 ** (bias - 1 + mantissa))
    dropped, below_half = np.uint32(23 - mantissa), np.uint32((1 << (22 - mantissa)) - 1)
    rebias = np.uint32((127 - bias) << mantissa)

    @njit(**_options)
    def code(x):
        magnitude = min(abs(x), largest)
        bits = float_bits(magnitude)
        sign = (float_bits(x) >> np.uint32(31)) << np.uint32(7)
        if magnitude < smallest_normal:
            return np.uint32(np.uint32(_round_small(magnitude * subnormals)) | sign)
        rounded = np.uint32(bits + below_half + ((bits >> dropped) & np.uint32(1))) >> dropped
        return np.uint32(np.uint32(rounded - rebias) | sign)

    return code


_e4m3_code = _float8_encoder(e4m3.maximum, mantissa=3, bias=7)
_e5m2_code = _float8_encoder(e5m2.maximum, mantissa=2, bias=15)


@njit(**_options)
def _code8(codec, x):
    """Code of a scaled codec; x is divided by its scale already."""
    if codec == _E4M3:
        return _e4m3_code(x)
    if codec == _E5M2:
        return _e5m2_code(x)
    return np.uint32(_round_small(_clamp(x, _INT8_MAX)) & np.int32(0xFF))


@njit(**_options)
def _encode_row(codec, cut, x, length, scale, group, words, at, params, at_params):
    """Encode ``length`` values, in groups of ``group``: codes to words[at:], parameters to params[at_params:]."""
    bits = _bits(codec)
    if _scaled(codec):
        for w in range(length // 4):
            word = np.uint32(0)
            for i in range(4):
                word |= _code8(codec, x[4 * w + i] / scale) << np.uint32(8 * i)
            words[at + w] = np.int32(word)
        return
    if not _grouped(codec):
        for w in range(length // 2):
            low = np.uint32(np.uint16(_code16(codec, x[2 * w])))
            high = np.uint32(np.uint16(_code16(codec, x[2 * w + 1])))
            words[at + w] = np.int32(low | (high << np.uint32(16)))
        return
    levels = np.float32((1 << bits) - 1)
    per_word = 32 // bits
    for start in range(0, length, group):
        stop = min(start + group, length)
        smallest, largest = x[start], x[start]
        for i in range(start + 1, stop):
            smallest, largest = min(smallest, x[i]), max(largest, x[i])
        span = np.float32(largest - smallest)
        if cut > 0:
            margin = span / np.float32(cut)
            smallest, span = smallest + margin, span - np.float32(2.0) * margin
        scale_code = half_bits(min(span / levels, np.float32(F16_MAX)))
        minimum_code = half_bits(_clamp(smallest, F16_MAX))
        step, minimum = half_value(scale_code), half_value(minimum_code)
        params[at_params + start // group] = np.int32(
            np.uint32(np.uint16(scale_code)) | (np.uint32(np.uint16(minimum_code)) << np.uint32(16))
        )
        for w in range(start // per_word, stop // per_word):
            word = np.uint32(0)
            if step > np.float32(0.0):
                for i in range(per_word):
                    ratio = np.float32(x[w * per_word + i] - minimum) / step
                    clamped = min(max(ratio, np.float32(0.0)), levels)
                    word |= np.uint32(_round_small(clamped)) << np.uint32(i * bits)
            words[at + w] = np.int32(word)


@njit(**_options)
def _scales(layer, head):
    """(K scales [D], V scale) of a head."""
    channels = layer[HEAD_DIM]
    k_scales = carray(pointer(layer[K_SCALES] + 4 * head * channels), (channels,), np.float32)
    return k_scales, carray(pointer(layer[V_SCALES] + 4 * head), (1,), np.float32)[0]


@njit(**_options)
def _encode_cold(layer, head, keys, values, arena, cold):
    """Write keys [D, G] and values [G, D] of one head to its cold record."""
    channels, group = layer[HEAD_DIM], layer[GROUP]
    k_scales, v_scale = _scales(layer, head)
    record = cold * UNIT_WORDS + layer[COLD_OFFSET]
    codec, cut = layer[COLD_K], layer[K_CUT]
    row = group * _bits(codec) // 32
    for d in range(channels):
        at = record + (head * channels + d) * row
        at_params = record + layer[K_PARAMS] + head * channels + d
        _encode_row(codec, cut, keys[d], group, k_scales[d], group, arena, at, arena, at_params)
    codec, cut = layer[COLD_V], layer[V_CUT]
    row = channels * _bits(codec) // 32
    params = (channels + 31) // 32
    for t in range(group):
        at = record + layer[V_CODES] + (head * group + t) * row
        at_params = record + layer[V_PARAMS] + (head * group + t) * params
        _encode_row(codec, cut, values[t], channels, v_scale, 32, arena, at, arena, at_params)


@njit(**_options)
def _load_own(layer, head, k, k_row, v, v_row, keys, values):
    """Tokens of this step, from the inputs at k and v, to keys [D, G] and values [G, D], in model precision."""
    channels, group, hot = layer[HEAD_DIM], layer[GROUP], layer[HOT]
    for t in range(group):
        source_k = carray(pointer(k + 4 * (t * k_row + head * channels)), (channels,), np.float32)
        source_v = carray(pointer(v + 4 * (t * v_row + head * channels)), (channels,), np.float32)
        for d in range(channels):
            keys[d, t] = _round16(hot, source_k[d])
        for d in range(channels):
            values[t, d] = _round16(hot, source_v[d])


@njit(**_options)
def _unpack_hot(layer, head, arena, block, keys, values):
    """A hot block's record at int64 address arena to f32 keys [D, G] and values [G, D]."""
    channels, group, hot = layer[HEAD_DIM], layer[GROUP], layer[HOT]
    record = arena + 4 * (np.int64(block) * UNIT_WORDS + layer[HOT_OFFSET])
    one = np.float32(1.0)
    k = record + 2 * head * channels * group
    dequantize(hot, k, 2 * group, channels, group // 16, keys, 4 * group, 0, 0, 0, one)
    v = record + 4 * layer[HOT_V] + 2 * head * channels * group
    dequantize(hot, v, 2 * channels, group, channels // 16, values, 4 * channels, 0, 0, 0, one)


@njit(**_options)
def _unpack_cold(layer, head, arena, block, keys, values, v_scale):
    """A cold block's record to f32; keys without the scales that `_attend` has multiplied into the queries."""
    channels, group = layer[HEAD_DIM], layer[GROUP]
    record = arena + 4 * (np.int64(block) * UNIT_WORDS + layer[COLD_OFFSET])
    codec = layer[COLD_K]
    row = group * _bits(codec) // 8
    k = record + head * channels * row
    params = record + 4 * (layer[K_PARAMS] + head * channels)
    dequantize(codec, k, row, channels, group // 16, keys, 4 * group, params, 4, 0, _mult(codec, np.float32(1.0)))
    codec = layer[COLD_V]
    row = channels * _bits(codec) // 8
    words = (channels + 31) // 32
    v = record + 4 * layer[V_CODES] + head * group * row
    params = record + 4 * (layer[V_PARAMS] + head * group * words)
    mult = _mult(codec, v_scale)
    dequantize(codec, v, row, group, channels // 16, values, 4 * channels, params, 4 * words, 4, mult)


@njit(**_options)
def _ints(address, count):
    return carray(pointer(address), (count,), np.int32)


@njit(**_options)
def _append(call, layer, s, head, scratch):
    """Store this step's tokens of one head of one sequence."""
    channels, group, hot = layer[HEAD_DIM], layer[GROUP], layer[HOT]
    first = np.int64(_ints(call[QUERY_START] + 4 * s, 2)[0])
    n = np.int64(_ints(call[QUERY_START] + 4 * s, 2)[1]) - first
    past = np.int64(_ints(call[PAST] + 4 * s, 1)[0])
    total = past + n
    table = _ints(call[TABLE] + 4 * s * call[COLUMNS], call[COLUMNS])
    cold_begin = np.int64(_ints(call[COLD_BEGIN] + 4 * s, 1)[0])
    direct_end = np.int64(_ints(call[DIRECT_END] + 4 * s, 1)[0])
    arena = _ints(call[ARENA], np.int64(1 << 60))
    halves = carray(pointer(call[ARENA]), (1 << 60,), np.int16)
    keys = carray(pointer(scratch + 4 * _KEYS), (channels, group), np.float32)
    values = carray(pointer(scratch + 4 * _VALUES), (group, channels), np.float32)
    for block in range(past // group, (total - 1) // group + 1):
        begin = max(past, block * group)
        end = min(total, (block + 1) * group)
        k = call[K] + 4 * (first + begin - past) * call[K_ROW]
        v = call[V] + 4 * (first + begin - past) * call[V_ROW]
        if block * group >= past and cold_begin <= block < direct_end:
            _load_own(layer, head, k, call[K_ROW], v, call[V_ROW], keys, values)
            _encode_cold(layer, head, keys, values, arena, np.int64(table[block]))
            continue
        record = 2 * (np.int64(table[block]) * UNIT_WORDS + layer[HOT_OFFSET])
        k_at = record + head * channels * group
        v_at = record + 2 * layer[HOT_V] + head * channels * group
        for t in range(begin, end):
            slot = t - block * group
            source = carray(pointer(k + 4 * ((t - begin) * call[K_ROW] + head * channels)), (channels,), np.float32)
            for d in range(channels):
                halves[k_at + d * group + slot] = _code16(hot, source[d])
            source = carray(pointer(v + 4 * ((t - begin) * call[V_ROW] + head * channels)), (channels,), np.float32)
            for d in range(channels):
                halves[v_at + slot * channels + d] = _code16(hot, source[d])


@njit(**_options)
def _prefetch_cold(layer, head, arena, block):
    """Ask for one head of a cold block: its four parts lie apart, each too short for the hardware to see coming."""
    channels, group = layer[HEAD_DIM], layer[GROUP]
    record = arena + 4 * (np.int64(block) * UNIT_WORDS + layer[COLD_OFFSET])
    k_bytes = channels * group * _bits(layer[COLD_K]) // 8
    v_bytes = channels * group * _bits(layer[COLD_V]) // 8
    prefetch(record + head * k_bytes, k_bytes)
    prefetch(record + 4 * layer[V_CODES] + head * v_bytes, v_bytes)
    if _grouped(layer[COLD_K]):
        prefetch(record + 4 * (layer[K_PARAMS] + head * channels), 4 * channels)
    if _grouped(layer[COLD_V]):
        params = (channels + 31) // 32
        prefetch(record + 4 * (layer[V_PARAMS] + head * group * params), 4 * group * params)


@njit(**_options)
def _attend(call, layer, s, head, token, tokens, scratch):
    """Queries ``token .. token + tokens`` of sequence s, all heads that share the KV head."""
    channels, group = layer[HEAD_DIM], layer[GROUP]
    gqa = call[HEADS] // layer[KV_HEADS]
    rows = tokens * gqa
    first = np.int64(_ints(call[QUERY_START] + 4 * s, 1)[0])
    past = np.int64(_ints(call[PAST] + 4 * s, 1)[0])
    table = _ints(call[TABLE] + 4 * s * call[COLUMNS], call[COLUMNS])
    cold_begin = np.int64(_ints(call[COLD_BEGIN] + 4 * s, 1)[0])
    cold_end = np.int64(_ints(call[COLD_END] + 4 * s, 1)[0])
    direct_end = np.int64(_ints(call[DIRECT_END] + 4 * s, 1)[0])
    k_scales, v_scale = _scales(layer, head)
    softmax_scale = float_value(np.uint32(layer[SOFTMAX_SCALE]))
    window = layer[WINDOW]

    queries = carray(pointer(scratch + 4 * _QUERIES), (MAX_TILE, Q_STRIDE), np.float32)
    scaled = carray(pointer(scratch + 4 * _SCALED), (MAX_TILE, Q_STRIDE), np.float32)
    outputs = carray(pointer(scratch + 4 * _OUTPUTS), (MAX_TILE, Q_STRIDE), np.float32)
    weights = carray(pointer(scratch + 4 * _SCORES), (MAX_ROWS, S_STRIDE), np.float32)
    rest = carray(pointer(scratch + 4 * _REST), (MAX_ROWS, MAX_PARAM_GROUPS, 16), np.float32)
    init = carray(pointer(scratch + 4 * _INIT), (16,), np.float32)
    corr = carray(pointer(scratch + 4 * _CORR), (16,), np.float32)
    lo = carray(pointer(scratch + 4 * _LO), (16,), np.int32)
    hi = carray(pointer(scratch + 4 * _HI), (16,), np.int32)
    m = carray(pointer(scratch + 4 * _M), (MAX_TILE,), np.float32)
    l = carray(pointer(scratch + 4 * _L), (MAX_TILE,), np.float32)  # noqa: E741 - the field's name for the sum

    for r in range(rows):
        at = (first + token + r // gqa) * call[Q_ROW] + (head * gqa + r % gqa) * channels
        source = carray(pointer(call[Q] + 4 * at), (channels,), np.float32)
        for d in range(channels):
            queries[r, d] = source[d] * softmax_scale
            outputs[r, d] = np.float32(0.0)
        m[r] = np.float32(-np.inf)
        l[r] = np.float32(0.0)
    scaled_keys = _scaled(layer[COLD_K])
    if scaled_keys:
        for r in range(rows):
            for d in range(channels):
                scaled[r, d] = queries[r, d] * k_scales[d]

    fused = rows <= MAX_ROWS
    summed_minima = fused and _grouped(layer[COLD_V])
    params = (channels + 31) // 32
    if summed_minima:
        for r in range(rows):
            for g in range(params):
                for i in range(16):
                    rest[r, g, i] = np.float32(0.0)

    position = past + token  # of the first query
    begin = max(np.int64(0), position - window + 1) // group if window > 0 else np.int64(0)
    for block in range(begin, (position + tokens - 1) // group + 1):
        start = block * group
        own = start >= past
        cold = cold_begin <= block < cold_end
        direct = own and not cold and cold_begin <= block < direct_end
        ahead = block + PREFETCH_BLOCKS
        if cold_begin <= ahead < cold_end:
            _prefetch_cold(layer, head, call[ARENA], table[ahead])
        if not fused or direct:
            keys, values = scratch + 4 * _KEYS, scratch + 4 * _VALUES
            if direct:
                k = call[K] + 4 * (first + start - past) * call[K_ROW]
                v = call[V] + 4 * (first + start - past) * call[V_ROW]
                own_keys = carray(pointer(keys), (channels, group), np.float32)
                own_values = carray(pointer(values), (group, channels), np.float32)
                _load_own(layer, head, k, call[K_ROW], v, call[V_ROW], own_keys, own_values)
            elif cold:
                _unpack_cold(layer, head, call[ARENA], table[block], keys, values, v_scale)
            else:
                _unpack_hot(layer, head, call[ARENA], table[block], keys, values)
            k_codec, v_codec = F32_CODEC, F32_CODEC
            score, gather = layer[F32_SCORES], layer[F32_ACCUMULATE]
            k_stride, v_stride = 4 * group, 4 * channels
            k_at, v_at = keys, values
            k_params = v_params = np.int64(0)
        elif cold:
            record = call[ARENA] + 4 * (np.int64(table[block]) * UNIT_WORDS + layer[COLD_OFFSET])
            k_codec, v_codec = layer[COLD_K], layer[COLD_V]
            score, gather = layer[COLD_SCORES], layer[COLD_ACCUMULATE]
            k_stride, v_stride = group * _bits(k_codec) // 8, channels * _bits(v_codec) // 8
            k_at = record + head * channels * k_stride
            v_at = record + 4 * layer[V_CODES] + head * group * v_stride
            k_params = record + 4 * (layer[K_PARAMS] + head * channels)
            v_params = record + 4 * (layer[V_PARAMS] + head * group * params)
        else:
            record = call[ARENA] + 4 * (np.int64(table[block]) * UNIT_WORDS + layer[HOT_OFFSET])
            k_codec = v_codec = layer[HOT]
            score, gather = layer[HOT_SCORES], layer[HOT_ACCUMULATE]
            k_stride, v_stride = 2 * group, 2 * channels
            k_at = record + head * channels * k_stride
            v_at = record + 4 * layer[HOT_V] + head * group * v_stride
            k_params = v_params = np.int64(0)

        for tile in range(0, rows, MAX_ROWS):
            count = min(MAX_ROWS, rows - tile)
            seen_from, seen_to = group, np.int64(0)
            for r in range(count):
                at = position + (tile + r) // gqa
                upper = min(max(at + 1 - start, np.int64(0)), group)
                lower = np.int64(0)
                if window > 0:
                    lower = min(max(at - window + 1 - start, np.int64(0)), group)
                lo[r], hi[r] = lower, upper
                if lower < upper:
                    seen_from, seen_to = min(seen_from, lower), max(seen_to, upper)
                init[r] = np.float32(0.0)
            if seen_from >= seen_to:
                continue
            q_at = scratch + 4 * ((_SCALED if cold and scaled_keys else _QUERIES) + tile * Q_STRIDE)
            s_at = scratch + 4 * _SCORES
            out_at = scratch + 4 * (_OUTPUTS + tile * Q_STRIDE)
            corr_at = scratch + 4 * _CORR
            vectors = group // 16
            mult = _mult(k_codec, np.float32(1.0))
            if _grouped(k_codec):
                premultiply(count, q_at, k_params, channels, scratch + 4 * _SCALED, scratch + 4 * _INIT)
                q_at = scratch + 4 * _SCALED
            call_scores(score, count, q_at, k_at, k_stride, channels, vectors, mult, scratch + 4 * _INIT, s_at)
            softmax(
                count,
                vectors,
                s_at,
                scratch + 4 * _LO,
                scratch + 4 * _HI,
                scratch + 4 * (_M + tile),
                scratch + 4 * (_L + tile),
                corr_at,
            )
            weights_at, weights_group = s_at, np.int64(0)
            if _grouped(v_codec):
                scales, minima = scratch + 4 * _V_SCALES, scratch + 4 * _V_MINIMA
                weights_at, weights_group = scratch + 4 * _WEIGHTS, np.int64(4 * MAX_ROWS * S_STRIDE)
                split_params(params, v_params, group, scales, minima)
                rest_at = scratch + 4 * _REST
                weigh(count, s_at, scales, minima, group, params, corr_at, weights_at, weights_group, rest_at)
            else:
                if _scaled(v_codec):
                    by = _mult(v_codec, v_scale)
                    for r in range(count):
                        for t in range(group):
                            weights[r, t] *= by
                if summed_minima:
                    for r in range(count):
                        for g in range(params):
                            for i in range(16):
                                rest[r, g, i] *= corr[r]
            call_accumulate(
                gather,
                count,
                v_at,
                v_stride,
                seen_from,
                seen_to,
                channels // 16,
                weights_at,
                weights_group,
                corr_at,
                out_at,
            )

    for r in range(rows):
        at = (first + token + r // gqa) * call[HEADS] * channels + (head * gqa + r % gqa) * channels
        target = carray(pointer(call[OUT] + 4 * at), (channels,), np.float32)
        norm = np.float32(1.0) / l[r]
        for d in range(channels):
            target[d] = outputs[r, d] * norm
        if summed_minima:
            for g in range(params):
                total = np.float32(0.0)
                for i in range(16):
                    total += rest[r, g, i]
                total *= norm
                for d in range(32 * g, min(32 * g + 32, channels)):
                    target[d] += total


@njit(**_options)
def _seal(layer, head, arena_at, hot, cold, scratch):
    """One head of one layer of one pair."""
    channels, group = layer[HEAD_DIM], layer[GROUP]
    _unpack_hot(layer, head, arena_at, hot, scratch + 4 * _KEYS, scratch + 4 * _VALUES)
    keys = carray(pointer(scratch + 4 * _KEYS), (channels, group), np.float32)
    values = carray(pointer(scratch + 4 * _VALUES), (group, channels), np.float32)
    _encode_cold(layer, head, keys, values, _ints(arena_at, np.int64(1 << 60)), cold)


@cache
def worker():
    """The C function ``void work(int64 *call)``: one thread's part of a call."""

    @cfunc(types.void(types.intp), cache=True, nopython=True)
    def work(address):
        call = carray(pointer(address), (CALL_WORDS,), np.int64)
        thread = fetch_add(address + 8 * NEXT_THREAD, 1)
        scratch = call[SCRATCH] + 4 * SCRATCH_FLOATS * thread
        while True:
            index = fetch_add(address + 8 * NEXT_ITEM, 1)
            if index >= call[ITEM_COUNT]:
                return
            item = _ints(call[ITEMS] + 4 * ITEM_WORDS * index, ITEM_WORDS)
            a, head, c, d = np.int64(item[0]), np.int64(item[1]), np.int64(item[2]), np.int64(item[3])
            if call[MODE] == SEAL:
                layer = carray(pointer(call[LAYER] + 8 * LAYER_WORDS * a), (LAYER_WORDS,), np.int64)
                _seal(layer, head, call[ARENA], c, d, scratch)
                continue
            layer = carray(pointer(call[LAYER]), (LAYER_WORDS,), np.int64)
            starts = _ints(call[QUERY_START] + 4 * a, 2)
            if call[MODE] == APPEND:
                _append(call, layer, a, head, scratch)
                continue
            if c == 0 and d == starts[1] - starts[0]:
                _append(call, layer, a, head, scratch)  # the whole step in one item: no separate pass
            _attend(call, layer, a, head, c, d, scratch)

    return work


@cache
def scores_worker(codec):
    """`scores` of one codec as a C function ``void f(int64 rows, ...)``."""

    @cfunc(types.void(*[types.int64] * 6, types.float32, types.int64, types.int64), cache=True, nopython=True)
    def work(rows, q, k, k_stride, channels, vectors, mult, init, s):
        scores(codec, rows, q, k, k_stride, channels, vectors, mult, init, s)

    return work


@cache
def accumulate_worker(codec):
    """`accumulate` of one codec as a C function ``void f(int64 rows, ...)``."""

    @cfunc(types.void(*[types.int64] * 10), cache=True, nopython=True)
    def work(rows, v, v_stride, begin, end, vectors, weights, group_stride, corr, out):
        accumulate(codec, rows, v, v_stride, begin, end, vectors, weights, group_stride, corr, out)

    return work
