# SPDX-License-Identifier: Apache-2.0
"""Backward for windows that fit in registers, of rows aligned to 16 bytes.

As `backward`, but a warp takes one row at a time, all its lanes side by side along the columns, and
its next row travels to shared memory meanwhile. So a row's latency is hidden behind the work on the
one before, and costs no registers. The first row's window starts its way at once, from where it
lies if no segment has a tail.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute import arch

from aot.kernels import bf16
from aot.kernels.ape_table import ApeTable, fold_into_plane
from aot.kernels.column import Column
from aot.kernels.launchable import launchable
from aot.kernels.memory import Matrix
from aot.kernels.pair import KV, SCORE
from aot.kernels.parked import Parked
from aot.kernels.presumed_row import Presumed, copy_presumed, copy_rest
from aot.kernels.segments import Pack, find_segment, place
from aot.kernels.warp import LOG2_WARP, WARP
from aot.kernels.warp_ape import WarpApe, start_ape, write_zeros
from aot.kernels.warp_buffer import WarpBuffer, copy_grad, copy_own, copy_previous
from aot.kernels.warp_gradients import differentiate, write_gradients, zero_first_half
from aot.kernels.window import Window
from aot.variants import Variant


def entry(variant: Variant) -> tuple[Any, Any, list[Any]]:
    """(kernel, host function, sample arguments) of a backward variant, for the compiler."""
    window = Window(variant.ratio, variant.coff, variant.columns)
    threads, ratio = variant.threads, variant.ratio
    warps = threads // WARP
    table = ApeTable(window, threads)
    # In shared memory: the APE, prefixes, rows; at the end `table` lies over the rows.
    ape_tile = WarpApe(window)
    offset = 4 * (ape_tile.words + 2 * threads)
    buffer = WarpBuffer(window, warps, offset, variant.prefetch_size)
    if buffer.offset + buffer.bytes != variant.dynamic_shared or warps < window.positions:
        raise ValueError(f"{variant.name} keeps {buffer.offset + buffer.bytes} bytes")

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
        lane, warp = thread % WARP, arch.make_warp_uniform(thread // WARP)
        group = Int32(Uint32(block) // Uint32(column_tiles))
        column_tile = block - group * column_tiles
        tile_column = column_tile * window.warp_tile
        wanted_column = tile_column + lane * window.columns
        column = min(wanted_column, head_dim - window.columns)
        active = wanted_column < head_dim
        step = Uint32(groups) * warps
        row = Uint32(group) * warps + Uint32(warp)

        pack = Pack(cu_seqlens, cu_seqlens_comp, segments, tokens, rows)
        real_rows = pack.real_rows()
        memory = arch.get_dyn_smem(Float32, alignment=16)
        parked = Parked(cute.recast_ptr(memory + ape_tile.words, dtype=Int32), threads)
        start_ape(ape_tile, memory, ape, head_dim, column, warp, lane)
        parked.start(pack, pack.row_or_last(row))

        kv, score = Matrix(kv, kv_stride), Matrix(score, score_stride)
        source = buffer.source(
            kv, score, Matrix(grad_out, grad_out_stride), tile_column, head_dim, lane
        )
        slot = buffer.slot(memory, warp, Int32(0))
        presumed = Presumed.of(pack, row, ratio)
        copy_presumed(buffer, slot, source, presumed, lane)
        if row < Uint32(rows):
            copy_grad(buffer, slot, source, Int32(row), lane)
        arch.cp_async_commit_group()
        write_zeros(ape_tile, memory)
        source = source.pinned()
        own_columns = window.column(window.positions - 1, head_dim, column)
        to_kv = Column.of(Matrix(grad_kv, grad_kv_stride), Int32(0), own_columns).pinned()
        to_score = Column.of(Matrix(grad_score, grad_score_stride), Int32(0), own_columns).pinned()
        sums = cute.make_rmem_tensor((window.positions, window.columns), Float32)
        sums.fill(0.0)
        end = Uint32(max(min(real_rows, rows), 0))

        sought = pack.row_or_last(row)
        segment_row, segment_token, segment_end = find_segment(
            pack, sought, parked.glanced(pack, sought, 1)
        )
        token, first, last = place(pack, sought, segment_row, segment_token, segment_end, ratio)
        copy_rest(buffer, slot, source, presumed, row < end, token, first, lane)
        arch.cp_async_commit_group()  # the loop waits for no copy outside a group
        if Int32(row + step) >= segment_end:
            parked.start(pack, pack.row_or_last(row + step))
        arch.sync_threads()

        index = Int32(0)
        while row < end:
            next_row = row + step
            next_token, next_first, next_last = Int32(0), Int32(1), Int32(1)
            arch.cp_async_wait_group(0)
            arch.sync_warp()
            if next_row < end:
                sought = Int32(next_row)
                if sought >= segment_end:
                    segment_row, segment_token, segment_end = find_segment(
                        pack, sought, parked.glanced(pack, sought)
                    )
                next_token, next_first, next_last = place(
                    pack, sought, segment_row, segment_token, segment_end, ratio
                )
                free = buffer.slot(memory, warp, index ^ 1)
                copy_own(buffer, free, source, next_token, lane)
                if cutlass.const_expr(window.coff == 2):
                    copy_previous(buffer, free, source, next_token, next_first, lane)
                copy_grad(buffer, free, source, Int32(next_row), lane)
                if Int32(next_row + step) >= segment_end:
                    parked.start(pack, pack.row_or_last(next_row + step))
                arch.cp_async_commit_group()
            if cutlass.const_expr(window.coff == 2):
                # No next block pools the first half of a last block's columns.
                unpooled = active & ((last != 0) | (row + 1 >= end))
                zero_first_half(window, to_kv, to_score, token, head_dim, unpooled)
            slot = buffer.slot(memory, warp, index)
            bias = ape_tile.read(memory, lane, first)
            scores = window.scores(buffer.read(slot, SCORE, lane), bias)
            values = window.values(buffer.read(slot, KV, lane))
            grads = bf16.unpack(buffer.read_grad(slot, lane), window.columns)
            gradients = differentiate(window, scores, values, grads, first)
            write_gradients(
                window, to_kv, to_score, token, head_dim, active, first == 0, gradients, sums
            )
            arch.sync_warp()  # the next copies overwrite what every lane has read by now
            row, token, first, last = next_row, next_token, next_first, next_last
            index = index ^ 1
        arch.cp_async_wait_group(0)  # nothing may arrive once the block is gone
        if workspace.toint() != 0:
            arch.sync_threads()
            shared = memory + buffer.offset // 4
            table.write(shared, thread, window.as_lists(sums))
            arch.sync_threads()
            plane_elements = Int64(head_dim) * (ratio * window.coff)
            plane = workspace + group * plane_elements
            fold_into_plane(table, shared, plane, column_tile, Int32(LOG2_WARP), head_dim)

    return launchable(backward, variant)
