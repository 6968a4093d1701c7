# SPDX-License-Identifier: Apache-2.0
"""Reference R on the GPU: torch's eager autograd in fp32, and the same in fp64.

For ratio 2 and 4 and head_dim >= 2 eager's gradients are R; its weighted sum is not in R's order,
so `out` is summed here position by position. head_dim 1 is computed as two equal columns, because
a softmax over the last dimension takes another kernel of torch's.
"""

from dataclasses import dataclass

import torch

from gpu.problems import Packing, Values


@dataclass(frozen=True)
class Gradients:
    """grad_kv, grad_score (T, W) bf16 (fp64 for the fp64 oracle); grad_ape (ratio, W)."""

    grad_kv: torch.Tensor
    grad_score: torch.Tensor
    grad_ape: torch.Tensor
    grad_ape_sum: torch.Tensor  # the addends of grad_ape summed in fp64
    grad_ape_scale: torch.Tensor  # their absolute values summed in fp64


@dataclass(frozen=True)
class Output:
    """out (rows, d): R in bf16; fp64; and how far from R the contract lets an element be.

    summed: as R, but added up in torch's own order.
    """

    out: torch.Tensor
    out64: torch.Tensor
    bound: torch.Tensor
    summed: torch.Tensor


def block_starts(packing: Packing, ratio: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First token of each of `rows` rows (0 for padding), and whether a block precedes it."""
    starts = torch.zeros(rows, dtype=torch.int64)
    follows = torch.zeros(rows, dtype=torch.bool)
    comp = torch.tensor(packing.cu_seqlens_comp, dtype=torch.int64)
    real = min(rows, packing.computed)
    row = torch.arange(real)
    segment = torch.searchsorted(comp, row, right=True) - 1
    within = row - comp[segment]
    starts[:real] = torch.tensor(packing.cu_seqlens, dtype=torch.int64)[segment] + within * ratio
    follows[:real] = within > 0
    return starts, follows


def consumed(packing: Packing, ratio: int, coff: int) -> torch.Tensor:
    """Which token positions a computed real row reads: (T, coff), a column for each half of W."""
    found = torch.zeros(packing.tokens, coff, dtype=torch.bool)
    starts, follows = block_starts(packing, ratio, packing.computed)
    own = starts[:, None] + torch.arange(ratio)
    found[own.flatten(), coff - 1] = True
    if coff == 2:
        found[own[follows].flatten() - ratio, 0] = True
    return found


def windows(
    packing: Packing, ratio: int, coff: int, rows: int, inputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scores of every window, (rows, coff * ratio, d), -inf and 0 where none exists."""
    kv, score, ape = inputs
    head_dim = kv.shape[1] // coff
    starts, follows = (t.to(kv.device) for t in block_starts(packing, ratio, rows))
    own = starts[:, None] + torch.arange(ratio, device=kv.device)
    tail = slice((coff - 1) * head_dim, coff * head_dim)
    value = kv[:, tail][own]
    logit = score[:, tail][own] + ape[:, tail]
    if coff == 1:
        return value, logit
    before = (own - ratio).clamp_min(0)
    exists = follows[:, None, None]
    previous = torch.where(exists, kv[:, :head_dim][before], 0.0)
    earlier = torch.where(exists, score[:, :head_dim][before] + ape[:, :head_dim], -torch.inf)
    return torch.cat([previous, value], dim=1), torch.cat([earlier, logit], dim=1)


def leaves(
    given: Values, ratio: int, coff: int, dtype: torch.dtype
) -> tuple[list[torch.Tensor], bool]:
    """Inputs in `dtype` that want gradients, head_dim 1 doubled (and whether it was)."""
    ape = given.ape
    if ape is None:
        ape = torch.zeros(ratio, given.kv.shape[1], device=given.kv.device)
    doubled = given.kv.shape[1] == coff
    found = [t.repeat_interleave(2, dim=1) if doubled else t for t in (given.kv, given.score, ape)]
    return [t.detach().to(dtype, copy=True).requires_grad_() for t in found], doubled


def output(packing: Packing, given: Values, ratio: int, coff: int) -> Output:
    """R's `out`, padding rows included, with the contract's bound around it."""
    if packing.rows == 0:
        empty = given.grad_out.new_empty(0, given.grad_out.shape[1])
        return Output(empty, empty.double(), empty.double(), empty)
    inputs, doubled = leaves(given, ratio, coff, torch.float32)
    with torch.no_grad():
        value, logit = windows(packing, ratio, coff, packing.rows, tuple(inputs))
        weight = torch.softmax(logit, dim=1)
        total = torch.zeros_like(value[:, 0])
        for k in range(value.shape[1]):
            product = weight[:, k] * value[:, k]
            total = total + product
        out = total.to(torch.bfloat16)
        summed = (weight * value).sum(dim=1).to(torch.bfloat16)
        step = torch.exp2(torch.frexp(out.double().abs())[1].double() - 8)
        step = torch.where(out == 0, 0.0, step).clamp_min(2.0**-133)
        spread = (weight.double() * value.double().abs()).sum(dim=1)
        # A long window's sums are added in another order: 256 addends, each rounding 2**-24.
        slack = 2.0**-20 if ratio <= 4 else 2.0**-16
        bound = step + spread * slack + value.double().abs().amax(dim=1) * 2.0**-126
        exact, _ = leaves(given, ratio, coff, torch.float64)
        value, logit = windows(packing, ratio, coff, packing.rows, tuple(exact))
        out64 = (torch.softmax(logit, dim=1) * value).sum(dim=1)
    every = slice(None, None, 2 if doubled else 1)
    return Output(out[:, every], out64[:, every], bound[:, every], summed[:, every])


def gradients(
    packing: Packing, given: Values, ratio: int, coff: int, dtype: torch.dtype = torch.float32
) -> Gradients:
    """Eager autograd over the real rows: bf16 inputs, `dtype` between, one rounding if fp32."""
    rounded = torch.bfloat16 if dtype == torch.float32 else dtype
    if packing.computed == 0:
        zeros = torch.zeros_like(given.kv, dtype=rounded)
        flat = torch.zeros(ratio, given.kv.shape[1], dtype=torch.float64, device=zeros.device)
        return Gradients(zeros, zeros, flat.to(dtype), flat, flat)
    inputs, doubled = leaves(given, ratio, coff, dtype)
    kv, score, ape = inputs
    grad_out = given.grad_out[: packing.computed]
    if doubled:
        grad_out = grad_out.repeat_interleave(2, dim=1)
    value, logit = windows(packing, ratio, coff, packing.computed, (kv, score, ape))
    logit.retain_grad()
    out = (torch.softmax(logit, dim=1) * value).sum(dim=1)
    out.backward(grad_out.to(dtype))
    head_dim = kv.shape[1] // coff
    addends = logit.grad.double()  # (rows, coff * ratio, d)
    if coff == 2:
        # Where no block precedes, eager's addend to ape is 0 whatever the window holds.
        _, follows = block_starts(packing, ratio, packing.computed)
        exists = follows.to(kv.device)[:, None, None]
        addends[:, :ratio] = torch.where(exists, addends[:, :ratio], 0.0)

    def over_rows(each: torch.Tensor) -> torch.Tensor:
        total = each.sum(dim=0)  # (coff * ratio, d) -> (ratio, coff * d)
        return total.view(coff, ratio, head_dim).transpose(0, 1).reshape(ratio, coff * head_dim)

    every = slice(None, None, 2 if doubled else 1)
    return Gradients(
        kv.grad[:, every].to(rounded),
        score.grad[:, every].to(rounded),
        ape.grad[:, every],
        over_rows(addends)[:, every],
        over_rows(addends.abs())[:, every],
    )
