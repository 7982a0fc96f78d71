"""A small vocabulary for emitting LLVM IR over vectors of 16 lanes.

The kernels are written as IR because what makes them fast (one broadcast word feeding sixteen lanes, accumulators
that stay in registers) is what an auto-vectorizer does not find. LLVM maps the 16 lanes to one AVX-512 register or
two AVX2 registers, and converts fp16 with F16C; nothing here names an instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

LANES = 16

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, HALF = ir.FloatType(), ir.HalfType()
VF, VI, VH = (ir.VectorType(scalar, LANES) for scalar in (F32, I32, HALF))

Value = Any  # an llvmlite value
Function = Any  # an llvmlite function

FLOAT_BYTES = 4


def integer(value: int) -> Value:
    """An i64 constant."""
    return ir.Constant(I64, value)


def lanes_i32(values: Sequence[int]) -> Value:
    """A constant vector of i32."""
    return ir.Constant(VI, [v - (1 << 32) if v >= 1 << 31 else v for v in values])


def lanes_f32(values: Sequence[float]) -> Value:
    """A constant vector of f32."""
    return ir.Constant(VF, list(values))


class Emitter:
    """An IR builder bound to one function, with addresses as i64 byte counts."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.entry = function.append_basic_block("entry")
        body = function.append_basic_block("body")
        self.b = ir.IRBuilder(body)
        self._body = body

    def finish(self) -> None:
        """Close the function; call once, after the body."""
        self.b.ret_void()
        ir.IRBuilder(self.entry).branch(self._body)

    def variable(self, kind: Any) -> Value:
        """A stack variable, which LLVM turns into registers."""
        builder = ir.IRBuilder()
        builder.position_at_end(self.entry)
        return builder.alloca(kind)

    @contextmanager
    def loop(self, start: Value, stop: Value, step: int = 1) -> Iterator[Value]:
        """``for index in range(start, stop, step)``; yields the index."""
        b = self.b
        index = self.variable(I64)
        b.store(start, index)
        head, body, end = (self.function.append_basic_block(name) for name in ("head", "loop", "end"))
        b.branch(head)
        b.position_at_end(head)
        now = b.load(index)
        b.cbranch(b.icmp_signed("<", now, stop), body, end)
        b.position_at_end(body)
        yield now
        b.store(b.add(now, integer(step)), index)
        b.branch(head)
        b.position_at_end(end)

    def at(self, base: Value, *terms: Value | int | tuple[Value, Value | int]) -> Value:
        """``base`` plus terms in bytes; a pair is a product."""
        total = base
        for term in terms:
            if isinstance(term, tuple):
                factor = integer(term[1]) if isinstance(term[1], int) else term[1]
                term = self.b.mul(term[0], factor)
            elif isinstance(term, int):
                if term == 0:
                    continue
                term = integer(term)
            total = self.b.add(total, term)
        return total

    def load(self, address: Value, kind: Any, align: int = 1) -> Value:
        return self.b.load(self.b.inttoptr(address, ir.PointerType(kind)), align=align)

    def store(self, value: Value, address: Value, align: int = FLOAT_BYTES) -> None:
        self.b.store(value, self.b.inttoptr(address, ir.PointerType(value.type)), align=align)

    def splat(self, scalar: Value) -> Value:
        """The scalar in every lane."""
        vector = ir.VectorType(scalar.type, LANES)
        undefined = ir.Constant(vector, ir.Undefined)
        first = self.b.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(VI, [0] * LANES))

    def splat_load(self, address: Value) -> Value:
        """The float at ``address`` in every lane."""
        return self.splat(self.load(address, F32, FLOAT_BYTES))

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        """``x * y + z``, fused where the machine can."""
        module, name = self.function.module, f"llvm.fmuladd.v{LANES}f32"
        function = module.globals.get(name) or ir.Function(module, ir.FunctionType(VF, [VF] * 3), name)
        return self.b.call(function, [x, y, z])

    def permute(self, x: Value, order: Sequence[int]) -> Value:
        return self.b.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), ir.Constant(VI, list(order)))

    def fold(self, x: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """All lanes combined into one scalar, pairwise."""
        width = LANES
        while width > 1:
            width //= 2
            undefined = ir.Constant(x.type, ir.Undefined)
            half = ir.VectorType(I32, width)
            low = self.b.shuffle_vector(x, undefined, ir.Constant(half, list(range(width))))
            high = self.b.shuffle_vector(x, undefined, ir.Constant(half, list(range(width, 2 * width))))
            x = combine(low, high)
        return self.b.extract_element(x, ir.Constant(I32, 0))

    def sum(self, x: Value) -> Value:
        return self.fold(x, self.b.fadd)

    def maximum(self, x: Value, y: Value) -> Value:
        """The larger, lane by lane; y where either is NaN."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def half_to_float(self, bits: Value) -> Value:
        """Vector of i16 holding fp16 to f32."""
        return self.b.fpext(self.b.bitcast(bits, VH), VF)

    def params(self, words: Value) -> tuple[Value, Value]:
        """Vector of parameter words to (scale, minimum)."""
        narrow = ir.VectorType(I16, LANES)
        scale = self.b.trunc(words, narrow)
        minimum = self.b.trunc(self.b.lshr(words, lanes_i32([16] * LANES)), narrow)
        return self.half_to_float(scale), self.half_to_float(minimum)

    def exp2(self, x: Value) -> Value:
        """2^x for x <= 0, 0 below -125; relative error under 2e-7."""
        b = self.b
        floor = lanes_f32([-126.0] * LANES)
        clamped = self.maximum(x, floor)
        magic = lanes_f32([12582912.0] * LANES)  # 1.5 * 2^23: adding it rounds to an integer
        shifted = b.fadd(clamped, magic)
        fraction = b.fsub(clamped, b.fsub(shifted, magic))  # in [-1/2, 1/2]
        power = lanes_f32([EXP2[-1]] * LANES)
        for coefficient in reversed(EXP2[:-1]):
            power = self.fma(power, fraction, lanes_f32([coefficient] * LANES))
        exponent = b.shl(b.bitcast(shifted, VI), lanes_i32([23] * LANES))
        result = b.bitcast(b.add(b.bitcast(power, VI), exponent), VF)
        tiny = b.fcmp_ordered("<", x, lanes_f32([-125.0] * LANES))
        return b.select(tiny, lanes_f32([0.0] * LANES), result)


EXP2 = (
    1.0,
    0.6931471805599453,
    0.2402265069591007,
    0.0555041086648216,
    0.0096181291076285,
    0.0013333558146428,
    0.0001540353039338,
)
"""ln(2)^k / k!: the Taylor series, whose remainder on [-1/2, 1/2] is 1.2e-7."""
