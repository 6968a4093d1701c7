# SPDX-License-Identifier: Apache-2.0
"""One random problem for `demo` and `check`: made, run on the GPU through pointers, compared.

bf16 values travel as their upper 16 bits, so NumPy and whatever holds GPU memory are enough.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from csa_runtime import _native
from csa_runtime.reference import Floats, np, reference_backward, reference_forward

RESULTS = ("out", "grad_kv", "grad_score", "grad_ape")


class Problem(NamedTuple):
    """Inputs in fp32, those of bf16 already rounded to its steps."""

    kv: Floats
    score: Floats
    ape: Floats
    cu_seqlens: Floats
    cu_seqlens_comp: Floats
    grad_out: Floats
    ratio: int
    coff: int


def bits_of(values: Floats) -> Floats:
    """Round fp32 to bf16, to nearest even: its bits as uint16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def values_of(bits: Floats) -> Floats:
    """Bf16 bits widened to fp32."""
    values: Floats = (bits.astype(np.uint32) << 16).view(np.float32)
    return values


def make(
    segments: list[int], *, ratio: int, coff: int, head_dim: int, padding: int, seed: int
) -> Problem:
    """A pack of these segment lengths, with padding rows, on the gate's distribution."""
    rng = np.random.default_rng(seed)

    def normal(rows: int, columns: int, std: float) -> Floats:
        return (rng.standard_normal((rows, columns)) * std).astype(np.float32)

    rows = [length // ratio for length in segments]
    width = coff * head_dim
    return Problem(
        values_of(bits_of(normal(sum(segments), width, 1.0))),
        values_of(bits_of(normal(sum(segments), width, 1.5))),
        normal(ratio, width, 0.25),
        np.cumsum([0, *segments], dtype=np.int32),
        np.cumsum([0, *rows], dtype=np.int32),
        values_of(bits_of(normal(sum(rows) + padding, head_dim, 1.0))),
        ratio,
        coff,
    )


def on_cpu(problem: Problem, *, exact: bool = False) -> dict[str, Floats]:
    """Results of Reference R, rounded to bf16 (grad_ape fp32); of fp64, unrounded, if exact."""
    kind = np.float64 if exact else np.float32
    arrays = [array.astype(kind) if array.dtype == np.float32 else array for array in problem[:6]]
    options: dict[str, Any] = {"ratio": problem.ratio, "coff": problem.coff}
    rows = problem.grad_out.shape[0]
    results = [
        reference_forward(*arrays[:5], **options, total_comp=rows),
        *reference_backward(*arrays, **options),
    ]
    if not exact:
        results[:3] = [values_of(bits_of(values)) for values in results[:3]]
    return dict(zip(RESULTS, results, strict=True))


class Memory:
    """GPU memory of torch or cupy on device 0; arrays are addressed, never computed with."""

    device = "cuda:0"

    def __init__(self) -> None:
        """Take the first library that is there and sees a GPU.

        Raises:
            RuntimeError: neither is.
        """
        for name in ("torch", "cupy"):
            try:
                self.library: Any = import_module(name)
            except ImportError:
                continue
            self.name = name
            if name == "cupy" or self.library.cuda.is_available():
                return
        raise RuntimeError(
            "there is a GPU, but nothing to hold memory on it: install torch (with CUDA) or cupy"
        )

    def upload(self, values: Floats) -> Any:
        """A copy on the GPU."""
        if self.name == "cupy":
            return self.library.asarray(values)
        signed = values.view(np.int16) if values.dtype == np.uint16 else values
        return self.library.from_numpy(np.ascontiguousarray(signed)).to(self.device)

    def download(self, array: Any) -> Floats:
        """A copy on the host, behind everything pending."""
        values: Floats = array.get() if self.name == "cupy" else array.cpu().numpy()
        return values.view(np.uint16) if values.dtype == np.int16 else values

    def address(self, array: Any) -> int:
        """Of the first element."""
        return int(array.data.ptr if self.name == "cupy" else array.data_ptr())

    @property
    def stream(self) -> int:
        """The library's current stream."""
        cuda = self.library.cuda
        if self.name == "cupy":
            return int(cuda.get_current_stream().ptr)
        return int(cuda.current_stream().cuda_stream)


def on_gpu(
    problem: Problem,
    memory: Memory,
    *,
    forward: str | None = None,
    backward: str | None = None,
    directions: tuple[str, ...] = ("forward", "backward"),
) -> dict[str, Floats]:
    """Results of the kernels, into NaN-poisoned memory; variants forced by name if given."""
    rows, head_dim = problem.grad_out.shape
    tokens, width = problem.kv.shape
    nan = np.uint16(0x7FC0)
    size = _native.backward_workspace_bytes(tokens, rows, head_dim, problem.ratio, problem.coff, 1)
    host = {
        "kv": bits_of(problem.kv),
        "score": bits_of(problem.score),
        "ape": problem.ape,
        "cu_seqlens": problem.cu_seqlens,
        "cu_seqlens_comp": problem.cu_seqlens_comp,
        "grad_out": bits_of(problem.grad_out),
        "out": np.full((rows, head_dim), nan),
        "grad_kv": np.full((tokens, width), nan),
        "grad_score": np.full((tokens, width), nan),
        "grad_ape": np.full_like(problem.ape, np.nan),
        "workspace": np.full(max(size // 4, 1), np.nan, dtype=np.float32),
    }
    device = {name: memory.upload(values) for name, values in host.items()}
    fields: dict[str, Any] = {name: memory.address(array) for name, array in device.items()}
    fields |= dict.fromkeys(("out_stride", "grad_out_stride"), head_dim)
    strided = ("kv_stride", "score_stride", "grad_kv_stride", "grad_score_stride")
    fields |= dict.fromkeys(strided, width)
    fields |= {
        "device": 0, "dtype": 1, "ratio": problem.ratio, "coff": problem.coff, "tokens": tokens,
        "segments": len(problem.cu_seqlens) - 1, "rows": rows, "head_dim": head_dim,
        "workspace_bytes": size, "stream": memory.stream,
    }  # fmt: skip
    if "forward" in directions:
        _native.launch_forward(**fields, variant=forward)
    if "backward" in directions:
        _native.launch_backward(**fields, variant=backward)
    names = RESULTS[:1] * ("forward" in directions) + RESULTS[1:] * ("backward" in directions)
    results = {name: memory.download(device[name]) for name in names}
    return {
        name: values if name == "grad_ape" else values_of(values)
        for name, values in results.items()
    }


class Comparison(NamedTuple):
    """How far one result is from R and from fp64."""

    name: str
    elements: int
    differing: int
    error: float
    reference_error: float
    passed: bool


def compare(name: str, ours: Floats, reference: Floats, exact: Floats) -> Comparison:
    """Compare one result with R and fp64.

    R on the CPU has a correctly rounded expf, the GPU's may be one unit off: an element in some
    ten thousand then rounds to the neighbouring bf16. More than that, a larger step, or an error
    against fp64 beyond R's own is a failure.
    """
    differing = int((ours != reference).sum())
    error = float(np.abs(ours - exact).max(initial=0))
    reference_error = float(np.abs(reference - exact).max(initial=0))
    if name == "grad_ape":
        passed = error <= 1e-3
    else:
        step = np.abs(ours - reference) <= 2.0**-7 * np.abs(reference) + 1e-5
        passed = differing <= max(2, ours.size // 1000) and bool(step.all())
        passed = passed and error <= reference_error * (1 + 1e-6) + 1e-4 + 2.0**-8 * bool(differing)
    return Comparison(name, ours.size, differing, error, reference_error, passed and error == error)
