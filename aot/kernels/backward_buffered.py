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
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute import arch

from aot.kernels import bf16
from aot.kernels.ape_table import ApeTable, fold_into_plane
from aot.kernels.backward import differentiate_row, warp_row
from aot.kernels.launchable import launchable
from aot.kernels.memory import Matrix, copy_async, load_f32, store_f32
from aot.kernels.parked import Parked
from aot.kernels.ptx import select
from aot.kernels.segments import LOG2_WARP, WARP, Pack, find_segment, place
from aot.kernels.warp_buffer import (
    KV,
    SCORE,
    Column,
    WarpBuffer,
    copy_grad,
    copy_own,
    copy_presumed,
    copy_previous,
)
from aot.kernels.window import Window, store_rows
from aot.variants import Variant


def entry(variant: Variant) -> tuple[Any, Any, list[Any]]:
    """(kernel, host function, sample arguments) of a backward variant, for the compiler."""
    window = Window(variant.ratio, variant.coff, variant.columns)
    threads, ratio = variant.threads, variant.ratio
    warps = threads // WARP
    table = ApeTable(window, threads)
    ape_tile = ApeTable(window, WARP)
    # In shared memory: the APE, zeros for what a first block lacks, prefixes, rows.
    zeros = ape_tile.entries * window.columns
    parked_words = zeros + (window.positions - ratio) * WARP * window.columns
    buffer = WarpBuffer(window, warps, 4 * (parked_words + 2 * threads))
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
        tile_column = column_tile * buffer.tile
        wanted_column = tile_column + lane * window.columns
        column = min(wanted_column, head_dim - window.columns)
        active = wanted_column < head_dim
        step = Uint32(groups) * warps
        row = Uint32(group) * warps + Uint32(warp)

        pack = Pack(cu_seqlens, cu_seqlens_comp, segments, tokens, rows)
        real_rows = pack.real_rows()
        memory = arch.get_dyn_smem(Float32, alignment=16)
        parked = Parked(cute.recast_ptr(memory + parked_words, dtype=Int32), threads)
        _start_ape(window, memory, ape, head_dim, column, warp, lane)
        parked.start(pack, warp_row(row, rows))

        # Without tails the blocks fill the pack, and a row's place is known.
        kv, score = Matrix(kv, kv_stride), Matrix(score, score_stride)
        source = buffer.source(
            kv, score, Matrix(grad_out, grad_out_stride), tile_column, head_dim, lane
        )
        slot = buffer.slot(memory, warp, Int32(0))
        presumed = Int32(row) * ratio
        presumed_own = pack.filled(ratio) & (row < Uint32(rows))
        presumed_previous = presumed_own & (row > 0) & pack.few_first_blocks()
        copy_presumed(buffer, slot, source, presumed, presumed_own, presumed_previous, lane)
        if row < Uint32(rows):
            copy_grad(buffer, slot, source, Int32(row), lane)
        arch.cp_async_commit_group()
        if thread < (window.positions - ratio) * WARP:
            store_f32(memory + zeros + thread * window.columns, [Float32(0.0)] * window.columns)
        source = source.pinned()
        own_columns = window.column(window.positions - 1, head_dim, column)
        to_kv = Column.of(Matrix(grad_kv, grad_kv_stride), Int32(0), own_columns).pinned()
        to_score = Column.of(Matrix(grad_score, grad_score_stride), Int32(0), own_columns).pinned()
        sums = cute.make_rmem_tensor((window.positions, window.columns), Float32)
        sums.fill(0.0)
        end = Uint32(max(min(real_rows, rows), 0))

        sought = warp_row(row, rows)
        segment_row, segment_token, segment_end = find_segment(
            pack, sought, sought, False, parked.glanced(pack, sought, 1)
        )
        token, first, last = place(pack, sought, segment_row, segment_token, segment_end, ratio)
        wrong = ~presumed_own | (token != presumed)
        incomplete = wrong | ~presumed_previous | (first != 0)
        if row < end:
            if (wrong & presumed_own) | (incomplete & presumed_previous):
                arch.cp_async_wait_group(0)  # or it would arrive after what replaces it
            if wrong:
                copy_own(buffer, slot, source, token, lane)
            if cutlass.const_expr(window.coff == 2):
                if incomplete:
                    copy_previous(buffer, slot, source, token, first, lane)
        arch.cp_async_commit_group()  # the loop waits for no copy outside a group
        if Int32(row + step) >= segment_end:
            parked.start(pack, warp_row(row + step, rows))
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
                        pack, sought, sought, False, parked.glanced(pack, sought)
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
                    parked.start(pack, warp_row(next_row + step, rows))
                arch.cp_async_commit_group()
            if cutlass.const_expr(window.coff == 2):
                # No next block pools the first half of a last block's columns.
                unpooled = active & ((last != 0) | (row + 1 >= end))
                _zero_first_half(window, to_kv, to_score, token, head_dim, unpooled)
            slot = buffer.slot(memory, warp, index)
            bias = _read_ape(window, memory, zeros, lane, first)
            scores = window.scores(buffer.read(slot, SCORE, lane), bias)
            values = window.values(buffer.read(slot, KV, lane))
            grads = bf16.unpack(buffer.read_grad(slot, lane), window.columns)
            _store_and_add(
                window, to_kv, to_score, token, head_dim, active, first == 0,
                _differentiate_row(window, scores, values, grads, first), sums,
            )  # fmt: skip
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


