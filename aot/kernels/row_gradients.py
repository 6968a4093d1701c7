# SPDX-License-Identifier: Apache-2.0
"""One row's gradients, for the long backward: computed, summed for the APE's, and written.

They leave straight from the threads, or `staged`: a warp puts them in place of the kv and score
that it has used up, and writes them out from there, 16 bytes at a time.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute import arch

from aot.kernels import arithmetic as ar
from aot.kernels import bf16
from aot.kernels.memory import store_f32
from aot.kernels.pair import KV, SCORE, Pair
from aot.kernels.row_buffer import Row
from aot.kernels.softmax_row import Registers
from aot.kernels.thread import Thread


@cute.jit
def write_gradients(
    buffer: cutlass.Constexpr,
    thread: Thread,
    row: Row,
    outputs: Pair,
    grads: list,
    registers: Registers,
    softmax: tuple,
) -> None:
    """Writes a warp's gradients of a row and adds those of the scores to the sums.

    softmax: as `softmax_row` returns it, and leaves the registers.
    """
    window = cutlass.const_expr(buffer.window)
    exists = buffer.computes(thread)
    if cutlass.const_expr(buffer.staged):
        exists = Boolean(True)  # until they are written out
    for half in cutlass.range_constexpr(window.coff):
        if window.exists(half, row.first) & exists:
            kv, score = (buffer.at(thread, row.slot, which, half) for which in (KV, SCORE))
            start = window.token(row.token, thread.warp, half)
            to_kv, to_score = outputs.at(start, thread.column + half * thread.head_dim)
            for k in cutlass.range_constexpr(window.run):
                i = half * window.run + k
                if cutlass.const_expr(i < window.reread):
                    word = arch.load(kv + k * window.tile, bf16.WORD[window.columns], ss="cta")
                    values = bf16.unpack(word, window.columns)
                    u = [ar.mul_rn(g, x) for g, x in zip(grads, values, strict=True)]
                else:
                    u = [registers.products[i - window.reread, v] for v in range(window.columns)]
                of_kv, of_score = _gradients(i, grads, u, registers, *softmax)
                if cutlass.const_expr(buffer.staged):
                    arch.store(kv + k * window.tile, bf16.pack(of_kv), ss="cta")
                    arch.store(score + k * window.tile, bf16.pack(of_score), ss="cta")
                else:
                    arch.store(to_kv + k * outputs.kv.stride, bf16.pack(of_kv))
                    arch.store(to_score + k * outputs.score.stride, bf16.pack(of_score))
    if cutlass.const_expr(buffer.staged):
        arch.sync_warp()
        if buffer.copies(thread):
            for half in cutlass.range_constexpr(window.coff):
                if window.exists(half, row.first):
                    start = window.token(row.token, thread.warp, half)
                    for which, tensor in outputs.both():
                        buffer.write_out(thread, row.slot, which, half, tensor, start)


def _gradients(
    i: int, grads: list, products: list, registers: Registers, scales: list, dots: list
) -> tuple[list[Float32], list[Float32]]:
    """A thread's gradients at its i-th position, of kv and of score, per column."""
    of_kv, of_score = [], []
    for v, g in enumerate(grads):
        p = ar.mul_rn(registers.weights[i, v], scales[v])
        ds = ar.fma_rn(-p, dots[v], ar.mul_rn(products[v], p))
        registers.sums[i, v] = registers.sums[i, v] + ds
        of_kv.append(ar.mul_rn(g, p))
        of_score.append(ds)
    return of_kv, of_score


@cute.jit
def write_sums(
    window: cutlass.Constexpr,
    thread: Thread,
    workspace: cute.Pointer,
    group: Int32,
    registers: Registers,
) -> None:
    """Writes a thread's sums to its group's plane of the workspace."""
    width = Int64(thread.head_dim) * window.coff
    plane = workspace + Int64(group) * (window.ratio * width)
    base = plane + (thread.warp * window.run * width + thread.column)
    for half in cutlass.range_constexpr(window.coff):
        for k in cutlass.range_constexpr(window.run):
            sums = [registers.sums[half * window.run + k, v] for v in range(window.columns)]
            store_f32(base + (k * width + half * thread.head_dim), sums)
