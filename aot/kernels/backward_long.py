# SPDX-License-Identifier: Apache-2.0
"""Backward for long windows: gradients, and APE sums as partial planes.

Blocks form `groups` x `column_tiles`: one owns a tile of columns and one of every `groups` rows.
Each of its warps owns a run of tokens in each half of the window, for which it keeps the
exponentials and the APE sums in registers; over a row the warps exchange their maxima, then their
sums, which every thread adds in pairs. The next row's kv and score travel to shared memory in the
meantime, and where a kernel is `ahead` those of the row after it to the second-level cache. Every
warp copies what it reads itself, so nothing else waits.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute import arch

from aot.kernels import bf16
from aot.kernels.ape_tile import fill_ape_tile
from aot.kernels.block_layout import block_layout
from aot.kernels.fetch_ahead import fetch_share, whole_lines
from aot.kernels.launchable import launchable
from aot.kernels.memory import Matrix, load_word_once
from aot.kernels.pair import Pair
from aot.kernels.row_buffer import DEPTH, Row, copy_row
from aot.kernels.row_gradients import write_gradients, write_sums
from aot.kernels.row_table import look_up_rows, row_of
from aot.kernels.segments import Pack, find_row
from aot.kernels.softmax_row import Registers, softmax_row
from aot.kernels.thread import Thread
from aot.kernels.warp import WARP
from aot.kernels.window_long import LongWindow
from aot.variants import Variant


def entry(variant: Variant) -> tuple[Any, Any, list[Any]]:
    """(kernel, host function, sample arguments) of a backward variant, for the compiler."""
    layout = block_layout(variant)
    window, ape_tile = layout.window, layout.ape_tile
    row_table, row_buffer = layout.row_table, layout.row_buffer

    @cute.kernel
    def backward(
        kv: cute.Pointer,
        score: cute.Pointer,
        ape: cute.Pointer,
        cu_seqlens: cute.Pointer,
        cu_seqlens_comp: cute.Pointer,
        grad_out: cute.Pointer,
        grad_kv: cute.Pointer,
        grad_score: cute.Pointer,
        workspace: cute.Pointer,
        kv_stride: Int64,
        score_stride: Int64,
        grad_out_stride: Int64,
        grad_kv_stride: Int64,
        grad_score_stride: Int64,
        tokens: Int32,
        segments: Int32,
        rows: Int32,
        head_dim: Int32,
        lanes_log2: Int32,
        column_tiles: Int32,
        groups: Int32,
    ) -> None:
        thread_index, _, _ = arch.thread_idx()
        block, _, _ = arch.block_idx()
        lane, warp = thread_index % WARP, arch.make_warp_uniform(thread_index // WARP)
        group, column_tile = block // column_tiles, block % column_tiles
        tile_column = column_tile * window.tile
        wanted_column = tile_column + lane * window.columns
        column = min(wanted_column, head_dim - window.columns)
        copied = row_buffer.column(tile_column, head_dim, lane)
        active = wanted_column < head_dim

        memory = arch.get_dyn_smem(Float32, alignment=16)
        thread = Thread(memory, warp, lane, head_dim, tile_column, column, copied)

        pack = Pack(cu_seqlens, cu_seqlens_comp, segments, tokens, rows)
        inputs = Pair(Matrix(kv, kv_stride), Matrix(score, score_stride))
        grad_out = Matrix(grad_out, grad_out_stride)
        outputs = Pair(Matrix(grad_kv, grad_kv_stride), Matrix(grad_score, grad_score_stride))
        if cutlass.const_expr(variant.ahead):
            # The first row is there when its copies ask for it, if the pack has no tails.
            fetches = whole_lines(inputs)
            presumed = row_of(Int32(0), group, groups)
            if fetches & pack.presumable(window.ratio, window.coff) & (presumed < Uint32(rows)):
                _fetch(window, thread, inputs, Int32(presumed) * window.ratio)
        # The first row is found by itself, and travels while the others are looked up. The APE
        # follows, or the look-up would wait behind its copies.
        real_rows = pack.real_rows()
        row = row_of(Int32(0), group, groups)
        first_row = Int32(row)
        token, first, _ = find_row(
            pack, first_row, first_row, Boolean(False), pack.glance(first_row), real_rows,
            window.ratio,
        )  # fmt: skip
        real_rows = Uint32(max(min(real_rows, rows), 0))
        grad_word = bf16.WORD[window.columns](0)
        if row < real_rows:
            grad_word = load_word_once(grad_out.at(row, column), window.columns)
            copy_row(row_buffer, thread, Row(Int32(0), token, first), inputs)
        look_up_rows(row_table, memory, Int32(0), pack, group, groups)
        if cutlass.const_expr(ape_tile.held):
            fill_ape_tile(ape_tile, thread, ape)
        arch.cp_async_commit_group()

        registers = Registers.of(window)
        index = Int32(0)
        while row < real_rows:
            later = index + (DEPTH - 1)
            if row_of(later, group, groups) < real_rows:
                if later % variant.threads == 0:
                    look_up_rows(row_table, memory, later, pack, group, groups)
                later_token, later_first = row_table.read(memory, later)
                copy_row(row_buffer, thread, Row(later % DEPTH, later_token, later_first), inputs)
            arch.cp_async_commit_group()
            if cutlass.const_expr(variant.ahead):
                beyond = later + 1
                looked_up = beyond % variant.threads != 0  # not the first of what comes next
                if fetches & looked_up & (row_of(beyond, group, groups) < real_rows):
                    beyond_token, _ = row_table.read(memory, beyond)
                    _fetch(window, thread, inputs, beyond_token)
            slot = index % DEPTH
            token, first = row_table.read(memory, index)
            current = Row(slot, token, first)
            grads = bf16.unpack(grad_word, window.columns)
            next_row = row_of(index + 1, group, groups)
            if next_row < real_rows:
                grad_word = load_word_once(grad_out.at(next_row, column), window.columns)
            arch.cp_async_wait_group(DEPTH - 1)
            arch.sync_warp()

            softmax = softmax_row(layout, thread, current, ape, grads, registers)
            write_gradients(row_buffer, thread, current, outputs, grads, registers, softmax)
            arch.sync_warp()  # the next copies overwrite what every lane has read by now
            row = next_row
            index = index + 1
        if active & (workspace.toint() != 0):
            write_sums(window, thread, workspace, group, registers)

    return launchable(backward, variant)


def _fetch(window: LongWindow, thread: Thread, inputs: Pair, token: Int32) -> None:
    fetch_share(window, inputs, token, thread.tile, thread.head_dim, thread.warp, thread.lane)
