# SPDX-License-Identifier: Apache-2.0
"""Backward's table in shared memory, (positions, threads, columns) fp32.

During the row loop its first lanes hold the block's tile of the APE; after it, every thread's
APE sums, to be folded into the block's part of a partial plane.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute import arch

from aot.kernels import arithmetic as ar
from aot.kernels.memory import load_f32, store_f32
from aot.kernels.ptx import select
from aot.kernels.window import Window


@dataclass(frozen=True)
class ApeTable:
    """The table's shape: `columns` adjacent floats per position and thread are one entry."""

    window: Window
    threads: int

    @property
    def entries(self) -> int:
        """Number of entries, the zeros behind them left out."""
        return self.window.positions * self.threads

    def allocate(self) -> cute.Pointer:
        """Static shared memory for the table and one more entry, which holds zeros."""
        return arch.alloc_smem(Float32, (self.entries + 1) * self.window.columns, alignment=16)

    def write(self, base: cute.Pointer, thread: Int32, values: list[list[Float32]]) -> None:
        """Sets a thread's entries, [position][column]."""
        for k, row in enumerate(values):
            store_f32(self._at(base, thread + k * self.threads), row)

    def write_zeros(self, base: cute.Pointer) -> None:
        """Sets the entry that `read` takes where no position exists."""
        store_f32(self._at(base, Int32(self.entries)), [Float32(0.0)] * self.window.columns)

    def read(self, base: cute.Pointer, thread: Int32, first: Int32) -> list[list[Float32]]:
        """A thread's entries, [position][column]; a first block's previous half reads zeros."""
        rows = []
        for k in range(self.window.positions):
            index = thread + k * self.threads
            if self.window.previous(k):
                index = select(first != 0, Int32(self.entries), index)
            rows.append(load_f32(self._at(base, index), self.window.columns))
        return rows

    def _at(self, base: cute.Pointer, index: Int32) -> cute.Pointer:
        return base + index * self.window.columns


@cute.jit
def fold_into_plane(
    table: cutlass.Constexpr,
    base: cute.Pointer,
    plane: cute.Pointer,
    column_tile: Int32,
    lanes_log2: Int32,
    head_dim: Int32,
) -> None:
    """Adds the row lanes' sums, two at a time, and writes this block's columns of the plane.

    There are two row lanes at least. plane: (ratio, width) fp32, contiguous. Call it behind a
    barrier, from every thread.
    """
    window = cutlass.const_expr(table.window)
    thread, _, _ = arch.thread_idx()
    tile = Int32(window.columns) << lanes_log2  # columns of this block's tile, a power of two
    width = Int64(head_dim) * window.coff
    item = thread
    while item < window.positions * tile:
        offset = item & (tile - 1)
        position = item // tile
        column = column_tile * tile + offset
        if column < head_dim:
            total = Float32(0.0)
            source = base + (position * (table.threads * window.columns) + offset)
            for _ in cutlass.range(Int32(table.threads // 2) >> lanes_log2):
                pair = [arch.load(source + i * tile, Float32, ss="cta") for i in range(2)]
                total = total + ar.sum_in_pairs(pair)
                source = source + 2 * tile
            row = position
            if cutlass.const_expr(window.coff == 2):
                row = position % window.ratio
                if position >= window.ratio:
                    column = column + head_dim
            arch.store(plane + (row * width + column), total)
        item = item + table.threads
