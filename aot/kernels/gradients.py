# SPDX-License-Identifier: Apache-2.0
"""Gradients of a window in registers: each product and sum is R's own, bit for bit."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32
from cutlass.cute import arch

from aot.kernels import arithmetic as ar
from aot.kernels import bf16
from aot.kernels.ptx import select
from aot.kernels.window import Window

# Quotients e / total are exact by one fma correction down to e = 2**-104; exp(-69) is 2**-99.5.
LEAST_EXPONENT = -69.0


def differentiate_row(
    window: Window,
    scores: list,
    values: list,
    grads: list[Float32],
    first: Int32,
    add: Callable[[int, int, Float32], None],
) -> tuple[list, list]:
    """(gradients of kv, gradients of score) as [position][pair of columns] words of bf16.

    Gives the latter, unrounded, to `add`, with their position and column. Columns go two at a time
    and are rounded at once, so that few fp32 gradients are alive together.
    """
    to_kv: list[list] = [[] for _ in range(window.positions)]
    to_score: list[list] = [[] for _ in range(window.positions)]
    for start in range(0, window.columns, 2):
        columns = range(start, min(start + 2, window.columns))
        pair = [
            _differentiate(
                _softmax(window, [row[v] for row in scores], first),
                [row[v] for row in values],
                grads[v],
            )
            for v in columns
        ]
        for k in range(window.positions):
            to_kv[k].append(bf16.pack([of_kv[k] for of_kv, _ in pair]))
            to_score[k].append(bf16.pack([of_score[k] for _, of_score in pair]))
            for v, (_, of_score) in zip(columns, pair, strict=True):
                add(k, v, of_score[k])
    return to_kv, to_score


def _differentiate(probabilities: list, values: list, grad: Float32) -> tuple[list, list]:
    """One column: (gradients of kv, gradients of score), fp32, one per position."""
    upstream = [ar.mul_rn(grad, value) for value in values]
    terms = [ar.mul_rn(u, p) for u, p in zip(upstream, probabilities, strict=True)]
    dot = terms[0]
    for t in terms[1:]:
        dot = dot + t
    to_kv = [ar.mul_rn(grad, p) for p in probabilities]
    to_score = [ar.fma_rn(-p, dot, t) for p, t in zip(probabilities, terms, strict=True)]
    return to_kv, to_score


def _softmax(window: Window, scores: list[Float32], first: Int32) -> list[Float32]:
    """R's probabilities of one column."""
    exponents = ar.below_maximum(scores)
    weights = [ar.exp(x) for x in exponents]
    total = weights[0]
    for e in weights[1:]:
        total = total + e
    own = window.positions - window.ratio
    least = ar.least(exponents[own:])
    if own > 0:
        previous = select(first != 0, Float32(0.0), ar.least(exponents[:own]))
        least = arch.fmin(least, previous)
    return _quotients(weights, total, least)


@cute.jit
def _quotients(weights: list, total: Float32, least: Float32) -> list:
    """IEEE quotients weight / total, for a total of 0, NaN or in [1, 2**24].

    least: of the exponents that the weights come from.

    By the correctly rounded reciprocal and one correction (Markstein), which is exact unless a
    weight is so small that the correction's remainder underflows. Then by the reciprocal in fp64:
    its relative error stays under 2**-51, and a quotient of two fp32 comes no closer than 2**-50
    to a value halfway between two fp32, subnormals included.
    """
    reciprocal = ar.reciprocal(total)
    quotients = cute.make_rmem_tensor((len(weights),), Float32)
    for k in cutlass.range_constexpr(len(weights)):
        near = ar.mul_rn(weights[k], reciprocal)
        rest = ar.fma_rn(-near, total, weights[k])
        quotients[k] = ar.fma_rn(rest, reciprocal, near)
    if least < LEAST_EXPONENT:
        error = Float64(ar.fma_rn(-reciprocal, total, Float32(1.0)))
        exact = Float64(reciprocal) * (error * error + error) + Float64(reciprocal)
        for k in cutlass.range_constexpr(len(weights)):
            quotients[k] = Float32(Float64(weights[k]) * exact)
    return [quotients[k] for k in range(len(weights))]
