# SPDX-License-Identifier: Apache-2.0
"""Zeros for the gradients of what no computed row pools.

That is tokens outside all blocks of computed rows, and with coff 2 the first half of the columns in
each segment's last such block, which a next block would pool; of long windows, since the kernels of
short ones write those themselves. Where there are tokens of the first kind every token is looked
at, each by one lane; a warp then writes together what its 32 tokens need. So the cost of finding
them does not depend on where they are, and long gaps are shared out over all blocks. For those of
the second kind rows are looked at, 32 at a time, by as many warps as a block has tokens, of which
each writes one: few segments and many are shared out alike, and empty ones cost nothing.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32
from cutlass.cute import arch

from aot.kernels.memory import store_f32
from aot.kernels.pair import Pair
from aot.kernels.prefix_search import gallop, glance, settle
from aot.kernels.segments import Pack, block_token, find_segments
from aot.kernels.warp import WARP

WIDE = 8  # elements of a 16-bit type that one store writes where the rows allow it


@cute.jit
def zero_unpooled(
    threads: cutlass.Constexpr,
    block: Int32,
    blocks: Int32,
    pack: Pack,
    outputs: Pair,
    width: Int32,
    ratio: Int32,
) -> None:
    """Block `block` of `blocks` does its share of all tokens, `width` columns each."""
    thread, _, _ = arch.thread_idx()
    lane = arch.lane_idx()
    wide = _all_multiples_of_wide(outputs, width)
    base = Int64(block) * threads + (thread & -WARP)
    if Int64(min(pack.real_rows(), pack.rows)) * ratio >= pack.tokens:
        base = Int64(pack.tokens)  # the blocks fill the pack
    while base < pack.tokens:
        token = Int32(min(base + lane, Int64(pack.tokens) - 1))
        pooled = _is_pooled(pack, ratio, Int32(base), token)
        pending = arch.vote_ballot_sync((base + lane < pack.tokens) & ~pooled)
        while pending != 0:
            row = base + arch.popc((pending & -pending) - 1)
            pending = pending & (pending - 1)
            _zero_token(outputs, row, width, lane, wide)
        base = base + Int64(blocks) * threads


@cute.jit
def zero_last_blocks(
    threads: cutlass.Constexpr,
    block: Int32,
    blocks: Int32,
    pack: Pack,
    outputs: Pair,
    head_dim: Int32,
    ratio: Int32,
) -> None:
    """Block `block` of `blocks` does its share of the first halves of the segments' last blocks."""
    thread, _, _ = arch.thread_idx()
    lane = arch.lane_idx()
    wide = _all_multiples_of_wide(outputs, head_dim)
    end = Uint32(max(min(pack.real_rows(), pack.rows), 0))
    # A warp's share: a token of a block, its place, in each last block among 32 rows.
    warps, places = cutlass.const_expr(threads // WARP), Uint32(ratio)
    begin = Uint32(block) * warps + Uint32(arch.make_warp_uniform(thread // WARP))
    step = Uint32(blocks * warps)
    base, place = begin // places * WARP, Int32(begin % places)
    while base < end:
        row, warp_row = pack.row_or_last(base + lane), pack.row_or_last(base)
        segment_row, segment_token, segment_end = find_segments(pack, row, warp_row)
        last = (row + 1 >= segment_end) | (Uint32(row) + 1 >= end)
        token = block_token(pack, row - segment_row, segment_token, ratio)
        pending = arch.vote_ballot_sync((base + lane < end) & last)
        while pending != 0:
            found = arch.shuffle_sync(token, arch.popc((pending & -pending) - 1)) + place
            pending = pending & (pending - 1)
            _zero_token(outputs, Int64(found), head_dim, lane, wide)
        base, place = base + step // places * WARP, place + Int32(step % places)
        if place >= ratio:
            base, place = base + WARP, place - ratio


@cute.jit
def _zero_token(outputs: Pair, token: Int64, width: Int32, lane: Int32, wide: Boolean) -> None:
    """A warp's zeros for the first `width` columns of a token, of both."""
    to_kv, to_score = outputs.at(token, Int32(0))
    if wide:
        _zero(to_kv, to_score, width, lane, WIDE)
    else:
        _zero(to_kv, to_score, width, lane, 1)


@cute.jit
def _zero(
    to_kv: cute.Pointer,
    to_score: cute.Pointer,
    width: Int32,
    lane: Int32,
    elements: cutlass.Constexpr,
) -> None:
    """A warp's zeros for one token: `width` columns of both, `elements` a store."""
    column = lane * elements
    while column < width:
        if cutlass.const_expr(elements == WIDE):
            zeros = [Float32(0.0)] * (WIDE // 2)
            store_f32(to_kv + column, zeros)
            store_f32(to_score + column, zeros)
        else:
            arch.store(to_kv + column, Uint16(0))
            arch.store(to_score + column, Uint16(0))
        column = column + WARP * elements


def _all_multiples_of_wide(outputs: Pair, width: Int32) -> Boolean:
    elements = outputs.kv.stride | outputs.score.stride | Int64(width)
    addresses = outputs.kv.base.toint() | outputs.score.base.toint()
    return ((addresses & (2 * WIDE - 1)) == 0) & ((elements & (WIDE - 1)) == 0)


@cute.jit
def _is_pooled(pack: Pack, ratio: Int32, warp_token: Int32, token: Int32) -> Boolean:
    """Whether a token lies in the block of a computed row.

    warp_token: the least of the warp's tokens. Mostly its segment is that of all of them.
    """
    pooled = Boolean(False)
    if pack.segments > 0:
        starts, rows = pack.cu_seqlens, pack.cu_seqlens_comp
        glanced = glance(starts, rows, pack.segments, warp_token, pack.tokens)
        found, begin, prefix, other = settle(starts, rows, pack.segments, warp_token, *glanced)
        segment = min(begin + found, pack.segments - 1)
        start = arch.shuffle_sync(prefix, found)
        next_start = arch.shuffle_sync(prefix, min(found + 1, WARP - 1))
        row = arch.shuffle_sync(other, found)
        end = arch.shuffle_sync(other, min(found + 1, WARP - 1))
        if arch.vote_any_sync((token >= next_start) & (segment + 1 < pack.segments)):
            segment = gallop(starts, pack.segments, segment, token)
            start = arch.load(starts + segment, Int32)
            row = arch.load(rows + segment, Int32)
            end = arch.load(rows + (segment + 1), Int32)
        index = token - start
        pooled = (index >= 0) & (index // ratio < min(end, pack.rows) - row)
    return pooled
