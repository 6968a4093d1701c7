# SPDX-License-Identifier: Apache-2.0
"""The CPU reference in the kernels' place: the net of random problems without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import csa_runtime
from csa_runtime.reference import reference_backward, reference_forward
from gpu import oracle, tally
from gpu.corpus_check import Oracles
from gpu.harness import Problem
from gpu.problems import Packing, Values


@pytest.fixture(autouse=True)
def own_tally(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the CPU compares, planted faults too, stays out of the GPU suite's record."""
    monkeypatch.setattr(tally, "COMPARED", Counter())
    monkeypatch.setattr(tally, "WORST", {})


Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass
class Reference:
    """The library's CPU path as the only variant, and a fault to plant.

    fault: given the problem and what a call of its operation wrote, does harm.
    calls: of `fault` so far.
    """

    operation: str = ""
    fault: Callable[[Reference, Problem, tuple[torch.Tensor, ...]], None] | None = None
    calls: int = 0
    device = torch.device("cpu")

    def variants(self, operation: str, p: Problem, outputs: Any) -> list[str | None]:
        """The one there is."""
        return [None]

    def forward(self, p: Problem, out: torch.Tensor, variant: str | None) -> None:
        """Computes `out`."""
        options = {"ratio": p.ratio, "coff": p.coff, "total_comp": p.packing.rows}
        csa_runtime.compressor_forward(*inputs(p.given, p), **options, out=out)
        self._spoil("forward", p, (out,))

    def backward(
        self, p: Problem, grads: Grads, variant: str | None, accumulate: bool, surroundings: int
    ) -> None:
        """Computes the gradients."""
        csa_runtime.compressor_backward(
            *inputs(p.given, p), p.given.grad_out, ratio=p.ratio, coff=p.coff,
            grads=grads, accumulate=accumulate and grads[2] is not None,
        )  # fmt: skip
        self._spoil("backward", p, tuple(t for t in grads if t is not None))

    def _spoil(self, operation: str, p: Problem, written: tuple[torch.Tensor, ...]) -> None:
        if self.fault is not None and operation == self.operation:
            self.fault(self, p, written)
            self.calls += 1


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
    """The reference's: of R's fusions torch has those on a GPU alone. In fp64 torch's."""
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
