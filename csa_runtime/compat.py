# SPDX-License-Identifier: Apache-2.0
"""The names of cuDNN frontend's compressor over this library's calls: a change of import is enough.

    from csa_runtime import CSA                     # was: from cudnn import CSA

`CSA` is a namespace of the four names, which `csa_runtime` has too. Both windows, short and long,
go by `ratio`. What differs on purpose: docs/seed_coverage.md. `install_megatron()` puts the library
in place of a training framework's dispatch of the operation: docs/megatron.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from csa_runtime import checks, ops
from csa_runtime.compat_classes import CSACompressorBackward, CSACompressorForward
from csa_runtime.compat_streams import on_stream
from csa_runtime.megatron import install_megatron, uninstall_megatron

__all__ = [
    "CSA",
    "CSACompressorBackward",
    "CSACompressorForward",
    "Results",
    "csa_compressor_backward_wrapper",
    "csa_compressor_forward_wrapper",
    "install_megatron",
    "uninstall_megatron",
]


class Results(tuple[Any, ...]):
    """Arrays in order that are known by name too: `a, b = results`, `results["grad_kv"]`."""

    _names: tuple[str, ...]

    def __new__(cls, **arrays: Any) -> Results:
        """In the order given."""
        results = super().__new__(cls, arrays.values())
        results._names = tuple(arrays)
        return results

    def __getitem__(self, key: Any) -> Any:
        """By name, or by place as any tuple.

        Raises:
            KeyError: no result has that name.
        """
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self._names:
            raise KeyError(f"{key!r}; the results are {', '.join(self._names)}")
        return super().__getitem__(self._names.index(key))

    def __contains__(self, key: object) -> bool:
        """Whether a result has that name, or is that object."""
        return key in self._names if isinstance(key, str) else any(key is one for one in self)

    def keys(self) -> tuple[str, ...]:
        """The names, in order."""
        return self._names

    def values(self) -> tuple[Any, ...]:
        """The arrays, in order."""
        return tuple(self)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Names with their arrays."""
        return zip(self._names, self, strict=True)

    def __repr__(self) -> str:
        """Names with what their arrays show of themselves."""
        return f"Results({', '.join(f'{name}={array!r}' for name, array in self.items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from names and arrays."""
        return _rebuild, (dict(self.items()),)


def _rebuild(arrays: dict[str, Any]) -> Results:
    return Results(**arrays)


def csa_compressor_forward_wrapper(
    kv: Any,
    score: Any,
    ape: Any,
    cu_seqlens: Any,
    cu_seqlens_comp: Any,
    ratio: int = 4,
    head_dim: int | None = None,
    coff: int = 2,
    total_comp: int | None = None,
    stream: Any = None,
) -> Results:
    """Pool windows of tokens into rows; records no gradient.

    Args:
        kv: `(T, coff * head_dim)` bf16, rows may be strided.
        score: as kv.
        ape: `(ratio, coff * head_dim)` fp32 contiguous; None for zeros.
        cu_seqlens: int32 `(segments + 1,)`, token prefixes.
        cu_seqlens_comp: int32 `(segments + 1,)`, row prefixes.
        ratio: tokens of a block.
        head_dim: columns of `out`; None takes them from kv.
        coff: 1, or 2 for windows that include the previous block.
        total_comp: rows of `out`; None reads `cu_seqlens_comp[-1]` back, which waits for the device
            and is refused under capture. More than that are padding rows.
        stream: a handle, or a stream of torch, cuda.bindings or any library with `__cuda_stream__`;
            None is torch's current one.

    Returns:
        `out`: `(total_comp, head_dim)` as kv.

    Raises:
        ValueError: malformed arguments, before any launch.
        RuntimeError: the device or its driver does not serve the call.
    """
    _check_width(kv, head_dim, ratio, coff)
    inputs = (kv, score, ape, cu_seqlens, cu_seqlens_comp)

    def forward(handle: Any) -> tuple[Any]:
        options = {"ratio": ratio, "coff": coff, "total_comp": total_comp, "stream": handle}
        return (ops.compressor_forward(*inputs, **options),)

    return Results(out=on_stream(forward, inputs, stream)[0])


def csa_compressor_backward_wrapper(
    kv: Any,
    score: Any,
    ape: Any,
    cu_seqlens: Any,
    cu_seqlens_comp: Any,
    grad_out: Any,
    ratio: int = 4,
    head_dim: int | None = None,
    coff: int = 2,
    stream: Any = None,
    deterministic: bool = False,
) -> Results:
    """Gradients of the forward, in new arrays, all positions written; the same bits every time.

    Args:
        kv: as in the forward, and so score, ape, cu_seqlens, cu_seqlens_comp, ratio, head_dim,
            coff, stream.
        score: as kv.
        ape: `(ratio, coff * head_dim)` fp32; None: then `grad_ape` is None.
        cu_seqlens: token prefixes.
        cu_seqlens_comp: row prefixes.
        grad_out: `(total_comp, head_dim)` as kv; what padding rows hold is ignored.
        ratio: tokens of a block.
        head_dim: columns of `grad_out`.
        coff: 1 or 2.
        stream: as in the forward.
        deterministic: taken for compatibility; every backward is.

    Returns:
        `grad_kv`, `grad_score` as kv, `grad_ape` as ape; zeros where no row reads, and everywhere
        without rows.

    Raises:
        ValueError: malformed arguments, before any launch.
        RuntimeError: the device or its driver does not serve the call.
    """
    _check_width(kv, head_dim, ratio, coff)
    inputs = (kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out)

    def backward(handle: Any) -> tuple[Any, Any, Any]:
        return ops.compressor_backward(*inputs, ratio=ratio, coff=coff, stream=handle)

    grads = on_stream(backward, inputs, stream)
    return Results(grad_kv=grads[0], grad_score=grads[1], grad_ape=grads[2])


def _check_width(kv: Any, head_dim: Any, ratio: Any, coff: Any) -> None:
    """Check a head_dim that is given against kv, whose other faults are the operation's to name."""
    if head_dim is None:
        return
    _, coff = checks.window(ratio, coff)
    columns = checks.integer("head_dim", head_dim, 1)
    shape = tuple(getattr(kv, "shape", ()))
    if len(shape) == 2 and shape[1] != coff * columns:
        raise ValueError(
            f"kv has shape {shape}; (tokens, {coff * columns}) is allowed, coff * head_dim = "
            f"{coff} * {columns}: pass the head_dim and coff that made kv, or head_dim=None"
        )


CSA = SimpleNamespace(
    CSACompressorForward=CSACompressorForward,
    CSACompressorBackward=CSACompressorBackward,
    csa_compressor_forward_wrapper=csa_compressor_forward_wrapper,
    csa_compressor_backward_wrapper=csa_compressor_backward_wrapper,
)
