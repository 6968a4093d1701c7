# SPDX-License-Identifier: Apache-2.0
"""The shared cases stretched to windows of 128 tokens, on the CPU reference."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_reference import NEAREST, assert_within, case_inputs, values

from csa_runtime.reference import reference_backward, reference_forward
from support.cases import CASES, LONG, STRETCHED, stretch

# Sums of up to 256 addends, each rounded: beyond the last bits of fp64, or of fp32.
SUMS = {"float64": 256 * 2.0**-53, "float32": 256 * 2.0**-24}


def run(
    inputs: dict[str, Any], case: dict[str, Any], grad_out: Any
) -> list[tuple[str, np.ndarray]]:
    """`out` and, where there is a `grad_out`, the gradients."""
    options = {"ratio": LONG, "coff": case["coff"]}
    found = [("out", reference_forward(**inputs, **options, total_comp=case["total_comp"]))]
    if grad_out is not None:
        grads = reference_backward(**inputs, grad_out=grad_out, **options)
        found += zip(("grad_kv", "grad_score", "grad_ape"), grads, strict=True)
    return found


def repeated(case: dict[str, Any], name: str) -> Any:
    """A table of the case, three columns wide, or None."""
    return np.repeat(values(case[name]), 3, axis=1) if name in case else None


@pytest.mark.parametrize("case", STRETCHED, ids=lambda case: case["name"])
def test_out_stays_and_gradients_divide(case: dict[str, Any]) -> None:
    inputs = case_inputs(case, 3, np.float64, np.float64)
    for name, found in run(inputs, case, repeated(case, "grad_out")):
        assert_within(found, repeated(case, name), SUMS["float64"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", STRETCHED, ids=lambda case: case["name"])
def test_narrow_inputs_are_one_rounding_and_their_sums_from_fp64(
    case: dict[str, Any], dtype: str
) -> None:
    if dtype == "float16" and "lowest_finite" in case["name"]:
        return  # an infinity there, and another case
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    narrow = case_inputs(case, 3, kind, np.float32)
    wide = {name: a.astype(np.float64) if "cu" not in name else a for name, a in narrow.items()}
    grad_out = repeated(case, "grad_out")
    given = None if grad_out is None else grad_out.astype(kind)
    exact = run(wide, case, None if given is None else given.astype(np.float64))
    for (_, found), (_, wanted) in zip(run(narrow, case, given), exact, strict=True):
        assert_within(found, wanted, NEAREST[dtype] + SUMS["float32"])


def test_every_other_case_is_stretched() -> None:
    assert len(STRETCHED) == sum(case["ratio"] != LONG for case in CASES) > 0
    for case in STRETCHED:
        assert len(case["ape"]) == LONG
        assert case["cu_seqlens"][-1] <= len(case["kv"])
    assert stretch(CASES[0], CASES[0]["ratio"])["kv"] == CASES[0]["kv"]
