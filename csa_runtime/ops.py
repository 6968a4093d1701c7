# SPDX-License-Identifier: Apache-2.0
"""The two operations on arrays: results, workspace, and one call of the launcher."""

from __future__ import annotations

import math
from typing import Any

from csa_runtime import _native, checks, prefixes
from csa_runtime._native import torch_backward, torch_forward
from csa_runtime.arrays import ITEMSIZE, Array, describe
from csa_runtime.calls import (
    Call,
    begin,
    bind,
    check_can_allocate,
    check_contents,
    check_streams,
    fields,
    host_array,
    on_cpu,
    optional,
    row_stride,
    rows_of,
)

Gradients = tuple[Any, Any, Any]


def compressor_forward(
    kv: Any,
    score: Any,
    ape: Any,
    cu_seqlens: Any,
    cu_seqlens_comp: Any,
    *,
    ratio: int,
    coff: int,
    total_comp: int | None = None,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Pool windows of tokens into rows.

    Arrays are torch tensors, NumPy arrays, or have DLPack or `__cuda_array_interface__`. No
    gradient is recorded: `csa_runtime.torch.compressor` is the differentiable form.

    Rows from `cu_seqlens_comp[-1]` on are padding: each holds the pack's first `ratio` tokens
    pooled as a segment's first block. Leave them out of a loss; their gradient is dropped. What
    the prefixes hold is not checked: malformed ones silently give unspecified values, unless
    `CSA_RUNTIME_CHECK=1` is set or `check_prefixes` is called.

    Args:
        kv: `(T, W)` with `W = coff * head_dim`, bf16 (on the CPU also fp16, fp32, fp64).
        score: as kv; rows of both may be strided.
        ape: `(ratio, W)` fp32 contiguous (fp64 beside an fp64 kv), or None for zeros.
        cu_seqlens: int32 `(B + 1,)`, token prefixes.
        cu_seqlens_comp: int32 `(B + 1,)`, row prefixes.
        ratio: tokens of a block.
        coff: 1, or 2 for windows that include the previous block.
        total_comp: rows of `out`. None: those of `out=`, else `cu_seqlens_comp[-1]` read back.
        out: `(total_comp, head_dim)` as kv, to write into.
        stream: a handle or stream object; None is the current stream of kv's library. Order
            between an explicit stream and the arrays' own is the caller's.

    Returns:
        `out`.

    Raises:
        ValueError: malformed arguments, before any launch.
        RuntimeError: `UnsupportedArch`, `DriverError` or `BundleError`.
    """
    if not prefixes.checking():
        made = torch_forward(
            kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, coff, total_comp, out, stream
        )
        if made is not None:
            return made
    call = begin(kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, coff, stream)
    result = optional("out", out, call.exported)
    rows = rows_of(call, kv, cu_seqlens_comp, total_comp, result)
    checks.enough_tokens(call.kv.shape[0], rows, call.ratio)
    shape = (rows, call.head_dim)
    if result is not None:
        checks.matrix(result, shape, call.kv.dtype, "total_comp and kv")
        checks.same_device(call.kv, (result,))
        check_streams((result,), stream, call.stream)
        checks.outputs((result,), call.read)
    check_contents(call, kv, (cu_seqlens, cu_seqlens_comp), rows)
    if call.kv.device == "cpu":
        check_can_allocate(call, out)
        raw = (kv, score, ape, cu_seqlens, cu_seqlens_comp)
        made = on_cpu().reference_forward(
            *map(host_array, raw, call.read),
            ratio=call.ratio,
            coff=call.coff,
            total_comp=rows,
            out=host_array(out, result),
        )
        return made if out is None else out
    if result is None:
        out = call.owner.empty(kv, shape, None, call.stream)
        result = describe("out", out, call.exported)
    bind(call)
    _native.launch_forward(
        **fields(call, rows, (result,)), out=result.pointer, out_stride=row_stride(result)
    )
    return out


def compressor_backward(
    kv: Any,
    score: Any,
    ape: Any,
    cu_seqlens: Any,
    cu_seqlens_comp: Any,
    grad_out: Any,
    *,
    ratio: int,
    coff: int,
    grads: Gradients | None = None,
    workspace: Any = None,
    accumulate: bool = False,
    stream: Any = None,
) -> Gradients:
    """Gradients of `compressor_forward`, every position written, unread ones with 0.

    The gradient of padding rows (see the forward) is dropped, NaN included.

    Args:
        kv: as in the forward, and so score, ape, cu_seqlens, cu_seqlens_comp, ratio, coff, stream.
        score: as kv.
        ape: `(ratio, W)` fp32, or None.
        cu_seqlens: token prefixes.
        cu_seqlens_comp: row prefixes.
        grad_out: `(total_comp, head_dim)` as kv; a row stride of 0 broadcasts one row.
        ratio: tokens of a block.
        coff: 1 or 2.
        grads: `(grad_kv, grad_score, grad_ape)` to write into; grad_ape None: not wanted.
        workspace: contiguous, 16-byte aligned; `backward_workspace_bytes(...)` always suffices.
            None takes one from kv's library. The CPU needs none.
        accumulate: add to the given `grad_ape` instead of overwriting it.
        stream: as in the forward.

    Returns:
        `(grad_kv, grad_score, grad_ape or None)`.

    Raises:
        ValueError: malformed arguments, before any launch.
        RuntimeError: `UnsupportedArch`, `DriverError` or `BundleError`.
    """
    if not prefixes.checking():
        made = torch_backward(
            kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, ratio, coff,
            True, grads, workspace, accumulate, stream,
        )  # fmt: skip
        if made is not None:
            return made
    call = begin(kv, score, ape, cu_seqlens, cu_seqlens_comp, ratio, coff, stream)
    incoming = describe("grad_out", grad_out, call.exported)
    rows = incoming.shape[0] if incoming.shape else 0
    checks.matrix(incoming, (rows, call.head_dim), call.kv.dtype, "kv")
    checks.same_device(call.kv, (incoming,))
    checks.integer("the number of rows", rows, 0)
    checks.enough_tokens(call.kv.shape[0], rows, call.ratio)
    if grads is None and accumulate:
        raise ValueError("accumulate=True adds to a grad_ape; pass grads= with it")
    given = None if grads is None else _given_gradients(call, grads, accumulate)
    sums = call.ape is not None and (given is None or given[2] is not None)
    scratch = optional("workspace", workspace, call.exported)
    if scratch is not None:
        _check_workspace(call, scratch, rows, sums)
    written = (*(given or ()), scratch)
    check_streams((incoming, *written), stream, call.stream)
    checks.outputs(written, (*call.read, incoming))
    check_contents(call, kv, (cu_seqlens, cu_seqlens_comp), rows)
    if call.kv.device == "cpu":
        check_can_allocate(call, grads)
        raw = (kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out)
        computed: Gradients = on_cpu().reference_backward(
            *map(host_array, raw, (*call.read, incoming)),
            ratio=call.ratio,
            coff=call.coff,
            grads=None if grads is None else tuple(map(host_array, grads, written)),
            accumulate=accumulate,
        )
        return computed if grads is None else (grads[0], grads[1], grads[2])
    if sums and scratch is None:
        scratch = _take_workspace(call, kv, rows)
    if grads is None or given is None:
        owner, shape, on = call.owner, call.kv.shape, call.stream
        bias = owner.empty(kv, call.ape.shape, "float32", on) if call.ape else None
        grads = owner.empty(kv, shape, None, on), owner.empty(kv, shape, None, on), bias
        given = _describe_gradients(call, grads)
    grad_kv, grad_score, grad_ape = given
    bind(call)
    _native.launch_backward(
        **fields(call, rows, (incoming, *given, scratch)),
        flags=1 if accumulate and sums else 0,
        grad_out=incoming.pointer,
        grad_out_stride=row_stride(incoming),
        grad_kv=grad_kv.pointer,
        grad_kv_stride=row_stride(grad_kv),
        grad_score=grad_score.pointer,
        grad_score_stride=row_stride(grad_score),
        grad_ape=None if grad_ape is None else grad_ape.pointer,
        **_workspace_fields(scratch if sums else None),
    )
    return grads[0], grads[1], grads[2]


def _given_gradients(
    call: Call, grads: Gradients, accumulate: bool
) -> tuple[Array, Array, Array | None]:
    """Describe and check `grads`."""
    if not isinstance(grads, (tuple, list)) or len(grads) != 3:
        raise ValueError("grads is no triple; (grad_kv, grad_score, grad_ape or None) is allowed")
    if grads[0] is None or grads[1] is None:
        raise ValueError(
            "grads lacks grad_kv or grad_score; None is allowed for grad_ape alone: pass both"
        )
    if accumulate and call.ape is not None and grads[2] is None:
        raise ValueError(
            "accumulate=True with grads whose grad_ape is None; an array to add to is allowed: "
            "pass one, or accumulate=False"
        )
    grad_kv, grad_score, grad_ape = given = _describe_gradients(call, grads)
    checks.matrix(grad_kv, call.kv.shape, call.kv.dtype, "kv")
    checks.matrix(grad_score, call.kv.shape, call.kv.dtype, "kv")
    if grad_ape is not None:
        if call.ape is None:
            raise ValueError("grads has a grad_ape but ape is None; pass the ape or None for both")
        checks.bias(grad_ape, call.kv, call.ratio)
    checks.same_device(call.kv, given)
    return given


def _describe_gradients(call: Call, grads: Gradients) -> tuple[Array, Array, Array | None]:
    return (
        describe("grad_kv", grads[0], call.exported),
        describe("grad_score", grads[1], call.exported),
        optional("grad_ape", grads[2], call.exported),
    )


def _check_workspace(call: Call, scratch: Array, rows: int, sums: bool) -> None:
    """Check a given workspace; its size only on the CPU, which stands in for any device."""
    if not checks.contiguous(scratch) or scratch.dtype not in ITEMSIZE or scratch.pointer % 16:
        raise ValueError(
            f"workspace is {scratch.dtype} {scratch.shape} with strides {scratch.strides} at "
            f"{scratch.pointer:#x}; contiguous memory aligned to 16 bytes is allowed: allocate "
            "uint8 (backward_workspace_bytes(...),)"
        )
    checks.same_device(call.kv, (scratch,))
    if call.kv.device != "cpu" or not sums:
        return
    try:
        needed = _workspace_bytes(call, rows)
    except ValueError:  # nothing but the reference serves this window or dtype
        return
    given = _workspace_fields(scratch)["workspace_bytes"]
    if given < needed:
        raise ValueError(
            f"workspace is {scratch.pointer:#x} of {given} bytes; this call needs up to {needed} "
            "on a GPU: allocate what backward_workspace_bytes() says, which always suffices"
        )


def _workspace_bytes(call: Call, rows: int) -> int:
    code = checks.DTYPE_CODES.get(call.kv.dtype, 0)
    return _native.backward_workspace_bytes(
        call.kv.shape[0], rows, call.head_dim, call.ratio, call.coff, code
    )


def _take_workspace(call: Call, kv: Any, rows: int) -> Array | None:
    """Memory for the partial planes from kv's library, for as long as the launch needs it."""
    size = _workspace_bytes(call, rows)
    if size == 0:
        return None
    capturing = call.owner.capturing(kv, call.stream)
    memory = None
    if call.owner.keeps_graph_memory or not capturing:
        memory = call.owner.empty(kv, (size,), "uint8", call.stream)
    if memory is None or (capturing and not call.owner.graph_owns(memory)):
        raise ValueError(
            "workspace=None under a capture takes memory that may be reused while the graph can "
            "be replayed; pass workspace= of backward_workspace_bytes(...), kept with the graph, "
            "or capture with torch.cuda.graph"
        )
    return describe("workspace", memory, call.exported)


def _workspace_fields(scratch: Array | None) -> dict[str, Any]:
    if scratch is None or 0 in scratch.shape:
        return {"workspace": None, "workspace_bytes": 0}
    size = math.prod(scratch.shape) * ITEMSIZE[scratch.dtype]
    return {"workspace": scratch.pointer, "workspace_bytes": size}
