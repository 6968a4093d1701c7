# SPDX-License-Identifier: Apache-2.0
"""Zeros for the gradients of tokens that no computed row consumes.

Every token is looked at, each by one lane; a warp then writes what its 32 tokens need together.
So the cost of finding the tokens does not depend on where they are, and long gaps are shared out
over all blocks.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute import arch

from aot.kernels import arithmetic as ar
from aot.kernels.segments import WARP, find_for_warp, gallop


@cute.jit
def zero_unconsumed(
    window: cutlass.Constexpr,
    threads: cutlass.Constexpr,
    block: Int32,
    blocks: Int32,
    cu_seqlens: cute.Pointer,
    cu_seqlens_comp: cute.Pointer,
    grad_kv: cute.Pointer,
    grad_score: cute.Pointer,
    grad_kv_stride: Int64,
    grad_score_stride: Int64,
    tokens: Int32,
    segments: Int32,
    rows: Int32,
    head_dim: Int32,
) -> None:
    """Block `block` of `blocks` does its share of all tokens."""
    thread, _, _ = arch.thread_idx()
    lane = arch.lane_idx()
    base = Int64(block) * threads + (thread & -WARP)
    while base < tokens:
        token = Int32(min(base + lane, Int64(tokens) - 1))
        width = _unconsumed_columns(
            window, cu_seqlens, cu_seqlens_comp, segments, rows, head_dim, Int32(base), token
        )
        if base + lane >= tokens:
            width = Int32(0)
        pending = arch.vote_ballot_sync(width != 0)
        while pending != 0:
            source = arch.popc((pending & -pending) - 1)
            pending = pending & (pending - 1)
            columns = arch.shuffle_sync(width, source)
            row = base + source
            to_kv = grad_kv + row * grad_kv_stride
            to_score = grad_score + row * grad_score_stride
            column = lane * window.columns
            while column < columns:
                arch.store(to_kv + column, ar.WORD[window.columns](0))
                arch.store(to_score + column, ar.WORD[window.columns](0))
                column = column + WARP * window.columns
        base = base + Int64(blocks) * threads


@cute.jit
def _unconsumed_columns(
    window: cutlass.Constexpr,
    cu_seqlens: cute.Pointer,
    cu_seqlens_comp: cute.Pointer,
    segments: Int32,
    rows: Int32,
    head_dim: Int32,
    warp_token: Int32,
    token: Int32,
) -> Int32:
    """How many leading columns of a token no row consumes.

    0, the first half (the last block's, which no next block pools) or the whole width.
    """
    width = head_dim * window.coff
    if segments > 0:
        segment = find_for_warp(cu_seqlens, segments, warp_token)
        segment = gallop(cu_seqlens, segments, segment, token)
        index = token - arch.load(cu_seqlens + segment, Int32)
        first_row = arch.load(cu_seqlens_comp + segment, Int32)
        last_row = min(arch.load(cu_seqlens_comp + (segment + 1), Int32), rows)
        block = index // window.ratio
        if (index >= 0) & (block < last_row - first_row):
            width = Int32(0)
            if cutlass.const_expr(window.coff == 2):
                if block == last_row - first_row - 1:
                    width = head_dim
    return width
