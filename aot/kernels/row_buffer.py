# SPDX-License-Identifier: Apache-2.0
"""Raw kv and score of a block's next rows in shared memory, filled by asynchronous copies.

Laid out [slot][KV, SCORE][position of the window][column of the tile], bf16: a row stays in slot
`index % DEPTH` from its copy to its last read. A warp copies and reads the positions it owns and no
others.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute import arch

from aot.kernels import bf16
from aot.kernels.memory import Matrix, copy_async_16, load_word_once
from aot.kernels.ptx import select
from aot.kernels.segments import WARP
from aot.kernels.window_chunk import ChunkedWindow

KV, SCORE = 0, 1
PIECE = 8  # bf16 of one asynchronous copy: 16 bytes
DEPTH = 2  # rows: the one in work and the next one


@dataclass(frozen=True)
class RowBuffer:
    """The buffer's shape, and its offset in the block's shared memory, in words.

    asynchronous: filled by 16-byte copies, which need aligned rows; else word by word, at once.
    """

    window: ChunkedWindow
    asynchronous: bool
    offset: int

    @property
    def words(self) -> int:
        """Size in 32-bit words."""
        return DEPTH * 2 * self.window.positions * self.window.tile // 2

    def column(self, tile_column: Int32, head_dim: Int32, lane: Int32) -> Int32:
        """The first column that a lane copies; past the last one it repeats the last piece."""
        if self.asynchronous:
            column = tile_column + (lane % (self.window.tile // PIECE)) * PIECE
            return select(column < head_dim, column, head_dim - PIECE)
        column = tile_column + lane * self.window.columns
        return select(column < head_dim, column, head_dim - self.window.columns)

    def copy(
        self,
        memory: cute.Pointer,
        slot: Int32,
        which: int,
        tensor: Matrix,
        start: Int32,
        warp: Int32,
        lane: Int32,
        column: Int32,
    ) -> None:
        """Starts a warp's copies of one tensor, KV or SCORE.

        start: the token of the warp's first position. column: as `self.column` gives it, packed.
        """
        if self.asynchronous:
            pieces = self.window.tile // PIECE
            together = WARP // pieces  # positions that one instruction of the warp copies
            position = lane // pieces
            source = tensor.at(start + position, column)
            target = self._at(memory, slot, which, warp, position) + (lane % pieces) * PIECE
            for k in range(0, self.window.warp_positions, together):
                copy_async_16(target + k * self.window.tile, source + k * tensor.stride)
        else:
            columns, positions = self.window.columns, range(self.window.warp_positions)
            source = tensor.at(start, column)
            target = self._at(memory, slot, which, warp, Int32(0)) + lane * columns
            words = [load_word_once(source + k * tensor.stride, columns) for k in positions]
            for k, word in enumerate(words):
                arch.store(target + k * self.window.tile, word, ss="cta")

    def read(
        self, memory: cute.Pointer, slot: Int32, which: int, warp: Int32, lane: Int32
    ) -> list[list[Float32]]:
        """A thread's values of one tensor, [position][column] fp32."""
        columns = self.window.columns
        first = self._at(memory, slot, which, warp, Int32(0)) + lane * columns
        return [
            bf16.unpack(
                arch.load(first + k * self.window.tile, bf16.WORD[columns], ss="cta"), columns
            )
            for k in range(self.window.warp_positions)
        ]

    def _at(
        self, memory: cute.Pointer, slot: Int32, which: int, warp: Int32, position: Int32
    ) -> cute.Pointer:
        row = (slot * 2 + which) * self.window.positions
        row = row + warp * self.window.warp_positions + position
        return cute.recast_ptr(memory + self.offset, dtype=BFloat16) + row * self.window.tile


@cute.jit
def copy_row(
    buffer: cutlass.Constexpr,
    memory: cute.Pointer,
    slot: Int32,
    kv: Matrix,
    score: Matrix,
    token: Int32,
    first: Int32,
    warp: Int32,
    lane: Int32,
    column: Int32,
) -> None:
    """Starts a warp's copies of the row whose block begins at `token`."""
    if buffer.window.exists(warp, first):
        start = buffer.window.first_token(token, warp)
        buffer.copy(memory, slot, KV, kv, start, warp, lane, column)
        buffer.copy(memory, slot, SCORE, score, start, warp, lane, column)
