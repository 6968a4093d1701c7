# SPDX-License-Identifier: Apache-2.0
"""What a block of the long backward keeps in dynamic shared memory, and where."""

from dataclasses import dataclass

from aot.kernels.ape_tile import ApeTile
from aot.kernels.memory import PIECE
from aot.kernels.row_buffer import RowBuffer
from aot.kernels.row_table import RowTable
from aot.kernels.warp import WARP
from aot.kernels.warp_exchange import WarpExchange
from aot.kernels.window_long import LongWindow
from aot.variants import Variant


@dataclass(frozen=True)
class BlockLayout:
    """Four parts, one after another; each knows its offset."""

    window: LongWindow
    exchange: WarpExchange
    ape_tile: ApeTile
    row_table: RowTable
    row_buffer: RowBuffer


def block_layout(variant: Variant) -> BlockLayout:
    """The layout of a variant's block.

    Raises:
        ValueError: the variant asks for another amount of shared memory.
    """
    warps = variant.threads // WARP
    window = LongWindow(
        variant.ratio, variant.coff, variant.columns, warps, variant.batch, variant.reread
    )
    exchange = WarpExchange(window, 0)
    end = exchange.words
    ape_tile = ApeTile(window, variant.holds_ape, end)
    end += ape_tile.words
    row_table = RowTable(variant.threads, variant.ratio, end)
    end += row_table.words
    asynchronous = variant.required_alignment % PIECE == 0
    row_buffer = RowBuffer(window, asynchronous, end, variant.staged, variant.prefetch_size)
    end += row_buffer.words
    if 4 * end != variant.dynamic_shared:
        raise ValueError(f"{variant.name} keeps {4 * end} bytes in shared memory")
    return BlockLayout(window, exchange, ape_tile, row_table, row_buffer)
