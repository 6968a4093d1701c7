# SPDX-License-Identifier: Apache-2.0
"""Backward for long windows: gradients, and APE sums as partial planes.

Blocks form `groups` x `column_tiles`: one owns a tile of columns and every groups-th row. Each of
its warps owns `positions / warps` positions of the window, for which it keeps the exponentials and
the APE sums in registers; over a row the warps exchange their maxima, then their sums, which every
thread adds in ascending order. The next row's kv and score travel to shared memory in the
meantime. Every warp copies what it reads itself, so nothing else waits.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute import arch

from aot.kernels import arithmetic as ar
from aot.kernels import bf16
from aot.kernels.ape_tile import Bias
from aot.kernels.launchable import launchable
from aot.kernels.memory import Matrix, load_word_once, store_f32
from aot.kernels.row_buffer import DEPTH, PIECE, Stage
from aot.kernels.row_table import RowTable, look_up_rows
from aot.kernels.segments import WARP, Pack
from aot.kernels.softmax_row import softmax_row
from aot.kernels.warp_exchange import Exchange
from aot.kernels.window_long import Chunk
from aot.variants import Variant


class Layout:
    """What a block keeps in dynamic shared memory, in this order."""

    def __init__(self, variant: Variant) -> None:
        """For a variant's block."""
        warps = variant.threads // WARP
        self.chunk = Chunk(variant.ratio, variant.coff, variant.columns, warps, variant.batch)
        self.exchange = Exchange(self.chunk)
        self.bias = Bias(self.chunk, variant.holds_ape)
        self.row_table = RowTable(variant.threads, variant.ratio)
        self.stage = Stage(self.chunk, variant.required_alignment % PIECE == 0)

    @property
    def bytes(self) -> int:
        """Size of it all."""
        words = self.exchange.floats + self.bias.floats + self.row_table.words
        return 4 * words + self.stage.bytes


