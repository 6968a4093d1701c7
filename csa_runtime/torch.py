# SPDX-License-Identifier: Apache-2.0
"""The compressor as a differentiable torch operation, eager and under `torch.compile`.

Registers `torch.ops.csa_runtime.compressor_forward` and `compressor_backward`, with kernels for
CUDA (the launcher) and the CPU (the reference), shapes for tracing and a derivative. torch >= 2.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from csa_runtime import checks, ops

__all__ = ["compressor"]

_INPUTS = "Tensor kv, Tensor score, Tensor? ape, Tensor cu_seqlens, Tensor cu_seqlens_comp, "
# torch annotates little of this module.
_registry: Any = torch.library
_library = _registry.Library("csa_runtime", "DEF")
_library.define(
    f"compressor_forward({_INPUTS}int ratio, int coff, SymInt total_comp) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
# An operator cannot return "no tensor": without need_ape the third result has no elements.
_library.define(
    f"compressor_backward({_INPUTS}Tensor grad_out, int ratio, int coff, bool need_ape)"
    " -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)

_Triple = tuple[Tensor, Tensor, Tensor]


def _forward(*arguments: Any) -> Tensor:
    """`compressor_forward`, by its schema."""
    ratio, coff, total_comp = arguments[5:]
    result: Tensor = ops.compressor_forward(
        *arguments[:5], ratio=ratio, coff=coff, total_comp=total_comp
    )
    return result


def _backward(*arguments: Any) -> _Triple:
    """`compressor_backward`, by its schema."""
    kv: Tensor = arguments[0]
    grad_out, ratio, coff, need_ape = arguments[5:]
    grads = None
    if not need_ape:
        grads = (kv.new_empty(kv.shape), kv.new_empty(kv.shape), None)
    arrays = (*arguments[:5], _readable(grad_out))
    grad_kv, grad_score, grad_ape = ops.compressor_backward(
        *arrays, ratio=ratio, coff=coff, grads=grads
    )
    return grad_kv, grad_score, _nothing(kv) if grad_ape is None else grad_ape


def _readable(grad_out: Tensor) -> Tensor:
    """The incoming gradient with contiguous rows; autograd chooses its layout, not the caller."""
    if grad_out.shape[1] == 1 or grad_out.stride(1) == 1:
        return grad_out
    if grad_out.stride() == (0, 0) and grad_out.shape[0]:
        # out.sum().backward(): one row, broadcast, in place of all of them.
        return grad_out[:1].contiguous().expand(grad_out.shape)
    return grad_out.contiguous()


def _nothing(like: Tensor) -> Tensor:
    return like.new_empty((0,), dtype=torch.float32)


for _device in ("CPU", "CUDA"):
    _library.impl("compressor_forward", _forward, _device)
    _library.impl("compressor_backward", _backward, _device)


def _forward_shape(kv: Tensor, *others: Any) -> Tensor:
    """Of `_forward`'s result, for the same arguments."""
    coff, total_comp = others[-2:]
    return kv.new_empty((total_comp, kv.shape[1] // coff))


def _backward_shapes(kv: Tensor, score: Tensor, ape: Tensor | None, *others: Any) -> _Triple:
    """Of `_backward`'s results, for the same arguments."""
    need_ape = others[-1]
    grad_ape = ape.new_empty(ape.shape) if need_ape and ape is not None else _nothing(kv)
    return kv.new_empty(kv.shape), kv.new_empty(kv.shape), grad_ape


_registry.register_fake("csa_runtime::compressor_forward", _forward_shape, lib=_library)
_registry.register_fake("csa_runtime::compressor_backward", _backward_shapes, lib=_library)

_jit: Any = torch.jit
_DENSE = (Tensor, torch.nn.Parameter)
_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)
_transforms: Any = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)


def _plain(tensors: Sequence[Tensor | None]) -> bool:
    """Whether nothing but the kernels would see this call: then the dispatcher can be spared.

    It costs as much as all the checks. Tracers, modes, transforms and tensor subclasses need it.
    """
    if torch.compiler.is_compiling() or _modes is None or _transforms is None:
        return False
    if _modes() or _transforms() is not None or _jit.is_tracing():
        return False
    if any(tensor is not None and type(tensor) not in _DENSE for tensor in tensors):
        return False
    return tensors[0] is not None and not tensors[0].is_meta


_forward_op = torch.ops.csa_runtime.compressor_forward.default
_backward_op = torch.ops.csa_runtime.compressor_backward.default


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any = None) -> None:
    """Keep what the derivative reads."""
    ctx.save_for_backward(*inputs[:5])
    ctx.ratio, ctx.coff = inputs[5], inputs[6]


