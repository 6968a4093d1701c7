# SPDX-License-Identifier: Apache-2.0
"""One row's pooling window as a thread sees it: a few columns at every position, in registers.

Positions come in halves of `ratio`: with coff 2 the previous block's tokens with columns
[0, head_dim), then the block's own tokens with columns [head_dim, 2 * head_dim); with coff 1 the
own tokens alone. The previous half of a segment's first block does not exist. Loads for it go to
the own half instead, whose bytes are read anyway, and are replaced once they are here: no branch
before the loads, no extra traffic.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute import arch

from aot.kernels import bf16
from aot.kernels.memory import Matrix, load_ape, load_word, load_word_once
from aot.kernels.ptx import select
from aot.kernels.warp import WARP


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

    @property
    def warp_tile(self) -> int:
        """Columns that a warp's lanes own, side by side."""
        return WARP * self.columns

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
        tensor: Matrix,
        token: Int32,
        first: Int32,
        head_dim: Int32,
        column: Int32,
        once: bool = False,
    ) -> list:
        """One word of `columns` elements per position; the first block's previous half is junk.

        once: as a variant's.
        """
        own, back = self._places(tensor, token, head_dim, column)
        previous = own
        if cutlass.const_expr(self.coff == 2):
            previous = own - select(first != 0, Int64(0), back)
        return self._load(own, previous, tensor.stride, once)

    def registers(self) -> cute.Tensor:
        """Room for a window's words, of no value yet."""
        return cute.make_rmem_tensor((self.positions,), bf16.WORD[self.columns])

    def words(self, registers: cute.Tensor) -> list:
        """What `registers` hold, by position."""
        return [registers[k] for k in range(self.positions)]

    def put(self, registers: cute.Tensor, words: list) -> None:
        """Makes `registers` hold words[position]."""
        for position, word in enumerate(words):
            registers[position] = word

    def load_from(
        self,
        tensor: Matrix,
        token: Uint32,
        previous: Uint32,
        head_dim: Int32,
        column: Int32,
    ) -> list:
        """As `load`, of halves that start at these tokens."""
        own = tensor.at(token, self.column(self.positions - 1, head_dim, column))
        back = tensor.at(previous, column)
        return self._load(own, back, tensor.stride)

    def _places(
        self, tensor: Matrix, token: Int32, head_dim: Int32, column: Int32
    ) -> tuple[cute.Pointer, Int64]:
        """The own half's first element, and how far before it the previous half's lies."""
        own = tensor.at(token, self.column(self.positions - 1, head_dim, column))
        return own, self.ratio * tensor.stride + head_dim

    def _load(
        self,
        own: cute.Pointer,
        previous: cute.Pointer,
        stride: Int64,
        once: bool = False,
    ) -> list:
        load = load_word_once if once else load_word
        words = []
        for position in range(self.positions):
            base = previous if self.previous(position) else own
            words.append(load(base + (position % self.ratio) * stride, self.columns))
        return words

    def erase_missing(self, first: Int32, kv_words: list, score_words: list) -> tuple[list, list]:
        """(kv words, score words), 0 and -inf where a first block has no position."""
        if self.coff == 1:
            return kv_words, score_words
        half = self.ratio
        kv_half, score_half = _replace(
            first,
            [kv_words[:half], score_words[:half]],
            [bf16.WORD[self.columns](0), bf16.negative_infinity(self.columns)],
        )
        return kv_half + kv_words[half:], score_half + score_words[half:]

    def store(
        self,
        tensor: Matrix,
        token: Int32,
        head_dim: Int32,
        column: Int32,
        own: Boolean,
        previous: Boolean,
        words: list,
    ) -> None:
        """Writes words[position] where the position's half exists for this thread."""
        base, back = self._places(tensor, token, head_dim, column)
        joined = [bf16.join(parts) for parts in words]
        store_rows(own, base, tensor.stride, joined[-self.ratio :])
        if cutlass.const_expr(self.coff == 2):
            store_rows(previous, base - back, tensor.stride, joined[: self.ratio])

    def zero_first_half(self, tensor: Matrix, token: Int32, column: Int32, wanted: Boolean) -> None:
        """Writes zeros to a block's own tokens in the columns that the next block pools."""
        store_rows(
            wanted,
            tensor.at(token, column),
            tensor.stride,
            [bf16.WORD[self.columns](0)] * self.ratio,
        )

    def load_ape(
        self, ape: cute.Pointer, head_dim: Int32, column: Int32, pinned: bool = False
    ) -> list:
        """The window's APE, [position][column] fp32; zeros without an APE.

        pinned: whether the loads stay where they stand.
        """

        def address(position: int) -> cute.Pointer:
            row = ape + (position % self.ratio) * (Int64(head_dim) * self.coff)
            return row + self.column(position, head_dim, column)

        return load_ape(ape, address, self.positions, self.columns, pinned)

    def as_lists(self, registers: cute.Tensor) -> list:
        """A (positions, columns) register tensor as [position][column]."""
        return [[registers[k, v] for v in range(self.columns)] for k in range(self.positions)]

    def scores(self, words: list, bias: list) -> list[list[Float32]]:
        """Score + ape, [position][column].

        bias: the window's APE, [position][column].
        """
        return [
            [score + b for score, b in zip(bf16.unpack(word, self.columns), row, strict=True)]
            for word, row in zip(words, bias, strict=True)
        ]

    def values(self, words: list) -> list[list[Float32]]:
        """The kv, [position][column]."""
        return [bf16.unpack(word, self.columns) for word in words]


@cute.jit
def store_rows(exists: Boolean, base: cute.Pointer, stride: Int64, words: list) -> None:
    """Writes words[k] k strides behind the base, if there is anything to write."""
    if exists:
        for k in cutlass.range_constexpr(len(words)):
            arch.store(base + k * stride, words[k])


@cute.jit
def _replace(condition: Int32, groups: list, replacements: list) -> list:
    """Every register of groups[i] becomes replacements[i] where the condition is not zero.

    A branch, because it is rarely taken and selects would cost an instruction a register.
    """
    copies = []
    for group, replacement in zip(groups, replacements, strict=True):
        copy = cute.make_rmem_tensor((len(group),), type(replacement))
        for k, value in enumerate(group):
            copy[k] = value
        copies.append(copy)
    if condition != 0:
        for i in cutlass.range_constexpr(len(groups)):
            for k in cutlass.range_constexpr(len(groups[i])):
                copies[i][k] = replacements[i]
    return [[copies[i][k] for k in range(len(group))] for i, group in enumerate(groups)]
