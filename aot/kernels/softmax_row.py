# SPDX-License-Identifier: Apache-2.0
"""One row's softmax over a window that the warps of a block share, for the long backward."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute import arch

from aot.kernels import arithmetic as ar
from aot.kernels.row_buffer import KV, SCORE


@cute.jit
def softmax_row(
    layout: cutlass.Constexpr,
    memory: cute.Pointer,
    slot: Int32,
    ape: cute.Pointer,
    head_dim: Int32,
    warp: Int32,
    lane: Int32,
    column: Int32,
    first: Int32,
    grads: list,
    weights: cute.Tensor,
    products: cute.Tensor,
) -> tuple[list, list]:
    """Sets a thread's `weights`, R's exponentials over the window's length, and `products`, R's u.

    Returns per column what turns the weights into probabilities, and R's S.
    """
    window = cutlass.const_expr(layout.window)
    exchange = cutlass.const_expr(layout.exchange)
    highest = cute.make_rmem_tensor((window.columns,), Float32)
    sums = cute.make_rmem_tensor((window.columns, 2), Float32)
    highest.fill(ar.LOWEST)
    for v in cutlass.range_constexpr(window.columns):
        # A position that does not exist has value 0: it matters where grad_out is infinite.
        sums[v, 0], sums[v, 1] = Float32(0.0), ar.mul_rn(grads[v], Float32(0.0))
    for half in cutlass.range_constexpr(window.coff):
        if window.exists(half, first):
            added = layout.ape_tile.read(memory, ape, head_dim, warp, lane, column, half)
            scores = layout.row_buffer.read(memory, slot, SCORE, half, warp, lane)
            for v in cutlass.range_constexpr(window.columns):
                for k in cutlass.range_constexpr(window.run):
                    weights[half * window.run + k, v] = scores[k][v] + added[k][v]
                places = window.places(half)
                highest[v] = ar.largest([highest[v], *(weights[i, v] for i in places)])
    exchange.write_maxima(memory, warp, lane, [highest[v] for v in range(window.columns)])
    arch.sync_threads()
    most = exchange.maxima(memory, lane)
    for half in cutlass.range_constexpr(window.coff):
        if window.exists(half, first):
            values = layout.row_buffer.read(memory, slot, KV, half, warp, lane)
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
    exchange.write_sums(memory, warp, lane, flat)
    arch.sync_threads()
    merged = exchange.sums(memory, lane)
    scales = [ar.reciprocal(merged[2 * v]) for v in range(window.columns)]
    dots = [ar.mul_rn(merged[2 * v + 1], scales[v]) for v in range(window.columns)]
    return scales, dots
