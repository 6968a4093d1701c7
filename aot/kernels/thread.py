# SPDX-License-Identifier: Apache-2.0
"""A thread of the long backward: where it stands in its block, and which columns are its own."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class Thread:
    """A warp and a lane of it, in a block that works on the tile of columns from `tile` on.

    column: the first of those that the lane computes. copied: the first of those that it copies,
    which are others, of its own warp's positions. Past the last one, either repeats the last.
    memory: the block's shared memory.
    """

    memory: cute.Pointer
    warp: Int32
    lane: Int32
    head_dim: Int32
    tile: Int32
    column: Int32
    copied: Int32
