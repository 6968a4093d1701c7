# SPDX-License-Identifier: Apache-2.0
"""Where a block's next rows start in the pack, found by all its threads at once.

A persistent block's index-th row is one of rows `index * groups` to `(index + 1) * groups`, which
the groups share out anew each time: else, with segments of as many rows, one group would get all
first blocks and another all last ones. Each thread looks one of the next `threads` rows up, so that
a row costs its warps one load from shared memory.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32, Uint64
from cutlass.cute import arch

from aot.kernels.ptx import select
from aot.kernels.segments import Pack, find_row
from aot.kernels.warp import WARP


@dataclass(frozen=True)
class RowTable:
    """Of 2 * threads rows, the first token and whether the block is its segment's first.

    Two int32 a row. Looking up fills one half of the table, so that rows of the other half may
    still be in work. It lies `offset` words into the block's shared memory.
    """

    threads: int
    ratio: int
    offset: int

    @property
    def words(self) -> int:
        """Size in 32-bit words."""
        return 4 * self.threads

    def read(self, memory: cute.Pointer, index: Int32) -> tuple[Int32, Int32]:
        """(first token, whether a first block) of the block's index-th row."""
        at = self.at(memory, index)
        return arch.load(at, Int32, ss="cta"), arch.load(at + 1, Int32, ss="cta")

    def at(self, memory: cute.Pointer, index: Int32) -> cute.Pointer:
        """The address of the entry of the block's index-th row."""
        entries = cute.recast_ptr(memory + self.offset, dtype=Int32)
        return entries + (index % (2 * self.threads)) * 2


def row_of(index: Int32, group: Int32, groups: Int32) -> Uint32:
    """A group's index-th row. Each index turns the groups by a multiple of the golden section."""
    turned = Uint64(Uint32(index) * Uint32(0x9E3779B9)) * Uint64(Uint32(groups))
    place = Uint32(group) + Uint32(turned >> 32)
    place = select(place < Uint32(groups), place, place - Uint32(groups))
    return Uint32(index) * Uint32(groups) + place


@cute.jit
def look_up_rows(
    table: cutlass.Constexpr,
    memory: cute.Pointer,
    index: Int32,
    pack: Pack,
    group: Int32,
    groups: Int32,
) -> None:
    """Enters the block's rows from its index-th on. Every thread calls it.

    For rows that are not real the entries are safe and meaningless.
    """
    thread, _, _ = arch.thread_idx()
    end = Uint32(pack.rows - 1)
    mine = Int32(min(row_of(index + thread, group, groups), end))
    warp_row = Int32(min(Uint32(index + (thread & -WARP)) * Uint32(groups), end))
    token, first, _ = find_row(
        pack, mine, warp_row, Boolean(True), pack.glance(warp_row), pack.real_rows(), table.ratio
    )
    at = table.at(memory, index + thread)
    arch.store(at, token, ss="cta")
    arch.store(at + 1, first, ss="cta")
    arch.sync_threads()
