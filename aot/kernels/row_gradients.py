# SPDX-License-Identifier: Apache-2.0
"""One row's gradients, for the long backward: computed, summed for the APE's, and written.

Where rows are copied 16 bytes at a time they are written so, too: a warp puts the gradients in
place of the kv and score that it has used up, and writes them out from there. That takes an eighth
of the stores and of their addresses.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.cute import arch

from aot.kernels import arithmetic as ar
from aot.kernels import bf16
from aot.kernels.memory import Matrix, zero_16
from aot.kernels.row_buffer import KV, PIECE, SCORE


@cute.jit
def write_gradients(
    buffer: cutlass.Constexpr,
    memory: cute.Pointer,
    slot: Int32,
    grad_kv: Matrix,
    grad_score: Matrix,
    token: Int32,
    first: Int32,
    unpooled: Boolean,
    warp: Int32,
    lane: Int32,
    column: Int32,
    copied_column: Int32,
    tile_column: Int32,
    head_dim: Int32,
    grads: list,
    weights: cute.Tensor,
    products: cute.Tensor,
    scales: list,
    dots: list,
    sums: cute.Tensor,
) -> None:
    """Writes a warp's gradients of the row in `slot` and adds those of the scores to `sums`.

    unpooled: whether no block pools the tokens in half 0, which then get zeros there.
    weights, products, scales, dots: as `softmax_row` leaves them.
    """
    window = cutlass.const_expr(buffer.window)
    if cutlass.const_expr(buffer.asynchronous):
        for half in cutlass.range_constexpr(window.coff):
            if window.exists(half, first):
                to_kv = buffer.at(memory, slot, KV, half, warp, lane)
                to_score = buffer.at(memory, slot, SCORE, half, warp, lane)
                for k in cutlass.range_constexpr(window.run):
                    i = half * window.run + k
                    if cutlass.const_expr(i < window.reread):
                        word = arch.load(
                            to_kv + k * window.tile, bf16.WORD[window.columns], ss="cta"
                        )
                        values = bf16.unpack(word, window.columns)
                        u = [ar.mul_rn(g, x) for g, x in zip(grads, values, strict=True)]
                    else:
                        u = [products[i - window.reread, v] for v in range(window.columns)]
                    of_kv, of_score = _gradients(i, grads, weights, u, scales, dots, sums)
                    arch.store(to_kv + k * window.tile, bf16.pack(of_kv), ss="cta")
                    arch.store(to_score + k * window.tile, bf16.pack(of_score), ss="cta")
        arch.sync_warp()
        if tile_column + lane % buffer.pieces * PIECE < head_dim:
            for half in cutlass.range_constexpr(window.coff):
                if window.exists(half, first):
                    start = window.token(token, warp, half)
                    at = copied_column + half * head_dim
                    buffer.write_out(memory, slot, KV, half, grad_kv, start, warp, lane, at)
                    buffer.write_out(memory, slot, SCORE, half, grad_score, start, warp, lane, at)
            if cutlass.const_expr(window.coff == 2):
                if unpooled:
                    start = window.token(token, warp, 1) + lane // buffer.pieces
                    to_kv = grad_kv.at(start, copied_column)
                    to_score = grad_score.at(start, copied_column)
                    for k in cutlass.range_constexpr(0, window.run, buffer.together):
                        zero_16(to_kv + k * grad_kv.stride)
                        zero_16(to_score + k * grad_score.stride)
    elif tile_column + lane * window.columns < head_dim:
        for half in cutlass.range_constexpr(window.coff):
            if window.exists(half, first):
                start = window.token(token, warp, half)
                to_kv = grad_kv.at(start, column + half * head_dim)
                to_score = grad_score.at(start, column + half * head_dim)
                for k in cutlass.range_constexpr(window.run):
                    i = half * window.run + k
                    u = [products[i, v] for v in range(window.columns)]
                    of_kv, of_score = _gradients(i, grads, weights, u, scales, dots, sums)
                    arch.store(to_kv + k * grad_kv.stride, bf16.pack(of_kv))
                    arch.store(to_score + k * grad_score.stride, bf16.pack(of_score))
        if cutlass.const_expr(window.coff == 2):
            if unpooled:
                start = window.token(token, warp, 1)
                to_kv, to_score = grad_kv.at(start, column), grad_score.at(start, column)
                zero = bf16.WORD[window.columns](0)
                for k in cutlass.range_constexpr(window.run):
                    arch.store(to_kv + k * grad_kv.stride, zero)
                    arch.store(to_score + k * grad_score.stride, zero)


def _gradients(
    i: int,
    grads: list,
    weights: cute.Tensor,
    products: list,
    scales: list,
    dots: list,
    sums: cute.Tensor,
) -> tuple[list[Float32], list[Float32]]:
    """A thread's gradients at its i-th position, of kv and of score, per column."""
    of_kv, of_score = [], []
    for v, g in enumerate(grads):
        p = ar.mul_rn(weights[i, v], scales[v])
        ds = ar.fma_rn(-p, dots[v], ar.mul_rn(products[v], p))
        sums[i, v] = sums[i, v] + ds
        of_kv.append(ar.mul_rn(g, p))
        of_score.append(ds)
    return of_kv, of_score
