# SPDX-License-Identifier: Apache-2.0
"""Pooling of windows in registers: cheap where that is exact enough, careful elsewhere."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Uint32

from aot.kernels import arithmetic as ar
from aot.kernels import bf16
from aot.kernels.ptx import select
from aot.kernels.window import Window

# What makes a sum of cheap exponentials times values exact enough; see `_pool`.
TRUSTED = 2.0**-13
NEAR = -8.0


def pool(window: Window, score_words: list, kv_words: list, bias: list) -> Any:
    """The pooled columns of these positions as one word. bias: their APE, [position][column]."""
    scores = window.scores(score_words, bias)
    values = window.values(kv_words)
    largest = bf16.largest_magnitudes(kv_words, window.columns)
    by_column = [list(column) for column in zip(*scores, strict=True)]
    pooled = _pool(by_column, [list(column) for column in zip(*values, strict=True)], largest)
    return bf16.pack(pooled)


@cute.jit
def _pool(scores: list, values: list, largest: list) -> list:
    """Per column sum(e * value) / sum(e) with e = exp(score - max score).

    scores, values: [column][position]; largest: max |value| of each column.

    The cheap exponential of x is off by 2**-24 |x| of itself beyond 2**-22. Since e**x |x| < 0.37,
    that adds up to less than 2**-21 * largest on sum(e * value): it hides in the rounding of any
    sum above TRUSTED * largest. It also does where every x is at least NEAR, whatever cancels.
    The few other columns, and those that overflow, are done again with the full-precision
    exponential, and with weights divided by the window's length, so that no partial sum exceeds
    the largest value.
    """
    columns = range(len(scores))
    shifted = [ar.below_maximum(scores[v]) for v in columns]
    sums = [_sums([ar.exp_approx(x) for x in shifted[v]], values[v]) for v in columns]
    sizes = [_magnitude(pooled) for pooled, _ in sums]
    finite = [size < Float32(float("inf")) for size in sizes]
    done = [
        (size >= most * Float32(TRUSTED)) & fits
        for size, most, fits in zip(sizes, largest, finite, strict=True)
    ]
    results = cute.make_rmem_tensor((len(scores),), Float32)
    for v in cutlass.range_constexpr(len(scores)):
        results[v] = sums[v][0] * ar.rcp_approx(sums[v][1])
    if not _all(done):
        near = [(ar.least(shifted[v]) >= Float32(NEAR)) & finite[v] for v in columns]
        settled = [done[v] | near[v] for v in columns]
        if not _all(settled):
            log2_positions = len(scores[0]).bit_length() - 1
            for v in cutlass.range_constexpr(len(scores)):
                weights = [ar.exp_over(x, log2_positions) for x in shifted[v]]
                pooled, total = _sums(weights, values[v])
                results[v] = select(settled[v], results[v], pooled * ar.rcp_approx(total))
    return [results[v] for v in range(len(scores))]


def _sums(weights: list[Float32], values: list[Float32]) -> tuple[Float32, Float32]:
    """(sum of weight * value, sum of weights), in order."""
    pooled, total = ar.mul_rn(weights[0], values[0]), weights[0]
    for e, value in zip(weights[1:], values[1:], strict=True):
        pooled = ar.fma_rn(e, value, pooled)
        total = total + e
    return pooled, total


def _magnitude(x: Float32) -> Float32:
    return (x.bitcast(Uint32) & Uint32(0x7FFFFFFF)).bitcast(Float32)


def _all(conditions: list[Boolean]) -> Boolean:
    every = conditions[0]
    for condition in conditions[1:]:
        every = every & condition
    return every
