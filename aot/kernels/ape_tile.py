# SPDX-License-Identifier: Apache-2.0
"""A block's tile of the APE, kept in shared memory where that is large enough.

The first-level cache would lose it to the gradients that pass through.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from aot.kernels.memory import load_f32, store_f32
from aot.kernels.segments import WARP
from aot.kernels.window_long import LongWindow


@dataclass(frozen=True)
class ApeTile:
    """Every thread's own part of the APE: in shared memory where `held`, else in global memory.

    Laid out [position of the window][column of the tile], fp32, `offset` words into the block's
    shared memory. A thread reads what it wrote.
    """

    window: LongWindow
    held: bool
    offset: int

    @property
    def words(self) -> int:
        """Size in 32-bit words."""
        return self.window.positions * self.window.tile if self.held else 0

    def fill(
        self,
        memory: cute.Pointer,
        ape: cute.Pointer,
        head_dim: Int32,
        warp: Int32,
        lane: Int32,
        column: Int32,
    ) -> None:
        """Moves a thread's part from global to shared memory, once, where it is held."""
        if self.held:
            for half in self.window.halves:
                rows = self.window.load_whole_ape(ape, head_dim, warp, column, half)
                for k, row in enumerate(rows):
                    store_f32(self._at(memory, warp, lane, half, k), row)

    def read(
        self,
        memory: cute.Pointer,
        ape: cute.Pointer,
        head_dim: Int32,
        warp: Int32,
        lane: Int32,
        column: Int32,
        half: int,
    ) -> list[list[Float32]]:
        """A thread's part of a half, [position][column]."""
        if not self.held:
            return self.window.load_whole_ape(ape, head_dim, warp, column, half)
        return [
            load_f32(self._at(memory, warp, lane, half, k), self.window.columns)
            for k in range(self.window.run)
        ]

    def _at(
        self, memory: cute.Pointer, warp: Int32, lane: Int32, half: int, k: int
    ) -> cute.Pointer:
        row = warp * self.window.run + (half * self.window.ratio + k)
        return memory + self.offset + (row * WARP + lane) * self.window.columns
