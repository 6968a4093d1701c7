# SPDX-License-Identifier: Apache-2.0
"""The operation in torch's own: gather, add, softmax, weighted sum, one rounding, and autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from csa_runtime.bench.clock import Call
from csa_runtime.bench.packs import Pack
from csa_runtime.bench.problem import Problem


def pooled(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_comp: Tensor,
    *,
    pack: Pack,
) -> Tensor:
    """`out` of a pack, its prefixes full: (rows, head_dim), intermediates in fp32.

    Never waits for the device, so a graph can capture it.
    """
    ratio, coff, d, _ = pack
    row = torch.arange(pack.rows, device=kv.device)
    starts, firsts = cu_seqlens.long(), cu_seqlens_comp.long()
    segment = torch.searchsorted(firsts, row, right=True) - 1
    inside = row - firsts[segment]
    start = starts[segment] + inside * ratio
    own = start[:, None] + torch.arange(ratio, device=kv.device)
    values, scores = [], []
    for half in range(coff):
        columns = slice(half * d, (half + 1) * d)
        before = half == 0 and coff == 2
        token = (own - ratio).clamp(min=0) if before else own
        value = kv[:, columns][token].float()
        weight = score[:, columns][token] + ape[:, columns]
        if before:
            missing = (inside == 0)[:, None, None]
            value = value.masked_fill(missing, 0.0)
            weight = weight.masked_fill(missing, -torch.inf)
        values.append(value)
        scores.append(weight)
    weights = torch.cat(scores, dim=1).softmax(dim=1)
    return (torch.cat(values, dim=1) * weights).sum(dim=1).to(kv.dtype)


class Eager:
    """torch's eager mode."""

    def calls(self, problem: Problem) -> dict[str, Call]:
        """Forward without a graph of autograd, its backward alone, and one after the other."""
        kv, score, ape, *prefixes = problem.inputs
        leaves = tuple(tensor.detach().requires_grad_() for tensor in (kv, score, ape))
        inputs, grad_out = (*leaves, *prefixes), problem.grad_out

        def record() -> Tensor:
            return pooled(*inputs, pack=problem.pack)

        def forward() -> Tensor:
            with torch.no_grad():
                return record()

        recorded = record()  # on the current stream, on which autograd then runs the backward

        def backward() -> Any:
            return torch.autograd.grad(recorded, leaves, grad_out, retain_graph=True)

        def both() -> Any:
            return torch.autograd.grad(record(), leaves, grad_out)

        return {"forward": forward, "backward": backward, "both": both}

    def host_calls(self, problem: Problem) -> dict[str, Call]:
        """With and without a gradient."""
        calls = self.calls(problem)
        return {"eager, no gradient": calls["forward"], "eager and autograd.grad": calls["both"]}
