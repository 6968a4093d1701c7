# SPDX-License-Identifier: Apache-2.0
"""What backward leaves to a second launch: the sum of its partial planes, and zeros.

The last `fill_ctas` blocks write the zeros of what no row pools. Each of the others owns `columns`
elements of grad_ape, with `lanes` threads for each: a lane takes every lanes-th plane, then the
lanes' sums are added in pairs.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute import arch

from aot.kernels import arithmetic as ar
from aot.kernels.launchable import launchable
from aot.kernels.memory import Matrix
from aot.kernels.pair import Pair
from aot.kernels.segments import Pack
from aot.kernels.zeros import zero_last_blocks, zero_unpooled
from aot.variants import LONG_RATIO, Variant

IN_FLIGHT = 8  # planes a thread loads before it adds the first


def entry(variant: Variant) -> tuple[Any, Any, list[Any]]:
    """(kernel, host function, sample arguments) of a finishing variant, for the compiler."""
    columns = variant.columns
    lanes = variant.threads // columns

    @cute.kernel
    def finish(
        workspace: cute.Pointer,
        grad_ape: cute.Pointer,
        cu_seqlens: cute.Pointer,
        cu_seqlens_comp: cute.Pointer,
        grad_kv: cute.Pointer,
        grad_score: cute.Pointer,
        plane_elements: Int64,
        grad_kv_stride: Int64,
        grad_score_stride: Int64,
        groups: Int32,
        accumulate: Int32,
        tokens: Int32,
        segments: Int32,
        rows: Int32,
        head_dim: Int32,
        ratio: Int32,
        coff: Int32,
        fill_ctas: Int32,
    ) -> None:
        thread, _, _ = arch.thread_idx()
        block, _, _ = arch.block_idx()
        blocks, _, _ = arch.grid_dim()
        zeros = block - (blocks - fill_ctas)  # the planes come first: they take longer
        if zeros >= 0:
            pack = Pack(cu_seqlens, cu_seqlens_comp, segments, tokens, rows)
            outputs = Pair(Matrix(grad_kv, grad_kv_stride), Matrix(grad_score, grad_score_stride))
            share = variant.threads, zeros, fill_ctas, pack, outputs
            if (coff == 2) & (ratio >= LONG_RATIO):
                zero_last_blocks(*share, head_dim, ratio)
            zero_unpooled(*share, head_dim * coff, ratio)
        else:
            column, lane = thread % columns, thread // columns
            element = Int64(block) * columns + column
            total = Float32(0.0)
            if element < plane_elements:
                source = workspace + (lane * plane_elements + element)
                step = lanes * plane_elements
                plane = lane
                while plane + (IN_FLIGHT - 1) * lanes < groups:
                    loaded = [arch.load(source + i * step, Float32) for i in range(IN_FLIGHT)]
                    total = total + ar.sum_in_pairs(loaded)
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
                    total = ar.sum_in_pairs(
                        [
                            arch.load(partial + (i * columns + column), Float32, ss="cta")
                            for i in range(lanes)
                        ]
                    )
            if (lane == 0) & (element < plane_elements):
                if accumulate != 0:
                    total = total + arch.load(grad_ape + element, Float32)
                arch.store(grad_ape + element, total)

    return launchable(finish, variant)
