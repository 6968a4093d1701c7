# SPDX-License-Identifier: Apache-2.0
"""The CPU reference against the shared cases, exact arithmetic and torch's eager autograd."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from csa_runtime import reference
from csa_runtime.reference import fma, reference_backward, reference_forward
from support.eager import eager
from support.packs import Pack, random_pack

CASES = json.loads((Path(__file__).parents[1] / "cases/compressor_cases.json").read_text())["cases"]
HEAD_DIMS = (1, 3, 8)
NEAREST = {"float32": 1e-6, "bfloat16": 2.0**-8, "float16": 2.0**-10}


def values(rows: list[list[Any]]) -> np.ndarray:
    """A case's table in fp64: null is NaN, infinities are strings."""
    return np.array(
        [[np.nan if v is None else float(v) for v in row] for row in rows], dtype=np.float64
    ).reshape(len(rows), -1)


def case_inputs(case: dict[str, Any], head_dim: int, dtype: Any, ape_dtype: Any) -> dict[str, Any]:
    """Inputs of a case, each column repeated `head_dim` times."""
    table = lambda name, kind: np.repeat(values(case[name]), head_dim, axis=1).astype(kind)  # noqa: E731
    return {
        "kv": table("kv", dtype),
        "score": table("score", dtype),
        "ape": table("ape", ape_dtype),
        "cu_seqlens": np.array(case["cu_seqlens"], np.int32),
        "cu_seqlens_comp": np.array(case["cu_seqlens_comp"], np.int32),
    }


def assert_within(actual: np.ndarray, expected: np.ndarray, step: float) -> None:
    """Equal NaN and infinities; else within `step`, relative, and fp32's noise at the largest."""
    actual = actual.astype(np.float64)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    error = np.abs(actual[finite] - expected[finite])
    noise = min(step, 1e-6) * np.abs(expected[finite]).max(initial=0)
    assert (error <= step * np.abs(expected[finite]) + noise).all(), error.max()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_cases_are_exact_in_fp64(case: dict[str, Any], head_dim: int) -> None:
    """The shared cases, to the last bits of fp64."""
    inputs = case_inputs(case, head_dim, np.float64, np.float64)
    options = {"ratio": case["ratio"], "coff": case["coff"]}
    out = reference_forward(**inputs, **options, total_comp=case["total_comp"])
    assert_within(out, np.repeat(values(case["out"]), head_dim, axis=1), 1e-14)
    if "grad_out" not in case:
        return
    grad_out = np.repeat(values(case["grad_out"]), head_dim, axis=1)
    grads = reference_backward(**inputs, grad_out=grad_out, **options)
    for name, grad in zip(("grad_kv", "grad_score", "grad_ape"), grads, strict=True):
        assert_within(grad, np.repeat(values(case[name]), head_dim, axis=1), 1e-14)


# The lowest finite bf16 is an infinity in fp16, and another case there.
NARROW = [
    pytest.param(case, dtype, id=f"{dtype}-{case['name']}")
    for case in CASES
    for dtype in ("bfloat16", "float16", "float32")
    if not (dtype == "float16" and "lowest_finite" in case["name"])
]


@pytest.mark.parametrize(("case", "dtype"), NARROW)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_cases_hold_in_narrow_dtypes(case: dict[str, Any], dtype: str, library: str) -> None:
    """The shared cases, inputs rounded: one rounding from fp64 on the same inputs."""
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    narrow = case_inputs(case, 4, kind, np.float32)
    wide = {name: a.astype(np.float64) if "cu" not in name else a for name, a in narrow.items()}
    options = {"ratio": case["ratio"], "coff": case["coff"]}
    if library == "torch":
        narrow = {name: to_torch(a) for name, a in narrow.items()}
    out = reference_forward(**narrow, **options, total_comp=case["total_comp"])
    exact = reference_forward(**wide, **options, total_comp=case["total_comp"])
    assert_within(to_numpy(out), exact, NEAREST[dtype])
    if "grad_out" not in case:
        return
    grad_out = np.repeat(values(case["grad_out"]), 4, axis=1).astype(kind)
    given = to_torch(grad_out) if library == "torch" else grad_out
    grads = reference_backward(**narrow, grad_out=given, **options)
    oracle = reference_backward(**wide, grad_out=grad_out.astype(np.float64), **options)
    for grad, expected in zip(grads, oracle, strict=True):
        assert_within(to_numpy(grad), expected, NEAREST[dtype])


def to_torch(array: np.ndarray) -> torch.Tensor:
    """A tensor of the same dtype and values."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(array: Any) -> np.ndarray:
    """The values, widened to fp64."""
    if isinstance(array, torch.Tensor):
        return array.double().numpy()
    return array.astype(np.float64)


PACKS = {
    "r4c2": ([5, 0, 3, 8, 17, 64], 4, 2, 6),
    "r4c1": ([5, 0, 3, 8, 17, 64], 4, 1, 7),
    "r2c2": ([1, 2, 9, 0, 0, 31], 2, 2, 1),
    "r2c1": ([1, 2, 9, 0, 0, 31], 2, 1, 5),
    "r128c2": ([300, 127, 128, 513], 128, 2, 4),
}


def run_torch(pack: Pack) -> tuple[torch.Tensor, ...]:
    """Output and gradients of the reference, on the pack's tensors."""
    out = reference_forward(*pack.inputs, **pack.options, total_comp=pack.total_comp)
    return (out, *reference_backward(*pack.inputs, pack.grad_out, **pack.options))


