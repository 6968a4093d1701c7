# SPDX-License-Identifier: Apache-2.0
"""A warp's share of one row's window in the backward: consecutive positions, `columns` a lane.

Positions count from the window's start and their tokens are consecutive: with coff 2 the window
starts `ratio` tokens before the block. A warp's positions lie in one half, so they share a column
offset, and in a segment's first block the warps of the previous half have nothing to do.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from aot.kernels.memory import Matrix, load_ape, load_word_once
from aot.kernels.ptx import select
from aot.kernels.segments import WARP


@dataclass(frozen=True)
class ChunkedWindow:
    """The shape of every warp's share, all known at compile time.

    batch: positions whose loads are in flight together.
    """

    ratio: int
    coff: int
    columns: int
    warps: int
    batch: int

    def __post_init__(self) -> None:
        """A warp's positions are whole batches, in one half of the window."""
        if self.ratio % self.warp_positions or self.warp_positions % self.batch:
            raise ValueError(f"{self.warp_positions} positions a warp, {self.batch} a batch")

    @property
    def positions(self) -> int:
        """Positions of the whole window."""
        return self.ratio * self.coff

    @property
    def warp_positions(self) -> int:
        """Positions of one warp."""
        return self.positions // self.warps

    @property
    def tile(self) -> int:
        """Columns of a block's tile, of which a lane of every warp owns `columns`."""
        return WARP * self.columns

    @property
    def log2_positions(self) -> int:
        """Binary logarithm of the window's length."""
        return self.positions.bit_length() - 1

    def ape_row(self, warp: Int32) -> Int32:
        """The APE row of a warp's first position."""
        return (warp * self.warp_positions) % self.ratio

    def in_own_half(self, warp: Int32) -> Boolean:
        """Whether a warp's positions are the block's own tokens."""
        if self.coff == 1:
            return Boolean(True)
        return warp >= self.warps // 2

    def exists(self, warp: Int32, first: Int32) -> Boolean:
        """Whether a warp's positions exist: not in a first block's previous half."""
        return self.in_own_half(warp) | (first == 0)

    def first_token(self, token: Int32, warp: Int32) -> Int32:
        """The token of a warp's first position, for a block that starts at `token`."""
        return token + (warp * self.warp_positions - (self.coff - 1) * self.ratio)

    def column(self, head_dim: Int32, column: Int32, warp: Int32) -> Int32:
        """The column of the packed width that a warp reads."""
        if self.coff == 1:
            return column
        return column + select(self.in_own_half(warp), head_dim, Int32(0))

    def load(self, tensor: Matrix, start: Int32, begin: int, column: Int32) -> list:
        """Words of the batch of positions that starts at `begin`."""
        base = tensor.at(start, column)
        return [
            load_word_once(base + (begin + k) * tensor.stride, self.columns)
            for k in range(self.batch)
        ]

    def load_ape(
        self, ape: cute.Pointer, head_dim: Int32, warp: Int32, begin: int, column: Int32
    ) -> list:
        """APE of the batch that starts at `begin`, [position][column]; zeros without an APE."""

        def address(k: int) -> cute.Pointer:
            width = Int64(head_dim) * self.coff
            first = self.ape_row(warp) + begin
            return ape + (first * width + column) + k * width

        return load_ape(ape, address, self.batch, self.columns)

    def load_whole_ape(
        self, ape: cute.Pointer, head_dim: Int32, warp: Int32, column: Int32
    ) -> list:
        """APE of all of a warp's positions, [position][column]."""
        rows: list = []
        for begin in range(0, self.warp_positions, self.batch):
            rows += self.load_ape(ape, head_dim, warp, begin, column)
        return rows
