# SPDX-License-Identifier: Apache-2.0
"""Forward for windows that fit in registers: one thread owns one row and a few columns.

All loads of the window are issued before the first use, at addresses that are valid for every
thread, so no branch stands between the prefix search and the arithmetic.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute import arch

from aot.kernels import arithmetic as ar
from aot.kernels.launchable import launchable
from aot.kernels.segments import WARP, find_row
from aot.kernels.window import Window
from aot.variants import Variant


def entry(variant: Variant):
    """(kernel, host function, sample arguments) of a forward variant, for the compiler."""
    window = Window(variant.ratio, variant.coff, variant.columns)
    threads = variant.threads

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
    ):
        thread, _, _ = arch.thread_idx()
        row_tile, column_tile, _ = arch.block_idx()
        lane = thread & ((Int32(1) << lanes_log2) - 1)
        wanted_column = ((column_tile << lanes_log2) + lane) * window.columns
        tile_row = Uint32(row_tile) * (Uint32(threads) >> Uint32(lanes_log2))
        wanted_row = tile_row + Uint32(thread >> lanes_log2)
        active = (wanted_row < Uint32(rows)) & (wanted_column < head_dim)
        # Threads past the edge repeat the edge's loads and store nothing.
        last_row = Uint32(rows - 1)
        row = Int32(min(wanted_row, last_row))
        warp_row = Int32(min(tile_row + Uint32((thread & -WARP) >> lanes_log2), last_row))
        column = min(wanted_column, head_dim - window.columns)

        bias = window.load_ape(ape, head_dim, column)
        real_rows = arch.load(cu_seqlens_comp + segments, Int32)
        token, first = find_row(
            cu_seqlens, cu_seqlens_comp, segments, tokens, row, warp_row, lanes_log2, window.ratio
        )
        padding = row >= real_rows  # pools the first tokens, as a first block
        token = ar.select(padding, Int32(0), token)
        first = ar.select(padding, Int32(1), first)

        kv_words = window.load(kv, kv_stride, token, first, head_dim, column)
        score_words = window.load(score, score_stride, token, first, head_dim, column)
        scores = window.scores(score_words, bias, first)
        values = window.values(kv_words, first)
        pooled = []
        for v in cutlass.range_constexpr(window.columns):
            pooled.append(_pool([s[v] for s in scores], [x[v] for x in values]))
        words = [
            ar.round_to_bf16(pooled[v : v + 2]) for v in range(0, window.columns, 2)
        ]
        if active:
            arch.store(out + (Int64(row) * out_stride + column), ar.join(words))

    return launchable(forward, variant)


def _pool(scores: list[Float32], values: list[Float32]) -> Float32:
    """One column: sum(e * value) / sum(e) with e = exp(score - max score).

    Every e is divided by the window's length, so that no partial sum exceeds the largest value:
    the result is finite wherever R's is.
    """
    highest = Float32(ar.LOWEST)
    for s in scores:
        highest = arch.fmax(highest, s)
    log2_positions = len(scores).bit_length() - 1
    weights = [ar.exp_over(s - highest, log2_positions) for s in scores]
    total, pooled = weights[0], ar.mul_rn(weights[0], values[0])
    for e, value in zip(weights[1:], values[1:], strict=True):
        total = total + e
        pooled = ar.fma_rn(e, value, pooled)
    return pooled * ar.rcp_approx(total)