def entry(variant: Variant) -> tuple[Any, Any, list[Any]]:
    """(kernel, host function, sample arguments) of a backward variant, for the compiler."""
    layout = Layout(variant)
    if layout.bytes != variant.dynamic_shared:
        raise ValueError(f"{variant.name} keeps {layout.bytes} bytes in shared memory")
    chunk, stage, exchange = layout.chunk, layout.stage, layout.exchange
    bias, row_table = layout.bias, layout.row_table

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
        thread, _, _ = arch.thread_idx()
        block, _, _ = arch.block_idx()
        lane, warp = thread % WARP, arch.make_warp_uniform(thread // WARP)
        group, column_tile = block // column_tiles, block % column_tiles
        tile_column = column_tile * (WARP * chunk.columns)
        wanted_column = tile_column + lane * chunk.columns
        column = min(wanted_column, head_dim - chunk.columns)
        packed_column = chunk.column(head_dim, column, warp)
        staged_column = chunk.column(head_dim, stage.column(tile_column, head_dim, lane), warp)
        active = wanted_column < head_dim

        memory = arch.get_dyn_smem(Float32, alignment=16)
        table = memory + exchange.floats
        starts = cute.recast_ptr(table + bias.floats, dtype=Int32)
        shared = table + (bias.floats + row_table.words)

        pack = Pack(cu_seqlens, cu_seqlens_comp, segments, tokens)
        kv, score = Matrix(kv, kv_stride), Matrix(score, score_stride)
        grad_out = Matrix(grad_out, grad_out_stride)
        grad_kv = Matrix(grad_kv, grad_kv_stride)
        grad_score = Matrix(grad_score, grad_score_stride)
        real = pack.real_rows()
        row = Uint32(group)
        step = Uint32(groups)
        look_up_rows(row_table, starts, Int32(0), pack, row, groups, rows)
        real_rows = Uint32(max(min(real, rows), 0))
        grad_word = bf16.WORD[chunk.columns](0)
        if row < real_rows:
            grad_word = load_word_once(grad_out.at(row, column), chunk.columns)
        for ahead in cutlass.range_constexpr(DEPTH - 1):
            if row + Uint32(ahead) * step < real_rows:
                token, first, _ = row_table.entry(starts, Int32(ahead))
                _copy_row(
                    chunk, stage, shared, Int32(ahead), kv, score,
                    token, first, warp, lane, staged_column,
                )  # fmt: skip
            arch.cp_async_commit_group()
        bias.fill(table, ape, head_dim, warp, lane, packed_column)

        sums = cute.make_rmem_tensor((chunk.positions, chunk.columns), Float32)
        sums.fill(0.0)
        weights = cute.make_rmem_tensor((chunk.positions, chunk.columns), Float32)
        values = cute.make_rmem_tensor((chunk.positions, chunk.columns), Float32)
        index = Int32(0)
        while row < real_rows:
            later = index + (DEPTH - 1)
            later_row = row + Uint32(DEPTH - 1) * step
            if later_row < real_rows:
                if later % variant.threads == 0:
                    look_up_rows(row_table, starts, later, pack, later_row, groups, rows)
                later_token, later_first, _ = row_table.entry(starts, later)
                _copy_row(
                    chunk, stage, shared, later % DEPTH, kv, score,
                    later_token, later_first, warp, lane, staged_column,
                )  # fmt: skip
            arch.cp_async_commit_group()
            grads = bf16.unpack(grad_word, chunk.columns)
            if row + step < real_rows:
                grad_word = load_word_once(grad_out.at(row + step, column), chunk.columns)
            arch.cp_async_wait_group(DEPTH - 1)
            arch.sync_warp()

            slot = index % DEPTH
            token, first, last = row_table.entry(starts, index)
            exists = chunk.exists(warp, first)
            scales, dots = softmax_row(
                chunk, stage, exchange, shared, memory, slot, ape, head_dim, warp, lane,
                packed_column, exists, grads, weights, values, bias, table,
            )  # fmt: skip
            if exists & active:
                _store_gradients(
                    chunk, grad_kv, grad_score,
                    chunk.first_token(token, warp), packed_column, grads, weights, values,
                    scales, dots, sums,
                )  # fmt: skip
            if cutlass.const_expr(chunk.coff == 2):
                # No next block pools the first half of a last block's columns.
                unpooled = (last != 0) | (row + 1 >= real_rows)
                if unpooled & active & chunk.in_own_half(warp):
                    _store_zeros(
                        chunk, grad_kv, grad_score,
                        chunk.first_token(token, warp), column,
                    )  # fmt: skip
            arch.sync_warp()  # the next copies overwrite what every lane has read by now
            row = row + step
            index = index + 1
        if active & (workspace.toint() != 0):
            width = Int64(head_dim) * chunk.coff
            plane = workspace + Int64(group) * (chunk.ratio * width)
            base = plane + (chunk.ape_row(warp) * width + packed_column)
            for k in cutlass.range_constexpr(chunk.positions):
                row_sums = [sums[k, v] for v in range(chunk.columns)]
                store_f32(base + k * width, row_sums)

    return launchable(backward, variant)


@cute.jit
def _copy_row(
    chunk: cutlass.Constexpr,
    stage: cutlass.Constexpr,
    shared: cute.Pointer,
    slot: Int32,
    kv: Matrix,
    score: Matrix,
    token: Int32,
    first: Int32,
    warp: Int32,
    lane: Int32,
    column: Int32,
) -> None:
    if chunk.exists(warp, first):
        start = chunk.first_token(token, warp)
        stage.copy(shared, slot, 0, kv, start, warp, lane, column)
        stage.copy(shared, slot, 1, score, start, warp, lane, column)


def _store_gradients(
    chunk: Chunk,
    grad_kv: Matrix,
    grad_score: Matrix,
    start: Int32,
    column: Int32,
    grads: list,
    weights: cute.Tensor,
    values: cute.Tensor,
    scales: list,
    dots: list,
    sums: cute.Tensor,
) -> None:
    """Writes a thread's gradients and adds those of the scores, unrounded, to `sums`."""
    to_kv = grad_kv.at(start, column)
    to_score = grad_score.at(start, column)
    for k in range(chunk.positions):
        of_kv, of_score = [], []
        for v in range(chunk.columns):
            p = ar.mul_rn(weights[k, v], scales[v])
            t = ar.mul_rn(ar.mul_rn(grads[v], values[k, v]), p)
            ds = ar.fma_rn(-p, dots[v], t)
            sums[k, v] = sums[k, v] + ds
            of_kv.append(ar.mul_rn(grads[v], p))
            of_score.append(ds)
        arch.store(to_kv + k * grad_kv.stride, bf16.pack(of_kv))
        arch.store(to_score + k * grad_score.stride, bf16.pack(of_score))


def _store_zeros(
    chunk: Chunk,
    grad_kv: Matrix,
    grad_score: Matrix,
    start: Int32,
    column: Int32,
) -> None:
    """Writes zeros at a warp's tokens in the columns that the next block pools."""
    to_kv = grad_kv.at(start, column)
    to_score = grad_score.at(start, column)
    for k in range(chunk.positions):
        arch.store(to_kv + k * grad_kv.stride, bf16.WORD[chunk.columns](0))
        arch.store(to_score + k * grad_score.stride, bf16.WORD[chunk.columns](0))