@pytest.mark.parametrize("name", PACKS)
def test_fp64_equals_autograd(name: str) -> None:
    """fp64 is torch's autograd on ragged packs, padding and stray tokens included."""
    segments, ratio, coff, d = PACKS[name]
    pack = random_pack(
        segments, ratio=ratio, coff=coff, head_dim=d, padding=3, first=2, after=3,
        dtype=torch.float64,
    )  # fmt: skip
    pack.grad_out[-1] = torch.nan
    for ours, theirs in zip(run_torch(pack), eager(pack, compute=torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", PACKS)
def test_bf16_is_one_rounding_from_autograd(name: str) -> None:
    """R differs from torch's fp32 only where expf does."""
    segments, ratio, coff, d = PACKS[name]
    pack = random_pack(segments, ratio=ratio, coff=coff, head_dim=d, padding=3, first=2, after=3)
    for ours, theirs in zip(run_torch(pack)[:3], eager(pack)[:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=1e-6)
        assert (ours != theirs).double().mean() < 0.01


def test_numpy_and_torch_give_the_same_bits() -> None:
    """Both libraries take one path."""
    pack = random_pack([9, 30, 4], ratio=4, coff=2, head_dim=5, padding=1)
    as_numpy = lambda t: (  # noqa: E731
        t.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        if t.dtype == torch.bfloat16
        else t.numpy()
    )
    arrays = [as_numpy(t) for t in pack.inputs]
    out = reference_forward(*arrays, **pack.options, total_comp=pack.total_comp)
    grads = reference_backward(*arrays, as_numpy(pack.grad_out), **pack.options)
    for ours, theirs in zip(run_torch(pack), (out, *grads), strict=True):
        np.testing.assert_array_equal(to_numpy(ours), to_numpy(theirs))


def test_chunks_do_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many rows are held at once is invisible."""
    pack = random_pack([9, 30, 4, 41], ratio=4, coff=2, head_dim=5, padding=1)
    whole = run_torch(pack)
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 5 * 8 * 2)
    for ours, theirs in zip(run_torch(pack)[:3], whole[:3], strict=True):
        assert torch.equal(ours, theirs)


def test_accumulate_adds_the_finished_sum_once() -> None:
    """The option concerns grad_ape alone."""
    pack = random_pack([9, 30, 4, 41], ratio=4, coff=2, head_dim=5)
    fresh = reference_backward(*pack.inputs, pack.grad_out, **pack.options)
    before = torch.full_like(fresh[2], 0.5)
    grads = (torch.empty_like(fresh[0]), torch.empty_like(fresh[1]), before.clone())
    reference_backward(*pack.inputs, pack.grad_out, **pack.options, grads=grads, accumulate=True)
    assert torch.equal(grads[0], fresh[0])
    assert torch.equal(grads[2], before + fresh[2])


def test_overflow_before_the_sum_reaches_the_gradient() -> None:
    """grad_out * kv is rounded before it enters a sum."""
    pack = random_pack([8], ratio=4, coff=1, head_dim=2, dtype=torch.float32)
    pack.grad_out[0] = 1e30
    pack.kv[0] = 1e30
    grad_score = run_torch(pack)[2]
    assert not grad_score[:4].isfinite().any()
    assert grad_score[4:].isfinite().all()


def test_malformed_prefixes_do_not_fault() -> None:
    """Values are unspecified, but nothing raises."""
    pack = random_pack([16, 16], ratio=4, coff=2, head_dim=3)
    for tokens, rows in ([[99, -5, 7], [0, 4, 8]], [[0, 16, 32], [5, -3, 2**30]]):
        pack.cu_seqlens[:] = torch.tensor(tokens)
        pack.cu_seqlens_comp[:] = torch.tensor(rows)
        run_torch(pack)


def rounded(exact: Fraction) -> np.float32:
    """Round an exact value to fp32, to nearest even, by integer arithmetic."""
    if exact == 0:
        return np.float32(0)
    magnitude = abs(exact)
    exponent = -149
    while magnitude / Fraction(2) ** exponent >= 2**24:
        exponent += 1
    units = round(magnitude / Fraction(2) ** exponent)
    value = float(units) * 2.0**exponent
    return np.float32(value if exact > 0 else -value)


def test_fma_rounds_once() -> None:
    """Against exact rational arithmetic, halfway cases and subnormals included."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, size=(3, 400), dtype=np.uint32)
    # Exponents from 2**-20 to 2**20, so that sums interact; some tiny products near the subnormals.
    a, b, c = ((bits & 0x807FFFFF) | ((bits >> 8) % 40 + 107 << 23).astype(np.uint32)).view("f4")
    tiny = np.float32(2.0**-75)
    halfway = np.float32(1 + 2.0**-12)
    a = np.concatenate([a, a * tiny, [halfway, halfway, -halfway]]).astype(np.float32)
    b = np.concatenate([b, b * tiny, [halfway, halfway, halfway]]).astype(np.float32)
    c = np.concatenate([c, c * np.float32(2.0**-149), [2.0**-80, -(2.0**-80), 2.0**30]])
    c = c.astype(np.float32)
    expected = [
        rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    np.testing.assert_array_equal(fma(a, b, c), np.array(expected, np.float32))


def test_fma_keeps_infinities_and_nan() -> None:
    """The correction leaves what is not finite alone."""
    a = np.array([np.inf, np.inf, 0, 1, 3e38], np.float32)
    b = np.array([1, 0, np.inf, np.nan, 3e38], np.float32)
    c = np.array([1, 1, 1, 1, -3e38], np.float32)
    np.testing.assert_array_equal(fma(a, b, c), np.array([np.inf] + [np.nan] * 3 + [np.inf]))
