# SPDX-License-Identifier: Apache-2.0
"""Words of adjacent bf16: `columns` of them travel as one unsigned word of 16 * columns bits."""

from typing import Any

from cutlass import Float32, Uint16, Uint32, Uint64

from aot.kernels.ptx import ptx

WORD = {1: Uint16, 2: Uint32, 4: Uint64}


def negative_infinity(columns: int) -> Any:
    """A word of nothing but -inf."""
    return WORD[columns](0xFF80FF80FF80FF80 >> (64 - 16 * columns))


def join(words: list) -> Any:
    """One or two adjacent words as one, lowest address first."""
    if len(words) == 1:
        return words[0]
    return Uint64(words[0]) | (Uint64(words[1]) << 32)


def unpack(word: Any, columns: int) -> list[Float32]:
    """The values of a word, lowest address first."""
    values = []
    for half in _halves(word, columns):
        values.append((half << 16).bitcast(Float32))
        values.append((half & Uint32(0xFFFF0000)).bitcast(Float32))
    return values[:columns]


def pack(values: list[Float32]) -> Any:
    """A word of the values, each rounded once, to nearest even."""
    if len(values) == 1:
        return Uint16(_round_pair(values[0], Float32(0.0)) & Uint32(0xFFFF))
    return join([_round_pair(*values[v : v + 2]) for v in range(0, len(values), 2)])


def scale(word: Any, columns: int, power: int) -> Any:
    """Every bf16 of a word times 2**power, two at a time; exact but for subnormals."""
    factor = Uint32((127 + power) << 7 | (127 + power) << 23)
    minus_zero = Uint32(0x80008000)
    scaled = [
        ptx(Uint32, "fma.rn.bf16x2", half, factor, minus_zero) for half in _halves(word, columns)
    ]
    return Uint16(scaled[0] & Uint32(0xFFFF)) if columns == 1 else join(scaled)


def largest_magnitudes(words: list, columns: int) -> list[Float32]:
    """Largest |value| over words, per column, at half an instruction an element."""
    largest = []
    for column_halves in zip(*(_halves(word, columns) for word in words), strict=True):
        most = ptx(Uint32, "abs.bf16x2", column_halves[0])
        for half in column_halves[1:]:
            most = ptx(Uint32, "max.bf16x2", most, ptx(Uint32, "abs.bf16x2", half))
        largest += unpack(most, 2)
    return largest[:columns]


def _round_pair(low: Float32, high: Float32) -> Uint32:
    return ptx(Uint32, "cvt.rn.bf16x2.f32", high, low)


def _halves(word: Any, columns: int) -> list:
    """A word's 32-bit pieces of at most two bf16, lowest address first."""
    if columns == 1:
        return [Uint32(word)]
    if columns == 2:
        return [word]
    return [Uint32(word & Uint64(0xFFFFFFFF)), Uint32(word >> 32)]
