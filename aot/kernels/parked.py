# SPDX-License-Identifier: Apache-2.0
"""What a warp sees of the next row's segment, kept in shared memory until it gets there.

It travels while the row before is in work, and takes no registers from that.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute import arch

from aot.kernels.memory import copy_async
from aot.kernels.prefix_search import guess, of_lane
from aot.kernels.segments import Pack


@dataclass(frozen=True)
class Parked:
    """Two int32 of each thread: its prefix of the rows, then of the tokens."""

    base: cute.Pointer
    threads: int

    @staticmethod
    def allocate(threads: int) -> "Parked":
        """In the block's static shared memory."""
        return Parked(arch.alloc_smem(Int32, 2 * threads), threads)

    def start(self, pack: Pack, row: Int32) -> None:
        """Starts copying what `pack.glance` would load. A warp's lanes ask for one row."""
        thread, _, _ = arch.thread_idx()
        index = of_lane(guess(pack.segments, row, pack.rows), pack.segments)
        copy_async(self.base + thread, pack.cu_seqlens_comp + index, 4)
        copy_async(self.base + (self.threads + thread), pack.cu_seqlens + index, 4)
        arch.cp_async_commit_group()

    def glanced(self, pack: Pack, row: Int32, younger: int = 0) -> tuple[Int32, Int32, Int32]:
        """What `pack.glance` returns, of the row last started. Waits for it.

        younger: groups of copies that were started since then, for which it does not wait.
        """
        thread, _, _ = arch.thread_idx()
        arch.cp_async_wait_group(younger)
        prefix = arch.load(self.base + thread, Int32, ss="cta")
        other = arch.load(self.base + (self.threads + thread), Int32, ss="cta")
        return guess(pack.segments, row, pack.rows), prefix, other
