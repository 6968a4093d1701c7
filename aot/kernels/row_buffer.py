# SPDX-License-Identifier: Apache-2.0
"""Raw kv and score of a block's next rows in shared memory, filled by asynchronous copies.

Laid out [slot][KV, SCORE][position of the window][column of the tile], bf16: a row stays in slot
`index % DEPTH` from its copy to its last read. A warp copies and reads the positions it owns and no
others.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32
from cutlass.cute import arch

from aot.kernels import bf16
from aot.kernels.memory import PIECE, Matrix, copy_async, load_16, load_word_once
from aot.kernels.pair import Pair
from aot.kernels.ptx import select
from aot.kernels.thread import Thread
from aot.kernels.warp import WARP
from aot.kernels.window_long import LongWindow

DEPTH = 2  # slots: the row in work and the next one


@dataclass(frozen=True)
class Row:
    """The slot of a row, and where it lies: its block's first token, and whether a first block."""

    slot: Int32
    token: Int32
    first: Int32


@dataclass(frozen=True)
class RowBuffer:
    """The buffer's shape, and its offset in the block's shared memory, in words.

    asynchronous: filled by 16-byte copies, which need aligned rows; else word by word, at once.
    staged, prefetch_size: as a variant's.
    """

    window: LongWindow
    asynchronous: bool
    offset: int
    staged: bool
    prefetch_size: int

    @property
    def words(self) -> int:
        """Size in 32-bit words."""
        return DEPTH * 2 * self.window.positions * self.window.tile // 2

    def column(self, tile_column: Int32, head_dim: Int32, lane: Int32) -> Int32:
        """The first column that a lane copies; past the last one it repeats the last piece."""
        if self.asynchronous:
            column = tile_column + (lane % self.pieces) * PIECE
            return select(column < head_dim, column, head_dim - PIECE)
        column = tile_column + lane * self.window.columns
        return select(column < head_dim, column, head_dim - self.window.columns)

    def computes(self, thread: Thread) -> Boolean:
        """Whether the columns that a lane computes exist."""
        return thread.tile + thread.lane * self.window.columns < thread.head_dim

    def copies(self, thread: Thread) -> Boolean:
        """Whether the columns that a lane copies exist, where it copies asynchronously."""
        return thread.tile + thread.lane % self.pieces * PIECE < thread.head_dim

    @property
    def pieces(self) -> int:
        """Pieces of one position's tile."""
        return self.window.tile // PIECE

    @property
    def together(self) -> int:
        """Positions whose pieces one instruction of a warp moves."""
        return WARP // self.pieces

    def copy(
        self, thread: Thread, slot: Int32, which: int, half: int, tensor: Matrix, token: Int32
    ) -> None:
        """Starts a warp's copies of one tensor, KV or SCORE, in one half.

        token: of the warp's first position there.
        """
        column = thread.copied + half * thread.head_dim
        if self.asynchronous:
            source = tensor.at(token + thread.lane // self.pieces, column)
            target = self._piece(thread, slot, which, half)
            for k in range(0, self.window.run, self.together):
                copy_async(
                    target + k * self.window.tile, source + k * tensor.stride, 16,
                    self.prefetch_size,
                )  # fmt: skip
        else:
            columns, positions = self.window.columns, range(self.window.run)
            source = tensor.at(token, column)
            target = self.at(thread, slot, which, half)
            words = [load_word_once(source + k * tensor.stride, columns) for k in positions]
            for k, word in enumerate(words):
                arch.store(target + k * self.window.tile, word, ss="cta")

    def read(self, thread: Thread, slot: Int32, which: int, half: int) -> list[list[Float32]]:
        """A thread's values of one tensor in one half, [position][column] fp32."""
        columns = self.window.columns
        first = self.at(thread, slot, which, half)
        return [
            bf16.unpack(
                arch.load(first + k * self.window.tile, bf16.WORD[columns], ss="cta"), columns
            )
            for k in range(self.window.run)
        ]

    def write_out(
        self, thread: Thread, slot: Int32, which: int, half: int, tensor: Matrix, token: Int32
    ) -> None:
        """Writes what a warp has put into its places of a slot to a tensor, as `copy` reads it."""
        source = self._piece(thread, slot, which, half)
        column = thread.copied + half * thread.head_dim
        target = tensor.at(token + thread.lane // self.pieces, column)
        for k in range(0, self.window.run, self.together):
            arch.store(target + k * tensor.stride, load_16(source + k * self.window.tile))

    def at(self, thread: Thread, slot: Int32, which: int, half: int) -> cute.Pointer:
        """Where a thread's columns of its first position in a half lie; `tile` apart the next."""
        return self._position(thread, slot, which, half) + thread.lane * self.window.columns

    def _piece(self, thread: Thread, slot: Int32, which: int, half: int) -> cute.Pointer:
        first, lane = self._position(thread, slot, which, half), thread.lane
        return first + (lane // self.pieces * self.window.tile + lane % self.pieces * PIECE)

    def _position(self, thread: Thread, slot: Int32, which: int, half: int) -> cute.Pointer:
        row = (slot * 2 + which) * self.window.positions + half * self.window.ratio
        row = row + thread.warp * self.window.run
        base = cute.recast_ptr(thread.memory + self.offset, dtype=BFloat16)
        return base + row * self.window.tile


@cute.jit
def copy_row(buffer: cutlass.Constexpr, thread: Thread, row: Row, inputs: Pair) -> None:
    """Starts a warp's copies of a row."""
    window = cutlass.const_expr(buffer.window)
    for half in cutlass.range_constexpr(window.coff):
        if window.exists(half, row.first):
            start = window.token(row.token, thread.warp, half)
            for which, tensor in inputs.both():
                buffer.copy(thread, row.slot, which, half, tensor, start)
