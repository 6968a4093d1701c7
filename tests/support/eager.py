# SPDX-License-Identifier: Apache-2.0
"""Reference R as torch's eager autograd computes it, on the tensors' own device.

Gather, add, `softmax(dim=1)` over `(rows, window, head_dim)`, weighted sum, one rounding. Nothing
here knows the library under test.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from support.packs import Pack


class Result(NamedTuple):
    """Output and gradients; `grad_ape` is None without an APE."""

    out: torch.Tensor
    grad_kv: torch.Tensor
    grad_score: torch.Tensor
    grad_ape: torch.Tensor | None


def _windows(pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
    """First token of each real computed row's own block, and whether a previous one exists."""
    starts, rows = pack.cu_seqlens.long(), pack.cu_seqlens_comp.long()
    real = min(int(rows[-1]), pack.total_comp)
    row = torch.arange(real, device=starts.device)
    segment = torch.searchsorted(rows, row, right=True) - 1
    inside = row - rows[segment]
    return starts[segment] + inside * pack.ratio, inside > 0


def _pool(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor | None,
    start: torch.Tensor,
    previous: torch.Tensor,
    ratio: int,
    coff: int,
) -> torch.Tensor:
    """Unrounded rows `(len(start), head_dim)`."""
    d = kv.shape[1] // coff
    own = start[:, None] + torch.arange(ratio, device=kv.device)
    window_kv, window_score = [], []
    for half in range(coff):
        columns = slice(half * d, (half + 1) * d)
        before = half == 0 and coff == 2
        token = (own - ratio).clamp(min=0) if before else own
        values, scores = kv[:, columns][token], score[:, columns][token]
        if ape is not None:
            scores = scores + ape[:, columns]
        if before:
            missing = ~previous[:, None, None]
            values = values.masked_fill(missing, 0.0)
            scores = scores.masked_fill(missing, -torch.inf)
        window_kv.append(values)
        window_score.append(scores)
    weights = torch.cat(window_score, dim=1).softmax(dim=1)
    return (torch.cat(window_kv, dim=1) * weights).sum(dim=1)


def eager(pack: Pack, *, compute: torch.dtype = torch.float32) -> Result:
    """Output and gradients of a pack; padding rows are pooled and give no gradient.

    Args:
        pack: the problem.
        compute: float32 is R, results rounded once to the inputs' dtype; float64 is the oracle,
            results unrounded in float64.
    """
    exact = compute == torch.float64
    kv = pack.kv.detach().to(compute) if exact else pack.kv.detach().clone()
    score = pack.score.detach().to(compute) if exact else pack.score.detach().clone()
    ape = None if pack.ape is None else pack.ape.detach().to(compute, copy=True)
    leaves = [t.requires_grad_() for t in (kv, score, ape) if t is not None]
    wide_kv, wide_score = kv.to(compute), score.to(compute)

    start, previous = _windows(pack)
    real = start.shape[0]
    rows = _pool(wide_kv, wide_score, ape, start, previous, pack.ratio, pack.coff).to(kv.dtype)
    grads = torch.autograd.grad(rows, leaves, pack.grad_out[:real].to(rows.dtype))
    out = rows.detach()
    if pack.total_comp > real:
        with torch.no_grad():
            at_zero = torch.zeros(1, dtype=torch.long, device=kv.device)
            padding = _pool(
                wide_kv, wide_score, ape, at_zero, at_zero > 0, pack.ratio, pack.coff
            ).to(kv.dtype)
        out = torch.cat([out, padding.expand(pack.total_comp - real, -1)])
    return Result(out, grads[0], grads[1], grads[2] if ape is not None else None)
