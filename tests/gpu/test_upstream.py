# SPDX-License-Identifier: Apache-2.0
"""Against the upstream training code's eager form, which rounds the softmax weights to bf16.

There the weights are fp32 until a cast to kv's dtype; the products with kv are bf16, their sum and
the gradients are rounded to bf16. With its unit roundoff r = 2**-8, weights p, u_k = g * kv_k and
U = sum p_k |u_k|, first order in r (the factor SLOP covers higher orders and fp32's own errors):
- out: each addend is rounded twice, the sum once, ours once: (2 + 1 + 1) r * sum p_k |kv_k|.
- grad_kv: g * p_k, p_k and the product rounded, ours once: 3 r * |g| p_k.
- grad_score: p_k * (u_k - S) of rounded u: r * p_k (|u_k| + U); the result rounded on both sides,
  at most twice that: 3 r * p_k (|u_k| + U).
- grad_ape: the same addends, not rounded again: r * sum over rows of p_k (|u_k| + U).
"""

import pytest
import torch

from gpu import harness, oracle, problems, tally
from gpu.buffers import DEVICE
from gpu.harness import Problem

pytestmark = [pytest.mark.gpu, pytest.mark.L0]

ROUNDOFF = 2.0**-8
SLOP = 1 + 2.0**-5
TINY = 2.0**-132  # a bf16 subnormal's step
BF16 = torch.bfloat16


def upstream(p: Problem) -> tuple[torch.Tensor, ...]:
    """out, grad_kv, grad_score and grad_ape of the real rows, by autograd through bf16 weights."""
    leaves = [t.detach().clone().requires_grad_() for t in (p.given.kv, p.given.score, p.given.ape)]
    rows = p.packing.computed
    value, logit = oracle.windows(
        p.packing, p.ratio, p.coff, rows, (leaves[0], leaves[1].float(), leaves[2])
    )
    weight = torch.softmax(logit, dim=1).to(BF16)
    out = (value * weight).sum(dim=1)
    assert value.dtype == out.dtype == BF16
    return (out.detach(), *torch.autograd.grad(out, leaves, p.given.grad_out[:rows]))


def near(name: str, found: torch.Tensor, other: torch.Tensor, bound: torch.Tensor) -> None:
    """Every element within `bound` of the other form's."""
    off = (found.double() - other.double()).abs()
    tally.count(f"upstream form, {name}", found.numel())
    tally.worst(f"upstream form, {name} over its bound", float((off / (bound + TINY)).amax()))
    assert bool((off <= bound * SLOP + TINY).all()), name


@pytest.mark.parametrize("head_dim", [128, 512])
@pytest.mark.parametrize(("ratio", "coff"), [*problems.CONFIGS, *problems.LONG_CONFIGS])
def test_results_are_those_of_bf16_weights_up_to_their_rounding(
    ratio: int, coff: int, head_dim: int
) -> None:
    packing = problems.packing("pack", ratio, [2000, ratio - 1, 300, 5 * ratio], after=3)
    p = harness.problem(packing, ratio, coff, head_dim, seed=ratio)
    rows = packing.computed
    out = torch.full((packing.rows, head_dim), torch.nan, dtype=BF16, device=DEVICE)
    large = [torch.full_like(p.given.kv, torch.nan) for _ in range(2)]
    grad_ape = torch.full_like(p.given.ape, torch.nan)
    harness.forward(p, out)
    harness.backward(p, *large, grad_ape)
    theirs = upstream(p)

    def window(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return oracle.windows(packing, ratio, coff, rows, inputs)

    wide = [t.double() for t in (p.given.kv, p.given.score, p.given.ape)]
    value, logit = window(*wide)
    weight = torch.softmax(logit, dim=1)
    gradient = p.given.grad_out[:rows].double()[:, None]
    near("out", out, theirs[0], 4 * ROUNDOFF * (weight * value.abs()).sum(dim=1))

    product = (gradient * value).abs()
    spread = weight * (product + (weight * product).sum(dim=1, keepdim=True))
    bounds = {
        "grad_kv": 3 * ROUNDOFF * weight * gradient.abs(),
        "grad_score": 3 * ROUNDOFF * spread,
    }
    none = torch.zeros_like(wide[2])
    for name, ours, other in zip(bounds, large, theirs[1:3], strict=True):
        pair = [window(t.double(), t.double(), none)[0] for t in (ours, other)]
        near(name, *pair, bounds[name])
    per_row = spread.sum(dim=0).view(coff, ratio, head_dim).transpose(0, 1).flatten(1)
    near("grad_ape", grad_ape, theirs[3], ROUNDOFF * per_row + 1e-6)
