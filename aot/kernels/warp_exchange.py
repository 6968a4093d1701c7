# SPDX-License-Identifier: Apache-2.0
"""What the warps of a block tell each other of a row: first maxima, then sums.

Two tables in shared memory, [warp][column of the tile]. A barrier lies between writing and reading
either, so each may be written again once the other's barrier has passed.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from aot.kernels import arithmetic as ar
from aot.kernels.memory import load_f32, store_f32
from aot.kernels.thread import Thread
from aot.kernels.warp import WARP
from aot.kernels.window_long import LongWindow


@dataclass(frozen=True)
class WarpExchange:
    """The tables' shape, and their offset in the block's shared memory, in words."""

    window: LongWindow
    offset: int

    @property
    def entries(self) -> int:
        """Columns of the tile times warps."""
        return self.window.warps * self.window.tile

    @property
    def words(self) -> int:
        """Size of both tables in 32-bit words: a maximum and two sums an entry."""
        return 3 * self.entries

    def write_maxima(self, thread: Thread, maxima: list[Float32]) -> None:
        """Publishes a thread's maximum of each of its columns."""
        store_f32(self._maximum(thread, thread.warp), maxima)

    def maxima(self, thread: Thread) -> list[Float32]:
        """The maximum over all warps, of each of a thread's columns."""
        parts = [
            load_f32(self._maximum(thread, Int32(w)), self.window.columns)
            for w in range(self.window.warps)
        ]
        return [ar.largest(list(column)) for column in zip(*parts, strict=True)]

    def write_sums(self, thread: Thread, sums: list[Float32]) -> None:
        """Publishes a thread's two sums of each of its columns."""
        store_f32(self._sums(thread, thread.warp), sums)

    def sums(self, thread: Thread) -> list[Float32]:
        """The sums over all warps, added in pairs, of each of a thread's columns."""
        parts = [
            load_f32(self._sums(thread, Int32(w)), 2 * self.window.columns)
            for w in range(self.window.warps)
        ]
        return [ar.sum_in_pairs(list(column)) for column in zip(*parts, strict=True)]

    def _maximum(self, thread: Thread, warp: Int32) -> cute.Pointer:
        return thread.memory + self.offset + self._entry(warp, thread.lane)

    def _sums(self, thread: Thread, warp: Int32) -> cute.Pointer:
        return thread.memory + self.offset + (self.entries + 2 * self._entry(warp, thread.lane))

    def _entry(self, warp: Int32, lane: Int32) -> Int32:
        return (warp * WARP + lane) * self.window.columns
