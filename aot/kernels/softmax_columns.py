# SPDX-License-Identifier: Apache-2.0
"""R's softmax of a window's scores, several columns behind one test for what is rare."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32, Uint32

from aot.kernels import arithmetic as ar
from aot.kernels.ptx import select
from aot.kernels.window import Window


def softmax(window: Window, first: Int32, scores: list[list]) -> list[list]:
    """R's probabilities, [column][position] as the scores."""
    exponents = [ar.below_maximum(of_column) for of_column in scores]
    parts = [[ar.exp_parts(x) for x in of_column] for of_column in exponents]
    fractions = [[fraction for fraction, _ in of_column] for of_column in parts]
    integers = [[integer for _, integer in of_column] for of_column in parts]
    return _probabilities(window, exponents, fractions, integers, first)


@cute.jit
def _probabilities(
    window: cutlass.Constexpr, exponents: list, fractions: list, integers: list, first: Int32
) -> list:
    """The quotients of the exponentials and their sum, IEEE.

    Mostly all exponents are moderate. Then exponentials are halved, which cancels, and quotients
    are formed by the correctly rounded reciprocal and one correction (Markstein), which is exact
    unless the correction's remainder underflows.
    """
    columns = cutlass.const_expr(range(len(exponents)))
    positions = cutlass.const_expr(range(window.positions))
    absent = cutlass.const_expr(window.positions - window.ratio)  # in a first block
    results = cute.make_rmem_tensor((len(exponents), window.positions), Float32)
    moderate = _all_bits([i for of_column in integers for i in of_column[absent:]])
    if cutlass.const_expr(absent > 0):
        previous = _all_bits([i for of_column in integers for i in of_column[:absent]])
        moderate = moderate & (previous | select(first != 0, Uint32(ar.MODERATE), Uint32(0)))
    if (moderate & ar.MODERATE) != 0:
        weights = cute.make_rmem_tensor((len(exponents), window.positions), Float32)
        unit = Uint32(ar.EXPONENT_UNIT)
        previous_unit = select(first != 0, Uint32(0), unit)
        for v in cutlass.range_constexpr(len(columns)):
            for k in cutlass.range_constexpr(len(positions)):
                of_position = previous_unit if cutlass.const_expr(k < absent) else unit
                weights[v, k] = ar.exp_halved(fractions[v][k], integers[v][k], of_position)
        for v in cutlass.range_constexpr(len(columns)):
            total = weights[v, 0]
            for k in cutlass.range_constexpr(1, len(positions)):
                total = total + weights[v, k]
            reciprocal = ar.reciprocal(total)
            for k in cutlass.range_constexpr(len(positions)):
                near = ar.mul_rn(weights[v, k], reciprocal)
                rest = ar.fma_rn(-near, total, weights[v, k])
                results[v, k] = ar.fma_rn(rest, reciprocal, near)
    else:
        for v in cutlass.range_constexpr(len(columns)):
            quotients = _any_quotients([ar.exp(x) for x in exponents[v]])
            for k in cutlass.range_constexpr(len(positions)):
                results[v, k] = quotients[k]
    return [[results[v, k] for k in positions] for v in columns]


def _all_bits(words: list[Uint32]) -> Uint32:
    """The bits that are set in all words."""
    common = words[0]
    for word in words[1:]:
        common = common & word
    return common


def _any_quotients(weights: list[Float32]) -> list[Float32]:
    """IEEE quotients weight / total, for a total of 0, NaN or in [1, 2**24].

    By the reciprocal in fp64: its relative error stays under 2**-51, and a quotient of two fp32
    comes no closer than 2**-50 to a value halfway between two fp32, subnormals included.
    """
    total = weights[0]
    for e in weights[1:]:
        total = total + e
    reciprocal = ar.reciprocal(total)
    error = Float64(ar.fma_rn(-reciprocal, total, Float32(1.0)))
    exact = Float64(reciprocal) * (error * error + error) + Float64(reciprocal)
    return [Float32(Float64(e) * exact) for e in weights]
