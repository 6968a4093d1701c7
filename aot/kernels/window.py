# SPDX-License-Identifier: Apache-2.0
"""One row's pooling window as a thread sees it: a few columns at every position, in registers.

Positions come in halves of `ratio`: with coff 2 the previous block's tokens with columns
[0, head_dim), then the block's own tokens with columns [head_dim, 2 * head_dim); with coff 1 the
own tokens alone. The previous half of a segment's first block does not exist. Loads for it go to
the own half instead, whose bytes are read anyway, and the values are replaced afterwards: no
branch, no extra traffic.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute import arch

from aot.kernels import arithmetic as ar


@dataclass(frozen=True)
class Window:
    """A window's shape, all known at compile time."""

    ratio: int
    coff: int
    columns: int

    @property
    def positions(self) -> int:
        """Number of positions: ratio * coff."""
        return self.ratio * self.coff

    def previous(self, position: int) -> bool:
        """Whether a position belongs to the previous block."""
        return self.coff == 2 and position < self.ratio

    def column(self, position: int, head_dim: Int32, column: Int32) -> Int32:
        """The column of the packed width that a position reads."""
        if self.coff == 2 and not self.previous(position):
            return head_dim + column
        return column

    def load(
        self,
        tensor: cute.Pointer,
        stride: Int64,
        token: Int32,
        first: Int32,
        head_dim: Int32,
        column: Int32,
    ) -> list:
        """One word of `columns` elements per position; the first block's previous half is junk."""
        own = tensor + (Int64(token) * stride + self.column(self.positions - 1, head_dim, column))
        previous = own
        if cutlass.const_expr(self.coff == 2):
            back = self.ratio * stride + head_dim
            previous = own - ar.select(first != 0, Int64(0), back)
        words = []
        for position in range(self.positions):
            base = previous if self.previous(position) else own
            address = base + (position % self.ratio) * stride
            words.append(self.load_word(address))
        return words

    def load_word(self, address: cute.Pointer):
        """One word of `columns` elements.

        Relaxed, because the assembler sinks plain loads towards their uses and then waits for each
        of them; these it leaves where they stand, all in flight together.
        """
        return arch.load(address, ar.WORD[self.columns], sem="relaxed", scope="cta")

    def store(
        self,
        tensor: cute.Pointer,
        stride: Int64,
        token: Int32,
        head_dim: Int32,
        column: Int32,
        own: Boolean,
        previous: Boolean,
        words: list,
    ) -> None:
        """Writes words[position] where the position's half exists for this thread."""
        base = tensor + (Int64(token) * stride + self.column(self.positions - 1, head_dim, column))
        joined = [ar.join(parts) for parts in words]
        _store_rows(own, base, stride, joined[-self.ratio :])
        if cutlass.const_expr(self.coff == 2):
            earlier = base - (self.ratio * stride + head_dim)
            _store_rows(previous, earlier, stride, joined[: self.ratio])

    def load_ape(self, ape: cute.Pointer, head_dim: Int32, column: Int32) -> list:
        """The window's APE, [position][column] fp32; zeros without an APE."""
        table = cute.make_rmem_tensor((self.positions, self.columns), Float32)
        table.fill(0.0)
        _fill_ape(self, table, ape, head_dim, column)
        return self.rows(table)

    def rows(self, tensor: cute.Tensor) -> list:
        """A (positions, columns) register tensor as [position][column]."""
        return [[tensor[k, v] for v in range(self.columns)] for k in range(self.positions)]

    def scores(self, words: list, bias: list, first: Int32) -> list:
        """score + ape per position and column; -inf where the position does not exist.

        bias: the window's APE, [position][column].
        """
        rows = []
        for position, word in enumerate(words):
            sums = []
            for v, score in enumerate(ar.unpack_bf16(word, self.columns)):
                total = score + bias[position][v]
                if cutlass.const_expr(self.previous(position)):
                    total = ar.select(first != 0, Float32(ar.NEGATIVE_INFINITY), total)
                sums.append(total)
            rows.append(sums)
        return rows

    def values(self, words: list, first: Int32) -> list[list[Float32]]:
        """kv per position and column; 0 where the position does not exist."""
        rows = []
        for position, word in enumerate(words):
            if cutlass.const_expr(self.previous(position)):
                word = ar.select(first != 0, ar.WORD[self.columns](0), word)
            rows.append(ar.unpack_bf16(word, self.columns))
        return rows


@cute.jit
def _fill_ape(
    window: cutlass.Constexpr, table: cute.Tensor, ape: cute.Pointer, head_dim: Int32, column: Int32
):
    if ape.toint() != 0:
        width = Int64(head_dim) * window.coff
        for position in cutlass.range_constexpr(window.positions):
            row = ape + (position % window.ratio) * width
            values = ar.load_f32(row + window.column(position, head_dim, column), window.columns)
            for v in cutlass.range_constexpr(window.columns):
                table[position, v] = values[v]


@cute.jit
def _store_rows(exists: Boolean, base: cute.Pointer, stride: Int64, words: list):
    if exists:
        for k in cutlass.range_constexpr(len(words)):
            arch.store(base + k * stride, words[k])
