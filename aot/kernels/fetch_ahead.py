# SPDX-License-Identifier: Apache-2.0
"""A row's bytes on their way to the second-level cache before there is room for them on the chip.

One instruction of a warp asks for 32 lines, and neither registers nor shared memory hold them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from aot.kernels.memory import fetch_line
from aot.kernels.pair import Pair
from aot.kernels.ptx import select
from aot.kernels.warp import WARP
from aot.kernels.window_long import LongWindow

LINE = 64  # bf16 of a line of the second-level cache


@cute.jit
def fetch_share(
    window: cutlass.Constexpr,
    inputs: Pair,
    block_token: Int32,
    tile_column: Int32,
    head_dim: Int32,
    warp: Int32,
    lane: Int32,
) -> None:
    """Starts fetching a warp's share, as `LongWindow` divides it, of the block at `block_token`."""
    lines = cutlass.const_expr(_lines(window))  # of one position's tile
    column = tile_column + lane // 2 % lines * LINE
    token = block_token + warp * window.run + lane // (2 * lines)
    if column < head_dim:
        for k in cutlass.range_constexpr(0, window.run, WARP // (2 * lines)):
            of_kv, of_score = inputs.at(token + k, column)
            fetch_line(select(lane % 2 == 0, of_kv.toint(), of_score.toint()))


def whole_lines(inputs: Pair) -> Boolean:
    """Whether their rows are so many whole lines long: of others, tiles would share lines."""
    return ((inputs.kv.stride | inputs.score.stride) & (LINE - 1)) == 0


def _lines(window: LongWindow) -> int:
    """Lines of one position's tile.

    Raises:
        ValueError: the window has two halves, a tile is no whole lines, or a warp's run is shorter
            than what one instruction asks for.
    """
    lines = window.tile // LINE
    if window.coff != 1 or window.tile % LINE or window.run * 2 * lines % WARP:
        raise ValueError(
            f"coff {window.coff}, tiles of {window.tile} columns, runs of {window.run}"
        )
    return lines
