# SPDX-License-Identifier: Apache-2.0
"""A column of a tensor in global memory, addressed row by row at the cost of one product."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32
from cutlass.cute import arch
from cutlass.cute.typing import AddressSpace

from aot.kernels.memory import Matrix


@dataclass(frozen=True)
class Column:
    """A column of a matrix: its address in row 0, and bytes from row to row.

    Apart from `Matrix`, so that what does not change from row to row is added up once.
    """

    base: cute.Pointer
    stride: Int64

    @staticmethod
    def of(matrix: Matrix, row: Int32, column: Int32) -> "Column":
        """A column, of which `at` counts rows from `row`."""
        return Column(cute.recast_ptr(matrix.at(row, column), dtype=Uint8), 2 * matrix.stride)

    def pinned(self) -> "Column":
        """The same, its base out of a shuffle: in registers to stay, not to be computed again.

        Call it where the whole warp comes by.
        """
        value = self.base.toint()
        low = arch.shuffle_sync(Int32(value & Int64(0xFFFFFFFF)), arch.lane_idx())
        high = arch.shuffle_sync(Int32(value >> 32), arch.lane_idx())
        address = Int64(Uint32(low)) | (Int64(high) << 32)
        pointer = cute.make_ptr(Uint8, address, AddressSpace.gmem, assumed_align=1)
        return Column(pointer, self.stride)

    def at(self, row: Int32) -> cute.Pointer:
        """The address in a row that is not negative."""
        return self.base + Int64(Uint32(row)) * self.stride
