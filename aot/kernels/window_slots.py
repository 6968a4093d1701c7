# SPDX-License-Identifier: Apache-2.0
"""A thread's next window on its way: raw words in shared memory, filled by asynchronous copies.

It travels while the row before computes, and takes no registers from that. Every thread copies and
reads its own words and no others.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute import arch

from aot.kernels import bf16
from aot.kernels.memory import Matrix, copy_async
from aot.kernels.window import Window

KV, SCORE = 0, 1


@dataclass(frozen=True)
class WindowSlots:
    """Words laid out [KV, SCORE][position][thread], of at least 4 bytes."""

    window: Window
    threads: int
    base: cute.Pointer

    @staticmethod
    def allocate(window: Window, threads: int) -> "WindowSlots":
        """In the block's static shared memory."""
        word = bf16.WORD[window.columns]
        count = 2 * window.positions * threads
        return WindowSlots(window, threads, arch.alloc_smem(word, count, alignment=16))

    def start(
        self, which: int, positions: range, tensor: Matrix, token: Int32, head_dim: Int32,
        column: Int32,
    ) -> None:  # fmt: skip
        """Starts copying one tensor's words of these positions, which exist."""
        window = self.window
        own = tensor.at(token, window.column(window.positions - 1, head_dim, column))
        previous = own - (window.ratio * tensor.stride + head_dim)
        for position in positions:
            source = previous if window.previous(position) else own
            source = source + (position % window.ratio) * tensor.stride
            copy_async(self._at(which, position), source, 2 * window.columns)

    def read(self, which: int) -> list:
        """One tensor's words, [position]: junk where nothing was copied."""
        word = bf16.WORD[self.window.columns]
        return [
            arch.load(self._at(which, position), word, ss="cta")
            for position in range(self.window.positions)
        ]

    def _at(self, which: int, position: int) -> cute.Pointer:
        thread, _, _ = arch.thread_idx()
        return self.base + ((which * self.window.positions + position) * self.threads + thread)


@cute.jit
def start_row(
    slots: WindowSlots,
    window: cutlass.Constexpr,
    kv: Matrix,
    score: Matrix,
    token: Int32,
    first: Int32,
    head_dim: Int32,
    column: Int32,
) -> None:
    """Starts copying a row's window: of a first block, its own half alone."""
    own = cutlass.const_expr(range(window.positions - window.ratio, window.positions))
    previous = cutlass.const_expr(range(window.positions - window.ratio))
    slots.start(KV, own, kv, token, head_dim, column)
    slots.start(SCORE, own, score, token, head_dim, column)
    if first == 0:
        slots.start(KV, previous, kv, token, head_dim, column)
        slots.start(SCORE, previous, score, token, head_dim, column)
    arch.cp_async_commit_group()
