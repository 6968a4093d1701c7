# SPDX-License-Identifier: Apache-2.0
"""Backward for windows that fit in registers: gradients, and APE sums as partial planes.

Blocks form `groups` x `column_tiles`: one owns a tile of columns and every groups-th tile of rows,
keeps its APE sums in registers over all of them, folds its row lanes in a fixed order through
shared memory and writes its part of the group's plane. `finish` adds the planes, and writes the
zeros of tokens outside all blocks.

Every product and sum of the gradients is R's own: they equal R bit for bit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Float64, Int32, Int64, Uint32
from cutlass.cute import arch

from aot.kernels import arithmetic as ar
from aot.kernels import bf16
from aot.kernels.ape_table import ApeTable, fold_into_plane
from aot.kernels.launchable import launchable
from aot.kernels.memory import Matrix, load_word
from aot.kernels.parked import Parked
from aot.kernels.ptx import select
from aot.kernels.segments import LOG2_WARP, WARP, Pack, find_row
from aot.kernels.window import Window
from aot.variants import Variant

# Quotients e / total are exact by one fma correction down to e = 2**-104; exp(-69) is 2**-99.5.
LEAST_EXPONENT = -69.0


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
        parked.start(pack, warp_row(tile_row + warp_offset, rows))
        while tile_row < Uint32(end):
            own = tile_row + row_lane < Uint32(end)
            row = Int32(min(tile_row + row_lane, Uint32(end - 1)))
            sought = warp_row(tile_row + warp_offset, rows)
            token, first, last = find_row(
                pack, row, sought, lanes_log2 < LOG2_WARP, parked.glanced(pack, sought), end,
                window.ratio,
            )  # fmt: skip
            tile_row = tile_row + Uint32(groups) * row_lanes
            parked.start(pack, warp_row(tile_row + warp_offset, rows))
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


def warp_row(wanted: Uint32, rows: Int32) -> Int32:
    """The row that a warp looks for: the wanted one, or the last of the call's `rows`."""
    last = Uint32(rows - 1)
    return Int32(select(wanted < last, wanted, last))


def differentiate_row(
    window: Window,
    scores: list,
    values: list,
    grads: list[Float32],
    first: Int32,
    add: Callable[[int, int, Float32], None],
) -> tuple[list, list]:
    """(gradients of kv, gradients of score) as [position][pair of columns] words of bf16.

    Gives the latter, unrounded, to `add`, with their position and column. Columns go two at a time
    and are rounded at once, so that few fp32 gradients are alive together.
    """
    to_kv: list[list] = [[] for _ in range(window.positions)]
    to_score: list[list] = [[] for _ in range(window.positions)]
    for start in range(0, window.columns, 2):
        columns = range(start, min(start + 2, window.columns))
        pair = [
            _differentiate(
                _softmax(window, [row[v] for row in scores], first),
                [row[v] for row in values],
                grads[v],
            )
            for v in columns
        ]
        for k in range(window.positions):
            to_kv[k].append(bf16.pack([of_kv[k] for of_kv, _ in pair]))
            to_score[k].append(bf16.pack([of_score[k] for _, of_score in pair]))
            for v, (_, of_score) in zip(columns, pair, strict=True):
                add(k, v, of_score[k])
    return to_kv, to_score


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


def _differentiate(probabilities: list, values: list, grad: Float32) -> tuple[list, list]:
    """One column: (gradients of kv, gradients of score), fp32, one per position."""
    upstream = [ar.mul_rn(grad, value) for value in values]
    terms = [ar.mul_rn(u, p) for u, p in zip(upstream, probabilities, strict=True)]
    dot = terms[0]
    for t in terms[1:]:
        dot = dot + t
    to_kv = [ar.mul_rn(grad, p) for p in probabilities]
    to_score = [ar.fma_rn(-p, dot, t) for p, t in zip(probabilities, terms, strict=True)]
    return to_kv, to_score


def _softmax(window: Window, scores: list[Float32], first: Int32) -> list[Float32]:
    """R's probabilities of one column."""
    exponents = ar.below_maximum(scores)
    weights = [ar.exp(x) for x in exponents]
    total = weights[0]
    for e in weights[1:]:
        total = total + e
    own = window.positions - window.ratio
    least = ar.least(exponents[own:])
    if own > 0:
        previous = select(first != 0, Float32(0.0), ar.least(exponents[:own]))
        least = arch.fmin(least, previous)
    return _quotients(weights, total, least)


@cute.jit
def _quotients(weights: list, total: Float32, least: Float32) -> list:
    """IEEE quotients weight / total, for a total of 0, NaN or in [1, 2**24].

    least: of the exponents that the weights come from.

    By the correctly rounded reciprocal and one correction (Markstein), which is exact unless a
    weight is so small that the correction's remainder underflows. Then by the reciprocal in fp64:
    its relative error stays under 2**-51, and a quotient of two fp32 comes no closer than 2**-50
    to a value halfway between two fp32, subnormals included.
    """
    reciprocal = ar.reciprocal(total)
    quotients = cute.make_rmem_tensor((len(weights),), Float32)
    for k in cutlass.range_constexpr(len(weights)):
        near = ar.mul_rn(weights[k], reciprocal)
        rest = ar.fma_rn(-near, total, weights[k])
        quotients[k] = ar.fma_rn(rest, reciprocal, near)
    if least < LEAST_EXPONENT:
        error = Float64(ar.fma_rn(-reciprocal, total, Float32(1.0)))
        exact = Float64(reciprocal) * (error * error + error) + Float64(reciprocal)
        for k in cutlass.range_constexpr(len(weights)):
            quotients[k] = Float32(Float64(weights[k]) * exact)
    return [quotients[k] for k in range(len(weights))]
