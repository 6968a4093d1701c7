# SPDX-License-Identifier: Apache-2.0
"""One row's gradients, for the buffered backward: written, and those of score summed for the APE's.

A warp has the whole row, so a half that does not exist costs one branch, not a predicate a word.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from aot.kernels import bf16
from aot.kernels.column import Column
from aot.kernels.gradients import differentiate_row
from aot.kernels.window import Window, store_rows


def differentiate(
    window: Window, scores: list, values: list, grads: list[Float32], first: Int32
) -> tuple[list, list, list]:
    """(gradients of kv, of score), words as of `differentiate_row`, and of score in fp32.

    The last [position][column].
    """
    addends = [[Float32(0.0)] * window.columns for _ in range(window.positions)]

    def keep(position: int, column: int, addend: Float32) -> None:
        addends[position][column] = addend

    return *differentiate_row(window, scores, values, grads, first, keep), addends


@cute.jit
def write_gradients(
    window: cutlass.Constexpr,
    to_kv: Column,
    to_score: Column,
    token: Int32,
    head_dim: Int32,
    active: Boolean,
    previous: Boolean,
    gradients: tuple,
    sums: cute.Tensor,
) -> None:
    """Writes what `differentiate` returns, and adds its fp32 to `sums`, where a position exists.

    token: the block's first. active: whether the lane's columns exist. previous: whether the
    previous half does. sums: (positions, columns).
    """
    kv_words = [bf16.join(parts) for parts in gradients[0]]
    score_words = [bf16.join(parts) for parts in gradients[1]]
    addends = gradients[2]
    own = cutlass.const_expr(window.positions - window.ratio)
    if active:
        at_kv, at_score = to_kv.at(token), to_score.at(token)
        store_rows(Boolean(True), at_kv, to_kv.stride, kv_words[own:])
        store_rows(Boolean(True), at_score, to_score.stride, score_words[own:])
        _add(sums, range(own, window.positions), addends)
        if cutlass.const_expr(window.coff == 2):
            if previous:
                at_kv = at_kv - (window.ratio * to_kv.stride + 2 * Int64(head_dim))
                at_score = at_score - (window.ratio * to_score.stride + 2 * Int64(head_dim))
                store_rows(Boolean(True), at_kv, to_kv.stride, kv_words[:own])
                store_rows(Boolean(True), at_score, to_score.stride, score_words[:own])
                _add(sums, range(own), addends)


def _add(sums: cute.Tensor, positions: range, addends: list) -> None:
    """Adds [position][column] of these positions to (positions, columns)."""
    for k in positions:
        for v, addend in enumerate(addends[k]):
            sums[k, v] = sums[k, v] + addend


@cute.jit
def zero_first_half(
    window: cutlass.Constexpr,
    to_kv: Column,
    to_score: Column,
    token: Int32,
    head_dim: Int32,
    wanted: Boolean,
) -> None:
    """Writes zeros to a block's own tokens in the columns that the next block pools."""
    if wanted:
        zeros = [bf16.WORD[window.columns](0)] * window.ratio
        back = 2 * Int64(head_dim)
        store_rows(Boolean(True), to_kv.at(token) - back, to_kv.stride, zeros)
        store_rows(Boolean(True), to_score.at(token) - back, to_score.stride, zeros)
