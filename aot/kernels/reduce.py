# SPDX-License-Identifier: Apache-2.0
"""grad_ape from the partial planes of backward: their sum, in an order that is always the same.

A block owns `columns` elements, with `lanes` threads for each. A lane takes every lanes-th plane;
then the lanes' sums are added in ascending order.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute import arch

from aot.kernels.launchable import launchable
from aot.variants import Variant

IN_FLIGHT = 8  # planes a thread loads before it adds the first


def entry(variant: Variant) -> tuple[Any, Any, list[Any]]:
    """(kernel, host function, sample arguments) of the reduction, for the compiler."""
    columns = variant.columns
    lanes = variant.threads // columns

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
        column, lane = thread % columns, thread // columns
        element = Int64(block) * columns + column
        total = Float32(0.0)
        if element < plane_elements:
            source = workspace + (lane * plane_elements + element)
            step = lanes * plane_elements
            plane = lane
            while plane + (IN_FLIGHT - 1) * lanes < groups:
                loaded = [arch.load(source + i * step, Float32) for i in range(IN_FLIGHT)]
                for value in loaded:
                    total = total + value
                source = source + IN_FLIGHT * step
                plane = plane + IN_FLIGHT * lanes
            while plane < groups:
                total = total + arch.load(source, Float32)
                source = source + step
                plane = plane + lanes
        if cutlass.const_expr(lanes > 1):
            partial = arch.alloc_smem(Float32, variant.threads)
            arch.store(partial + thread, total, ss="cta")
            arch.sync_threads()
            if lane == 0:
                for i in cutlass.range_constexpr(1, lanes):
                    total = total + arch.load(partial + (i * columns + column), Float32, ss="cta")
        if (lane == 0) & (element < plane_elements):
            if accumulate != 0:
                total = total + arch.load(grad_ape + element, Float32)
            arch.store(grad_ape + element, total)

    return launchable(reduce, variant)
