# SPDX-License-Identifier: Apache-2.0
"""One call's inputs, described and checked, and the launcher's words for them."""

# Annotations are not postponed: NamedTuple would compile each, which takes longer than the rest.
import contextlib
import functools
import sys
from typing import Any, NamedTuple

from csa_runtime import _native, checks, prefixes, streams
from csa_runtime.arrays import Array, describe, library_of
from csa_runtime.libraries import Library, library

_UNREADABLE = "pass prefixes that can, or leave CSA_RUNTIME_CHECK unset"
# Whose arrays on the CPU the reference takes as they are, and makes.
_ON_HOST = ("torch", "numpy")


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
    bias = optional("ape", ape, exported)
    starts = describe("cu_seqlens", cu_seqlens, exported)
    sums = describe("cu_seqlens_comp", cu_seqlens_comp, exported)
    head_dim = checks.inputs(values, scores, bias, starts, sums, ratio, coff)
    call = Call(owner, handle, exported, values, scores, bias, starts, sums, ratio, coff, head_dim)
    check_streams(call.read, stream, handle)
    return call


def _exporters_stream(owner: Library, raw: tuple[Any, ...], handle: int) -> int:
    """The stream that DLPack exporters are told of.

    Under a capture none (-1): waiting there for work outside it would spoil the capture.
    """
    strangers = any(array is not None and library_of(array) != "torch" for array in raw)
    return -1 if strangers and owner.capturing(raw[0], handle) else handle


def check_streams(arrays: tuple[Array | None, ...], given: Any, stream: int) -> None:
    """An interface names the stream its data is pending on; only another library could wait.

    With a stream given, the order is the caller's.
    """
    if given is not None:
        return
    for array in arrays:
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
    described = (call.cu_seqlens, call.cu_seqlens_comp)
    tokens, sums = (
        prefixes.read_back(prefix, array, call.stream, _UNREADABLE)
        for prefix, array in zip(raw, described, strict=True)
    )
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
    last = cu_seqlens_comp
    if hasattr(last, "__getitem__"):
        with contextlib.suppress(TypeError):
            last = last[-1:]
    advice = "pass total_comp= or out="
    values = prefixes.read_back(last, call.cu_seqlens_comp, call.stream, advice)
    return checks.integer("cu_seqlens_comp[-1]", values[-1], 0)


def bind(call: Call) -> None:
    """Let the native module serve calls like this one by itself, from the next one on."""
    if call.owner.name == "torch":
        _bind_torch()


@functools.cache
def _bind_torch() -> None:
    """Say what torch's tensors are, if torch tells C about them.

    The module then reads, checks and launches the usual call, and leaves all others to Python.
    """
    torch: Any = sys.modules["torch"]
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if exchange is not None and stream is not None:
        _native.bind_torch(torch.Tensor, torch.nn.Parameter, exchange, stream)


def row_stride(array: Array) -> int:
    """In elements; a single row has none that counts."""
    return array.strides[0] if array.shape[0] > 1 else array.shape[1]


def fields(call: Call, rows: int, others: tuple[Array | None, ...] = ()) -> dict[str, Any]:
    """The launcher's keywords common to both directions; `others` are not among the inputs."""
    _, stream, _, kv, score, ape, starts, sums, ratio, coff, head_dim = call
    return {
        "device": kv.ordinal if kv.ordinal >= 0 else _device((*call.read, *others)),
        "ratio": ratio,
        "coff": coff,
        "dtype": checks.DTYPE_CODES[kv.dtype],
        "tokens": kv.shape[0],
        "segments": starts.shape[0] - 1,
        "rows": rows,
        "head_dim": head_dim,
        "kv": kv.pointer,
        "score": score.pointer,
        "ape": None if ape is None else ape.pointer,
        "cu_seqlens": starts.pointer,
        "cu_seqlens_comp": sums.pointer,
        "kv_stride": row_stride(kv),
        "score_stride": row_stride(score),
        "stream": stream,
    }


def _device(arrays: tuple[Array | None, ...]) -> int:
    """Ordinal of the device that all arrays are on, where kv names none."""
    named = {array.ordinal for array in arrays if array is not None} - {-1}
    if len(named) > 1:
        raise ValueError(
            f"the arrays are on devices {sorted(named)}; all arrays on one device are allowed"
        )
    if named:
        return named.pop()
    count = visible_devices()
    if count > 1:
        raise ValueError(
            f"nothing tells which of {count} devices the arrays are on: none of them names its "
            "own. At least one that does is allowed (of torch, cupy or numba, or with DLPack): "
            "pass one, or let CUDA_VISIBLE_DEVICES show one device, or call launch_forward and "
            "launch_backward with device="
        )
    return 0


@functools.cache
def visible_devices() -> int:
    """How many devices the driver shows; asked once, and only for arrays that name none."""
    return len(_native.driver_info()["devices"])


def on_cpu() -> Any:
    """The CPU path, imported when needed: it needs NumPy."""
    from csa_runtime import reference

    return reference


def host_array(raw: Any, described: Array | None) -> Any:
    """An array of the CPU as the reference takes it: a torch tensor or a NumPy array."""
    if described is None or described.library in _ON_HOST:
        return raw
    # jax, or DLPack alone: NumPy could not read bf16 through either.
    from csa_runtime.host import from_pointer

    return from_pointer(described)


def check_can_allocate(call: Call, into: Any) -> None:
    """Check that results on the CPU are given where their library's arrays cannot be written."""
    if into is None and call.kv.library not in _ON_HOST:
        raise ValueError(
            f"arrays of {call.kv.library!r} cannot be allocated and written by this library; pass "
            "out= (forward) or grads= (backward), made by NumPy or torch"
        )
