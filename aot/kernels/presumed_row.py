# SPDX-License-Identifier: Apache-2.0
"""A warp's first row of the buffered backward, on its way before it is looked up.

Without tails the blocks fill the pack, and the row's number says where its block lies. Where that
turns out wrong, the row is copied again.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32
from cutlass.cute import arch

from aot.kernels.segments import Pack
from aot.kernels.warp_buffer import Source, copy_own, copy_previous


@dataclass(frozen=True)
class Presumed:
    """A row's first token, unless a segment has a tail, and which halves may be presumed at all."""

    token: Int32
    own: Boolean
    previous: Boolean

    @staticmethod
    def of(pack: Pack, row: Uint32, ratio: int) -> "Presumed":
        """Of a row, which the call may lack."""
        token = Int32(row) * ratio
        own = pack.filled(ratio) & (row < Uint32(pack.rows))
        return Presumed(token, own, own & (row > 0) & pack.few_first_blocks())


@cute.jit
def copy_presumed(
    buffer: cutlass.Constexpr, slot: cute.Pointer, source: Source, presumed: Presumed, lane: Int32
) -> None:
    """Starts copies of the presumed halves."""
    if presumed.own:
        copy_own(buffer, slot, source, presumed.token, lane)
    if cutlass.const_expr(buffer.window.coff == 2):
        if presumed.previous:
            copy_previous(buffer, slot, source, presumed.token, Int32(0), lane)


@cute.jit
def copy_rest(
    buffer: cutlass.Constexpr,
    slot: cute.Pointer,
    source: Source,
    presumed: Presumed,
    exists: Boolean,
    token: Int32,
    first: Int32,
    lane: Int32,
) -> None:
    """Starts copies of what was not presumed or lies elsewhere, if the row exists.

    token, first: as found.
    """
    wrong = ~presumed.own | (token != presumed.token)
    incomplete = wrong | ~presumed.previous | (first != 0)
    if exists:
        if (wrong & presumed.own) | (incomplete & presumed.previous):
            arch.cp_async_wait_group(0)  # or it would arrive after what replaces it
        if wrong:
            copy_own(buffer, slot, source, token, lane)
        if cutlass.const_expr(buffer.window.coff == 2):
            if incomplete:
                copy_previous(buffer, slot, source, token, first, lane)
