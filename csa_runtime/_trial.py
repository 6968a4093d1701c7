# SPDX-License-Identifier: Apache-2.0
"""One random problem for `demo` and `check`: made, run on the GPU through pointers, compared.

bf16 values travel as their upper 16 bits, so NumPy and the driver are enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from csa_runtime import _native
from csa_runtime._device_memory import Memory
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


def on_gpu(
    problem: Problem,
    *,
    forward: str | None = None,
    backward: str | None = None,
    directions: tuple[str, ...] = ("forward", "backward"),
) -> dict[str, Floats]:
    """Results of the kernels on device 0, into NaN-poisoned memory; variants forced by name."""
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
    fields: dict[str, Any] = {}
    fields |= dict.fromkeys(("out_stride", "grad_out_stride"), head_dim)
    strided = ("kv_stride", "score_stride", "grad_kv_stride", "grad_score_stride")
    fields |= dict.fromkeys(strided, width)
    fields |= {
        "device": 0, "dtype": 1, "ratio": problem.ratio, "coff": problem.coff, "tokens": tokens,
        "segments": len(problem.cu_seqlens) - 1, "rows": rows, "head_dim": head_dim,
        "workspace_bytes": size,
    }  # fmt: skip
    names = RESULTS[:1] * ("forward" in directions) + RESULTS[1:] * ("backward" in directions)
    with Memory() as memory:
        fields |= {name: memory.upload(values) for name, values in host.items()}
        if "forward" in directions:
            _native.launch_forward(**fields, variant=forward)
        if "backward" in directions:
            _native.launch_backward(**fields, variant=backward)
        for name in names:
            memory.download(fields[name], host[name])
    return {name: host[name] if name == "grad_ape" else values_of(host[name]) for name in names}


class Comparison(NamedTuple):
    """How far one result is from R and from fp64."""

    name: str
    elements: int
    differing: int
    error: float
    reference_error: float
    passed: bool


def compare(
    results: dict[str, Floats], problem: Problem, *, long: bool = False
) -> Iterator[Comparison]:
    """Compare results with R and with fp64, both computed here.

    R on the CPU has a correctly rounded expf, the GPU's may be one unit off: an element in some
    ten thousand then rounds to the neighbouring bf16. More than that, a larger step, or an error
    against fp64 beyond R's own is a failure. Long windows are summed in an order of their own:
    up to one element in a thousand may differ, by at most 1.6e-2.
    """
    reference, exact = on_cpu(problem), on_cpu(problem, exact=True)
    for name, values in results.items():
        yield compare_one(name, values, reference[name], exact[name], long=long)


def compare_one(
    name: str, ours: Floats, reference: Floats, exact: Floats, *, long: bool = False
) -> Comparison:
    """As `compare`, for one result."""
    differing = int((ours != reference).sum())
    error = float(np.abs(ours - exact).max(initial=0))
    reference_error = float(np.abs(reference - exact).max(initial=0))
    if name == "grad_ape":
        passed = error <= 1e-3
    else:
        distance = np.abs(ours - reference)
        step = distance <= 2.0**-7 * np.abs(reference) + 1e-5
        # Of few elements a share says nothing.
        passed = differing <= max(4 if long else 2, ours.size // 1000) and bool(step.all())
        passed = passed and error <= reference_error * (1 + 1e-6) + 1e-4 + 2.0**-8 * bool(differing)
        passed = passed and not (long and distance.max(initial=0) > 1.6e-2)
    return Comparison(name, ours.size, differing, error, reference_error, passed and error == error)


def rounded_once(name: str, values: Floats, exact: Floats) -> bool:
    """Whether values are fp64's but for fp32 arithmetic and, except grad_ape, one bf16 rounding."""
    step = 0.0 if name == "grad_ape" else 2.0**-8
    return bool((np.abs(values - exact) <= step * np.abs(exact) + 1e-5).all())
