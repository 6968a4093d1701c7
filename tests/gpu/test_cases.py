# SPDX-License-Identifier: Apache-2.0
"""The hand-computed cases that the reference passes too, on the GPU and at several head_dims."""

import math
from typing import Any

import pytest
import torch

from gpu import harness, tally
from gpu.buffers import DEVICE
from gpu.harness import Problem, prefix
from gpu.problems import Packing, Values
from support.cases import CASES, STRETCHED

pytestmark = [pytest.mark.gpu, pytest.mark.L0]


def table(entries: list[list[Any]], head_dim: int) -> torch.Tensor:
    """A case's table in fp64, each column repeated head_dim times; null is NaN."""
    number = {None: math.nan, "inf": math.inf, "-inf": -math.inf}
    rows = [
        [number.get(x, x) if x is None or isinstance(x, str) else x for x in r] for r in entries
    ]
    found = torch.tensor(rows, dtype=torch.float64, device=DEVICE)
    return found.repeat_interleave(head_dim, dim=1)


def build(case: dict[str, Any], head_dim: int) -> Problem:
    """The case as a problem."""
    comp = tuple(case["cu_seqlens_comp"])
    cu = tuple(case["cu_seqlens"])
    packing = Packing(case["name"], len(case["kv"]), case["total_comp"], cu, comp)
    bf16 = torch.bfloat16
    grad_out = case.get("grad_out", [[0.0]] * packing.rows)
    given = Values(
        table(case["kv"], head_dim).to(bf16),
        table(case["score"], head_dim).to(bf16),
        table(case["ape"], head_dim).to(torch.float32),
        table(grad_out, head_dim).to(bf16),
    )
    return Problem(packing, given, case["ratio"], case["coff"], prefix(cu), prefix(comp))


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal to the exact value up to one bf16 rounding; NaN where it is NaN."""
    off = (found.double() - wanted).abs()
    near = (off <= wanted.abs() * 2.0**-8 + 1e-6) | (found == wanted)
    assert bool((near | (found.isnan() & wanted.isnan())).all()), f"{found} is not {wanted}"
    tally.count("hand-computed", found.numel())


@pytest.mark.parametrize("head_dim", [1, 2, 5, 64, 512])
@pytest.mark.parametrize("case", [*CASES, *STRETCHED], ids=lambda case: case["name"])
def test_hand_computed_case(case: dict[str, Any], head_dim: int) -> None:
    p = build(case, head_dim)
    for variant in (None, *harness.variants("forward", p.ratio, p.coff)):
        out = torch.full((p.packing.rows, head_dim), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        if variant is None or harness.serves(variant, p, out):
            harness.forward(p, out, variant)
            assert_near(out, table(case["out"], head_dim))
    if "grad_kv" not in case:
        return
    for variant in (None, *harness.variants("backward", p.ratio, p.coff)):
        grads = [torch.full_like(p.given.kv, torch.nan) for _ in range(2)]
        grads.append(torch.full_like(p.given.ape, torch.nan))
        if variant is None or harness.serves(variant, p, *grads[:2], grad_out=True):
            harness.backward(p, *grads, variant)
            for name, found in zip(("grad_kv", "grad_score", "grad_ape"), grads, strict=True):
                assert_near(found, table(case[name], head_dim))
