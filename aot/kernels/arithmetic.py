# SPDX-License-Identifier: Apache-2.0
"""Scalar arithmetic whose rounding the results depend on.

The compiler fuses `x * y + z` where it can. Products that Reference R rounds on their own go
through `mul_rn`, which it cannot see into; sums of them are then safe to write with `+`.
"""

from typing import Any, TypeVar

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint16, Uint32, Uint64
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith as mlir_arith
from cutlass._mlir.dialects import llvm
from cutlass.cute import arch
from cutlass.cutlass_dsl import T, dsl_user_op

Scalar = TypeVar("Scalar", bound=Any)

LOWEST = -3.4028234663852886e38  # the lowest finite fp32, where every running maximum starts
NEGATIVE_INFINITY_BF16X4 = 0xFF80FF80FF80FF80
LOG2_E = 1.4426950408889634
LOG2_E_LOW = 1.925963033500011e-08  # log2(e) less its fp32 rounding


def mul_rn(a: Float32, b: Float32) -> Float32:
    """`a * b` rounded to nearest even, never contracted into a following addition."""
    return _asm("mul.rn.f32 $0, $1, $2;", "=f,f,f", (a, b))


def fma_rn(a: Float32, b: Float32, c: Float32) -> Float32:
    """`a * b + c` with one rounding."""
    return _asm("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", (a, b, c))


def rcp_approx(a: Float32) -> Float32:
    """The reciprocal to one unit in the last place."""
    return _asm("rcp.approx.ftz.f32 $0, $1;", "=f,f", (a,))


def reciprocal(a: Float32) -> Float32:
    """The correctly rounded reciprocal of a number in [2**-24, 2**24]; of 0 it is NaN."""
    guess = rcp_approx(a)
    return fma_rn(fma_rn(-a, guess, Float32(1.0)), guess, guess)


def pack_bf16x2(low: Float32, high: Float32) -> Uint32:
    """Two fp32 rounded to nearest-even bf16, `low` in the low half."""
    return _asm_b32("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", (high, low))


@dsl_user_op
def _asm_b32(
    text: str, constraints: str, operands: tuple, *, loc: Any = None, ip: Any = None
) -> Uint32:
    values = [v.ir_value(loc=loc, ip=ip) for v in operands]
    return Uint32(
        llvm.inline_asm(T.i32(), values, text, constraints, has_side_effects=False, loc=loc, ip=ip)
    )


@dsl_user_op
def _asm(
    text: str, constraints: str, operands: tuple, *, loc: Any = None, ip: Any = None
) -> Float32:
    # No side effects: the compiler may schedule and drop it like any other instruction.
    values = [Float32(v).ir_value(loc=loc, ip=ip) for v in operands]
    return Float32(
        llvm.inline_asm(T.f32(), values, text, constraints, has_side_effects=False, loc=loc, ip=ip)
    )


def exp(x: Float32) -> Float32:
    """CUDA's full-precision expf, which is what R and torch's softmax use."""
    return cute.math.exp(x)


def exp_approx(x: Float32) -> Float32:
    """e**x to a relative 2**-22 + 2**-24 |x|; results below 2**-126 are flushed to zero."""
    return _asm("ex2.approx.ftz.f32 $0, $1;", "=f,f", (mul_rn(x, Float32(LOG2_E)),))


def exp_over(x: Float32, log2_divisor: int) -> Float32:
    """expf(x) / 2**log2_divisor for x <= 0, as accurate as expf and at its cost.

    x * log2(e) splits into an integer, whose floor lands in the exponent field of a float through
    the rounding of a large addend, and a fraction for `ex2`. Lowering the integer before that
    rounding divides the result at no cost. -inf gives 0, NaN gives NaN, subnormals are kept.
    """
    magic = 12582912.0  # 1.5 * 2**23: adding it leaves an integer in the low bits
    clamped = _asm(
        "fma.rn.sat.f32 $0, $1, $2, $3;",
        "=f,f,f,f",
        (x, Float32(LOG2_E / 252.0), Float32((126.0 - log2_divisor) / 252.0)),
    )
    integer = _asm(
        "fma.rm.f32 $0, $1, $2, $3;", "=f,f,f,f", (clamped, Float32(252.0), Float32(magic + 1.0))
    )
    power = (integer.bitcast(Uint32) << 23).bitcast(Float32)
    negated = Float32(magic + 127.0 - log2_divisor) - integer
    fraction = fma_rn(x, Float32(LOG2_E), negated)
    fraction = fma_rn(x, Float32(LOG2_E_LOW), fraction)
    return mul_rn(_asm("ex2.approx.ftz.f32 $0, $1;", "=f,f", (fraction,)), power)


