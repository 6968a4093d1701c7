# SPDX-License-Identifier: Apache-2.0
"""Raw windows of a warp's rows in shared memory, filled by asynchronous copies of 16 bytes.

Laid out [warp][slot][KV, SCORE][position of the window][column of the tile] and, behind the
positions of a slot, the row of grad_out; bf16. A warp copies what it reads itself, so nothing but
its own lanes must wait; but a lane reads other columns than it copies.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint64
from cutlass.cute import arch

from aot.kernels import bf16
from aot.kernels.column import Column
from aot.kernels.memory import PIECE, Matrix, copy_async
from aot.kernels.pair import KV, SCORE
from aot.kernels.ptx import select
from aot.kernels.warp import WARP
from aot.kernels.window import Window

SLOTS = 2  # the row in work and the next one


@dataclass(frozen=True)
class Source:
    """Where a lane's pieces lie in global memory.

    kv, score: its first piece of a block's own tokens, by the block's first token. grad_out: by the
    row. back: bytes from the own to the previous block's tokens and columns, of kv and of score.
    """

    kv: Column
    score: Column
    grad_out: Column
    back: tuple[Int64, Int64]

    def pinned(self) -> "Source":
        """The same, as `Column.pinned`."""
        return Source(self.kv.pinned(), self.score.pinned(), self.grad_out.pinned(), self.back)


@dataclass(frozen=True)
class WarpBuffer:
    """The buffer's shape, and its offset in the block's shared memory, in bytes.

    prefetch_size: of kv and score, as a variant's.
    """

    window: Window
    warps: int
    offset: int
    prefetch_size: int

    @property
    def pieces(self) -> int:
        """Pieces of one position's tile."""
        return self.window.warp_tile // PIECE

    @property
    def together(self) -> int:
        """Positions of a half whose pieces one instruction of a warp copies."""
        return min(WARP // self.pieces, self.window.ratio)

    @property
    def slot_elements(self) -> int:
        """bf16 of a slot."""
        return (2 * self.window.positions + 1) * self.window.warp_tile

    @property
    def bytes(self) -> int:
        """Size of the whole buffer."""
        return self.warps * SLOTS * self.slot_elements * 2

    def source(
        self,
        kv: Matrix,
        score: Matrix,
        grad_out: Matrix,
        tile_column: Int32,
        head_dim: Int32,
        lane: Int32,
    ) -> Source:
        """What a lane copies; past the last column it repeats the last piece."""
        column = tile_column + lane % self.pieces * PIECE
        column = select(column < head_dim, column, head_dim - PIECE)
        own = self.window.column(self.window.positions - 1, head_dim, column)
        place = lane // self.pieces
        return Source(
            Column.of(kv, place, own),
            Column.of(score, place, own),
            Column.of(grad_out, Int32(0), column),
            tuple(2 * (self.window.ratio * m.stride + head_dim) for m in (kv, score)),
        )

    def slot(self, memory: cute.Pointer, warp: Int32, slot: Int32) -> cute.Pointer:
        """A slot's first element."""
        base = cute.recast_ptr(memory + self.offset // 4, dtype=BFloat16)
        return base + (warp * SLOTS + slot) * self.slot_elements

    def read(self, slot: cute.Pointer, which: int, lane: Int32) -> list:
        """A lane's words of one tensor, by position."""
        return [
            self._word(slot, which * self.window.positions + k, lane)
            for k in range(self.window.positions)
        ]

    def read_grad(self, slot: cute.Pointer, lane: Int32) -> Any:
        """A lane's word of grad_out."""
        return self._word(slot, 2 * self.window.positions, lane)

    def _word(self, slot: cute.Pointer, row: int, lane: Int32) -> Any:
        columns = self.window.columns
        address = slot + (lane * columns + row * self.window.warp_tile)
        return arch.load(address, bf16.WORD[columns], ss="cta")

    def piece(self, slot: cute.Pointer, which: int, position: int, lane: Int32) -> cute.Pointer:
        """Where a lane's piece of a position goes, and of its instruction's other positions."""
        return slot + (
            lane * PIECE + (which * self.window.positions + position) * self.window.warp_tile
        )

    def grad_piece(self, slot: cute.Pointer, lane: Int32) -> cute.Pointer:
        """Where a lane's piece of grad_out goes."""
        return slot + (lane * PIECE + 2 * self.window.positions * self.window.warp_tile)


@cute.jit
def copy_own(
    buffer: cutlass.Constexpr, slot: cute.Pointer, source: Source, token: Int32, lane: Int32
) -> None:
    """Starts a warp's copies of a block's own tokens."""
    if lane < buffer.together * buffer.pieces:
        _copy(buffer, slot, source.kv.at(token), source.kv.stride, KV, buffer.window.coff - 1, lane)
        _copy(
            buffer, slot, source.score.at(token), source.score.stride, SCORE,
            buffer.window.coff - 1, lane,
        )  # fmt: skip


@cute.jit
def copy_previous(
    buffer: cutlass.Constexpr,
    slot: cute.Pointer,
    source: Source,
    token: Int32,
    first: Int32,
    lane: Int32,
) -> None:
    """Starts a warp's copies of the block before, which a first block replaces by nothing."""
    ratio = cutlass.const_expr(buffer.window.ratio)
    if lane < buffer.together * buffer.pieces:
        if first == 0:
            of_kv = source.kv.at(token) - source.back[KV]
            of_score = source.score.at(token) - source.back[SCORE]
            _copy(buffer, slot, of_kv, source.kv.stride, KV, 0, lane)
            _copy(buffer, slot, of_score, source.score.stride, SCORE, 0, lane)
        else:
            for k in cutlass.range_constexpr(0, ratio, buffer.together):
                for which, word in ((KV, 0), (SCORE, 0xFF80FF80FF80FF80)):
                    piece = buffer.piece(slot, which, k, lane)
                    arch.store(piece, Uint64(word), ss="cta")
                    arch.store(piece + PIECE // 2, Uint64(word), ss="cta")


def _copy(
    buffer: WarpBuffer,
    slot: cute.Pointer,
    source: cute.Pointer,
    stride: Int64,
    which: int,
    half: int,
    lane: Int32,
) -> None:
    for k in range(0, buffer.window.ratio, buffer.together):
        target = buffer.piece(slot, which, half * buffer.window.ratio + k, lane)
        copy_async(target, source + k * stride, 16, buffer.prefetch_size)


@cute.jit
def copy_grad(
    buffer: cutlass.Constexpr, slot: cute.Pointer, source: Source, row: Int32, lane: Int32
) -> None:
    """Starts a warp's copies of a row of grad_out."""
    if lane < buffer.pieces:
        copy_async(buffer.grad_piece(slot, lane), source.grad_out.at(row), 16)
