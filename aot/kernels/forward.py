# SPDX-License-Identifier: Apache-2.0
"""Forward for windows that fit in registers: a thread pools a few columns, of a row at a time.

All loads of a window are issued before the first use. They go to addresses that are valid for every
thread, so that no branch stands between the search and them; and where the pack's sizes alone say
where a row's block should lie they do not wait for the search.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from cutlass.cute import arch

from aot.kernels import bf16
from aot.kernels.forward_grid import column_tile_and_row_block
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
    threads, once = variant.threads, variant.once
    each, together = variant.rows, variant.together

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
        column_lane = thread & ((Int32(1) << lanes_log2) - 1)
        wanted_column = ((column_tile << lanes_log2) + column_lane) * window.columns
        column = min(wanted_column, head_dim - window.columns)
        kv, score, out = Matrix(kv, kv_stride), Matrix(score, score_stride), Matrix(out, out_stride)
        columns = Columns(kv, score, ape, out, head_dim, column, wanted_column < head_dim)
        pack = Pack(cu_seqlens, cu_seqlens_comp, segments, tokens, rows)

        # A thread takes `each` consecutive rows, and so do a warp's threads together: of several,
        # its lanes look one up each. Threads past the edge repeat its loads and store nothing.
        last_row = Uint32(rows - 1)
        block_row = row_block * ((Uint32(threads) >> Uint32(lanes_log2)) * each)
        wanted_row = block_row + Uint32(thread >> lanes_log2) * each
        warp_row = min(block_row + Uint32((thread & -WARP) >> lanes_log2) * each, last_row)
        if cutlass.const_expr(each == 1):
            several = lanes_log2 < LOG2_WARP
            if cutlass.const_expr(variant.early):
                row, warp_row = pack.row_or_last(wanted_row), Int32(warp_row)
                presumed = ~several & pack.few_segments()
                if presumed & pack.presumable(window.ratio, window.coff):
                    _pool_presumed(window, columns, pack, wanted_row, row)
                else:
                    _pool_found(window, once, columns, pack, wanted_row, warp_row, several)
            else:
                _pool_found(window, once, columns, pack, wanted_row, Int32(warp_row), several)
        else:
            warp_row = Int32(warp_row)
            _pool_rows(window, each, together, once, columns, pack, wanted_row, warp_row)

    return launchable(forward, variant)


@dataclass(frozen=True)
class Columns:
    """A thread's columns of the tensors, from `column` on; active: whether they exist."""

    kv: Matrix
    score: Matrix
    ape: cute.Pointer
    out: Matrix
    head_dim: Int32
    column: Int32
    active: Boolean

    def load(
        self,
        window: Window,
        token: Int32,
        first: Int32,
        once: bool = False,
    ) -> tuple[list, list]:
        """(kv words, score words), as `Window.load` gives them."""
        place = token, first, self.head_dim, self.column
        return window.load(self.kv, *place, once), window.load(self.score, *place, once)

    def load_ape(self, window: Window, pinned: bool = False) -> list:
        """As `Window.load_ape`."""
        return window.load_ape(self.ape, self.head_dim, self.column, pinned)


def _pool_found(
    window: Window,
    once: bool,
    columns: Columns,
    pack: Pack,
    wanted_row: Uint32,
    warp_row: Int32,
    several: Boolean,
) -> None:
    """Pools a row, loaded once it is found."""
    bias = columns.load_ape(window)
    row = pack.row_or_last(wanted_row)
    token, first, _ = find_row(
        pack, row, warp_row, several, pack.glance(warp_row), pack.real_rows(), window.ratio
    )
    kv_words, score_words = columns.load(window, token, first, once)
    _pool_row(window, columns, pack, wanted_row, first, kv_words, score_words, bias)


@cute.jit
def _pool_presumed(
    window: cutlass.Constexpr, columns: Columns, pack: Pack, wanted_row: Uint32, row: Int32
) -> None:
    """Pools a row of few segments, loaded from where its block is presumed to lie.

    It is looked up in the meantime, and loaded again if it does not lie there.
    """
    presumed = row * window.ratio
    # The pack's first block has none before it. Its own tokens do as well.
    tokens = Uint32(presumed), Uint32(max(row - 1, 0) * window.ratio)
    place = columns.head_dim, columns.column
    kv_words, score_words = window.registers(), window.registers()
    window.put(kv_words, window.load_from(columns.kv, *tokens, *place))
    window.put(score_words, window.load_from(columns.score, *tokens, *place))
    bias = columns.load_ape(window, pinned=True)
    token, first = find_row_at_once(pack, row, window.ratio)
    if token != presumed:
        found = columns.load(window, token, first)
        window.put(kv_words, found[0])
        window.put(score_words, found[1])
    kv_words, score_words = window.words(kv_words), window.words(score_words)
    _pool_row(window, columns, pack, wanted_row, first, kv_words, score_words, bias)


@cute.jit
def _pool_rows(
    window: cutlass.Constexpr,
    each: cutlass.Constexpr,
    together: cutlass.Constexpr,
    once: cutlass.Constexpr,
    columns: Columns,
    pack: Pack,
    wanted_row: Uint32,
    warp_row: Int32,
) -> None:
    """Pools a thread's `each` rows from `wanted_row` on, as many at a time as it loads `together`.

    The warp's lanes look one up each.
    """
    sought = pack.row_or_last(Uint32(warp_row) + Uint32(arch.lane_idx()))
    places = find_row(
        pack, sought, warp_row, Boolean(True), pack.glance(warp_row), pack.real_rows(),
        window.ratio,
    )  # fmt: skip
    for _ in cutlass.range(each // together, unroll=1):
        loaded = []
        for i in cutlass.range_constexpr(together):
            row = pack.row_or_last(wanted_row + Uint32(i))
            lane = (row - warp_row) % WARP
            token = arch.shuffle_sync(places[0], lane)
            first = arch.shuffle_sync(places[1], lane)
            loaded.append((first, *columns.load(window, token, first, once)))
        for i in cutlass.range_constexpr(together):
            bias = columns.load_ape(window)
            _pool_row(window, columns, pack, wanted_row + Uint32(i), *loaded[i], bias)
        wanted_row = wanted_row + together


@cute.jit
def _pool_row(
    window: cutlass.Constexpr,
    columns: Columns,
    pack: Pack,
    wanted_row: Uint32,
    first: Int32,
    kv_words: list,
    score_words: list,
    bias: list,
) -> None:
    """Pools and stores a row, if it exists. A first block pools its own half alone."""
    word = bf16.WORD[window.columns](0)
    if (window.coff == 2) & (first != 0):
        own = cutlass.const_expr(window.positions - window.ratio)
        word = pool(window, score_words[own:], kv_words[own:], bias[own:])
    else:
        word = pool(window, score_words, kv_words, bias)
    if (wanted_row <= Uint32(pack.rows - 1)) & columns.active:
        arch.store(columns.out.at(pack.row_or_last(wanted_row), columns.column), word)
