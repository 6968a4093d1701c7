# SPDX-License-Identifier: Apache-2.0
"""Where a row's block lies: its segment is found in non-decreasing prefixes, in a few loads.

Every search returns the largest s in [0, segments) with prefixes[s] <= value, or 0 if there is
none, whatever the prefixes hold: malformed ones give a wrong s, never one out of range.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.cute import arch

from aot.kernels import arithmetic as ar
from aot.kernels.memory import PINNED
from aot.kernels.ptx import select

WARP = 32
LOG2_WARP = 5

# Of fewer rows a segment, too many are first blocks to read what precedes a block unasked.
LOG2_MANY_ROWS = 4


@cute.jit
def search(prefixes: cute.Pointer, segments: Int32, value: Int32) -> Int32:
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
def guess(segments: Int32, value: Int32, extent: Int32) -> Int32:
    """The first of the 32 prefixes that a warp looks at for a `value`, the same in all lanes.

    They lie around the place where it would be if the segments shared `extent` equally: so one
    load finds it where the segments are few or alike.
    """
    begin = Int32(0)
    if segments >= WARP:
        share = Float32(value) * ar.rcp_approx(Float32(extent))
        middle = Int32(share * Float32(segments))
        begin = max(min(middle - WARP // 2, segments - (WARP - 1)), 0)
    return begin


def of_lane(begin: Int32, segments: Int32) -> Int32:
    """The index of the prefix that a lane looks at: from `begin` on, up to the last one."""
    index = begin + arch.lane_idx()
    return select(index < segments, index, segments)


def glance(
    prefixes: cute.Pointer, others: cute.Pointer, segments: Int32, value: Int32, extent: Int32
) -> tuple[Int32, Int32, Int32]:
    """Starts loading what `guess` names: its first, a lane's prefix, and the one of `others`."""
    begin = guess(segments, value, extent)
    return begin, *_load_lane(prefixes, others, segments, begin)


def _load_lane(
    prefixes: cute.Pointer, others: cute.Pointer, segments: Int32, begin: Int32
) -> tuple[Int32, Int32]:
    index = of_lane(begin, segments)
    return arch.load(prefixes + index, Int32), arch.load(others + index, Int32)


@cute.jit
def settle(
    prefixes: cute.Pointer,
    others: cute.Pointer,
    segments: Int32,
    value: Int32,
    begin: Int32,
    prefix: Int32,
    other: Int32,
) -> tuple[Int32, Int32, Int32, Int32]:
    """Ends what `glance` began: the value's segment, by `search` if it is not among the 32.

    Returns the place among the 32 (those of the lanes now), their first, and the lane's two.
    """
    passed = Int32(1)
    if segments > 1:
        passed = arch.popc(arch.vote_ballot_sync(prefix <= value))
    if segments >= WARP:
        before = (passed == 0) & (begin > 0)
        behind = (passed == WARP) & (begin + WARP <= segments)
        # By a vote, so that the compiler knows that the warp stays together.
        if arch.vote_any_sync(before | behind):
            begin = search(prefixes, segments, value)
            passed = Int32(1)
            prefix, other = _load_lane(prefixes, others, segments, begin)
    return max(passed - 1, 0), begin, prefix, other


