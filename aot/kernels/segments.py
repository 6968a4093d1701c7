# SPDX-License-Identifier: Apache-2.0
"""Where a row's block lies: its segment is found in non-decreasing prefixes, in a few loads.

Every search returns the largest s in [0, segments) with prefixes[s] <= value, or 0 if there is
none, whatever the prefixes hold: malformed ones give a wrong s, never one out of range.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cute import arch

from aot.kernels.ptx import select

WARP = 32
LOG2_WARP = 5


@dataclass(frozen=True)
class Pack:
    """A pack of `tokens` tokens: where its segments' tokens and rows begin, and end."""

    cu_seqlens: cute.Pointer
    cu_seqlens_comp: cute.Pointer
    segments: Int32
    tokens: Int32

    def real_rows(self) -> Int32:
        """The number of rows that belong to a segment; any after them are padding."""
        return arch.load(self.cu_seqlens_comp + self.segments, Int32)


@cute.jit
def find_for_warp(prefixes: cute.Pointer, segments: Int32, value: Int32) -> Int32:
    """The segment of a `value` that is the same in all lanes: 32 probes a step.

    1,000 segments take two dependent loads and a million take four, where bisection would take
    ten and twenty.
    """
    lane = arch.lane_idx()
    low = Int32(0)
    width = segments  # the answer lies in [low, low + width)
    while width > 1:
        step = Int32((Uint32(width) + (WARP - 1)) // WARP)
        offset = Uint32(lane + 1) * Uint32(step)
        below = Int32(0)
        if offset < Uint32(width):
            below = Int32(arch.load(prefixes + (low + Int32(offset)), Int32) <= value)
        passed = arch.popc(arch.vote_ballot_sync(below != 0)) * step
        low = low + passed
        width = min(width - passed, step)
    return low


@cute.jit
def gallop(prefixes: cute.Pointer, segments: Int32, start: Int32, value: Int32) -> Int32:
    """The segment of a lane's own `value`, known not to lie before `start`.

    Doubling steps, then halving ones: a value in the start's own segment costs one load.
    """
    low = start
    step = Int32(1)
    growing = Int32(1)
    while growing != 0:
        growing = Int32(0)
        if step < segments - low:
            if arch.load(prefixes + (low + step), Int32) <= value:
                low = low + step
                growing = Int32(1)
                step = step * 2
    while step > 1:
        step = step // 2
        if step < segments - low:
            if arch.load(prefixes + (low + step), Int32) <= value:
                low = low + step
    return low


@cute.jit
def find_row(
    pack: Pack,
    row: Int32,
    warp_row: Int32,
    lanes_log2: Int32,
    ratio: cutlass.Constexpr,
) -> tuple[Int32, Int32, Int32]:
    """Where a row's block starts: its first token, and whether it is its segment's first, last.

    row: this lane's row. warp_row: the least of its warp's rows, which are all one where
    lanes_log2 is at least LOG2_WARP.
    The block [token, token + ratio) and, unless first, the one before it lie inside [0, tokens)
    even for malformed prefixes. For rows that are not real the answer is safe and meaningless.
    """
    token = Int32(0)
    first = Int32(1)
    last = Int32(1)
    if pack.segments > 0:
        segment = find_for_warp(pack.cu_seqlens_comp, pack.segments, warp_row)
        if lanes_log2 < LOG2_WARP:
            segment = gallop(pack.cu_seqlens_comp, pack.segments, segment, row)
        index = row - arch.load(pack.cu_seqlens_comp + segment, Int32)
        end = arch.load(pack.cu_seqlens_comp + (segment + 1), Int32)
        token = arch.load(pack.cu_seqlens + segment, Int32) + index * ratio
        token = max(min(token, pack.tokens - ratio), 0)
        first = Int32((index <= 0) | (token < ratio))
        last = Int32(row + 1 >= end)
    return token, first, last


def find_row_or_padding(
    pack: Pack, row: Int32, warp_row: Int32, lanes_log2: Int32, ratio: int
) -> tuple[Int32, Int32]:
    """`find_row` for forward, which computes padding too: the pack's start, as a first block.

    Returns the first token, and whether the block is its segment's first.
    """
    real_rows = pack.real_rows()
    token, first, _ = find_row(pack, row, warp_row, lanes_log2, ratio)
    padding = row >= real_rows
    return select(padding, Int32(0), token), select(padding, Int32(1), first)
