# SPDX-License-Identifier: Apache-2.0
"""What the compiler needs beside a kernel: a launch, and one sample of every argument's type.

Only the device code is kept. The launch's block size becomes the kernel's required block size;
its grid means nothing.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.runtime import make_ptr
from cutlass.cute.typing import AddressSpace

from aot.variants import OPERATION_PARAMETERS, PARAMETERS, Variant

_POINTEES = {
    **dict.fromkeys(("kv", "score", "out", "grad_out", "grad_kv", "grad_score"), BFloat16),
    **dict.fromkeys(("ape", "grad_ape", "workspace"), Float32),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_comp"), Int32),
}


def launchable(kernel: Any, variant: Variant) -> tuple[Any, Any, list[Any]]:
    """(kernel, host function, sample arguments) to hand to `cute.compile`."""
    # A carveout is named because the compiler asks a GPU for one otherwise; it stays on the host.
    bounds = {"min_blocks_per_mp": variant.min_blocks, "preferred_smem_carveout": 0}

    @cute.jit
    def host(*arguments: Any) -> None:
        kernel(*arguments).launch(
            grid=(1, 1, 1), block=(variant.threads, 1, 1), smem=variant.dynamic_shared, **bounds
        )

    return kernel, host, [_sample(name) for name in OPERATION_PARAMETERS[variant.operation]]


def _sample(name: str) -> Any:
    pointee = _POINTEES.get(name)
    if pointee is not None:
        return make_ptr(pointee, 256, AddressSpace.gmem, assumed_align=pointee.width // 8)
    _, size = PARAMETERS[name]
    return Int64(1) if size == 8 else Int32(1)
