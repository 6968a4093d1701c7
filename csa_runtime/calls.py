# SPDX-License-Identifier: Apache-2.0
"""One call's inputs, described and checked, and the launcher's words for them."""

from __future__ import annotations

from typing import Any, NamedTuple

from csa_runtime import checks, prefixes, streams
from csa_runtime.arrays import Array, describe, library_of
from csa_runtime.libraries import Library, library


class Call(NamedTuple):
    """What both directions know before they look at results.

    `exported` is the stream that DLPack exporters are told of.
    """

    owner: Library
    stream: int
    exported: int
    kv: Array
    score: Array
    ape: Array | None
    cu_seqlens: Array
    cu_seqlens_comp: Array
    ratio: int
    coff: int
    head_dim: int

    @property
    def read(self) -> tuple[Array | None, ...]:
        """All inputs."""
        return self.kv, self.score, self.ape, self.cu_seqlens, self.cu_seqlens_comp


def begin(
    kv: Any,
    score: Any,
    ape: Any,
    cu_seqlens: Any,
    cu_seqlens_comp: Any,
    ratio: Any,
    coff: Any,
    stream: Any,
) -> Call:
    """Describe and check the inputs."""
    ratio, coff = checks.window(ratio, coff)
    owner = library(kv)
    handle = owner.current_stream(kv) if stream is None else streams.handle_of(stream)
    raw = (kv, score, ape, cu_seqlens, cu_seqlens_comp)
    exported = handle if stream is None else _exporters_stream(owner, raw, handle)
    values = describe("kv", kv, exported)
    scores = describe("score", score, exported)
    bias = None if ape is None else describe("ape", ape, exported)
    starts = describe("cu_seqlens", cu_seqlens, exported)
    sums = describe("cu_seqlens_comp", cu_seqlens_comp, exported)
    head_dim = checks.inputs(values, scores, bias, starts, sums, ratio, coff)
    call = Call(owner, handle, exported, values, scores, bias, starts, sums, ratio, coff, head_dim)
    if stream is None:
        for array in call.read:
            check_stream(array, handle)
    return call


def _exporters_stream(owner: Library, raw: tuple[Any, ...], handle: int) -> int:
    """The stream that DLPack exporters are told of.

    Under a capture none (-1): waiting there for work outside it would spoil the capture.
    """
    strangers = any(array is not None and library_of(array) != "torch" for array in raw)
    return -1 if strangers and owner.capturing(raw[0], handle) else handle


def check_stream(array: Array | None, stream: int) -> None:
    """An interface names the stream its data is pending on; only another library could wait."""
    if array is not None and array.stream and not streams.same(array.stream, stream):
        raise ValueError(
            f"{array.name} is pending on stream {array.stream:#x} and kv's current stream is "
            f"{stream:#x}: make them one, or order them and pass stream="
        )


def optional(name: str, array: Any, stream: int) -> Array | None:
    """Describe an argument that may be absent."""
    return None if array is None else describe(name, array, stream)


def check_contents(call: Call, kv: Any, raw: tuple[Any, Any], rows: int) -> None:
    """Under CSA_RUNTIME_CHECK=1, check what the prefixes hold, outside capture."""
    if not prefixes.checking() or call.owner.capturing(kv, call.stream):
        return
    tokens, sums = (library(prefix).values(prefix, call.stream) for prefix in raw)
    prefixes.check_values(tokens, sums, call.kv.shape[0], call.ratio, rows, strict=False)


def rows_of(call: Call, kv: Any, cu_seqlens_comp: Any, total_comp: Any, out: Array | None) -> int:
    """How many rows the forward makes."""
    if total_comp is not None:
        return checks.integer("total_comp", total_comp, 0)
    if out is not None:
        return out.shape[0] if out.shape else 0
    if call.owner.capturing(kv, call.stream):
        raise ValueError(
            "total_comp=None reads cu_seqlens_comp back, which a stream under capture cannot do; "
            "pass total_comp= (max_rows gives a static capacity) or out="
        )
    try:
        last = library(cu_seqlens_comp).values(cu_seqlens_comp[-1:], call.stream)[0]
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"cu_seqlens_comp of {call.cu_seqlens_comp.library!r} cannot be read back here; pass "
            "total_comp= or out="
        ) from error
    return checks.integer("cu_seqlens_comp[-1]", last, 0)


def row_stride(array: Array) -> int:
    """In elements; a single row has none that counts."""
    return array.strides[0] if array.shape[0] > 1 else array.shape[1]


def fields(call: Call, rows: int) -> dict[str, Any]:
    """The launcher's keywords common to both directions."""
    ordinals = [array.ordinal for array in call.read if array is not None]
    return {
        "device": max(0, *ordinals),
        "ratio": call.ratio,
        "coff": call.coff,
        "dtype": checks.DTYPE_CODES[call.kv.dtype],
        "tokens": call.kv.shape[0],
        "segments": call.cu_seqlens.shape[0] - 1,
        "rows": rows,
        "head_dim": call.head_dim,
        "kv": call.kv.pointer,
        "score": call.score.pointer,
        "ape": None if call.ape is None else call.ape.pointer,
        "cu_seqlens": call.cu_seqlens.pointer,
        "cu_seqlens_comp": call.cu_seqlens_comp.pointer,
        "kv_stride": row_stride(call.kv),
        "score_stride": row_stride(call.score),
        "stream": call.stream,
    }


def host_array(raw: Any, described: Array | None) -> Any:
    """An array of the CPU as the reference takes it: a torch tensor or a NumPy array."""
    if described is None or described.library in ("torch", "numpy"):
        return raw
    # jax, or DLPack alone: NumPy could not read bf16 through either.
    from csa_runtime.host import from_pointer

    return from_pointer(described)


def check_can_allocate(call: Call, into: Any) -> None:
    """Check that results on the CPU are given where their library's arrays cannot be written."""
    if into is None and call.kv.library not in ("torch", "numpy"):
        raise ValueError(
            f"arrays of {call.kv.library!r} cannot be allocated and written by this library; pass "
            "out= (forward) or grads= (backward), made by NumPy or torch"
        )
