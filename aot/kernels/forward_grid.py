# SPDX-License-Identifier: Apache-2.0
"""Which tile of columns and which rows a block of a forward takes.

The tiles of one row follow each other in launch order, so that blocks in flight together read whole
rows of memory. Row blocks that the grid's second dimension is too small for go on in the third.
"""

from cutlass import Int32, Uint32
from cutlass.cute import arch


def column_tile_and_row_block() -> tuple[Int32, Uint32]:
    """This block's. The last row blocks may lie behind the last row."""
    column_tile, y, z = arch.block_idx()
    _, height, _ = arch.grid_dim()
    return column_tile, Uint32(z) * Uint32(height) + Uint32(y)
