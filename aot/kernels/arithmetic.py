# SPDX-License-Identifier: Apache-2.0
"""fp32 arithmetic whose rounding the results depend on.

The compiler fuses `x * y + z` where it can. Products that Reference R rounds on their own go
through `mul_rn`, which it cannot see into; sums of them are then safe to write with `+`.
"""

import cutlass.cute as cute
from cutlass import Float32, Uint32
from cutlass.cute import arch

from aot.kernels.ptx import ptx

LOWEST = -3.4028234663852886e38  # the lowest finite fp32, where every running maximum starts
LOG2_E = 1.4426950408889634
LOG2_E_LOW = 1.925963033500011e-08  # log2(e) less its fp32 rounding


def mul_rn(a: Float32, b: Float32) -> Float32:
    """`a * b` rounded to nearest even, never contracted into a following addition."""
    return ptx(Float32, "mul.rn.f32", a, b)


def fma_rn(a: Float32, b: Float32, c: Float32) -> Float32:
    """`a * b + c` with one rounding."""
    return ptx(Float32, "fma.rn.f32", a, b, c)


def rcp_approx(a: Float32) -> Float32:
    """The reciprocal to one unit in the last place."""
    return ptx(Float32, "rcp.approx.ftz.f32", a)


def reciprocal(a: Float32) -> Float32:
    """The correctly rounded reciprocal of a number in [2**-24, 2**24]; of 0 it is NaN."""
    near = rcp_approx(a)
    return fma_rn(fma_rn(-a, near, Float32(1.0)), near, near)


def exp(x: Float32) -> Float32:
    """CUDA's full-precision expf, which is what R and torch's softmax use."""
    return cute.math.exp(x)


def exp_approx(x: Float32) -> Float32:
    """e**x to a relative 2**-22 + 2**-24 |x|; results below 2**-126 are flushed to zero."""
    return _exp2_approx(mul_rn(x, Float32(LOG2_E)))


def exp_over(x: Float32, log2_divisor: int) -> Float32:
    """expf(x) / 2**log2_divisor for x <= 0, as accurate as expf and at its cost.

    x * log2(e) splits into an integer, whose floor lands in the exponent field of a float through
    the rounding of a large addend, and a fraction for `ex2`. Lowering the integer before that
    rounding divides the result at no cost. -inf gives 0, NaN gives NaN, subnormals are kept.
    """
    magic = 12582912.0  # 1.5 * 2**23: adding it leaves an integer in the low bits
    scale, offset = Float32(LOG2_E / 252.0), Float32((126.0 - log2_divisor) / 252.0)
    clamped = ptx(Float32, "fma.rn.sat.f32", x, scale, offset)
    integer = ptx(Float32, "fma.rm.f32", clamped, Float32(252.0), Float32(magic + 1.0))
    power = (integer.bitcast(Uint32) << 23).bitcast(Float32)
    negated = Float32(magic + 127.0 - log2_divisor) - integer
    fraction = fma_rn(x, Float32(LOG2_E), negated)
    fraction = fma_rn(x, Float32(LOG2_E_LOW), fraction)
    return mul_rn(_exp2_approx(fraction), power)


def largest(values: list[Float32]) -> Float32:
    """The maximum of the values and LOWEST; NaN is ignored."""
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


def sum_in_pairs(values: list[Float32]) -> Float32:
    """The sum: of neighbours, then of neighbouring sums; a short chain, and little is rounded."""
    while len(values) > 1:
        last = values[-1:] if len(values) % 2 else []
        values = [a + b for a, b in zip(values[::2], values[1::2], strict=False)] + last
    return values[0]


def below_maximum(scores: list[Float32]) -> list[Float32]:
    """The scores less their maximum."""
    most = largest(scores)
    return [s - most for s in scores]


def _exp2_approx(x: Float32) -> Float32:
    return ptx(Float32, "ex2.approx.ftz.f32", x)