@dataclass(frozen=True)
class Pack:
    """A pack of `tokens` tokens and `rows` rows: where its segments' begin, and end.

    rows: those of the call. The segments may have fewer, and the others are padding; or more.
    """

    cu_seqlens: cute.Pointer
    cu_seqlens_comp: cute.Pointer
    segments: Int32
    tokens: Int32
    rows: Int32

    def real_rows(self) -> Int32:
        """The number of rows that belong to a segment."""
        return arch.load(self.cu_seqlens_comp + self.segments, Int32)

    def filled(self, ratio: int) -> Boolean:
        """Whether row r's own block may be presumed to start at token r * ratio.

        It does in a well-formed pack whose rows are all real and fill the tokens, since none of its
        segments has a tail. In any other `find_row` will differ; the presumed blocks lie inside the
        tensors all the same.
        """
        tokens, rows = Uint32(self.tokens), Uint32(self.rows)
        return (tokens // ratio == rows) & (tokens % ratio == 0)

    def few_first_blocks(self) -> Boolean:
        """Whether a row may be presumed to have a previous block: most have one."""
        return (Uint32(self.rows) >> LOG2_MANY_ROWS) >= Uint32(self.segments)

    def presumable(self, ratio: int, coff: int) -> Boolean:
        """Whether a row's whole window may be presumed to lie where its number says."""
        return self.filled(ratio) if coff == 1 else self.filled(ratio) & self.few_first_blocks()

    def glance(self, row: Int32) -> tuple[Int32, Int32, Int32]:
        """Starts finding a row that is the same in all lanes; `find_row` needs what it returns."""
        return glance(self.cu_seqlens_comp, self.cu_seqlens, self.segments, row, self.rows)


@cute.jit
def find_row_at_once(pack: Pack, row: Int32, ratio: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """As `find_row` of a warp's only row, its token and first, where 1 to 31 segments are.

    A warp's lanes see all prefixes. Without a branch, so that only these loads are waited for.
    """
    index = of_lane(Int32(0), pack.segments)
    prefix, other = (
        arch.load(prefixes + index, Int32, **PINNED)
        for prefixes in (pack.cu_seqlens_comp, pack.cu_seqlens)
    )
    found = max(arch.popc(arch.vote_ballot_sync(prefix <= row)) - 1, 0)
    real_rows = arch.shuffle_sync(prefix, WARP - 1)
    index = row - arch.shuffle_sync(prefix, found)
    token = max(min(arch.shuffle_sync(other, found) + index * ratio, pack.tokens - ratio), 0)
    first = Int32((index <= 0) | (token < ratio))
    padding = row >= real_rows
    return select(padding, Int32(0), token), select(padding, Int32(1), first)


@cute.jit
def find_row(
    pack: Pack,
    row: Int32,
    warp_row: Int32,
    several: Boolean,
    glanced: tuple,
    real_rows: Int32,
    ratio: cutlass.Constexpr,
) -> tuple[Int32, Int32, Int32]:
    """Where a row's block starts: its first token, and whether it is its segment's first, last.

    As `find_segment`, and `place` of what that returns. A row of padding is the pack's start, as a
    first block.
    """
    token = Int32(0)
    first = Int32(1)
    last = Int32(1)
    if pack.segments > 0:
        segment = _find_segment(pack, row, warp_row, several, glanced)
        token, first, last = place(pack, row, *segment, ratio)
    padding = row >= real_rows
    return select(padding, Int32(0), token), select(padding, Int32(1), first), last


@cute.jit
def find_segment(
    pack: Pack, row: Int32, warp_row: Int32, several: Boolean, glanced: tuple
) -> tuple[Int32, Int32, Int32]:
    """A row's segment: its first row, its first token, and the first row behind it.

    row: this lane's row. warp_row: the least of its warp's rows, and `glanced` what
    `pack.glance` says of it. several: whether the warp's rows differ.
    """
    segment_row, segment_token, end = row, Int32(0), Int32(0)
    if pack.segments > 0:
        segment_row, segment_token, end = _find_segment(pack, row, warp_row, several, glanced)
    return segment_row, segment_token, end


@cute.jit
def _find_segment(
    pack: Pack, row: Int32, warp_row: Int32, several: Boolean, glanced: tuple
) -> tuple[Int32, Int32, Int32]:
    """As `find_segment`, where there are segments."""
    rows, tokens = pack.cu_seqlens_comp, pack.cu_seqlens
    begin, prefix, other = glanced
    found, begin, prefix, other = settle(
        rows, tokens, pack.segments, warp_row, begin, prefix, other
    )
    segment_row = arch.shuffle_sync(prefix, found)
    segment_token = arch.shuffle_sync(other, found)
    end = arch.shuffle_sync(prefix, min(found + 1, WARP - 1))
    if several:
        segment = min(begin + found, pack.segments - 1)
        segment = gallop(rows, pack.segments, segment, row)
        segment_row = arch.load(rows + segment, Int32)
        segment_token = arch.load(tokens + segment, Int32)
        end = arch.load(rows + (segment + 1), Int32)
    return segment_row, segment_token, end


@cute.jit
def place(
    pack: Pack,
    row: Int32,
    segment_row: Int32,
    segment_token: Int32,
    segment_end: Int32,
    ratio: cutlass.Constexpr,
) -> tuple[Int32, Int32, Int32]:
    """(first token, whether first, whether last) of a row's block in a segment.

    The block [token, token + ratio) and, unless first, the one before it lie inside [0, tokens)
    whatever the segment.
    """
    index = row - segment_row
    token = max(min(segment_token + index * ratio, pack.tokens - ratio), 0)
    first = Int32((index <= 0) | (token < ratio))
    last = Int32(row + 1 >= segment_end)
    return token, first, last
