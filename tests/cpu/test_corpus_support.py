# SPDX-License-Identifier: Apache-2.0
"""The net of random problems on the CPU: the reference passes it, planted faults do not."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import csa_runtime
from csa_runtime.reference import reference_backward, reference_forward
from gpu import corpus, oracle, problems
from gpu.corpus import Spec
from gpu.corpus_check import Oracles, Shares, check, check_hostile
from gpu.harness import Problem
from gpu.problems import LONG, Packing, Values

pytestmark = pytest.mark.L0

CONFIGS = pytest.mark.parametrize(("ratio", "coff"), [*problems.CONFIGS, *problems.LONG_CONFIGS])
ELEMENTS = (500, 3_000)
Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass
class Reference:
    """The library's CPU path as the only variant; `spoil` may then do harm, `spoil_at` calls in.

    spoil: of the problem and what the call wrote to.
    """

    spoil: Callable[..., None] | None = None
    device = torch.device("cpu")
    calls: int = 0

    def variants(self, operation: str, p: Problem, outputs: Any) -> list[str | None]:
        """The one there is."""
        return [None]

    def forward(self, p: Problem, out: torch.Tensor, variant: str | None) -> None:
        """Computes `out`."""
        options = {"ratio": p.ratio, "coff": p.coff, "total_comp": p.packing.rows}
        csa_runtime.compressor_forward(*inputs(p.given, p), **options, out=out)
        self.end(p, out)

    def backward(
        self, p: Problem, grads: Grads, variant: str | None, accumulate: bool, surroundings: int
    ) -> None:
        """Computes the gradients."""
        csa_runtime.compressor_backward(
            *inputs(p.given, p), p.given.grad_out, ratio=p.ratio, coff=p.coff,
            grads=grads, accumulate=accumulate and grads[2] is not None,
        )  # fmt: skip
        self.end(p, *grads)

    def end(self, p: Problem, *written: torch.Tensor | None) -> None:
        """Does the harm."""
        self.calls += 1
        if self.spoil is not None:
            self.spoil(self, p, *written)


def inputs(given: Values, p: Problem | Packing) -> tuple[Any, ...]:
    """Positional arguments of the array calls."""
    prefixes = (
        torch.as_tensor(getattr(p, name), dtype=torch.int32)
        for name in ("cu_seqlens", "cu_seqlens_comp")
    )
    return given.kv, given.score, given.ape, *prefixes


def output(packing: Packing, given: Values, ratio: int, coff: int) -> oracle.Output:
    """The bounds of the GPU's oracle around the reference's `out`."""
    found = oracle.output(packing, given, ratio, coff)
    options = {"ratio": ratio, "coff": coff, "total_comp": packing.rows}
    return replace(found, out=reference_forward(*inputs(given, packing), **options))


def gradients(
    packing: Packing, given: Values, ratio: int, coff: int, dtype: torch.dtype = torch.float32
) -> oracle.Gradients:
    """The reference's, which fuses what R fuses; torch's does so on a GPU alone. fp64 is torch's."""
    if dtype != torch.float32:
        return oracle.gradients(packing, given, ratio, coff, dtype)
    window = {"ratio": ratio, "coff": coff}
    kv, score, _ = reference_backward(*inputs(given, packing), given.grad_out, **window)
    # Unrounded, each token's gradient is an addend of grad_ape.
    wide = replace(given, kv=given.kv.float(), score=given.score.float())
    _, addends, total = reference_backward(*inputs(wide, packing), given.grad_out.float(), **window)
    scale = torch.zeros(ratio, given.kv.shape[1], dtype=torch.float64)
    d = given.grad_out.shape[1]
    starts, follows = oracle.block_starts(packing, ratio, packing.computed)
    places = starts[:, None] + torch.arange(ratio)
    scale[:, -d:] += addends.double().abs()[:, -d:][places].sum(dim=0)
    if coff == 2:
        scale[:, :d] += addends.double().abs()[:, :d][places[follows] - ratio].sum(dim=0)
    if total is None:
        total = torch.zeros_like(scale)
    return oracle.Gradients(kv, score, total, total.double(), scale)


ORACLES = Oracles(output, gradients)


@CONFIGS
def test_the_reference_passes(ratio: int, coff: int) -> None:
    runner, shares = Reference(), Shares()
    for seed in range(60 if ratio == LONG else 400):
        spec = corpus.draw(seed, ratio, coff, ELEMENTS)
        try:
            check(spec, runner, ORACLES, shares)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{spec}") from error
    assert not shares.broken(ratio)
