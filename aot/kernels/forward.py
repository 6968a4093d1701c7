# SPDX-License-Identifier: Apache-2.0
"""Forward for windows that fit in registers: a thread pools a few columns, of a row at a time.

All loads of a window are issued before the first use. Where a thread has one row they go to
addresses that are valid for every thread, so that no branch stands between the search and them; and
where the pack's sizes alone say where its block should lie they do not wait for the search.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from cutlass.cute import arch

from aot.kernels import bf16
from aot.kernels.launchable import launchable
from aot.kernels.memory import Matrix
from aot.kernels.pooling import pool
from aot.kernels.segments import Pack, find_row, find_row_at_once
from aot.kernels.warp import LOG2_WARP, WARP
from aot.kernels.window import Window
from aot.variants import Variant


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
            tensors = kv, score, ape
            several = lanes_log2 < LOG2_WARP
            if cutlass.const_expr(variant.early):
                row, warp_row = Int32(min(wanted_row, last_row)), Int32(warp_row)
                presumed = ~several & pack.few_segments()
                if presumed & pack.presumable(window.ratio, window.coff):
                    word = _pool_presumed(window, pack, row, tensors, head_dim, column)
                    if (wanted_row <= last_row) & active_columns:
                        arch.store(out.at(row, column), word)
                else:
                    bias = window.load_ape(ape, head_dim, column)
                    word = _pool_found(
                        window, variant.once, pack, row, warp_row, several,
                        tensors, bias, head_dim, column,
                    )  # fmt: skip
                    if (wanted_row <= last_row) & active_columns:
                        arch.store(out.at(row, column), word)
            else:
                bias = window.load_ape(ape, head_dim, column)
                row, warp_row = Int32(min(wanted_row, last_row)), Int32(warp_row)
                word = _pool_found(
                    window, variant.once, pack, row, warp_row, several,
                    tensors, bias, head_dim, column,
                )  # fmt: skip
                if (wanted_row <= last_row) & active_columns:
                    arch.store(out.at(row, column), word)
        else:
            _pool_rows(
                window, each, variant.once, pack, wanted_row, Int32(warp_row), last_row,
                kv, score, ape, out, head_dim, column, active_columns,
            )  # fmt: skip

    return launchable(forward, variant)


def _pool_found(
    window: Window,
    once: bool,
    pack: Pack,
    row: Int32,
    warp_row: Int32,
    several: Boolean,
    tensors: tuple[Matrix, Matrix, cute.Pointer],
    bias: list,
    head_dim: Int32,
    column: Int32,
) -> Any:
    """The pooled columns of a row, loaded once it is found."""
    kv, score, _ = tensors
    token, first, _ = find_row(
        pack, row, warp_row, several, pack.glance(warp_row), pack.real_rows(), window.ratio
    )
    kv_words = window.load(kv, token, first, head_dim, column, once)
    score_words = window.load(score, token, first, head_dim, column, once)
    return _pool_row(window, first, kv_words, score_words, bias)


@cute.jit
def _pool_presumed(
    window: cutlass.Constexpr,
    pack: Pack,
    row: Int32,
    tensors: tuple,
    head_dim: Int32,
    column: Int32,
) -> Any:
    """The pooled columns of a row of few segments, loaded from where its block is presumed to lie.

    It is looked up in the meantime, and loaded again if it does not lie there.
    """
    kv, score, ape = tensors
    presumed = row * window.ratio
    # The pack's first block has none before it. Its own tokens do as well.
    halves = Uint32(presumed), Uint32(max(row - 1, 0) * window.ratio)
    kv_words, score_words = window.registers(), window.registers()
    window.put(kv_words, window.load_from(kv, *halves, head_dim, column))
    window.put(score_words, window.load_from(score, *halves, head_dim, column))
    bias = window.load_ape(ape, head_dim, column, pinned=True)
    token, first = find_row_at_once(pack, row, window.ratio)
    if token != presumed:
        window.put(kv_words, window.load(kv, token, first, head_dim, column))
        window.put(score_words, window.load(score, token, first, head_dim, column))
    return _pool_row(window, first, window.words(kv_words), window.words(score_words), bias)


@cute.jit
def _pool_rows(
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
            word = pool(window, score_words, kv_words, bias[own.start :])
        else:
            every = cutlass.const_expr(range(window.positions))
            kv_words = window.load_some(every, kv, token, head_dim, column, once)
            score_words = window.load_some(every, score, token, head_dim, column, once)
            word = pool(window, score_words, kv_words, bias)
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
        word = pool(window, score_words[own:], kv_words[own:], bias[own:])
    else:
        word = pool(window, score_words, kv_words, bias)
    return word
