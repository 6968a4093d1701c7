# SPDX-License-Identifier: Apache-2.0
"""What the arrays of a call must be, decided before anything is launched or written.

Every refusal says what was given, what is allowed and what to do. What a launch can see from its
numbers alone on a GPU (strides, overlap, limits of the images) the native launcher refuses.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

from csa_runtime.arrays import ITEMSIZE, Array, contiguous_strides

DTYPE_CODES = {"bfloat16": 1, "float16": 2, "float32": 3}
LIMIT = 1 << 31


def integer(name: str, value: Any, low: int, high: int = LIMIT) -> int:
    """An integer option in `[low, high)`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if isinstance(value, bool) or not low <= number < high:
        raise ValueError(f"{name} is {value!r}; an integer from {low} to {high - 1} is allowed")
    return number


def window(ratio: Any, coff: Any) -> tuple[int, int]:
    """Checked `ratio` and `coff`; which ratios the images serve is the launcher's to say."""
    return integer("ratio", ratio, 1), integer("coff", coff, 1, 3)


def inputs(
    kv: Array,
    score: Array,
    ape: Array | None,
    cu_seqlens: Array,
    cu_seqlens_comp: Array,
    ratio: int,
    coff: int,
) -> int:
    """Check what both directions read; returns head_dim."""
    if len(kv.shape) != 2 or kv.shape[1] % coff or kv.shape[1] == 0:
        raise ValueError(
            f"kv has shape {kv.shape}; (tokens, coff * head_dim) with coff = {coff} is allowed: "
            "flatten batches into one token dimension, or pass the coff that made it"
        )
    # Which of the coded dtypes have an image, and for which windows, is the launcher's to say.
    if kv.dtype not in DTYPE_CODES and not (kv.device == "cpu" and kv.dtype == "float64"):
        served = [*DTYPE_CODES, "float64"] if kv.device == "cpu" else _served()
        raise ValueError(
            f"kv is {kv.dtype} on {kv.place}; allowed there: {', '.join(served)}: convert it"
        )
    matrix(kv, kv.shape, kv.dtype, "kv")
    matrix(score, kv.shape, kv.dtype, "kv")
    integer("the number of tokens", kv.shape[0], 0)
    if ape is not None:
        bias(ape, kv, ratio)
    for prefix in (cu_seqlens, cu_seqlens_comp):
        if len(prefix.shape) != 1 or prefix.shape[0] < 1:
            raise ValueError(
                f"{prefix.name} has shape {prefix.shape}; (segments + 1,) is allowed, beginning "
                "with the first segment's start"
            )
        exactly(prefix, prefix.shape, "int32", "pass it as int32")
    if cu_seqlens.shape != cu_seqlens_comp.shape:
        raise ValueError(
            f"cu_seqlens has {cu_seqlens.shape[0]} elements and cu_seqlens_comp "
            f"{cu_seqlens_comp.shape[0]}; both (segments + 1,) are allowed: compressed_prefixes "
            "makes the second from the first"
        )
    same_device(kv, (score, ape, cu_seqlens, cu_seqlens_comp))
    return kv.shape[1] // coff


def _served() -> list[str]:
    """The dtypes of kv that the bundle has images for."""
    from csa_runtime import _native

    short = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    variants = _native.bundle_info()["variants"]
    return sorted({short[v["dtype"]] for v in variants if v["operation"] != "finish"})


def bias(ape: Array, kv: Array, ratio: int) -> None:
    """Check `ape` or `grad_ape`: `(ratio, W)` contiguous, fp32 (fp64 beside fp64 on the CPU)."""
    wide = kv.dtype == "float64" and ape.dtype == "float64"
    exactly(
        ape,
        (ratio, kv.shape[1]),
        "float64" if wide else "float32",
        "it has one row for each token of a block and kv's width",
    )


def matrix(array: Array, shape: tuple[int, ...], dtype: str, like: str) -> None:
    """Check a `(rows, columns)` array whose rows may be strided."""
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"{array.name} is {array.dtype} {array.shape}; {dtype} {shape} is allowed, as {like} "
            "asks: convert or reshape it"
        )
    (rows, columns), (pitch, step) = shape, array.strides
    if step != 1 and columns > 1 and rows > 0:
        raise ValueError(
            f"{array.name} has strides {array.strides}; the last dimension must be contiguous "
            "(stride 1): copy it into a contiguous array"
        )
    if pitch < 0 and rows > 1:
        raise ValueError(
            f"{array.name} has row stride {pitch}; 0 or more is allowed: copy it into a "
            "contiguous array"
        )
    if array.pointer % ITEMSIZE[dtype]:
        raise _misaligned(array)


def exactly(array: Array, shape: tuple[int, ...], dtype: str, advice: str) -> None:
    """Check a contiguous array of one shape and dtype."""
    if array.shape != shape or array.dtype != dtype or not contiguous(array):
        layout = "" if contiguous(array) else f" with strides {array.strides}"
        raise ValueError(
            f"{array.name} is {array.dtype} {array.shape}{layout}; contiguous {dtype} {shape} is "
            f"allowed: {advice}"
        )
    if array.pointer % ITEMSIZE[dtype]:
        raise _misaligned(array)


