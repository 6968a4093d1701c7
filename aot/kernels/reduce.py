# SPDX-License-Identifier: Apache-2.0
"""grad_ape from the partial planes of backward: their sum, in an order that is always the same.

A block owns 32 columns. Its warps take every WARPS-th plane each, then the warps' sums are added in
ascending order.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute import arch

from aot.kernels.launchable import launchable
from aot.kernels.segments import WARP
from aot.variants import Variant

IN_FLIGHT = 8  # planes a thread loads before it adds the first


def entry(variant: Variant) -> tuple[Any, Any, list[Any]]:
    """(kernel, host function, sample arguments) of the reduction, for the compiler."""
    warps = variant.threads // WARP

    @cute.kernel
    def reduce(
        workspace: cute.Pointer,
        grad_ape: cute.Pointer,
        plane_elements: Int64,
        groups: Int32,
        accumulate: Int32,
    ) -> None:
        thread, _, _ = arch.thread_idx()
        block, _, _ = arch.block_idx()
        lane, warp = thread % WARP, thread // WARP
        element = Int64(block) * WARP + lane
        total = Float32(0.0)
        if element < plane_elements:
            source = workspace + (warp * plane_elements + element)
            step = warps * plane_elements
            plane = warp
            while plane + (IN_FLIGHT - 1) * warps < groups:
                loaded = [arch.load(source + i * step, Float32) for i in range(IN_FLIGHT)]
                for value in loaded:
                    total = total + value
                source = source + IN_FLIGHT * step
                plane = plane + IN_FLIGHT * warps
            while plane < groups:
                total = total + arch.load(source, Float32)
                source = source + step
                plane = plane + warps
        partial = arch.alloc_smem(Float32, variant.threads)
        arch.store(partial + thread, total, ss="cta")
        arch.sync_threads()
        if (warp == 0) & (element < plane_elements):
            for w in cutlass.range_constexpr(1, warps):
                total = total + arch.load(partial + (w * WARP + lane), Float32, ss="cta")
            if accumulate != 0:
                total = total + arch.load(grad_ape + element, Float32)
            arch.store(grad_ape + element, total)

    return launchable(reduce, variant)
