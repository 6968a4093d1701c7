# SPDX-License-Identifier: Apache-2.0
"""The compressor as a differentiable torch operation, eager and under `torch.compile`.

Registers `torch.ops.csa_runtime.compressor_forward` and `compressor_backward` with a derivative.
Tested with torch 2.11 and 2.13. Reverse mode only: forward mode and second derivatives raise.
torch.func's grad, vjp, jacrev and vmap work on `compressor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from csa_runtime import checks, ops
from csa_runtime._native import torch_usual
from csa_runtime._operators import (
    Triple,
    backward,
    forward,
    operators,
    refuse_tangents,
    registry,
)

__all__ = ["compressor"]

_DENSE = (Tensor, torch.nn.Parameter)
_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)
_is_tracing: Any = torch._C._is_tracing  # what torch.jit.is_tracing asks outside TorchScript
_functorch: Any = getattr(torch._C, "_functorch", None)
_transforms: Any = getattr(_functorch, "peek_interpreter_stack", None)
# Batches of is_grads_batched and vectorized jacobians: they look like any tensor, without memory.
_is_batched: Any = getattr(_functorch, "is_legacy_batchedtensor", None)
# Whether this torch can tell that a call is plain.
_can_tell = None not in (_modes, _transforms, _is_batched)


def _watched() -> bool:
    """Whether a tracer, mode or transform may see this call; it is not asked under dynamo."""
    return bool(not _can_tell or _modes() or _transforms() is not None or _is_tracing())


def _plain(tensors: Sequence[Tensor | None]) -> bool:
    """Whether nothing but the kernels would see this call: then the dispatcher can be spared.

    It costs as much as all the checks. Tracers, modes, transforms and tensor subclasses need it.
    """
    if torch.compiler.is_compiling() or _watched():
        return False
    if torch_usual(*tensors):
        return True
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _DENSE or _is_batched(tensor)):
            return False
    return tensors[0] is not None and not tensors[0].is_meta


def _transformed() -> bool:
    """Whether one of torch.func's transforms sees this call, outside `torch.compile`."""
    if _transforms is None or torch.compiler.is_compiling():
        return False
    return _transforms() is not None


_forward_op = torch.ops.csa_runtime.compressor_forward.default
_backward_op = torch.ops.csa_runtime.compressor_backward.default


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any = None) -> None:
    """Keep what the derivative reads."""
    ctx.save_for_backward(*inputs[:5])
    ctx.ratio, ctx.coff = inputs[5], inputs[6]


def _derivative(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    need_kv, need_score, need_ape = ctx.needs_input_grad[:3]
    tensors = (*ctx.saved_tensors, grad_out)
    call: Any = _backward_op
    if _transformed():
        call = _Gradient.apply  # torch.func differentiates with create_graph=True
    elif not torch.is_grad_enabled() and _plain(tensors):
        call = backward  # with create_graph=True the operator records that it has no derivative
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


registry.register_autograd(
    "csa_runtime::compressor_forward", _derivative, setup_context=_save, lib=operators
)
registry.register_autograd("csa_runtime::compressor_backward", _no_second_derivative, lib=operators)


class _Gradient(torch.autograd.Function):
    """The backward operator for torch.func's transforms, without a derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Triple:
        result: Triple = _backward_op(*inputs)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _no_second_derivative(ctx, *grads)


class _Compressor(torch.autograd.Function):
    """The operator's own derivative, without the generic wrapper's cost in eager mode."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _save(ctx, inputs)
        result: Tensor = (forward if _plain(inputs[:5]) else _forward_op)(*inputs)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _derivative(ctx, grads[0])


class _Direct(_Compressor):
    """For tensors that the native module reads, in a call that nothing else sees."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _save(ctx, inputs)
        kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, coff, total_comp = inputs
        result: Tensor = ops.compressor_forward(
            kv,
            score,
            ape,
            cu_seqlens,
            cu_seqlens_comp,
            ratio=ratio,
            coff=coff,
            total_comp=total_comp,
        )
        return result


class _Transformable(torch.autograd.Function):
    """The same for torch.func's transforms, in the form they ask for, which costs more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        result: Tensor = _forward_op(*inputs)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _save(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _derivative(ctx, grads[0])


_apply: Any = _Compressor.apply
# torch's own apply looks for setup_context and for transforms' wrappers first: neither is here.
_apply_direct: Any = getattr(super(torch.autograd.Function, _Direct), "apply", _Direct.apply)
_apply_transformed: Any = _Transformable.apply


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
    tensors = (kv, score, ape, cu_seqlens, cu_seqlens_comp)
    compiling = torch.compiler.is_compiling()
    usual = not compiling and torch_usual(kv, score, ape, cu_seqlens, cu_seqlens_comp)
    direct = usual and not _watched()
    if not direct and not (
        isinstance(kv, Tensor)
        and isinstance(score, Tensor)
        and (ape is None or isinstance(ape, Tensor))
        and isinstance(cu_seqlens, Tensor)
        and isinstance(cu_seqlens_comp, Tensor)
    ):
        raise _no_tensor(kv=kv, score=score, cu_seqlens=cu_seqlens, cu_seqlens_comp=cu_seqlens_comp)
    if not compiling:
        refuse_tangents(tensors)
    wanted = torch.is_grad_enabled() and (
        kv.requires_grad or score.requires_grad or (ape is not None and ape.requires_grad)
    )
    if total_comp is None:
        total_comp = _rows(cu_seqlens_comp)
    result: Tensor
    if not wanted and (direct or _plain(tensors)):
        rows: Any = total_comp
        result = ops.compressor_forward(
            kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio=ratio, coff=coff, total_comp=rows
        )
        return result
    if direct:
        result = _apply_direct(kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, coff, total_comp)
        return result
    call: Any
    checks.window(ratio, coff)
    if not compiling and not isinstance(total_comp, torch.SymInt):
        checks.integer("total_comp", total_comp, 0)  # would fix a traced size
    if not wanted:
        call = _forward_op
    else:
        call = _apply_transformed if _transformed() else _apply
    result = call(*tensors, ratio, coff, total_comp)
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
