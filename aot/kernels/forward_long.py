# SPDX-License-Identifier: Apache-2.0
"""Forward for long windows: one pass over a row's window, split over the warps of a block.

Each warp pools consecutive positions of one row's window for 32 * columns columns, with a running
maximum that is updated once a batch. The warps' partial (maximum, sum of weights, weighted
sum) are merged in ascending order through shared memory.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute import arch

from aot.kernels import arithmetic as ar
from aot.kernels import bf16
from aot.kernels.fetch_ahead import fetch_share, whole_lines
from aot.kernels.forward_grid import column_tile_and_row_block
from aot.kernels.launchable import launchable
from aot.kernels.memory import Matrix
from aot.kernels.pair import Pair
from aot.kernels.segments import Pack, find_row, find_row_at_once
from aot.kernels.warp import WARP
from aot.kernels.window_long import LongWindow
from aot.variants import Variant

# The first blocks of an `ahead` forward's grid: 8 for each multiprocessor of an H200, each of which
# holds 3 at a time. What more of them fetched would take the place of what is about to be read.
FETCHING_BLOCKS = 1_056


def entry(variant: Variant) -> tuple[Any, Any, list[Any]]:
    """(kernel, host function, sample arguments) of a forward variant, for the compiler."""
    warps = variant.threads // WARP
    window = LongWindow(
        variant.ratio, variant.coff, variant.columns, warps, variant.batch, once=variant.once
    )
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
        column_tile, row_block = column_tile_and_row_block()
        lane, warp = thread % WARP, arch.make_warp_uniform(thread // WARP)
        column = min((column_tile * WARP + lane) * window.columns, head_dim - window.columns)

        pack = Pack(cu_seqlens, cu_seqlens_comp, segments, tokens, rows)
        row = pack.row_or_last(row_block)
        highest = cute.make_rmem_tensor((window.columns,), Float32)
        total = cute.make_rmem_tensor((window.columns,), Float32)
        pooled = cute.make_rmem_tensor((window.columns,), Float32)
        highest.fill(ar.LOWEST)
        total.fill(0.0)
        pooled.fill(0.0)
        tensors = Matrix(score, score_stride), Matrix(kv, kv_stride), ape
        sums = highest, total, pooled
        if cutlass.const_expr(variant.early):
            batch = window.registers()
            token, first = _load_early(window, pack, row, warp, column, head_dim, tensors, batch)
            batch = window.words(batch)
            token, ape_row, offset = window.share(token, first, warp, column, head_dim)
        else:
            glanced, real_rows = pack.glance(row), pack.real_rows()  # on their way meanwhile
            if cutlass.const_expr(variant.ahead):
                tiles, _, _ = arch.grid_dim()
                inputs = Pair(tensors[1], tensors[0])
                presumable = pack.presumable(window.ratio, window.coff) & whole_lines(inputs)
                if presumable & (Int64(row) * tiles < FETCHING_BLOCKS):
                    fetch_share(
                        window, inputs, row * window.ratio, column_tile * tile, head_dim, warp, lane
                    )
            token, first, _ = find_row(
                pack, row, row, Boolean(False), glanced, real_rows, window.ratio
            )
            token, ape_row, offset = window.share(token, first, warp, column, head_dim)
            batch = window.load_batch(tensors, token, ape_row, 0, offset, head_dim)
        _accumulate(window, True, batch, sums)
        _pool(window, window.batch, token, ape_row, offset, head_dim, tensors, sums)
        if cutlass.const_expr(window.coff == 2):
            if first == 0:
                run = window.run
                _pool(window, 0, token + run, ape_row + run, offset, head_dim, tensors, sums)

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


@cute.jit
def _load_early(
    window: cutlass.Constexpr,
    pack: Pack,
    row: Int32,
    warp: Int32,
    column: Int32,
    head_dim: Int32,
    tensors: tuple,
    batch: tuple,
) -> tuple[Int32, Int32]:
    """Loads a warp's first (scores, values, APE) into `batch`; a row's token and first.

    Of few segments, they are on their way from where `Pack.presumable` lets the block lie before
    the row is looked up, and are loaded again if it does not lie there.
    """
    token, first = Int32(0), Int32(1)
    if pack.few_segments() & pack.presumable(window.ratio, window.coff):
        presumed, alone = row * window.ratio, Int32(row == 0)
        window.fill(batch, tensors, presumed, alone, warp, column, head_dim)
        token, first = find_row_at_once(pack, row, window.ratio)
        wrong = token != presumed
        if cutlass.const_expr(window.coff == 2):
            wrong = wrong | (first != alone)
        if wrong:
            window.fill(batch, tensors, token, first, warp, column, head_dim)
    else:
        token, first, _ = find_row(
            pack, row, row, Boolean(False), pack.glance(row), pack.real_rows(), window.ratio
        )
        window.fill(batch, tensors, token, first, warp, column, head_dim)
    return token, first


def _pool(
    window: LongWindow,
    begin: int,
    token: Int32,
    ape_row: Int32,
    column: Int32,
    head_dim: Int32,
    tensors: tuple[Matrix, Matrix, cute.Pointer],
    sums: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
) -> None:
    """Folds a run's positions from the begin-th on into `sums`.

    token, ape_row and column are its first position's. tensors: score, kv and ape.
    """
    for k in range(begin, window.run, window.batch):
        batch = window.load_batch(tensors, token, ape_row, k, column, head_dim)
        _accumulate(window, False, batch, sums)


def _accumulate(
    window: LongWindow,
    initial: bool,
    batch: tuple[list, list, list],
    sums: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
) -> None:
    """Folds a batch of positions into a thread's running sums: (maximum, total, pooled).

    initial: whether they hold nothing yet. batch: (scores, values, APE) of the positions.
    Values are divided by the window's length, so that no sum exceeds the largest of them.
    """
    scores, values, bias = batch
    highest, total, pooled = sums
    wide_scores = [bf16.unpack(word, window.columns) for word in scores]
    wide_values = [
        bf16.unpack(bf16.scale(word, window.columns, -window.log2_positions), window.columns)
        for word in values
    ]
    for v in range(window.columns):
        column = [row[v] + b[v] for row, b in zip(wide_scores, bias, strict=True)]
        most = ar.largest([highest[v], *column])
        weights = [ar.exp_approx(s - most) for s in column]
        if initial:
            sum_weights, sum_values = weights[0], ar.mul_rn(weights[0], wide_values[0][v])
        else:
            kept = ar.exp_approx(highest[v] - most)
            sum_weights, sum_values = total[v] * kept, pooled[v] * kept
        for k, weight in list(enumerate(weights))[1 if initial else 0 :]:
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
