# SPDX-License-Identifier: Apache-2.0
"""The operation on the CPU: Reference R in fp32, and the same formulas in fp64.

Takes NumPy arrays (bfloat16 through ml_dtypes) and CPU torch tensors. bf16, fp16 and fp32 inputs
are computed in fp32, one rounding an operation, sums in window order; fp64 inputs in fp64. So the
oracle of a bf16 problem is the same call on its inputs converted to fp64.

`expf` is the correctly rounded one where CUDA's may be off by a unit in the last place, and
`grad_ape` is summed in fp64 and rounded once, since R leaves its order open. fp64 has no fused
multiply-add here: `t - p * S` rounds twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

try:
    import numpy as np
    import numpy.typing as npt
except ImportError as error:  # pragma: no cover
    raise ImportError("the CPU reference needs NumPy: pip install numpy ml_dtypes") from error

from csa_runtime.host import host, store

# np: for those who need NumPy along with this module, and its explanation where there is none.
__all__ = ["Floats", "fma", "np", "reference_backward", "reference_forward"]

Floats = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

# Window elements held at once: a few arrays of this size are the whole memory of a call.
_CHUNK_ELEMENTS = 1 << 19


class _Shape(NamedTuple):
    """Sizes every step needs."""

    ratio: int
    coff: int
    head_dim: int

    def half(self, half: int) -> tuple[slice, slice]:
        """Columns of the inputs, and places in a window, of one half of the windows."""
        columns = slice(half * self.head_dim, (half + 1) * self.head_dim)
        return columns, slice(half * self.ratio, (half + 1) * self.ratio)


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """`a * b + c` with one rounding, for float32 arrays; for float64, with two.

    A product of two fp32 is exact in fp64. Their sum with `c` is rounded to odd there, which a
    second rounding, to fp32, cannot tell from the exact sum.
    """
    if np.result_type(a, b, c) != np.float32:
        return a * b + c
    with np.errstate(all="ignore"):
        product = a.astype(np.float64) * b.astype(np.float64)
        addend = c.astype(np.float64)
        total = product + addend
        # Knuth's TwoSum: what the addition lost. NaN where anything is not finite.
        part = total - product
        lost = (product - (total - part)) + (addend - part)
        even = (total.view(np.int64) & 1) == 0
        inexact = np.isfinite(lost) & (lost != 0) & even
        nudged = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
        rounded: Floats = np.where(inexact, nudged, total).astype(np.float32)
    return rounded


def _windows(
    cu_seqlens: Ints, cu_seqlens_comp: Ints, first: int, last: int, ratio: int
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Own block's first token of rows `[first, last)`, and whether a previous block exists."""
    row = np.arange(first, last, dtype=np.int64)
    segment = np.searchsorted(cu_seqlens_comp, row, side="right") - 1
    # Malformed prefixes give unspecified values, never a fault.
    segment = np.clip(segment, 0, len(cu_seqlens) - 2)
    inside = row - cu_seqlens_comp[segment]
    return cu_seqlens[segment] + inside * ratio, inside > 0


def _tokens(start: Ints, half: int, shape: _Shape, tokens: int) -> Ints:
    """Tokens `(rows, ratio)` of one half of the windows, within the pack."""
    offset = -shape.ratio if shape.coff == 2 and half == 0 else 0
    token = start[:, None] + np.arange(offset, offset + shape.ratio)
    inside: Ints = np.clip(token, 0, max(tokens - 1, 0))
    return inside


def _gather(
    kv: Floats,
    score: Floats,
    ape: Floats | None,
    start: Ints,
    previous: npt.NDArray[np.bool_],
    shape: _Shape,
    compute: type[np.floating[Any]],
) -> tuple[Floats, Floats]:
    """Biased scores and values, both `(rows, coff * ratio, head_dim)`."""
    scores = np.empty((len(start), shape.coff * shape.ratio, shape.head_dim), dtype=compute)
    values = np.empty_like(scores)
    for half in range(shape.coff):
        columns, window = shape.half(half)
        token = _tokens(start, half, shape, kv.shape[0])
        values[:, window] = kv[:, columns][token]
        scores[:, window] = score[:, columns][token]
        if ape is not None:
            scores[:, window] += ape[:, columns].astype(compute)
    if shape.coff == 2:
        scores[~previous, : shape.ratio] = -np.inf
        values[~previous, : shape.ratio] = 0
    return scores, values


def _softmax(scores: Floats) -> Floats:
    """Weights over axis 1, the denominator summed in order."""
    lowest = np.finfo(scores.dtype).min
    shifted = scores - np.fmax.reduce(scores, axis=1, keepdims=True, initial=lowest)
    exponentials = np.exp(shifted.astype(np.float64)).astype(scores.dtype)
    weights: Floats = exponentials / _ordered_sum(exponentials)[:, None]
    return weights


def _ordered_sum(terms: Floats) -> Floats:
    """Sum over axis 1, first to last, starting from 0."""
    total = np.zeros(terms.shape[:1] + terms.shape[2:], dtype=terms.dtype)
    for k in range(terms.shape[1]):
        total = total + terms[:, k]
    return total


def _real(prefixes: tuple[Ints, Ints], rows: int) -> int:
    """How many of the rows are no padding."""
    return min(max(int(prefixes[1][-1]), 0), rows)


