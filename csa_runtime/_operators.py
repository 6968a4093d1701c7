# SPDX-License-Identifier: Apache-2.0
"""The operators `torch.ops.csa_runtime.*`: schemas, kernels for CUDA and the CPU, shapes.

CUDA's kernels are the launcher, the CPU's the reference. `csa_runtime.torch` adds the derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from csa_runtime import ops, prefixes
from csa_runtime._native import torch_backward

_INPUTS = "Tensor kv, Tensor score, Tensor? ape, Tensor cu_seqlens, Tensor cu_seqlens_comp, "
# torch annotates little of this module.
registry: Any = torch.library


class _Operators(torch.library.Library):
    """The operators, whose derivatives refuse tangents."""

    def __init__(self) -> None:
        """In their own namespace."""
        begin: Any = super().__init__
        begin("csa_runtime", "DEF")

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        """Register a kernel; autograd's are the last to see the tangents of torch.func."""

        def refusing(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
            refuse_tangents(arguments)
            return fn(keyset, *arguments, **keywords)

        register: Any = super().impl
        register(op_name, refusing if dispatch_key == "Autograd" else fn, dispatch_key, **options)


operators: Any = _Operators()
operators.define(
    f"compressor_forward({_INPUTS}int ratio, int coff, SymInt total_comp) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
# An operator cannot return "no tensor": without need_ape the third result has no elements.
operators.define(
    f"compressor_backward({_INPUTS}Tensor grad_out, int ratio, int coff, bool need_ape)"
    " -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)

_forward_ad: Any = torch.autograd.forward_ad
Triple = tuple[Tensor, Tensor, Tensor]


def forward(
    kv: Tensor,
    score: Tensor,
    ape: Tensor | None,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    ratio: int,
    coff: int,
    total_comp: int,
) -> Tensor:
    """`compressor_forward`, by its schema."""
    tensors = (kv, score, ape, cu_seqlens, cu_seqlens_comp)
    refuse_tangents(tensors)
    result: Tensor = ops.compressor_forward(*tensors, ratio=ratio, coff=coff, total_comp=total_comp)
    return result


def backward(
    kv: Tensor,
    score: Tensor,
    ape: Tensor | None,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    grad_out: Tensor,
    ratio: int,
    coff: int,
    need_ape: bool,
) -> Triple:
    """`compressor_backward`, by its schema."""
    tensors = (kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out)
    refuse_tangents(tensors)
    readable = _readable(grad_out)
    if not prefixes.checking():
        made = torch_backward(
            *tensors[:5], readable, ratio, coff, need_ape, None, None, False, None
        )
        if made is not None:
            return made[0], made[1], _nothing(kv) if made[2] is None else made[2]
    grads = None if need_ape else (kv.new_empty(kv.shape), kv.new_empty(kv.shape), None)
    grad_kv, grad_score, grad_ape = ops.compressor_backward(
        *tensors[:5], readable, ratio=ratio, coff=coff, grads=grads
    )
    return grad_kv, grad_score, _nothing(kv) if grad_ape is None else grad_ape


def refuse_tangents(arguments: Sequence[Any]) -> None:
    """Check that no forward-mode derivative is asked for: there is none, and zeros would be wrong.

    The generic derivative of an operator leaves tangents out without a word.
    """
    if _forward_ad._current_level < 0:
        return
    for one in arguments:
        if isinstance(one, Tensor) and _forward_ad.unpack_dual(one).tangent is not None:
            raise RuntimeError(
                "the compressor has no forward-mode derivative: use reverse mode (backward, "
                "torch.func.vjp, jacrev), or detach its inputs"
            )


def _readable(grad_out: Tensor) -> Tensor:
    """The incoming gradient with contiguous rows; autograd chooses its layout, not the caller."""
    if grad_out.dim() != 2:  # for the checks to refuse
        return grad_out
    if grad_out.shape[1] == 1 or grad_out.stride(1) == 1:
        return grad_out
    if grad_out.stride() == (0, 0) and grad_out.shape[0]:
        # out.sum().backward(): one row, broadcast, in place of all of them.
        return grad_out[:1].contiguous().expand(grad_out.shape)
    return grad_out.contiguous()


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty((0,), dtype=torch.float32)


for _device in ("CPU", "CUDA"):
    operators.impl("compressor_forward", forward, _device)
    operators.impl("compressor_backward", backward, _device)


def _forward_shape(kv: Tensor, *others: Any) -> Tensor:
    """Of `forward`'s result, for the same arguments."""
    coff, total_comp = others[-2:]
    return kv.new_empty((total_comp, kv.shape[1] // coff))


def _backward_shapes(kv: Tensor, score: Tensor, ape: Tensor | None, *others: Any) -> Triple:
    """Of `backward`'s results, for the same arguments."""
    need_ape = others[-1]
    grad_ape = ape.new_empty(ape.shape) if need_ape and ape is not None else _nothing(kv)
    return kv.new_empty(kv.shape), kv.new_empty(kv.shape), grad_ape


registry.register_fake("csa_runtime::compressor_forward", _forward_shape, lib=operators)
registry.register_fake("csa_runtime::compressor_backward", _backward_shapes, lib=operators)
