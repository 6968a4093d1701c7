# SPDX-License-Identifier: Apache-2.0
"""Where a block's next rows start in the pack, found by all its threads at once.

A persistent block takes every `groups`-th row. Each thread looks one of the next `threads` rows up,
so that a row costs its warps one load from shared memory.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32
from cutlass.cute import arch

from aot.kernels.segments import WARP, Pack, find_row


@dataclass(frozen=True)
class RowTable:
    """Of 2 * threads rows, the first token and whether the block is its segment's first, last.

    Two int32 a row: the token, and first + 2 * last. Looking up fills one half of the table, so
    that rows of the other half may still be in work. It lies `offset` words into
    the block's shared memory.
    """

    threads: int
    ratio: int
    offset: int

    @property
    def words(self) -> int:
        """Size in 32-bit words."""
        return 4 * self.threads

    def read(self, memory: cute.Pointer, index: Int32) -> tuple[Int32, Int32, Int32]:
        """(first token, whether a first block, whether a last one) of the block's index-th row."""
        at = self.at(memory, index)
        flags = arch.load(at + 1, Int32, ss="cta")
        return arch.load(at, Int32, ss="cta"), flags & 1, flags & 2

    def at(self, memory: cute.Pointer, index: Int32) -> cute.Pointer:
        """The address of the entry of the block's index-th row."""
        entries = cute.recast_ptr(memory + self.offset, dtype=Int32)
        return entries + (index % (2 * self.threads)) * 2


@cute.jit
def look_up_rows(
    table: cutlass.Constexpr,
    memory: cute.Pointer,
    index: Int32,
    pack: Pack,
    row: Uint32,
    groups: Int32,
    rows: Int32,
) -> None:
    """Enters the block's rows from its index-th on, which is `row`. Every thread calls it.

    For rows that are not real the entries are safe and meaningless.
    """
    thread, _, _ = arch.thread_idx()
    end = Uint32(rows - 1)
    mine = min(row + Uint32(thread) * Uint32(groups), end)
    warp_row = min(row + Uint32(thread & -WARP) * Uint32(groups), end)
    warp_row = Int32(warp_row)
    token, first, last = find_row(
        pack, Int32(mine), warp_row, Boolean(True), pack.glance(warp_row), pack.real_rows(),
        table.ratio,
    )  # fmt: skip
    at = table.at(memory, index + thread)
    arch.store(at, token, ss="cta")
    arch.store(at + 1, first + 2 * last, ss="cta")
    arch.sync_threads()