def _chunks(
    prefixes: tuple[Ints, Ints], real: int, shape: _Shape
) -> Iterator[tuple[slice, Ints, npt.NDArray[np.bool_]]]:
    """The real rows in chunks, each with what `_windows` says of it."""
    step = max(1, _CHUNK_ELEMENTS // (shape.coff * shape.ratio * shape.head_dim))
    for first in range(0, real, step):
        last = min(first + step, real)
        yield slice(first, last), *_windows(*prefixes, first, last, shape.ratio)


def _forward(
    kv: Floats,
    score: Floats,
    ape: Floats | None,
    prefixes: tuple[Ints, Ints],
    rows: int,
    shape: _Shape,
) -> Floats:
    """Unrounded output `(rows, head_dim)` in the computing dtype."""
    compute = _compute_dtype(kv)
    out = np.empty((rows, shape.head_dim), dtype=compute)
    real = _real(prefixes, rows)

    def pool(start: Ints, previous: npt.NDArray[np.bool_]) -> Floats:
        scores, values = _gather(kv, score, ape, start, previous, shape, compute)
        return _ordered_sum(_softmax(scores) * values)

    for chunk, start, previous in _chunks(prefixes, real, shape):
        out[chunk] = pool(start, previous)
    if rows > real:
        out[real:] = pool(np.zeros(1, np.int64), np.zeros(1, np.bool_))
    return out


def _backward(
    kv: Floats,
    score: Floats,
    ape: Floats | None,
    prefixes: tuple[Ints, Ints],
    grad_out: Floats,
    shape: _Shape,
) -> tuple[Floats, Floats, npt.NDArray[np.float64]]:
    """Unrounded `grad_kv`, `grad_score`, and `grad_ape` in fp64."""
    compute = _compute_dtype(kv)
    d, ratio = shape.head_dim, shape.ratio
    grad_kv = np.zeros((kv.shape[0], shape.coff * d), dtype=compute)
    grad_score = np.zeros_like(grad_kv)
    grad_ape = np.zeros((ratio, shape.coff * d), dtype=np.float64)
    real = _real(prefixes, grad_out.shape[0])

    for chunk, start, previous in _chunks(prefixes, real, shape):
        scores, values = _gather(kv, score, ape, start, previous, shape, compute)
        weights = _softmax(scores)
        gradient = grad_out[chunk].astype(compute)[:, None]
        terms = (gradient * values) * weights
        total = np.broadcast_to(_ordered_sum(terms)[:, None], weights.shape)
        score_part, kv_part = fma(-weights, total, terms), gradient * weights
        for half in range(shape.coff):
            columns, window = shape.half(half)
            exists = previous if shape.coff == 2 and half == 0 else np.ones_like(previous)
            token = _tokens(start[exists], half, shape, kv.shape[0])
            grad_kv[:, columns][token] = kv_part[exists, window]
            part = score_part[exists, window]
            grad_score[:, columns][token] = part
            grad_ape[:, columns] += part.sum(axis=0, dtype=np.float64)
    return grad_kv, grad_score, grad_ape


def _compute_dtype(kv: Floats) -> type[np.floating[Any]]:
    return np.float64 if kv.dtype == np.float64 else np.float32


def _prepared(
    kv: Any, ape: Any, cu_seqlens: Any, cu_seqlens_comp: Any, ratio: int, coff: int
) -> tuple[tuple[Ints, Ints], Floats | None, _Shape]:
    prefixes = (
        np.asarray(host(cu_seqlens), dtype=np.int64),
        np.asarray(host(cu_seqlens_comp), dtype=np.int64),
    )
    return prefixes, host(ape), _Shape(ratio, coff, kv.shape[1] // coff)


def reference_forward(
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
) -> Any:
    """`out (total_comp, head_dim)`; arguments as `csa_runtime.compressor_forward`, unchecked."""
    prefixes, bias, shape = _prepared(kv, ape, cu_seqlens, cu_seqlens_comp, ratio, coff)
    rows = int(prefixes[1][-1]) if total_comp is None else total_comp
    with np.errstate(all="ignore"):
        values = _forward(host(kv), host(score), bias, prefixes, rows, shape)
        return store(values, kv, out)


def reference_backward(
    kv: Any,
    score: Any,
    ape: Any,
    cu_seqlens: Any,
    cu_seqlens_comp: Any,
    grad_out: Any,
    *,
    ratio: int,
    coff: int,
    grads: tuple[Any, Any, Any] | None = None,
    accumulate: bool = False,
) -> tuple[Any, Any, Any]:
    """Gradients of kv, score and ape; arguments as `csa_runtime.compressor_backward`, unchecked."""
    prefixes, bias, shape = _prepared(kv, ape, cu_seqlens, cu_seqlens_comp, ratio, coff)
    into = grads or (None, None, None)
    with np.errstate(all="ignore"):
        grad_kv, grad_score, grad_ape = _backward(
            host(kv), host(score), bias, prefixes, host(grad_out), shape
        )
        if bias is not None:
            grad_ape = grad_ape.astype(bias.dtype)
            if accumulate and into[2] is not None:
                grad_ape += host(into[2])
        wanted = ape is not None and (grads is None or into[2] is not None)
        return (
            store(grad_kv, kv, into[0]),
            store(grad_score, kv, into[1]),
            store(grad_ape, ape, into[2]) if wanted else None,
        )