def largest(values: list[Float32]) -> Float32:
    """The maximum from LOWEST on; NaN is ignored."""
    most = Float32(LOWEST)
    for value in values:
        most = arch.fmax(most, value)
    return most


def least(values: list[Float32]) -> Float32:
    """The minimum; NaN is ignored."""
    lowest = values[0]
    for value in values[1:]:
        lowest = arch.fmin(lowest, value)
    return lowest


def below_maximum(scores: list[Float32]) -> tuple[list[Float32], Float32]:
    """(scores less their maximum, the maximum)."""
    most = largest(scores)
    return [s - most for s in scores], most


# `columns` adjacent bf16 travel as one unsigned word of 16 * columns bits.
WORD = {1: Uint16, 2: Uint32, 4: Uint64}


def halves(word: Any, columns: int) -> list:
    """A word's 32-bit pieces of at most two bf16, lowest address first."""
    if columns == 1:
        return [Uint32(word)]
    if columns == 2:
        return [word]
    return [Uint32(word & Uint64(0xFFFFFFFF)), Uint32(word >> 32)]


def unpack_bf16(word: Any, columns: int) -> list[Float32]:
    """The fp32 values of `columns` adjacent bf16, lowest address first."""
    values = []
    for half in halves(word, columns):
        values.append((half << 16).bitcast(Float32))
        values.append((half & Uint32(0xFFFF0000)).bitcast(Float32))
    return values[:columns]


def largest_magnitudes(words: list, columns: int) -> list[Float32]:
    """Largest |value| over words of bf16, per column, at half an instruction an element."""
    largest = []
    for pieces in zip(*(halves(word, columns) for word in words), strict=True):
        folded = _abs_bf16x2(pieces[0])
        for piece in pieces[1:]:
            folded = _max_bf16x2(folded, _abs_bf16x2(piece))
        largest += unpack_bf16(folded, 2)
    return largest[:columns]


def _abs_bf16x2(a: Uint32) -> Uint32:
    return _asm_b32("abs.bf16x2 $0, $1;", "=r,r", (a,))


def _max_bf16x2(a: Uint32, b: Uint32) -> Uint32:
    return _asm_b32("max.bf16x2 $0, $1, $2;", "=r,r,r", (a, b))


def round_to_bf16(values: list[Float32]) -> Any:
    """One or two adjacent bf16 as one word, each rounded once."""
    if len(values) == 1:
        return Uint16(pack_bf16x2(values[0], Float32(0.0)) & Uint32(0xFFFF))
    return pack_bf16x2(values[0], values[1])


def join(words: list) -> Any:
    """One or two adjacent words as one, lowest address first."""
    if len(words) == 1:
        return words[0]
    return Uint64(words[0]) | (Uint64(words[1]) << 32)


@dsl_user_op
def load_f32(
    pointer: cute.Pointer, count: int, *, loc: Any = None, ip: Any = None
) -> list[Float32]:
    """`count` adjacent fp32 in one access."""
    if count == 1:
        return [arch.load(pointer, Float32)]
    vector = arch.load(pointer, ir.VectorType.get([count], T.f32()))
    return [
        Float32(llvm.extractelement(vector, Int32(i).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))
        for i in range(count)
    ]


@dsl_user_op
def store_f32(
    pointer: cute.Pointer, values: list[Float32], *, loc: Any = None, ip: Any = None
) -> None:
    """Adjacent fp32 in one access."""
    if len(values) == 1:
        arch.store(pointer, values[0])
        return
    vector = llvm.mlir_undef(ir.VectorType.get([len(values)], T.f32()), loc=loc, ip=ip)
    for i, value in enumerate(values):
        index = Int32(i).ir_value(loc=loc, ip=ip)
        vector = llvm.insertelement(vector, value.ir_value(), index, loc=loc, ip=ip)
    arch.store(pointer, vector)


def select(condition: Boolean, chosen: Scalar, otherwise: Scalar) -> Scalar:
    """`chosen` where the condition holds, else `otherwise`, without a branch."""
    return type(otherwise)(
        mlir_arith.select(condition.ir_value(), chosen.ir_value(), otherwise.ir_value())
    )


def scale_bf16(word: Any, columns: int, power: int) -> Any:
    """Every bf16 of a word times 2**power, two at a time; exact but for subnormals."""
    factor = Uint32((127 + power) << 7 | (127 + power) << 23)
    minus_zero = Uint32(0x80008000)
    scaled = [
        _asm_b32("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", (piece, factor, minus_zero))
        for piece in halves(word, columns)
    ]
    return Uint16(scaled[0] & Uint32(0xFFFF)) if columns == 1 else join(scaled)


def copy_async_16(target: cute.Pointer, source: cute.Pointer) -> None:
    """Starts copying 16 bytes, both ends aligned, from global to shared memory."""
    arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", read_only_args=[target, source]
    )
