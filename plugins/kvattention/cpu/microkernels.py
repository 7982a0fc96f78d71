"""The inner loops, one per (codec, query rows), emitted as LLVM IR and callable from numba code.

Each intrinsic below takes addresses (int64), switches on the number of rows (or the codec), and calls the loop emitted
for it. `scores` and `accumulate` are compiled once per codec, for all rows, when a layer first needs the codec, and
then called by address. Rows are the query
heads that share a KV head: a vector of codes is unpacked once and multiplied into all of them.

    scores      lanes = 16 tokens of one channel (K is stored channel-major); walks channels
    accumulate  lanes = 16 channels of one token; walks tokens
    dequantize  codes -> f32, for tiles with more rows than the fused loops take (codec F32 then reads the result)

Scales cost no multiplication per value: K's are multiplied into q (by `premultiply` for the groups of a block) and
V's into the weights (by `weigh`); the minima of groups add one term per row and block.

numba's cache looks at the file of the function it compiles, which is `work`: after editing this file or `vector`,
touch work.py, or old machine code keeps running.

Addresses of scratch rows have fixed strides (Q_STRIDE, S_STRIDE floats), chosen off powers of two so that rows do
not fall on one cache set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvattention.codec import CODECS, bf16, e4m3, e5m2, f16, int2, int4, int8
from kvattention.cpu.vector import (
    F32,
    FLOAT_BYTES,
    I8,
    I16,
    I32,
    I64,
    LANES,
    VF,
    VI,
    Emitter,
    Function,
    Value,
    integer,
    lanes_f32,
    lanes_i32,
)

MAX_ROWS = 8
"""Query rows the fused loops take at once."""
Q_STRIDE = 272
"""Floats between rows of queries and of outputs (256 + 16)."""
S_STRIDE = 144
"""Floats between rows of scores and weights (128 + 16)."""
MAX_PARAM_GROUPS = 8
"""V parameter words of a token at the largest head_dim."""

F32_CODEC = len(CODECS)
"""Codec number of dequantized scratch."""

_STORED = [codec for codec in CODECS.values() if codec.reader == codec]
_VECTOR_BYTES = {codec.index: LANES * codec.bits // 8 for codec in _STORED} | {F32_CODEC: LANES * FLOAT_BYTES}
_BITS = {int4.index: 4, int2.index: 2}

_ZERO = lanes_f32([0.0] * LANES)


class _Decoder:
    """Turns the bytes of 16 values into f32 lanes.

    Integer lanes come out in a convenient order and, where the machine converts unsigned integers (AVX-512), still
    multiplied by the power of two of their position in the word: `restore` puts the sums right, once per loop.
    """

    def __init__(self, emit: Emitter, codec: int, unsigned: bool) -> None:
        self.emit, self.codec, self.unsigned = emit, codec, unsigned
        self.bytes = _VECTOR_BYTES[codec]
        if codec in _BITS:
            bits = _BITS[codec]
            words = LANES * bits // 32  # lane l holds value l // words of word l % words
            self.shifts = [lane // words * bits for lane in range(LANES)]
            self.order = [(value % (32 // bits)) * words + value // (32 // bits) for value in range(LANES)]

    def load(self, address: Value) -> Value:
        e, b = self.emit, self.emit.b
        if self.codec == F32_CODEC:
            return e.load(address, VF, FLOAT_BYTES)
        if self.codec == f16.index:
            return e.half_to_float(e.load(address, ir.VectorType(I16, LANES), 2))
        if self.codec == bf16.index:
            wide = b.zext(e.load(address, ir.VectorType(I16, LANES), 2), VI)
            return b.bitcast(b.shl(wide, lanes_i32([16] * LANES)), VF)
        if self.codec == e4m3.index:  # sign-extended, shifted: fp16 bits of value / 256 once the copied sign is cleared
            short = ir.VectorType(I16, LANES)
            wide = b.shl(b.sext(e.load(address, ir.VectorType(I8, LANES)), short), ir.Constant(short, [7] * LANES))
            return e.half_to_float(b.and_(wide, ir.Constant(short, [0xBF80 - 0x10000] * LANES)))
        if self.codec == e5m2.index:  # the upper byte of an fp16
            short = ir.VectorType(I16, LANES)
            wide = b.zext(e.load(address, ir.VectorType(I8, LANES)), short)
            return e.half_to_float(b.shl(wide, ir.Constant(short, [8] * LANES)))
        if self.codec == int8.index:
            return b.sitofp(b.sext(e.load(address, ir.VectorType(I8, LANES)), VI), VF)
        if self.codec == int2.index:
            words = e.splat(e.load(address, I32, 4))
        else:
            pair = e.load(address, I64, 4)
            eight = ir.VectorType(I64, LANES // 2)
            undefined = ir.Constant(eight, ir.Undefined)
            first = b.insert_element(undefined, pair, ir.Constant(I32, 0))
            zeros = ir.Constant(ir.VectorType(I32, LANES // 2), [0] * (LANES // 2))
            words = b.bitcast(b.shuffle_vector(first, undefined, zeros), VI)
        mask = (1 << _BITS[self.codec]) - 1
        if self.unsigned:
            return b.uitofp(b.and_(words, lanes_i32([mask << shift for shift in self.shifts])), VF)
        return b.sitofp(b.and_(b.lshr(words, lanes_i32(self.shifts)), lanes_i32([mask] * LANES)), VF)

    def restore(self, x: Value) -> Value:
        """Sums over loaded lanes, in the order and size of the values."""
        if self.codec not in _BITS:
            return x
        if self.unsigned:
            x = self.emit.b.fmul(x, lanes_f32([2.0**-shift for shift in self.shifts]))
        return self.emit.permute(x, self.order) if self.codec == int4.index else x


def _wide(context: Any) -> bool:
    """Whether the target has 32 registers of 16 lanes (AVX-512)."""
    return "+avx512f" in context.codegen().magic_tuple()[2]


def _emit_scores(function: Function, codec: int, rows: int, wide: bool) -> None:
    """s[r][t] = mult * sum_d q[r][d] * codes[d][t] + init[r]."""
    e = Emitter(function)
    b = e.b
    q, k, k_stride, channels, vectors, mult, init, s = function.args
    decoder = _Decoder(e, codec, wide)
    together = 2 if wide or rows <= 3 else 1
    unroll = 2 if rows * together <= 3 else 1  # enough independent sums to hide the latency of an addition
    sums = [[[e.variable(VF) for _ in range(together)] for _ in range(rows)] for _ in range(unroll)]
    scale = e.splat(mult)
    with e.loop(integer(0), vectors, together) as vector:
        for variable in (x for step in sums for row in step for x in row):
            b.store(_ZERO, variable)
        base = e.at(k, (vector, decoder.bytes))
        with e.loop(integer(0), channels, unroll) as channel:
            for u in range(unroll):
                address = e.at(base, (b.add(channel, integer(u)), k_stride))
                keys = [decoder.load(e.at(address, i * decoder.bytes)) for i in range(together)]
                for r in range(rows):
                    value = e.splat_load(e.at(q, (channel, FLOAT_BYTES), (r * Q_STRIDE + u) * FLOAT_BYTES))
                    for i in range(together):
                        b.store(e.fma(keys[i], value, b.load(sums[u][r][i])), sums[u][r][i])
        for r in range(rows):
            offset = e.splat_load(e.at(init, r * FLOAT_BYTES))
            for i in range(together):
                total = b.load(sums[0][r][i])
                for u in range(1, unroll):
                    total = b.fadd(total, b.load(sums[u][r][i]))
                address = e.at(s, (vector, LANES * FLOAT_BYTES), (r * S_STRIDE + i * LANES) * FLOAT_BYTES)
                e.store(e.fma(decoder.restore(total), scale, offset), address)
    e.finish()


def _emit_accumulate(function: Function, codec: int, rows: int, wide: bool) -> None:
    """out[r][d] = out[r][d] * corr[r] + sum over begin <= t < end of weight[d / 32][r][t] * codes[t][d]."""
    e = Emitter(function)
    b = e.b
    v, v_stride, begin, end, vectors, weights, group_stride, corr, out = function.args
    decoder = _Decoder(e, codec, wide)

    def span(start: Value, stop: Value, together: int) -> None:
        sums = [[e.variable(VF) for _ in range(together)] for _ in range(rows)]
        with e.loop(start, stop, together) as vector:
            for variable in (x for row in sums for x in row):
                b.store(_ZERO, variable)
            base = e.at(v, (vector, decoder.bytes))
            group = b.lshr(vector, integer(1))
            with e.loop(begin, end) as token:
                address = e.at(base, (token, v_stride))
                for pair in range(0, together, 2):
                    weight = e.at(weights, (b.add(group, integer(pair // 2)), group_stride), (token, FLOAT_BYTES))
                    values = [
                        decoder.load(e.at(address, i * decoder.bytes)) for i in range(pair, min(pair + 2, together))
                    ]
                    for r in range(rows):
                        factor = e.splat_load(e.at(weight, r * S_STRIDE * FLOAT_BYTES))
                        for i, value in enumerate(values, pair):
                            b.store(e.fma(value, factor, b.load(sums[r][i])), sums[r][i])
            for r in range(rows):
                factor = e.splat_load(e.at(corr, r * FLOAT_BYTES))
                for i in range(together):
                    address = e.at(out, (vector, LANES * FLOAT_BYTES), (r * Q_STRIDE + i * LANES) * FLOAT_BYTES)
                    old = e.load(address, VF, FLOAT_BYTES)
                    e.store(e.fma(old, factor, decoder.restore(b.load(sums[r][i]))), address)

    together = (4 if rows <= 2 else 2) if wide else {1: 4, 2: 2, 3: 2}.get(rows, 1)
    whole = b.and_(vectors, integer(-together))
    span(integer(0), whole, together)
    if together > 1:
        span(whole, vectors, 1)
    e.finish()


def _emit_dequantize(function: Function, codec: int, _rows: int, wide: bool) -> None:
    """dst[o][j] = mult * codes[o][j], or codes * scale + min with parameters at o * outer + (j / 32) * inner."""
    e = Emitter(function)
    b = e.b
    src, src_stride, count, vectors, dst, dst_stride, params, outer, inner, mult = function.args
    decoder = _Decoder(e, codec, wide)
    scale = e.splat(mult)
    with e.loop(integer(0), count) as o, e.loop(integer(0), vectors) as vector:
        codes = decoder.restore(decoder.load(e.at(src, (o, src_stride), (vector, decoder.bytes))))
        if codec in _BITS:
            word = e.load(e.at(params, (o, outer), (b.lshr(vector, integer(1)), inner)), I32, 4)
            step, minimum = e.params(e.splat(word))
            values = e.fma(codes, step, minimum)
        else:
            values = b.fmul(codes, scale)
        e.store(values, e.at(dst, (o, dst_stride), (vector, LANES * FLOAT_BYTES)))
    e.finish()


def _emit_premultiply(function: Function, _codec: int, rows: int, _wide: bool) -> None:
    """scaled[r][d] = q[r][d] * scale[d]; init[r] = sum_d q[r][d] * min[d]."""
    e = Emitter(function)
    b = e.b
    q, params, channels, scaled, init = function.args
    sums = [e.variable(VF) for _ in range(rows)]
    for variable in sums:
        b.store(_ZERO, variable)
    with e.loop(integer(0), channels, LANES) as channel:
        step, minimum = e.params(e.load(e.at(params, (channel, 4)), VI, 4))
        for r in range(rows):
            offset = r * Q_STRIDE * FLOAT_BYTES
            query = e.load(e.at(q, (channel, FLOAT_BYTES), offset), VF, FLOAT_BYTES)
            e.store(b.fmul(query, step), e.at(scaled, (channel, FLOAT_BYTES), offset))
            b.store(e.fma(query, minimum, b.load(sums[r])), sums[r])
    for r in range(rows):
        e.store(e.sum(b.load(sums[r])), e.at(init, r * FLOAT_BYTES))
    e.finish()


def _emit_split_params(function: Function, _codec: int, groups: int, _wide: bool) -> None:
    """Parameter words [t][group] to f32 scale[group][t] and min[group][t], rows S_STRIDE apart."""
    e = Emitter(function)
    b = e.b
    params, tokens, scales, minima = function.args
    with e.loop(integer(0), tokens, LANES) as token:
        address = e.at(params, (token, 4 * groups))
        parts = [e.load(e.at(address, i * LANES * 4), VI, 4) for i in range(groups)]
        for group in range(groups):
            places = [divmod(t * groups + group, LANES) for t in range(LANES)]  # (part, lane) of each token's word
            words = e.permute(parts[0], [lane if part == 0 else 0 for part, lane in places])
            for i in range(1, groups):
                merge = [LANES + lane if part == i else t for t, (part, lane) in enumerate(places)]
                words = b.shuffle_vector(words, parts[i], ir.Constant(VI, merge))
            step, minimum = e.params(words)
            target = (token, FLOAT_BYTES), group * S_STRIDE * FLOAT_BYTES
            e.store(step, e.at(scales, *target))
            e.store(minimum, e.at(minima, *target))
    e.finish()


def _emit_weigh(function: Function, _codec: int, rows: int, _wide: bool) -> None:
    """weight[g][r][t] = p[r][t] * scale[g][t]; rest[r][g][lane] = rest * corr[r] + lanes of p[r][t] * min[g][t]."""
    e = Emitter(function)
    b = e.b
    p, scales, minima, tokens, groups, corr, weights, group_stride, rest = function.args
    sums = [e.variable(VF) for _ in range(rows)]
    with e.loop(integer(0), groups) as group:
        places = [e.at(rest, (group, LANES * 4), r * MAX_PARAM_GROUPS * LANES * 4) for r in range(rows)]
        for r in range(rows):
            old = e.load(places[r], VF, FLOAT_BYTES)
            b.store(b.fmul(old, e.splat_load(e.at(corr, r * FLOAT_BYTES))), sums[r])
        row = (group, S_STRIDE * FLOAT_BYTES)
        with e.loop(integer(0), tokens, LANES) as token:
            here = (token, FLOAT_BYTES)
            step = e.load(e.at(scales, row, here), VF, FLOAT_BYTES)
            minimum = e.load(e.at(minima, row, here), VF, FLOAT_BYTES)
            for r in range(rows):
                offset = r * S_STRIDE * FLOAT_BYTES
                weight = e.load(e.at(p, here, offset), VF, FLOAT_BYTES)
                e.store(b.fmul(weight, step), e.at(weights, (group, group_stride), here, offset))
                b.store(e.fma(weight, minimum, b.load(sums[r])), sums[r])
        for r in range(rows):
            e.store(b.load(sums[r]), places[r])
    e.finish()


def _emit_softmax(function: Function, *_: Any) -> None:
    """One step of the online softmax (base 2) on rows of scores, in place.

    Lanes outside [lo[r], hi[r]) get weight 0 whatever they hold. Updates the running maximum m and sum l, and leaves
    in corr the factor by which older sums shrink.
    """
    e = Emitter(function)
    b = e.b
    rows, vectors, s, lo, hi, m, l, corr = function.args  # noqa: E741 - the field's name for the sum
    low = lanes_f32([float("-inf")] * LANES)
    lane = lanes_i32(list(range(LANES)))
    best, total = e.variable(VF), e.variable(VF)
    with e.loop(integer(0), rows) as r:
        row = e.at(s, (r, S_STRIDE * FLOAT_BYTES))
        first = e.splat(e.load(e.at(lo, (r, 4)), I32, 4))
        last = e.splat(e.load(e.at(hi, (r, 4)), I32, 4))
        b.store(low, best)
        with e.loop(integer(0), vectors) as vector:
            address = e.at(row, (vector, LANES * FLOAT_BYTES))
            index = b.add(lane, e.splat(b.trunc(b.mul(vector, integer(LANES)), I32)))
            seen = b.and_(b.icmp_signed(">=", index, first), b.icmp_signed("<", index, last))
            score = b.select(seen, e.load(address, VF, FLOAT_BYTES), low)
            e.store(score, address)
            b.store(e.maximum(score, b.load(best)), best)
        old = e.load(e.at(m, (r, 4)), F32, 4)
        new = e.maximum(e.fold(b.load(best), e.maximum), old)
        e.store(new, e.at(m, (r, 4)))
        finite = b.fcmp_ordered(">", new, ir.Constant(F32, float("-inf")))
        base = e.splat(b.select(finite, new, ir.Constant(F32, 0.0)))
        shrink = b.extract_element(e.exp2(b.fsub(e.splat(old), base)), ir.Constant(I32, 0))
        e.store(shrink, e.at(corr, (r, 4)))
        b.store(_ZERO, total)
        with e.loop(integer(0), vectors) as vector:
            address = e.at(row, (vector, LANES * FLOAT_BYTES))
            weight = e.exp2(b.fsub(e.load(address, VF, FLOAT_BYTES), base))
            e.store(weight, address)
            b.store(b.fadd(b.load(total), weight), total)
        before = b.fmul(e.load(e.at(l, (r, 4)), F32, 4), shrink)
        e.store(b.fadd(before, e.sum(b.load(total))), e.at(l, (r, 4)))
    e.finish()


Emit = Callable[[Function, int, int, bool], None]
Typed = tuple[Any, Callable[[Any, Any, Any, Any], Value]]


def _function(module: Any, name: str, emit: Emit, kinds: list[Any], codec: int, rows: int, wide: bool) -> Function:
    full = f"kvattention_{name}_{codec}_{rows}"
    if full in module.globals:
        return module.globals[full]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), full)
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    emit(function, codec, rows, wide)
    return function


def _switch(name: str, emit: Emit, kinds: list[Any], variants: dict[int, tuple[int, int]], codec: Any = None) -> Typed:
    """Signature and code of an intrinsic whose first argument picks among loops emitted for (codec, rows).

    With a ``codec``, a constant, the intrinsic takes that one before the others.
    """

    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Value:
        pick, *rest = arguments if codec is None else arguments[1:]
        done = builder.append_basic_block("done")
        switch = builder.switch(pick, done)
        for value, (c, r) in variants.items():
            block = builder.append_basic_block(f"{name}_{c}_{r}")
            switch.add_case(integer(value), block)
            builder.position_at_end(block)
            builder.call(_function(builder.module, name, emit, kinds, c, r, _wide(context)), rest)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    given = [types.int64, *(types.float32 if kind is F32 else types.int64 for kind in kinds)]
    return types.void(*([] if codec is None else [codec]), *given), codegen


def _by_rows(codec: int = 0) -> dict[int, tuple[int, int]]:
    return {rows: (codec, rows) for rows in range(1, MAX_ROWS + 1)}


SCORES_KINDS = [I64] * 5 + [F32, I64, I64]
ACCUMULATE_KINDS = [I64] * 9


@intrinsic(prefer_literal=True)
def scores(
    _typing: Any,
    codec: Any,
    rows: Any,
    q: Any,
    k: Any,
    k_stride: Any,
    channels: Any,
    vectors: Any,
    mult: Any,
    init: Any,
    s: Any,
) -> Typed | None:
    if not isinstance(codec, types.IntegerLiteral):
        return None  # each codec is compiled by itself, when first met
    return _switch("scores", _emit_scores, SCORES_KINDS, _by_rows(codec.literal_value), codec)


@intrinsic(prefer_literal=True)
def accumulate(
    _typing: Any,
    codec: Any,
    rows: Any,
    v: Any,
    v_stride: Any,
    begin: Any,
    end: Any,
    vectors: Any,
    weights: Any,
    group_stride: Any,
    corr: Any,
    out: Any,
) -> Typed | None:
    if not isinstance(codec, types.IntegerLiteral):
        return None
    return _switch("accumulate", _emit_accumulate, ACCUMULATE_KINDS, _by_rows(codec.literal_value), codec)


@intrinsic
def dequantize(
    _typing: Any,
    codec: Any,
    src: Any,
    src_stride: Any,
    count: Any,
    vectors: Any,
    dst: Any,
    dst_stride: Any,
    params: Any,
    outer: Any,
    inner: Any,
    mult: Any,
) -> Typed:
    variants = {codec.index: (codec.index, 0) for codec in _STORED}
    return _switch("dequantize", _emit_dequantize, [I64] * 9 + [F32], variants)


@intrinsic
def premultiply(_typing: Any, rows: Any, q: Any, params: Any, channels: Any, scaled: Any, init: Any) -> Typed:
    return _switch("premultiply", _emit_premultiply, [I64] * 5, _by_rows())


@intrinsic
def split_params(_typing: Any, groups: Any, params: Any, tokens: Any, scales: Any, minima: Any) -> Typed:
    return _switch("split_params", _emit_split_params, [I64] * 4, _by_rows())


@intrinsic
def weigh(
    _typing: Any,
    rows: Any,
    p: Any,
    scales: Any,
    minima: Any,
    tokens: Any,
    groups: Any,
    corr: Any,
    weights: Any,
    group_stride: Any,
    rest: Any,
) -> Typed:
    return _switch("weigh", _emit_weigh, [I64] * 9, _by_rows())


@intrinsic
def softmax(_typing: Any, rows: Any, vectors: Any, s: Any, lo: Any, hi: Any, m: Any, sums: Any, corr: Any) -> Typed:
    kinds = [I64] * 8

    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Value:
        builder.call(_function(builder.module, "softmax", _emit_softmax, kinds, 0, 0, False), arguments)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


def _call_address(kinds: list[Any]) -> Typed:
    """An intrinsic calling the C function ``void f(int64 rows, ...)`` whose address is its first argument."""

    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Value:
        kind = ir.FunctionType(ir.VoidType(), [I64, *kinds])
        builder.call(builder.inttoptr(arguments[0], ir.PointerType(kind)), arguments[1:])
        return context.get_dummy_value()

    given = (types.float32 if kind is F32 else types.int64 for kind in kinds)
    return types.void(types.int64, types.int64, *given), codegen


@intrinsic
def call_scores(
    _typing: Any,
    address: Any,
    rows: Any,
    q: Any,
    k: Any,
    k_stride: Any,
    channels: Any,
    vectors: Any,
    mult: Any,
    init: Any,
    s: Any,
) -> Typed:
    return _call_address(SCORES_KINDS)


@intrinsic
def call_accumulate(
    _typing: Any,
    address: Any,
    rows: Any,
    v: Any,
    v_stride: Any,
    begin: Any,
    end: Any,
    vectors: Any,
    weights: Any,
    group_stride: Any,
    corr: Any,
    out: Any,
) -> Typed:
    return _call_address(ACCUMULATE_KINDS)


@intrinsic
def prefetch(_typing: Any, address: Any, size: Any) -> Typed:
    """Ask for the cache lines of ``size`` bytes from a 64-byte aligned address."""

    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Value:
        module, name = builder.module, "kvattention_prefetch"
        if name not in module.globals:
            function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64, I64]), name)
            function.linkage = "linkonce_odr"
            _emit_prefetch(function)
        builder.call(module.globals[name], arguments)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _emit_prefetch(function: Function) -> None:
    e = Emitter(function)
    address, size = function.args
    bytes_pointer = ir.PointerType(I8)
    kind = ir.FunctionType(ir.VoidType(), [bytes_pointer, I32, I32, I32])
    name = "llvm.prefetch.p0"
    instruction = function.module.globals.get(name) or ir.Function(function.module, kind, name)
    read, near, data = ir.Constant(I32, 0), ir.Constant(I32, 3), ir.Constant(I32, 1)
    with e.loop(integer(0), size, 64) as offset:
        e.b.call(instruction, [e.b.inttoptr(e.at(address, offset), bytes_pointer), read, near, data])
    e.finish()


@intrinsic
def fetch_add(_typing: Any, address: Any, amount: Any) -> Typed:
    """Atomically add to the int64 at an address; returns the value before."""

    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Value:
        pointer = builder.inttoptr(arguments[0], ir.PointerType(I64))
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def half_bits(_typing: Any, x: Any) -> Typed:
    """The fp16 bits of a float32, rounded to nearest even, as int16."""

    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Value:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), I16)

    return types.int16(types.float32), codegen


@intrinsic
def half_value(_typing: Any, bits: Any) -> Typed:
    """The float32 value of fp16 bits (int16)."""

    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Value:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), F32)

    return types.float32(types.int16), codegen


@intrinsic
def float_bits(_typing: Any, x: Any) -> Typed:
    """The bits of a float32, as uint32."""

    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Value:
        return builder.bitcast(arguments[0], I32)

    return types.uint32(types.float32), codegen


@intrinsic
def float_value(_typing: Any, bits: Any) -> Typed:
    """The float32 with the given bits (uint32)."""

    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Value:
        return builder.bitcast(arguments[0], F32)

    return types.float32(types.uint32), codegen


@intrinsic
def pointer(_typing: Any, address: Any) -> Typed:
    """A void pointer from an address (int64), for `numba.carray`."""

    def codegen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Value:
        return builder.inttoptr(arguments[0], ir.PointerType(I8))

    return types.voidptr(types.int64), codegen