def _derivative(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    need_kv, need_score, need_ape = ctx.needs_input_grad[:3]
    tensors = (*ctx.saved_tensors, grad_out)
    # With create_graph=True the operator records that it has no second derivative.
    call: Any = _backward if not torch.is_grad_enabled() and _plain(tensors) else _backward_op
    grad_kv, grad_score, grad_ape = call(*tensors, ctx.ratio, ctx.coff, need_ape)
    return (
        grad_kv if need_kv else None,
        grad_score if need_score else None,
        grad_ape if need_ape else None,
        *(None,) * 5,
    )


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "the compressor has no second derivative: call backward without create_graph=True, or "
        "detach its gradients before differentiating them"
    )


_registry.register_autograd(
    "csa_runtime::compressor_forward", _derivative, setup_context=_save, lib=_library
)
_registry.register_autograd("csa_runtime::compressor_backward", _no_second_derivative, lib=_library)


class _Compressor(torch.autograd.Function):
    """The operator's own derivative, without the generic wrapper's cost in eager mode."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _save(ctx, inputs)
        result: Tensor = (_forward if _plain(inputs[:5]) else _forward_op)(*inputs)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _derivative(ctx, grads[0])


_apply: Any = _Compressor.apply


def compressor(
    kv: Tensor,
    score: Tensor,
    ape: Tensor | None,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    *,
    ratio: int,
    coff: int,
    total_comp: int | torch.SymInt | None = None,
) -> Tensor:
    """Pool windows of tokens into rows; differentiable in kv, score and ape.

    Runs on the current stream of the tensors' device; on the CPU it is the reference.

    Rows from `cu_seqlens_comp[-1]` on are padding: each holds the pack's first `ratio` tokens
    pooled as a segment's first block. Leave them out of a loss; their gradient is dropped. What
    the prefixes hold is not checked: malformed ones silently give unspecified values, unless
    `CSA_RUNTIME_CHECK=1` is set or `check_prefixes` is called.

    Args:
        kv: `(T, W)` with `W = coff * head_dim`, last dimension contiguous; bf16, on the CPU also
            fp16, fp32 and fp64.
        score: as kv.
        ape: `(ratio, W)` fp32 contiguous (fp64 beside an fp64 kv), or None for zeros.
        cu_seqlens: int32 `(B + 1,)`, token prefixes.
        cu_seqlens_comp: int32 `(B + 1,)`, row prefixes.
        ratio: tokens of a block.
        coff: 1, or 2 for windows that include the previous block.
        total_comp: rows of the result; None reads `cu_seqlens_comp[-1]` back, which waits for the
            device, is refused under capture and breaks the graph under `torch.compile`.

    Returns:
        `(total_comp, head_dim)` of kv's dtype.

    Raises:
        ValueError: malformed arguments, before any launch.
        RuntimeError: `UnsupportedArch`, `DriverError` or `BundleError`.
    """
    checks.window(ratio, coff)
    if not (
        isinstance(kv, Tensor)
        and isinstance(score, Tensor)
        and (ape is None or isinstance(ape, Tensor))
        and isinstance(cu_seqlens, Tensor)
        and isinstance(cu_seqlens_comp, Tensor)
    ):
        raise _no_tensor(kv=kv, score=score, cu_seqlens=cu_seqlens, cu_seqlens_comp=cu_seqlens_comp)
    if total_comp is None:
        total_comp = _rows(cu_seqlens_comp)
    elif not torch.compiler.is_compiling() and not isinstance(total_comp, torch.SymInt):
        checks.integer("total_comp", total_comp, 0)  # would fix a traced size
    inputs = (kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, coff, total_comp)
    wanted = torch.is_grad_enabled() and (
        kv.requires_grad or score.requires_grad or (ape is not None and ape.requires_grad)
    )
    call: Any = _apply if wanted else _forward if _plain(inputs[:5]) else _forward_op
    result: Tensor = call(*inputs)
    return result


def _no_tensor(**given: Any) -> ValueError:
    """The first that is no tensor; ape if all of these are."""
    name = next((name for name, array in given.items() if not isinstance(array, Tensor)), "ape")
    kinds = ", ".join(f"{name} {type(array).__qualname__}" for name, array in given.items())
    return ValueError(
        f"{name} is no torch tensor ({kinds}); tensors are allowed: convert it, or call "
        "csa_runtime.compressor_forward, which takes arrays of any library"
    )


def _rows(cu_seqlens_comp: Tensor) -> int:
    if cu_seqlens_comp.dim() != 1 or cu_seqlens_comp.shape[0] == 0:
        raise ValueError(
            f"cu_seqlens_comp has shape {tuple(cu_seqlens_comp.shape)}; (segments + 1,) is allowed"
        )
    if (
        cu_seqlens_comp.is_cuda
        and not torch.compiler.is_compiling()
        and torch.cuda.is_current_stream_capturing()
    ):
        raise ValueError(
            "total_comp=None reads cu_seqlens_comp back, which a stream under capture cannot do; "
            "pass total_comp= (csa_runtime.max_rows gives a static capacity)"
        )
    return int(cu_seqlens_comp[-1].item())
