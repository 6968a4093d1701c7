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
from aot.kernels.segments import WARP
from aot.kernels.window_long import Chunk


@dataclass(frozen=True)
class Exchange:
    """The tables' shape."""

    chunk: Chunk

    @property
    def entries(self) -> int:
        """Columns of the tile times warps."""
        return self.chunk.warps * WARP * self.chunk.columns

    @property
    def floats(self) -> int:
        """Size of both tables: a maximum, and two sums."""
        return 3 * self.entries

    def write_maxima(
        self, base: cute.Pointer, warp: Int32, lane: Int32, maxima: list[Float32]
    ) -> None:
        """Publishes a thread's maximum of each of its columns."""
        store_f32(base + self._column(warp, lane), maxima)

    def maxima(self, base: cute.Pointer, lane: Int32) -> list[Float32]:
        """The maximum over all warps, of each of a thread's columns."""
        parts = [
            load_f32(base + self._column(Int32(w), lane), self.chunk.columns)
            for w in range(self.chunk.warps)
        ]
        return [ar.largest(list(column)) for column in zip(*parts, strict=True)]

    def write_sums(self, base: cute.Pointer, warp: Int32, lane: Int32, sums: list[Float32]) -> None:
        """Publishes a thread's two sums of each of its columns."""
        store_f32(base + (self.entries + 2 * self._column(warp, lane)), sums)

    def sums(self, base: cute.Pointer, lane: Int32) -> list[Float32]:
        """The sums over all warps, in ascending order, of each of a thread's columns."""
        count = 2 * self.chunk.columns
        totals = [Float32(0.0)] * count
        for w in range(self.chunk.warps):
            at = base + (self.entries + 2 * self._column(Int32(w), lane))
            part = load_f32(at, count)
            totals = [total + x for total, x in zip(totals, part, strict=True)]
        return totals

    def _column(self, warp: Int32, lane: Int32) -> Int32:
        return (warp * WARP + lane) * self.chunk.columns