@cute.jit
def _start_ape(
    window: cutlass.Constexpr,
    memory: cute.Pointer,
    ape: cute.Pointer,
    head_dim: Int32,
    column: Int32,
    warp: Int32,
    lane: Int32,
) -> None:
    """Starts copying the APE tile, [position][column], to the begin of shared memory.

    A warp copies one position.
    """
    if warp < window.positions:
        target = memory + (warp * WARP + lane) * window.columns
        if ape.toint() == 0:
            store_f32(target, [Float32(0.0)] * window.columns)
        else:
            own = select(
                warp >= window.positions - window.ratio, (window.coff - 1) * head_dim, Int32(0)
            )
            row = ape + (warp % window.ratio) * (Int64(head_dim) * window.coff)
            copy_async(target, row + (own + column), 4 * window.columns)


def _read_ape(
    window: Window, memory: cute.Pointer, zeros: int, lane: Int32, first: Int32
) -> list[list[Float32]]:
    """A lane's APE, [position][column]; a first block's previous half reads zeros."""
    own = memory + lane * window.columns
    previous = own + select(first != 0, Int32(zeros), Int32(0))
    tile = WARP * window.columns
    return [
        load_f32((previous if window.previous(k) else own) + k * tile, window.columns)
        for k in range(window.positions)
    ]


def _differentiate_row(
    window: Window, scores: list, values: list, grads: list[Float32], first: Int32
) -> tuple[list, list, list]:
    """What `differentiate_row` returns, and what it adds as [position][column]."""
    addends = [[Float32(0.0)] * window.columns for _ in range(window.positions)]

    def keep(position: int, column: int, addend: Float32) -> None:
        addends[position][column] = addend

    return *differentiate_row(window, scores, values, grads, first, keep), addends


@cute.jit
def _store_and_add(
    window: cutlass.Constexpr,
    to_kv: Column,
    to_score: Column,
    token: Int32,
    head_dim: Int32,
    active: Boolean,
    previous: Boolean,
    gradients: tuple,
    sums: cute.Tensor,
) -> None:
    """Writes a row's gradients and adds those unrounded to `sums`, where the position exists."""
    kv_words = [bf16.join(parts) for parts in gradients[0]]
    score_words = [bf16.join(parts) for parts in gradients[1]]
    addends = gradients[2]
    own = cutlass.const_expr(window.positions - window.ratio)
    if active:
        at_kv, at_score = to_kv.at(token), to_score.at(token)
        for k in cutlass.range_constexpr(window.ratio):
            arch.store(at_kv + k * to_kv.stride, kv_words[own + k])
        for k in cutlass.range_constexpr(window.ratio):
            arch.store(at_score + k * to_score.stride, score_words[own + k])
        for k in cutlass.range_constexpr(own, window.positions):
            for v in cutlass.range_constexpr(window.columns):
                sums[k, v] = sums[k, v] + addends[k][v]
        if cutlass.const_expr(window.coff == 2):
            if previous:
                at_kv = at_kv - (window.ratio * to_kv.stride + 2 * Int64(head_dim))
                at_score = at_score - (window.ratio * to_score.stride + 2 * Int64(head_dim))
                for k in cutlass.range_constexpr(window.ratio):
                    arch.store(at_kv + k * to_kv.stride, kv_words[k])
                for k in cutlass.range_constexpr(window.ratio):
                    arch.store(at_score + k * to_score.stride, score_words[k])
                for k in cutlass.range_constexpr(own):
                    for v in cutlass.range_constexpr(window.columns):
                        sums[k, v] = sums[k, v] + addends[k][v]


@cute.jit
def _zero_first_half(
    window: cutlass.Constexpr,
    to_kv: Column,
    to_score: Column,
    token: Int32,
    head_dim: Int32,
    wanted: Boolean,
) -> None:
    """Writes zeros to a block's own tokens in the columns that the next block pools."""
    if wanted:
        zeros = [bf16.WORD[window.columns](0)] * window.ratio
        back = 2 * Int64(head_dim)
        store_rows(Boolean(True), to_kv.at(token) - back, to_kv.stride, zeros)
        store_rows(Boolean(True), to_score.at(token) - back, to_score.stride, zeros)
