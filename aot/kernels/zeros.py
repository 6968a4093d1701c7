# SPDX-License-Identifier: Apache-2.0
"""Zeros for the gradients of what no computed row pools.

That is tokens outside all blocks of computed rows, and with coff 2 the first half of the columns in
each segment's last such block, which a next block would pool; of long windows, since the kernels of
short ones write those themselves. Where there are tokens of the first kind every token is looked
at, 32 by a warp, or by several where the launch has warps to spare, which then write every so many
each. So the cost of finding them does not depend on where they are, and long gaps are shared out
over all blocks. For those of the second kind each block has some segments and a part of their last
blocks; segments are looked at 32 at a time, and empty ones cost little. Blocks start in the order
of what they write, which memory takes fastest.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32
from cutlass.cute import arch

from aot.kernels.memory import PINNED, store_f32
from aot.kernels.pair import Pair
from aot.kernels.prefix_search import gallop, glance, settle
from aot.kernels.segments import Pack, block_token
from aot.kernels.warp import WARP

WIDE = 8  # elements of a 16-bit type that one store writes where the rows allow it
LOG2_PARTS = 2, 4  # of a last block, each another block's: with many segments, with few
EVERY_TOKEN = 0xFFFFFFFF  # a bit for each token of a warp


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
    lane, warp = arch.lane_idx(), arch.make_warp_uniform(thread // WARP)
    wide = _all_multiples_of_wide(outputs, width)
    warps = cutlass.const_expr(threads // WARP)
    log2_sharers = Int32(0)  # of the same 32 tokens
    while (1 << log2_sharers < warps) & (
        Int64(blocks) * threads >= Int64(pack.tokens) << (log2_sharers + 1)
    ):
        log2_sharers = log2_sharers + 1
    sharers = Int32(1) << log2_sharers
    mine = Uint32(EVERY_TOKEN) // ((Uint32(1) << Uint32(sharers)) - 1)  # every so many-th
    mine = mine << Uint32(warp & (sharers - 1))
    base = (Int64(block) * warps + warp >> log2_sharers) * WARP
    step = (Int64(blocks) * warps >> log2_sharers) * WARP
    if Int64(min(pack.real_rows(), pack.rows)) * ratio >= pack.tokens:
        base = Int64(pack.tokens)  # the blocks fill the pack
    while base < pack.tokens:
        token = Int32(min(base + lane, Int64(pack.tokens) - 1))
        pooled = _is_pooled(pack, ratio, Int32(base), token)
        pending = arch.vote_ballot_sync((base + lane < pack.tokens) & ~pooled) & mine
        while pending != 0:
            row = base + arch.popc((pending & -pending) - 1)
            pending = pending & (pending - 1)
            _zero_token(outputs, row, width, lane, wide)
        base = base + step


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
    lane, warp = arch.lane_idx(), arch.make_warp_uniform(thread // WARP)
    wide = _all_multiples_of_wide(outputs, head_dim)
    rows_end = max(min(pack.real_rows(), pack.rows), 0)
    log2_parts = Int32(LOG2_PARTS[0])
    if blocks >> LOG2_PARTS[1] >= pack.segments:
        log2_parts = Int32(LOG2_PARTS[1])
    places = ratio >> log2_parts
    first_place = (block & ((1 << log2_parts) - 1)) * places
    share, shares = block >> log2_parts, blocks >> log2_parts
    left = Int32(0)  # segments to look at, from `segment` on
    segment = Int32(0)
    if share < shares:
        each, more = pack.segments // shares, pack.segments % shares
        left = each + Int32(share < more)
        segment = share * each + min(share, more)
    while left > 0:
        mine = segment + min(lane, left - 1)
        row, next_row = (
            arch.load(pack.cu_seqlens_comp + (mine + i), Int32, **PINNED) for i in range(2)
        )
        start = arch.load(pack.cu_seqlens + mine, Int32, **PINNED)
        end_row = min(next_row, rows_end)
        token = block_token(pack, end_row - 1 - row, start, ratio)
        # Whatever the prefixes hold, without rows there is no block: the pack may be too short.
        pending = arch.vote_ballot_sync((lane < left) & (row >= 0) & (row < end_row))
        while pending != 0:
            found = arch.shuffle_sync(token, arch.popc((pending & -pending) - 1))
            pending = pending & (pending - 1)
            place = Int32(warp)
            while place < places:
                _zero_token(outputs, Int64(found + (first_place + place)), head_dim, lane, wide)
                place = place + cutlass.const_expr(threads // WARP)
        segment = segment + WARP
        left = left - WARP


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
    # Unrolled, it would be mostly tests: it runs once or a few times.
    for column in cutlass.range(lane * elements, width, WARP * elements, unroll=1):
        if cutlass.const_expr(elements == WIDE):
            zeros = [Float32(0.0)] * (WIDE // 2)
            store_f32(to_kv + column, zeros)
            store_f32(to_score + column, zeros)
        else:
            arch.store(to_kv + column, Uint16(0))
            arch.store(to_score + column, Uint16(0))


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