def _misaligned(array: Array) -> ValueError:
    return ValueError(
        f"{array.name} begins at address {array.pointer:#x}; a multiple of its element's "
        f"{ITEMSIZE[array.dtype]} bytes is allowed: copy it into an array of its own"
    )


def contiguous(array: Array) -> bool:
    """Row-major without gaps; extents of 1 may have any stride, and so all without elements."""
    shape, strides, wanted = array.shape, array.strides, contiguous_strides(array.shape)
    if strides == wanted or 0 in shape:
        return True
    return all(n == 1 or s == w for n, s, w in zip(shape, strides, wanted, strict=True))


def same_device(kv: Array, others: tuple[Array | None, ...]) -> None:
    """Check that nothing is elsewhere than kv; an unknown ordinal is taken to match."""
    device, ordinal = kv.device, kv.ordinal
    for other in others:
        if other is None or (other.device == device and other.ordinal == ordinal):
            continue
        if other.device == device and -1 in (other.ordinal, ordinal):
            continue
        raise ValueError(
            f"{other.name} is on {other.place} and kv on {kv.place}; all arrays on one device are "
            f"allowed: move {other.name}"
        )


def enough_tokens(tokens: int, rows: int, ratio: int) -> None:
    """Check that rows have tokens to pool."""
    if rows > 0 and tokens < ratio:
        raise ValueError(
            f"{rows} rows are asked of {tokens} tokens; rows > 0 needs at least ratio = {ratio} "
            "tokens: pad the pack or ask for total_comp=0"
        )


def outputs(results: tuple[Array | None, ...], read: tuple[Array | None, ...]) -> None:
    """Check that results can be written and, on the CPU, overlap nothing else."""
    for result in results:
        if result is None:
            continue
        if result.library == "torch" and result.owner.requires_grad:
            torch: Any = sys.modules["torch"]
            if torch.is_grad_enabled():
                raise ValueError(
                    f"{result.name} requires a gradient, which writing into it would falsify; a "
                    "tensor that requires none is allowed: detach() it, or call under "
                    "torch.no_grad()"
                )
        if not result.writable:
            raise ValueError(
                f"{result.name} is a read-only array of {result.library!r}; one that may be "
                "written is allowed: make it with torch, cupy, numba or NumPy"
            )
    written = [result for result in results if result is not None and result.device == "cpu"]
    for position, result in enumerate(written, start=1):
        if len(result.shape) == 2 and result.shape[0] > 1 and result.strides[0] < result.shape[1]:
            raise ValueError(
                f"{result.name} has row stride {result.strides[0]}; at least its width "
                f"{result.shape[1]} is allowed: rows of a result may not overlap"
            )
        for other in (*read, *written[position:]):
            if other is not None and overlap(result, other):
                raise ValueError(
                    f"{result.name} overlaps {other.name}; a result in memory of its own is "
                    "allowed: allocate another"
                )


def overlap(first: Array, second: Array) -> bool:
    """Whether two arrays of at most two dimensions share a byte of an element."""
    if 0 in (*first.shape, *second.shape):
        return False
    a, b = sorted(map(_region, (first, second)), key=lambda region: region[1])
    start, rows, width, pitch = a
    other_start, other_rows, other_width, other_pitch = b
    distance = other_start - start
    # Row i of a and row j of b meet where
    # i * pitch - distance - other_width < j * other_pitch < i * pitch - distance + width.
    if pitch == other_pitch:  # then only i - j counts, and one step looks at all of them
        return _multiple(distance - width, distance + other_width, pitch, 1 - other_rows, rows - 1)
    return any(
        _multiple(at - other_width, at + width, other_pitch, 0, other_rows - 1)
        for at in range(-distance, -distance + rows * pitch, pitch)
    )


def _region(array: Array) -> tuple[int, int, int, int]:
    """Address, rows, bytes of a row and from row to row; a repeated row counts once."""
    itemsize = ITEMSIZE[array.dtype]
    if len(array.shape) != 2:
        return array.pointer, 1, span(array), max(1, span(array))
    rows, columns = array.shape
    pitch = array.strides[0] * itemsize
    if rows == 1 or pitch == 0:
        rows, pitch = 1, columns * itemsize
    return array.pointer, rows, columns * itemsize, max(1, pitch)


def _multiple(lower: int, upper: int, step: int, low: int, high: int) -> bool:
    """Whether `lower < k * step < upper` for some k of `[low, high]`."""
    k = max(lower // step + 1, low)
    return k <= high and k * step < upper


def span(array: Array) -> int:
    """Bytes from the first element to the end of the last."""
    last = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
    return (last + 1) * ITEMSIZE[array.dtype]
