# SPDX-License-Identifier: Apache-2.0
"""A block's tile of the APE in shared memory, where each warp has a row and its lanes the tile.

Behind it lie zeros, for what a first block lacks: so a window's half is chosen by its address.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute import arch

from aot.kernels.memory import copy_async, load_f32, store_f32
from aot.kernels.ptx import select
from aot.kernels.warp import WARP
from aot.kernels.window import Window


@dataclass(frozen=True)
class WarpApe:
    """Laid out [position][column of the tile], fp32, at the begin of the block's shared memory.

    The zeros are as long as the previous half, if there is one.
    """

    window: Window

    @property
    def zeros(self) -> int:
        """Where the zeros begin, in words."""
        return self.window.positions * self.window.warp_tile

    @property
    def words(self) -> int:
        """Size in words, of the zeros too."""
        return self.zeros + (self.window.positions - self.window.ratio) * self.window.warp_tile

    def read(self, memory: cute.Pointer, lane: Int32, first: Int32) -> list[list[Float32]]:
        """A lane's APE, [position][column]; a first block's previous half reads zeros."""
        window = self.window
        own = memory + lane * window.columns
        previous = own + select(first != 0, Int32(self.zeros), Int32(0))
        return [
            load_f32(
                (previous if window.previous(k) else own) + k * self.window.warp_tile,
                window.columns,
            )
            for k in range(window.positions)
        ]


@cute.jit
def start_ape(
    layout: cutlass.Constexpr,
    memory: cute.Pointer,
    ape: cute.Pointer,
    head_dim: Int32,
    column: Int32,
    warp: Int32,
    lane: Int32,
) -> None:
    """Starts copying the tile, a position a warp: there are as many warps at least."""
    window = cutlass.const_expr(layout.window)
    if warp < window.positions:
        target = memory + (warp * WARP + lane) * window.columns
        if ape.toint() == 0:
            store_f32(target, [Float32(0.0)] * window.columns)
        else:
            own = select(
                warp >= window.positions - window.ratio, (window.coff - 1) * head_dim, Int32(0)
            )
            row = ape + (warp % window.ratio) * (Int64(head_dim) * window.coff)
            copy_async(target, row + (own + column), 4 * window.columns)


@cute.jit
def write_zeros(layout: cutlass.Constexpr, memory: cute.Pointer) -> None:
    """Writes the zeros. Every thread of the block calls it."""
    window = cutlass.const_expr(layout.window)
    thread, _, _ = arch.thread_idx()
    if thread < (window.positions - window.ratio) * WARP:
        target = memory + layout.zeros + thread * window.columns
        store_f32(target, [Float32(0.0)] * window.columns)
