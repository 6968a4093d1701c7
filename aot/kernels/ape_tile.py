# SPDX-License-Identifier: Apache-2.0
"""A block's tile of the APE, kept in shared memory where that is large enough.

The first-level cache would lose it to the gradients that pass through.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from aot.kernels.memory import copy_async, load_f32, store_f32
from aot.kernels.ptx import select
from aot.kernels.thread import Thread
from aot.kernels.warp import WARP
from aot.kernels.window_long import LongWindow

PIECE = 4  # fp32 of 16 bytes


@dataclass(frozen=True)
class ApeTile:
    """Every thread's own part of the APE: in shared memory where `held`, else in global memory.

    Laid out [position of the window][column of the tile], fp32, `offset` words into the block's
    shared memory. A warp reads what it wrote.
    """

    window: LongWindow
    held: bool
    offset: int

    @property
    def words(self) -> int:
        """Size in 32-bit words."""
        return self.window.positions * self.window.tile if self.held else 0

    def read(self, thread: Thread, ape: cute.Pointer, half: int) -> list[list[Float32]]:
        """A thread's part of a half, [position][column]."""
        if not self.held:
            return self.window.load_whole_ape(ape, thread, half)
        return [
            load_f32(self.at(thread, half, k), self.window.columns) for k in range(self.window.run)
        ]

    def at(self, thread: Thread, half: int, k: int) -> cute.Pointer:
        """Where a thread's columns of its k-th position in a half lie."""
        row = thread.warp * self.window.run + (half * self.window.ratio + k)
        return thread.memory + self.offset + (row * WARP + thread.lane) * self.window.columns


@cute.jit
def fill_ape_tile(tile: cutlass.Constexpr, thread: Thread, ape: cute.Pointer) -> None:
    """Starts copying a warp's part to shared memory; sets it to zeros without an APE."""
    window = cutlass.const_expr(tile.window)
    pieces = cutlass.const_expr(window.tile // PIECE)
    together = cutlass.const_expr(WARP // pieces)  # positions that one instruction of a warp copies
    place, at = thread.lane // pieces, thread.lane % pieces * PIECE
    wanted = thread.tile + at
    column = select(wanted < thread.head_dim, wanted, thread.head_dim - PIECE)
    row = thread.warp * window.run + place
    target = thread.memory + tile.offset + (row * window.tile + at)
    width = Int64(thread.head_dim) * window.coff
    source = ape + (row * width + column)
    for half in cutlass.range_constexpr(window.coff):
        to = target + half * window.ratio * window.tile
        if ape.toint() == 0:
            for k in cutlass.range_constexpr(0, window.run, together):
                store_f32(to + k * window.tile, [Float32(0.0)] * PIECE)
        else:
            for k in cutlass.range_constexpr(0, window.run, together):
                copy_async(to + k * window.tile, source + (k * width + half * thread.head_dim), 16)
