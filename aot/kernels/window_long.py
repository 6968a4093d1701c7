# SPDX-License-Identifier: Apache-2.0
"""A warp's share of one row's long window: a run of consecutive tokens in each half.

With coff 1 there is one half, the block's own tokens. With coff 2 half 0 is the previous block's
tokens with columns [0, head_dim), half 1 the block's own with columns [head_dim, 2 * head_dim). All
warps share every half, so that they all have work in a segment's first block, which has no half 0.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from aot.kernels import bf16
from aot.kernels.memory import Matrix, load_ape, load_word, load_word_once
from aot.kernels.ptx import select
from aot.kernels.thread import Thread
from aot.kernels.warp import WARP


@dataclass(frozen=True)
class LongWindow:
    """The shape of every warp's share, all known at compile time; `columns` a lane.

    batch: positions whose loads are in flight together. reread, once: as a variant's.
    """

    ratio: int
    coff: int
    columns: int
    warps: int
    batch: int
    reread: int = 0
    once: bool = False

    def __post_init__(self) -> None:
        """A run is whole batches, or a batch whole runs."""
        if self.ratio % self.warps or (self.run % self.batch and self.batch % self.run):
            raise ValueError(
                f"{self.warps} warps of {self.run} positions a half, {self.batch} a batch"
            )

    @property
    def positions(self) -> int:
        """Positions of the whole window."""
        return self.ratio * self.coff

    @property
    def run(self) -> int:
        """Positions of one warp in one half."""
        return self.ratio // self.warps

    @property
    def warp_positions(self) -> int:
        """Positions of one warp."""
        return self.run * self.coff

    @property
    def own(self) -> int:
        """The half of the block's own tokens."""
        return self.coff - 1

    @property
    def tile(self) -> int:
        """Columns of a block's tile, of which a lane of every warp owns `columns`."""
        return WARP * self.columns

    @property
    def log2_positions(self) -> int:
        """Binary logarithm of the window's length."""
        return self.positions.bit_length() - 1

    def places(self, half: int) -> range:
        """Of a warp's positions, counted over the halves, those in this one."""
        return range(half * self.run, (half + 1) * self.run)

    def exists(self, half: int, first: Int32) -> Boolean:
        """Whether a half's tokens exist: the previous block's do not in a first block."""
        return Boolean(True) if half == self.own else first == 0

    def token(self, block_token: Int32, warp: Int32, half: Int32) -> Int32:
        """The first token of a warp's run in a half, for a block that starts at `block_token`."""
        return block_token + (warp * self.run + (half - self.own) * self.ratio)

    def share(
        self, block_token: Int32, first: Int32, warp: Int32, column: Int32, head_dim: Int32
    ) -> tuple[Int32, Int32, Int32]:
        """Forward's division: (token, APE row, packed column) of a warp's first position.

        Its positions are consecutive: two runs in one half, or one in a first block, which has
        half 1 alone.
        """
        if self.coff == 1:
            return block_token + warp * self.run, warp * self.run, column
        begin = warp * (2 * self.run)  # of the window
        own = select((first != 0) | (begin >= self.ratio), head_dim, Int32(0))
        token = select(first != 0, warp * self.run, begin - self.ratio)
        row = select(first != 0, warp * self.run, begin % self.ratio)
        return block_token + token, row, column + own

    def load(self, tensor: Matrix, token: Int32, begin: int, count: int, column: Int32) -> list:
        """Words of `count` tokens from the begin-th after `token` on."""
        base = tensor.at(token, column)
        load = load_word_once if self.once else load_word
        return [load(base + (begin + k) * tensor.stride, self.columns) for k in range(count)]

    def load_batch(
        self,
        tensors: tuple[Matrix, Matrix, cute.Pointer],
        token: Int32,
        ape_row: Int32,
        begin: int,
        column: Int32,
        head_dim: Int32,
        pinned: bool = False,
    ) -> tuple[list, list, list]:
        """(scores, values, APE) of a batch of positions from the begin-th after the given one on.

        tensors: score, kv and ape. column: packed.
        """
        score, kv, ape = tensors
        scores = self.load(score, token, begin, self.batch, column)
        values = self.load(kv, token, begin, self.batch, column)
        bias = self.load_ape(ape, head_dim, ape_row, begin, self.batch, column, pinned)
        return scores, values, bias

    def registers(self) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor]:
        """Room for forward's first batch: (scores, values, APE), of no value yet."""
        words = bf16.WORD[self.columns]
        return (
            cute.make_rmem_tensor((self.batch,), words),
            cute.make_rmem_tensor((self.batch,), words),
            cute.make_rmem_tensor((self.batch, self.columns), Float32),
        )

    def words(
        self, registers: tuple[cute.Tensor, cute.Tensor, cute.Tensor]
    ) -> tuple[list, list, list]:
        """What `registers` hold, as `load_batch` returns it."""
        scores, values, bias = registers
        batch, columns = range(self.batch), range(self.columns)
        return (
            [scores[k] for k in batch],
            [values[k] for k in batch],
            [[bias[k, v] for v in columns] for k in batch],
        )

    def fill(
        self,
        registers: tuple[cute.Tensor, cute.Tensor, cute.Tensor],
        tensors: tuple[Matrix, Matrix, cute.Pointer],
        block_token: Int32,
        first: Int32,
        warp: Int32,
        column: Int32,
        head_dim: Int32,
    ) -> None:
        """The first batch of a warp's share of the block at `block_token` into `registers`."""
        token, row, offset = self.share(block_token, first, warp, column, head_dim)
        loaded = self.load_batch(tensors, token, row, 0, offset, head_dim, pinned=True)
        for table, values in zip(registers[:2], loaded[:2], strict=True):
            for k, value in enumerate(values):
                table[k] = value
        for k, bias in enumerate(loaded[2]):
            for v, value in enumerate(bias):
                registers[2][k, v] = value

    def load_ape(
        self,
        ape: cute.Pointer,
        head_dim: Int32,
        row: Int32,
        begin: int,
        count: int,
        column: Int32,
        pinned: bool = False,
    ) -> list:
        """As many rows of the APE, [position][column]; zeros without an APE."""

        def address(k: int) -> cute.Pointer:
            width = Int64(head_dim) * self.coff
            return ape + (row * width + column) + (begin + k) * width

        return load_ape(ape, address, count, self.columns, pinned)

    def load_whole_ape(self, ape: cute.Pointer, thread: Thread, half: int) -> list:
        """A thread's APE in a half, [position][column]."""
        rows: list = []
        count = min(self.run, self.batch)
        for begin in range(0, self.run, count):
            at = thread.column + half * thread.head_dim
            row = thread.warp * self.run
            rows += self.load_ape(ape, thread.head_dim, row, begin, count, at)
        return rows
