# SPDX-License-Identifier: Apache-2.0
"""A block's tile of the APE, kept in shared memory where that is large enough.

The first-level cache would lose it to the gradients that pass through.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from aot.kernels.memory import load_f32, store_f32
from aot.kernels.segments import WARP
from aot.kernels.window_long import Chunk


@dataclass(frozen=True)
class Bias:
    """Every thread's own part of the APE in shared memory, where `held`; else read from memory.

    Laid out [position of the window][column of the tile], fp32. A thread reads what it wrote.
    """

    chunk: Chunk
    held: bool

    @property
    def floats(self) -> int:
        """Size of the table."""
        return self.chunk.window * WARP * self.chunk.columns if self.held else 0

    def fill(
        self,
        base: cute.Pointer,
        ape: cute.Pointer,
        head_dim: Int32,
        warp: Int32,
        lane: Int32,
        column: Int32,
    ) -> None:
        """Reads a thread's part from memory, once."""
        if self.held:
            for k, row in enumerate(self.chunk.load_whole_ape(ape, head_dim, warp, column)):
                store_f32(self._at(base, warp, lane, k), row)

    def read(
        self,
        base: cute.Pointer,
        ape: cute.Pointer,
        head_dim: Int32,
        warp: Int32,
        lane: Int32,
        column: Int32,
    ) -> list[list[Float32]]:
        """A thread's part, [position][column]."""
        if not self.held:
            return self.chunk.load_whole_ape(ape, head_dim, warp, column)
        return [
            load_f32(self._at(base, warp, lane, k), self.chunk.columns)
            for k in range(self.chunk.positions)
        ]

    def _at(self, base: cute.Pointer, warp: Int32, lane: Int32, k: int) -> cute.Pointer:
        row = warp * self.chunk.positions + k
        return base + (row * WARP + lane) * self.chunk.columns
