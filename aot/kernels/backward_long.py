# SPDX-License-Identifier: Apache-2.0
"""Backward for long windows: gradients, and APE sums as partial planes.

Blocks form `groups` x `column_tiles`: one owns a tile of columns and one of every `groups` rows.
Each of its warps owns a run of tokens in each half of the window, for which it keeps the
exponentials and the APE sums in registers; over a row the warps exchange their maxima, then their
sums, which every thread adds in ascending order. The next row's kv and score travel to shared
memory in the meantime. Every warp copies what it reads itself, so nothing else waits.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute import arch

from aot.kernels import bf16
from aot.kernels.ape_tile import fill_ape_tile
from aot.kernels.block_layout import block_layout
from aot.kernels.launchable import launchable
from aot.kernels.memory import Matrix, load_word_once, store_f32
from aot.kernels.row_buffer import DEPTH, copy_row
from aot.kernels.row_gradients import write_gradients, write_zeros
from aot.kernels.row_table import look_up_rows, row_of
from aot.kernels.segments import Pack, find_row
from aot.kernels.softmax_row import softmax_row
from aot.kernels.warp import WARP
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
        thread, _, _ = arch.thread_idx()
        block, _, _ = arch.block_idx()
        lane, warp = thread % WARP, arch.make_warp_uniform(thread // WARP)
        group, column_tile = block // column_tiles, block % column_tiles
        tile_column = column_tile * window.tile
        wanted_column = tile_column + lane * window.columns
        column = min(wanted_column, head_dim - window.columns)
        # A lane copies other columns than it reads: 16 bytes, of its own warp's positions.
        copied_column = row_buffer.column(tile_column, head_dim, lane)
        active = wanted_column < head_dim

        memory = arch.get_dyn_smem(Float32, alignment=16)

        pack = Pack(cu_seqlens, cu_seqlens_comp, segments, tokens, rows)
        kv, score = Matrix(kv, kv_stride), Matrix(score, score_stride)
        grad_out = Matrix(grad_out, grad_out_stride)
        grad_kv = Matrix(grad_kv, grad_kv_stride)
        grad_score = Matrix(grad_score, grad_score_stride)
        # The first row is found by itself, and travels while the others are looked up.
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
            copy_row(
                row_buffer, memory, Int32(0), kv, score, token, first,
                warp, lane, copied_column, head_dim,
            )  # fmt: skip
        if cutlass.const_expr(ape_tile.held):
            fill_ape_tile(ape_tile, memory, ape, head_dim, warp, lane, column)
        arch.cp_async_commit_group()
        look_up_rows(row_table, memory, Int32(0), pack, group, groups, rows)

        sums = cute.make_rmem_tensor((window.warp_positions, window.columns), Float32)
        sums.fill(0.0)
        weights = cute.make_rmem_tensor((window.warp_positions, window.columns), Float32)
        kept = (window.warp_positions - window.reread, window.columns)
        products = cute.make_rmem_tensor(kept, Float32)
        index = Int32(0)
        while row < real_rows:
            later = index + (DEPTH - 1)
            if row_of(later, group, groups) < real_rows:
                if later % variant.threads == 0:
                    look_up_rows(row_table, memory, later, pack, group, groups, rows)
                later_token, later_first, _ = row_table.read(memory, later)
                copy_row(
                    row_buffer, memory, later % DEPTH, kv, score, later_token, later_first,
                    warp, lane, copied_column, head_dim,
                )  # fmt: skip
            arch.cp_async_commit_group()
            slot = index % DEPTH
            token, first, last = row_table.read(memory, index)
            if cutlass.const_expr(window.coff == 2):
                write_zeros(
                    row_buffer, grad_kv, grad_score, token, (last != 0) | (row + 1 >= real_rows),
                    warp, lane, column, copied_column, tile_column, head_dim,
                )  # fmt: skip
            grads = bf16.unpack(grad_word, window.columns)
            next_row = row_of(index + 1, group, groups)
            if next_row < real_rows:
                grad_word = load_word_once(grad_out.at(next_row, column), window.columns)
            arch.cp_async_wait_group(DEPTH - 1)
            arch.sync_warp()

            scales, dots = softmax_row(
                layout, memory, slot, ape, head_dim, warp, lane, column,
                first, grads, weights, products,
            )  # fmt: skip
            write_gradients(
                row_buffer, memory, slot, grad_kv, grad_score, token, first,
                warp, lane, column, copied_column, tile_column, head_dim,
                grads, weights, products, scales, dots, sums,
            )  # fmt: skip
            arch.sync_warp()  # the next copies overwrite what every lane has read by now
            row = next_row
            index = index + 1
        if active & (workspace.toint() != 0):
            width = Int64(head_dim) * window.coff
            plane = workspace + Int64(group) * (window.ratio * width)
            base = plane + (warp * window.run * width + column)
            for half in cutlass.range_constexpr(window.coff):
                for k in cutlass.range_constexpr(window.run):
                    row_sums = [sums[half * window.run + k, v] for v in range(window.columns)]
                    store_f32(base + (k * width + half * head_dim), row_sums)

    return launchable(backward, variant)
