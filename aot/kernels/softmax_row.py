# SPDX-License-Identifier: Apache-2.0
"""One row's softmax over a window that the warps of a block share, for the long backward."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute import arch

from aot.kernels import arithmetic as ar
from aot.kernels.pair import KV, SCORE
from aot.kernels.row_buffer import Row
from aot.kernels.thread import Thread
from aot.kernels.window_long import LongWindow


@dataclass(frozen=True)
class Registers:
    """What a thread keeps of its positions, [position][column].

    weights: R's exponentials in a row, over the window's length. products: R's u there, but of the
    positions reread. sums: the APE's gradients in all rows so far.
    """

    weights: cute.Tensor
    products: cute.Tensor
    sums: cute.Tensor

    @staticmethod
    def of(window: LongWindow) -> "Registers":
        """Sums of zero, and room for a row."""
        positions, columns = window.warp_positions, window.columns
        sums = cute.make_rmem_tensor((positions, columns), Float32)
        sums.fill(0.0)
        weights = cute.make_rmem_tensor((positions, columns), Float32)
        products = cute.make_rmem_tensor((positions - window.reread, columns), Float32)
        return Registers(weights, products, sums)


@cute.jit
def softmax_row(
    layout: cutlass.Constexpr,
    thread: Thread,
    row: Row,
    ape: cute.Pointer,
    grads: list,
    registers: Registers,
) -> tuple[list, list]:
    """Sets a thread's `weights` and `products` of a row.

    Returns per column what turns the weights into probabilities, and R's S.
    """
    weights, products = registers.weights, registers.products
    window = cutlass.const_expr(layout.window)
    exchange = cutlass.const_expr(layout.exchange)
    highest = cute.make_rmem_tensor((window.columns,), Float32)
    sums = cute.make_rmem_tensor((window.columns, 2), Float32)
    highest.fill(ar.LOWEST)
    for v in cutlass.range_constexpr(window.columns):
        # A position that does not exist has value 0: it matters where grad_out is infinite.
        sums[v, 0], sums[v, 1] = Float32(0.0), ar.mul_rn(grads[v], Float32(0.0))
    for half in cutlass.range_constexpr(window.coff):
        if window.exists(half, row.first):
            added = layout.ape_tile.read(thread, ape, half)
            scores = layout.row_buffer.read(thread, row.slot, SCORE, half)
            for v in cutlass.range_constexpr(window.columns):
                for k in cutlass.range_constexpr(window.run):
                    weights[half * window.run + k, v] = scores[k][v] + added[k][v]
                own = window.places(half)
                highest[v] = ar.largest([highest[v], *(weights[i, v] for i in own)])
    exchange.write_maxima(thread, [highest[v] for v in range(window.columns)])
    arch.sync_threads()
    most = exchange.maxima(thread)
    for half in cutlass.range_constexpr(window.coff):
        if window.exists(half, row.first):
            values = layout.row_buffer.read(thread, row.slot, KV, half)
            for v in cutlass.range_constexpr(window.columns):
                for k in cutlass.range_constexpr(window.run):
                    i = half * window.run + k
                    e = ar.exp_over(weights[i, v] - most[v], window.log2_positions)
                    u = ar.mul_rn(grads[v], values[k][v])
                    weights[i, v] = e
                    if cutlass.const_expr(i >= window.reread):
                        products[i - window.reread, v] = u
                    sums[v, 0] = sums[v, 0] + e
                    sums[v, 1] = ar.fma_rn(u, e, sums[v, 1])
    flat = [sums[v, i] for v in range(window.columns) for i in range(2)]
    exchange.write_sums(thread, flat)
    arch.sync_threads()
    merged = exchange.sums(thread)
    scales = [ar.reciprocal(merged[2 * v]) for v in range(window.columns)]
    dots = [ar.mul_rn(merged[2 * v + 1], scales[v]) for v in range(window.columns)]
    return scales, dots
