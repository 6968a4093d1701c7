# SPDX-License-Identifier: Apache-2.0
"""Backward for windows that fit in registers: gradients, and APE sums as partial planes.

Blocks form `groups` x `column_tiles`: one owns a tile of columns and every groups-th tile of rows,
keeps its APE sums in registers over all of them, folds its row lanes in a fixed order through
shared memory and writes its part of the group's plane. `finish` adds the planes, and writes the
zeros of tokens outside all blocks.
"""

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute import arch

from aot.kernels import bf16
from aot.kernels.ape_table import ApeTable, fold_into_plane
from aot.kernels.gradients import differentiate_row
from aot.kernels.launchable import launchable
from aot.kernels.memory import Matrix, load_word
from aot.kernels.parked import Parked
from aot.kernels.ptx import select
from aot.kernels.segments import Pack, find_row
from aot.kernels.warp import LOG2_WARP, WARP
from aot.kernels.window import Window
from aot.variants import Variant


def entry(variant: Variant) -> tuple[Any, Any, list[Any]]:
    """(kernel, host function, sample arguments) of a backward variant, for the compiler."""
    window = Window(variant.ratio, variant.coff, variant.columns)
    threads = variant.threads
    table = ApeTable(window, threads)

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
        block, _, _ = arch.block_idx()
        thread, _, _ = arch.thread_idx()
        group = block // column_tiles
        column_tile = block % column_tiles
        column_lane = thread & ((Int32(1) << lanes_log2) - 1)
        wanted_column = ((column_tile << lanes_log2) + column_lane) * window.columns
        column = min(wanted_column, head_dim - window.columns)
        # Threads past the last column own rows that never exist: they load, and store nothing.
        row_lane = Uint32(thread >> lanes_log2)
        row_lane = select(wanted_column < head_dim, row_lane, Uint32(1 << 31))
        row_lanes = Uint32(threads) >> Uint32(lanes_log2)

        pack = Pack(cu_seqlens, cu_seqlens_comp, segments, tokens, rows)
        kv, score = Matrix(kv, kv_stride), Matrix(score, score_stride)
        grad_out = Matrix(grad_out, grad_out_stride)
        grad_kv = Matrix(grad_kv, grad_kv_stride)
        grad_score = Matrix(grad_score, grad_score_stride)
        shared = table.allocate()
        if thread == column_lane:
            table.write(shared, column_lane, window.load_ape(ape, head_dim, column))
        if thread == 0:
            table.write_zeros(shared)
        arch.sync_threads()
        sums = cute.make_rmem_tensor((window.positions, window.columns), Float32)
        sums.fill(0.0)
        end = max(min(pack.real_rows(), rows), 0)
        tile_row = Uint32(group) * row_lanes
        warp_offset = Uint32((thread & -WARP) >> lanes_log2)
        parked = Parked.allocate(threads)
        parked.start(pack, pack.row_or_last(tile_row + warp_offset))
        while tile_row < Uint32(end):
            own = tile_row + row_lane < Uint32(end)
            row = Int32(min(tile_row + row_lane, Uint32(end - 1)))
            sought = pack.row_or_last(tile_row + warp_offset)
            token, first, last = find_row(
                pack, row, sought, lanes_log2 < LOG2_WARP, parked.glanced(pack, sought), end,
                window.ratio,
            )  # fmt: skip
            tile_row = tile_row + Uint32(groups) * row_lanes
            parked.start(pack, pack.row_or_last(tile_row + warp_offset))
            if cutlass.const_expr(window.coff == 2):
                # No next block pools the first half of a last block's columns.
                unpooled = own & ((last != 0) | (row + 1 >= end))
                window.zero_first_half(grad_kv, token, column, unpooled)
                window.zero_first_half(grad_score, token, column, unpooled)
            previous = own & (first == 0)
            grad_word = load_word(grad_out.at(row, column), window.columns)
            kv_words = window.load(kv, token, first, head_dim, column)
            score_words = window.load(score, token, first, head_dim, column)
            kv_words, score_words = window.erase_missing(first, kv_words, score_words)
            scores = window.scores(score_words, table.read(shared, column_lane, first))
            values = window.values(kv_words)
            grads = bf16.unpack(grad_word, window.columns)
            to_kv, to_score = differentiate_row(
                window, scores, values, grads, first, partial(_add, window, sums, own, previous)
            )
            window.store(grad_kv, token, head_dim, column, own, previous, to_kv)
            window.store(grad_score, token, head_dim, column, own, previous, to_score)
        arch.cp_async_wait_group(0)  # nothing may arrive once the block is gone
        if workspace.toint() != 0:
            arch.sync_threads()
            table.write(shared, thread, window.as_lists(sums))
            arch.sync_threads()
            plane_elements = Int64(head_dim) * (window.ratio * window.coff)
            plane = workspace + group * plane_elements
            fold_into_plane(table, shared, plane, column_tile, lanes_log2, head_dim)

    return launchable(backward, variant)


def _add(
    window: Window,
    sums: cute.Tensor,
    own: Boolean,
    previous: Boolean,
    position: int,
    column: int,
    addend: Float32,
) -> None:
    """Adds to the sum of a position that exists."""
    exists = previous if window.previous(position) else own
    total = sums[position, column]
    sums[position, column] = select(exists, total + addend, total)
