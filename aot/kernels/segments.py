# SPDX-License-Identifier: Apache-2.0
"""Where a row's block lies in the pack: its segment by `prefix_search`, its place by its number.

Whatever the prefixes hold, a block that is found lies inside the tensors.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32
from cutlass.cute import arch

from aot.kernels.memory import PINNED
from aot.kernels.prefix_search import among, gallop, glance, of_lane, settle
from aot.kernels.ptx import select
from aot.kernels.warp import WARP

# Of fewer rows a segment, too many are first blocks to read what precedes a block unasked.
LOG2_MANY_ROWS = 4


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

    def row_or_last(self, row: Uint32) -> Int32:
        """The row, or the call's last one if there is no such row. It has one at least."""
        last = Uint32(self.rows - 1)
        return Int32(select(row < last, row, last))

    def few_segments(self) -> Boolean:
        """Whether 1 to 31 segments are, all of whose prefixes a warp's lanes see at a glance."""
        return (self.segments > 0) & (self.segments < WARP)

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
    """As `find_row` of a warp's only row, its token and first, where `Pack.few_segments`.

    Without a branch, so that only these loads are waited for.
    """
    index = of_lane(Int32(0), pack.segments)
    prefix, other = (
        arch.load(prefixes + index, Int32, **PINNED)
        for prefixes in (pack.cu_seqlens_comp, pack.cu_seqlens)
    )
    found = max(arch.popc(arch.vote_ballot_sync(prefix <= row)) - 1, 0)
    real_rows = arch.shuffle_sync(prefix, WARP - 1)
    segment = arch.shuffle_sync(prefix, found), arch.shuffle_sync(other, found), Int32(0)
    token, first, _ = place(pack, row, *segment, ratio)
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

    row: this lane's row. warp_row: the least of its warp's rows, and `glanced` what `pack.glance`
    says of it. several: whether the warp's rows differ. A row of padding is the pack's start, as a
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
def find_segment(pack: Pack, row: Int32, glanced: tuple) -> tuple[Int32, Int32, Int32]:
    """A row's segment: its first row, its first token, and the first row behind it.

    row: the same in all lanes. glanced: what `pack.glance` says of it. Without segments, none is
    behind it: the end is 0.
    """
    segment_row, segment_token, end = row, Int32(0), Int32(0)
    if pack.segments > 0:
        segment_row, segment_token, end = _find_segment(pack, row, row, False, glanced)
    return segment_row, segment_token, end


@cute.jit
def _find_segment(
    pack: Pack, row: Int32, warp_row: Int32, several: Boolean, glanced: tuple
) -> tuple[Int32, Int32, Int32]:
    """As `find_segment`, where there are segments, of rows as `find_row` takes them.

    Of consecutive rows most lie in segments whose prefixes the warp's lanes hold by then.
    """
    rows, tokens = pack.cu_seqlens_comp, pack.cu_seqlens
    begin, prefix, other = glanced
    found, begin, prefix, other = settle(
        rows, tokens, pack.segments, warp_row, begin, prefix, other
    )
    if several:
        found = among(prefix, row)
    segment_row = arch.shuffle_sync(prefix, found)
    segment_token = arch.shuffle_sync(other, found)
    end = arch.shuffle_sync(prefix, min(found + 1, WARP - 1))
    if several:
        behind = (found == WARP - 1) & (begin <= pack.segments - WARP)
        if arch.vote_any_sync(behind):
            if behind:
                segment = gallop(rows, pack.segments, begin + found, row)
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
    token = block_token(pack, index, segment_token, ratio)
    first = Int32((index <= 0) | (token < ratio))
    last = Int32(row + 1 >= segment_end)
    return token, first, last


@cute.jit
def block_token(pack: Pack, index: Int32, segment_token: Int32, ratio: Int32) -> Int32:
    """The first token of a segment's index-th block, which lies inside [0, tokens) in any case."""
    return max(min(segment_token + index * ratio, pack.tokens - ratio), 0)
