# SPDX-License-Identifier: Apache-2.0
"""Forward for long windows: one pass over a row's window, split over the warps of a block.

Each warp pools a run of tokens in each half of one row's window for 32 * columns columns, with a
running maximum that is updated once a batch. The warps' partial (maximum, sum of weights, weighted
sum) are merged in ascending order through shared memory.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute import arch

from aot.kernels import arithmetic as ar
from aot.kernels import bf16
from aot.kernels.launchable import launchable
from aot.kernels.memory import Matrix
from aot.kernels.segments import WARP, Pack, find_row
from aot.kernels.window_long import LongWindow
from aot.variants import Variant


def entry(variant: Variant) -> tuple[Any, Any, list[Any]]:
    """(kernel, host function, sample arguments) of a forward variant, for the compiler."""
    warps = variant.threads // WARP
    window = LongWindow(variant.ratio, variant.coff, variant.columns, warps, variant.batch)
    tile = window.tile
    table = warps * tile

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
        row, column_tile, _ = arch.block_idx()
        lane, warp = thread % WARP, arch.make_warp_uniform(thread // WARP)
        column = min((column_tile * WARP + lane) * window.columns, head_dim - window.columns)

        pack = Pack(cu_seqlens, cu_seqlens_comp, segments, tokens, rows)
        token, first, _ = find_row(
            pack, row, row, Boolean(False), pack.glance(row), pack.real_rows(), window.ratio
        )

        highest = cute.make_rmem_tensor((window.columns,), Float32)
        total = cute.make_rmem_tensor((window.columns,), Float32)
        pooled = cute.make_rmem_tensor((window.columns,), Float32)
        highest.fill(ar.LOWEST)
        total.fill(0.0)
        pooled.fill(0.0)
        # In a first block half 0 does not exist. The same code serves either half where a batch
        # fits one; else both travel together.
        tensors = Matrix(score, score_stride), Matrix(kv, kv_stride), ape
        place = token, warp, column, head_dim
        sums = highest, total, pooled
        if cutlass.const_expr(window.coff == 1):
            _pool(window, (0,), place, tensors, sums)
        elif cutlass.const_expr(window.batch <= window.run):
            for half in cutlass.range(first, 2, unroll=1):
                _pool(window, (half,), place, tensors, sums)
        elif first != 0:
            _pool(window, (1,), place, tensors, sums)
        else:
            _pool(window, (0, 1), place, tensors, sums)

        # Three tables, [warp][column of the tile]: maxima, sums of weights, weighted sums.
        base = arch.alloc_smem(Float32, 3 * table)
        for v in cutlass.range_constexpr(window.columns):
            at = base + (warp * tile + lane * window.columns + v)
            arch.store(at, highest[v], ss="cta")
            arch.store(at + table, total[v], ss="cta")
            arch.store(at + 2 * table, pooled[v], ss="cta")
        arch.sync_threads()
        if thread < tile:
            column = column_tile * tile + thread
            if column < head_dim:
                result = _merge(window, base + thread, tile, table)
                arch.store(Matrix(out, out_stride).at(row, column), bf16.pack([result]))

    return launchable(forward, variant)


def _pool(
    window: LongWindow,
    halves: tuple[int | Int32, ...],
    place: tuple[Int32, Int32, Int32, Int32],
    tensors: tuple[Matrix, Matrix, cute.Pointer],
    sums: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
) -> None:
    """Folds a thread's positions in these halves into its sums, a batch at a time.

    place: the block's token, the warp, the thread's first column, head_dim. tensors: score, kv and
    ape.
    """
    token, warp, column, head_dim = place
    score, kv, ape = tensors
    count = min(window.run, window.batch)
    row = warp * window.run
    parts = [
        (window.token(token, warp, half), column + half * head_dim, begin)
        for half in halves
        for begin in range(0, window.run, count)
    ]
    for i in range(0, len(parts), window.batch // count):
        scores, values, bias = [], [], []
        for start, at, begin in parts[i : i + window.batch // count]:
            scores += window.load(score, start, begin, count, at)
            values += window.load(kv, start, begin, count, at)
            bias += window.load_ape(ape, head_dim, row, begin, count, at)
        _accumulate(window, scores, values, bias, *sums)


def _accumulate(
    window: LongWindow,
    scores: list,
    values: list,
    bias: list,
    highest: cute.Tensor,
    total: cute.Tensor,
    pooled: cute.Tensor,
) -> None:
    """Folds a batch of positions into a thread's running (maximum, total, pooled).

    Values are divided by the window's length, so that no sum exceeds the largest of them.
    """
    wide_scores = [bf16.unpack(word, window.columns) for word in scores]
    wide_values = [
        bf16.unpack(bf16.scale(word, window.columns, -window.log2_positions), window.columns)
        for word in values
    ]
    for v in range(window.columns):
        column = [row[v] + b[v] for row, b in zip(wide_scores, bias, strict=True)]
        most = ar.largest([highest[v], *column])
        weights = [ar.exp_approx(s - most) for s in column]
        kept = ar.exp_approx(highest[v] - most)
        sum_weights, sum_values = total[v] * kept, pooled[v] * kept
        for k, weight in enumerate(weights):
            sum_weights = sum_weights + weight
            sum_values = ar.fma_rn(weight, wide_values[k][v], sum_values)
        highest[v], total[v], pooled[v] = most, sum_weights, sum_values


def _merge(window: LongWindow, base: cute.Pointer, tile: int, table: int) -> Float32:
    """One column's result from the partial sums of all warps, in ascending order.

    base: the column's place in the first table, of rows of `tile` floats; the tables have `table`.
    """
    maxima = [arch.load(base + w * tile, Float32, ss="cta") for w in range(window.warps)]
    most = ar.largest(maxima)
    total, pooled = Float32(0.0), Float32(0.0)
    for w, m in enumerate(maxima):
        scale = ar.exp_approx(m - most)
        total = ar.fma_rn(arch.load(base + (table + w * tile), Float32, ss="cta"), scale, total)
        pooled = ar.fma_rn(
            arch.load(base + (2 * table + w * tile), Float32, ss="cta"), scale, pooled
        )
    return pooled * ar.rcp_approx(total) * Float32(window.positions)
