# SPDX-License-Identifier: Apache-2.0
"""Forward for windows that fit in registers: one thread owns one row and a few columns.

All loads of a window are issued before the first use, at addresses that are valid for every thread,
so no branch stands between the prefix search and the loads.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute import arch

from aot.kernels import arithmetic as ar
from aot.kernels import bf16
from aot.kernels.launchable import launchable
from aot.kernels.memory import Matrix
from aot.kernels.ptx import select
from aot.kernels.segments import LOG2_WARP, WARP, Pack, find_row
from aot.kernels.window import Window
from aot.variants import Variant

# What makes a sum of cheap exponentials times values exact enough; see `_pool`.
TRUSTED = 2.0**-13
NEAR = -8.0


def entry(variant: Variant) -> tuple[Any, Any, list[Any]]:
    """(kernel, host function, sample arguments) of a forward variant, for the compiler."""
    window = Window(variant.ratio, variant.coff, variant.columns)
    threads, each = variant.threads, variant.rows

    @cute.kernel
    def forward(
        kv: cute.Pointer,
        score: cute.Pointer,
        ape: cute.Pointer,
        cu_seqlens: cute.Pointer,
        cu_seqlens_comp: cute.Pointer,
        out: cute.Pointer,
        kv_stride: Int64,
        score_stride: Int64,
        out_stride: Int64,
        tokens: Int32,
        segments: Int32,
        rows: Int32,
        head_dim: Int32,
        lanes_log2: Int32,
    ) -> None:
        thread, _, _ = arch.thread_idx()
        row_block, column_tile, _ = arch.block_idx()
        column_lane = thread & ((Int32(1) << lanes_log2) - 1)
        wanted_column = ((column_tile << lanes_log2) + column_lane) * window.columns
        column = min(wanted_column, head_dim - window.columns)
        kv, score, out = Matrix(kv, kv_stride), Matrix(score, score_stride), Matrix(out, out_stride)
        pack = Pack(cu_seqlens, cu_seqlens_comp, segments, tokens, rows)

        # A thread takes `each` consecutive rows, and so do a warp's threads together: of several,
        # its lanes look one up each. Threads past the edge repeat its loads and store nothing.
        last_row = Uint32(rows - 1)
        block_row = Uint32(row_block) * ((Uint32(threads) >> Uint32(lanes_log2)) * each)
        wanted_row = block_row + Uint32(thread >> lanes_log2) * each
        warp_row = min(block_row + Uint32((thread & -WARP) >> lanes_log2) * each, last_row)
        active_columns = wanted_column < head_dim
        if cutlass.const_expr(each == 1):
            bias = window.load_ape(ape, head_dim, column)
            row, warp_row = Int32(min(wanted_row, last_row)), Int32(warp_row)
            several = lanes_log2 < LOG2_WARP
            token, first, _ = find_row(
                pack, row, warp_row, several, pack.glance(warp_row), pack.real_rows(), window.ratio
            )
            kv_words = window.load(kv, token, first, head_dim, column, variant.once)
            score_words = window.load(score, token, first, head_dim, column, variant.once)
            word = _pool_row(window, first, kv_words, score_words, bias)
            if (wanted_row <= last_row) & active_columns:
                arch.store(out.at(row, column), word)
        else:
            pool_rows(
                window, each, variant.once, pack, wanted_row, Int32(warp_row), last_row, kv, score, ape, out,
                head_dim, column, active_columns,
            )  # fmt: skip

    return launchable(forward, variant)


@cute.jit
def pool_rows(
    window: cutlass.Constexpr,
    each: cutlass.Constexpr,
    once: cutlass.Constexpr,
    pack: Pack,
    wanted_row: Uint32,
    warp_row: Int32,
    last_row: Uint32,
    kv: Matrix,
    score: Matrix,
    ape: cute.Pointer,
    out: Matrix,
    head_dim: Int32,
    column: Int32,
    active_columns: Boolean,
) -> None:
    """Pools a thread's `each` rows from `wanted_row` on. The warp's lanes look one up each."""
    sought = Int32(min(Uint32(warp_row) + Uint32(arch.lane_idx()), last_row))
    places = find_row(
        pack, sought, warp_row, Boolean(True), pack.glance(warp_row), pack.real_rows(),
        window.ratio,
    )  # fmt: skip
    for _ in cutlass.range(each, unroll=1):
        row = Int32(min(wanted_row, last_row))
        lane = (row - warp_row) % WARP
        token = arch.shuffle_sync(places[0], lane)
        first = arch.shuffle_sync(places[1], lane)
        bias = window.load_ape(ape, head_dim, column)
        word = bf16.WORD[window.columns](0)
        if (window.coff == 2) & (first != 0):
            own = cutlass.const_expr(range(window.positions - window.ratio, window.positions))
            kv_words = window.load_some(own, kv, token, head_dim, column, once)
            score_words = window.load_some(own, score, token, head_dim, column, once)
            word = _pool_positions(window, score_words, kv_words, bias[own.start :])
        else:
            every = cutlass.const_expr(range(window.positions))
            kv_words = window.load_some(every, kv, token, head_dim, column, once)
            score_words = window.load_some(every, score, token, head_dim, column, once)
            word = _pool_positions(window, score_words, kv_words, bias)
        if (wanted_row <= last_row) & active_columns:
            arch.store(out.at(row, column), word)
        wanted_row = wanted_row + 1


@cute.jit
def _pool_row(
    window: cutlass.Constexpr, first: Int32, kv_words: list, score_words: list, bias: list
) -> Any:
    """The pooled columns as one word. A first block pools its own half alone."""
    word = bf16.WORD[window.columns](0)
    if (window.coff == 2) & (first != 0):
        own = cutlass.const_expr(window.positions - window.ratio)
        word = _pool_positions(window, score_words[own:], kv_words[own:], bias[own:])
    else:
        word = _pool_positions(window, score_words, kv_words, bias)
    return word


def _pool_positions(window: Window, score_words: list, kv_words: list, bias: list) -> Any:
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
