# SPDX-License-Identifier: Apache-2.0
"""Packs and values: every shape the contract names, and inputs that break careless arithmetic."""

import functools
import random
from dataclasses import dataclass

import torch

from gpu.buffers import DEVICE

HEAD_DIMS = (1, 2, 3, 6, 8, 20, 64, 100, 127, 128, 130, 256, 512, 576, 1000, 7168)
CONFIGS = tuple((ratio, coff) for ratio in (2, 4) for coff in (1, 2))
LONG = 128
LONG_CONFIGS = ((LONG, 1), (LONG, 2))


@dataclass(frozen=True)
class Packing:
    """Prefixes in tokens and rows, the number of tokens T and of output rows."""

    name: str
    tokens: int
    rows: int
    cu_seqlens: tuple[int, ...]
    cu_seqlens_comp: tuple[int, ...]

    @property
    def segments(self) -> int:
        """B."""
        return len(self.cu_seqlens) - 1

    @property
    def computed(self) -> int:
        """Real rows that are computed."""
        return min(self.rows, self.cu_seqlens_comp[-1])


def packing(
    name: str,
    ratio: int,
    lengths: list[int],
    *,
    start: int = 0,
    after: int = 0,
    extra_rows: int = 0,
    rows: int | None = None,
    drop: int = 0,
) -> Packing:
    """Segments of `lengths` tokens from token `start`, then `after` tokens of padding.

    Each segment gives `len // ratio` rows, less `drop` where it has more. The output has
    `extra_rows` more rows than are real, or just `rows`.
    """
    cu, comp = [start], [0]
    for length in lengths:
        cu.append(cu[-1] + length)
        comp.append(comp[-1] + max(length // ratio - drop, 0))
    return Packing(
        name,
        cu[-1] + after,
        comp[-1] + extra_rows if rows is None else rows,
        tuple(cu),
        tuple(comp),
    )


@functools.cache
def packings(ratio: int) -> tuple[Packing, ...]:
    """Every kind of pack, small."""
    r = ratio
    dice = random.Random(20240 + r)
    most, many = (40, 2000) if r <= 4 else (5 * r, 200)
    mixed = [5 * r + 1, 0, r - 1, r, 2 * r, 3 * r + r - 1, 0, 0, 7 * r, 1]
    return (
        packing("one_segment", r, [9 * r]),
        packing("one_token_over", r, [r + 1]),
        packing("exactly_one_block", r, [r]),
        packing("ragged", r, mixed),
        packing("empty_segments_at_both_ends", r, [0, 0, 3 * r, 0, 2 * r, 0]),
        packing("all_shorter_than_ratio", r, [r - 1] * 5),
        packing("all_shorter_with_padding_rows", r, [r - 1] * 5, extra_rows=3),
        packing("tails", r, [2 * r + r - 1, r + 1, 4 * r + 1]),
        packing("padding_rows_and_tokens", r, [3 * r, 2 * r + 1], after=2 * r + 3, extra_rows=5),
        packing("starts_after_zero", r, [4 * r, 2 * r], start=r + 1, after=1, extra_rows=2),
        # As many tokens as rows would fill without tails.
        packing("padding_rows_for_tails", r, [40 * r] + [40 * r + r // 2] * 2, extra_rows=1),
        packing("fewer_rows_than_fit", r, [5 * r, r, 6 * r + 1], drop=1),
        packing("real_rows_beyond_capacity", r, [5 * r, 3 * r, 4 * r], rows=7),
        packing("no_rows_asked", r, [5 * r, 3 * r], rows=0),
        packing("no_segments", r, [], after=2 * r, rows=3),
        packing("no_segments_no_rows", r, [], after=2 * r, rows=0),
        packing("no_tokens", r, [], rows=0),
        packing("random", r, [dice.randrange(0, most) for _ in range(37)], after=5, extra_rows=2),
        # Not where rows shared out equally over the segments would put them.
        packing("long_among_short", r, [r] * 60 + [60 * r + 1] + [r] * 60, after=1),
        packing("many_short", r, [dice.randrange(0, 3 * r) for _ in range(many)], after=3),
        *filled(r),
    )


def filled(r: int) -> tuple[Packing, ...]:
    """As many tokens as blocks of all rows have, so that row b's block may start at token b * r.

    It does in the first two; in the others padding rows make up for what the segments lack.
    """
    return (
        packing("filled", r, [17 * r, 20 * r, 16 * r]),
        packing("filled_by_single_blocks", r, [r] * 31),
        packing("filled_with_tails", r, [20 * r + r - 1, 0, 27 * r + 1], extra_rows=1),
        packing("filled_from_a_later_token", r, [34 * r], start=r + 1, after=r - 1, extra_rows=2),
        packing("filled_with_fewer_rows", r, [18 * r, 20 * r], drop=2, extra_rows=4),
        packing("filled_by_padding", r, [r - 1], after=16 * r + 1, extra_rows=17),
    )


def named_packing(name: str, ratio: int) -> Packing:
    """The pack of that name."""
    return next(p for p in packings(ratio) if p.name == name)


PACKING_NAMES = tuple(p.name for p in packings(2))


@dataclass(frozen=True)
class Values:
    """kv, score (T, W) bf16; ape (ratio, W) fp32 or None; grad_out (rows, d) bf16."""

    kv: torch.Tensor
    score: torch.Tensor
    ape: torch.Tensor | None
    grad_out: torch.Tensor


FINITE = ("gate", "gaps", "scales", "masks", "subnormal", "lowest", "finite_bits")
DISTRIBUTIONS = (*FINITE, "overflow", "any_bits")


def values(
    distribution: str,
    packing: Packing,
    ratio: int,
    coff: int,
    head_dim: int,
    seed: int,
    device: torch.device = DEVICE,
) -> Values:
    """Random inputs on a device, the same for the same arguments."""
    random_ = torch.Generator(device).manual_seed(seed)
    wide, short = (packing.tokens, coff * head_dim), (packing.rows, head_dim)

    def normal(shape: tuple[int, int], scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=random_, device=device) * scale

    def uniform(shape: tuple[int, int], low: float, high: float) -> torch.Tensor:
        return torch.rand(shape, generator=random_, device=device) * (high - low) + low

    def bits(shape: tuple[int, int]) -> torch.Tensor:
        raw = torch.randint(-32768, 32768, shape, generator=random_, device=device)
        found = raw.to(torch.int16).view(torch.bfloat16)
        if distribution == "any_bits":
            return found
        return torch.where(torch.isfinite(found), found, torch.zeros_like(found))

    kv, score, grad_out = normal(wide), normal(wide, 1.5), normal(short)
    ape = normal((ratio, coff * head_dim), 0.25)
    if distribution in ("gaps", "scales", "overflow"):
        gap = uniform(wide, 70.0, 105.0) + 5.0 * (uniform(wide, 0.0, 1.0) < 0.1)
        score -= gap * (uniform(wide, 0.0, 1.0) < 0.6)
    if distribution == "scales":
        kv *= torch.exp2(uniform(wide, -24.0, 24.0))
        grad_out *= torch.pow(10.0, uniform(short, -36.0, 30.0))
    elif distribution == "overflow":
        kv *= torch.pow(10.0, uniform(wide, 0.0, 30.0))
        grad_out *= torch.pow(10.0, uniform(short, 0.0, 30.0))
    elif distribution == "masks":
        score.masked_fill_(uniform(wide, 0.0, 1.0) < 0.5, -torch.inf)
    elif distribution == "subnormal":
        kv *= torch.exp2(uniform(wide, -140.0, -110.0))
        grad_out *= torch.exp2(uniform(short, -140.0, 0.0))
    elif distribution == "lowest":
        lowest = torch.finfo(torch.bfloat16).min
        score.masked_fill_(uniform(wide, 0.0, 1.0) < 0.7, lowest)
        kv = torch.where(uniform(wide, 0.0, 1.0) < 0.5, -lowest, lowest)
    elif distribution in ("finite_bits", "any_bits"):
        kv, score, grad_out = bits(wide), bits(wide), bits(short)
    bf16 = torch.bfloat16
    return Values(kv.to(bf16), score.to(bf16), ape, grad_out.to(bf16))
