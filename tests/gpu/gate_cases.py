# SPDX-License-Identifier: Apache-2.0
"""The numerics gate's cases: the same packs and seeds for every window."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from gpu import harness, problems
from gpu.buffers import placed
from gpu.harness import Placement, Problem

PAIRS = ((1, 128), (1, 512), (2, 128), (2, 512))  # (coff, head_dim)
RAGGED = (127, 128, 129, 0, 300, 1000)
LARGE = {(1, 128): 131_072, (1, 512): 65_536, (2, 512): 131_072}
SCALE = 64.0
SCALED_PAIR, SCALED_LENGTHS = (2, 512), (8192,)
LARGEST = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True)
class Case:
    """One pack under one window.

    kind: "unit", "padding", "scaled", "reach" (takes a schedule row that no other case takes),
    "forced" (a variant by name) or a key of OVERFLOW.
    offset, ape_offset: bytes that kv, score and grad_out, and ape, lie off a 256-byte boundary.
    forward, backward: variants to force.
    """

    kind: str
    ratio: int
    coff: int
    head_dim: int
    lengths: tuple[int, ...]
    extra_rows: int = 0
    after: int = 0
    offset: int = 0
    ape_offset: int = 0
    forward: str | None = None
    backward: str | None = None

    @property
    def name(self) -> str:
        """Window and pack in words."""
        pack = f"{self.lengths[0]}" if len(self.lengths) == 1 else f"{len(self.lengths)} segments"
        away = (self.offset, self.ape_offset)
        more = f" {away[0]} and {away[1]} bytes off" if any(away) else ""
        return f"r{self.ratio} c{self.coff} d{self.head_dim} {pack}, {self.kind}{more}"

    @property
    def tokens(self) -> int:
        """T."""
        return sum(self.lengths) + self.after


def unit_cases(ratio: int) -> list[Case]:
    """The 15 unit-scale cases."""
    found = []
    for coff, head_dim in PAIRS:
        packs = [(128,), RAGGED, (8192,)]
        if (coff, head_dim) in LARGE:
            packs.append((LARGE[coff, head_dim],))
        found += [Case("unit", ratio, coff, head_dim, pack) for pack in packs]
    return found


def cases(ratio: int) -> list[Case]:
    """All fixed cases of a ratio, the scaled one after its twin."""
    return [
        *unit_cases(ratio),
        *(Case("padding", ratio, *pair, RAGGED, extra_rows=3, after=64) for pair in PAIRS),
        Case("scaled", ratio, *SCALED_PAIR, SCALED_LENGTHS),
        *(Case(kind, ratio, *pair, RAGGED) for kind in OVERFLOW for pair in PAIRS),
    ]


def build(case: Case, seed: int = 1) -> Problem:
    """The case on the GPU; a scaled case has its twin's values, scaled."""
    packing = problems.packing(
        case.name, case.ratio, list(case.lengths), after=case.after, extra_rows=case.extra_rows
    )
    own = zlib.crc32(f"{case.coff} {case.head_dim} {case.lengths}".encode()) + seed
    placement = Placement("gate", offset=case.offset)
    p = harness.problem(
        packing, case.ratio, case.coff, case.head_dim, seed=own, placement=placement
    )
    ape = placed(p.given.ape, 0, case.ape_offset)
    p = replace(p, given=replace(p.given, ape=ape))
    if case.kind == "scaled":
        p.given.kv.mul_(SCALE)
        p.given.grad_out.mul_(SCALE)
    elif case.kind == "padding":
        p.given.grad_out[packing.computed :].fill_(torch.nan)
    elif case.kind in OVERFLOW:
        OVERFLOW[case.kind](p)
    return p


def _sums(p: Problem) -> None:
    p.given.score.fill_(LARGEST)
    assert p.given.ape is not None
    p.given.ape.fill_(torch.finfo(torch.float32).max)


def _one_sum(p: Problem) -> None:
    """One score + ape is infinite, in the columns of each half: those columns alone are NaN."""
    assert p.given.ape is not None
    token, at = _inside(p)
    for half in range(p.coff):
        column = half * p.head_dim + 3
        p.given.score[token, column] = LARGEST
        p.given.ape[at, column] = torch.finfo(torch.float32).max


def _one_product(p: Problem) -> None:
    """One grad_out * kv of each half is infinite; the windows' other rows are not touched."""
    token, _ = _inside(p)
    p.given.grad_out.fill_(4.0)
    for half in range(p.coff):
        p.given.kv[token, half * p.head_dim + 5] = LARGEST


def _lowest(p: Problem) -> None:
    p.given.score.fill_(-LARGEST)


def _lowest_chunk(p: Problem) -> None:
    """In the first block of each segment a run of positions is masked."""
    _masked_chunk(p, -LARGEST)


def _minus_inf_chunk(p: Problem) -> None:
    _masked_chunk(p, -torch.inf)


def _minus_inf(p: Problem) -> None:
    p.given.score.fill_(-torch.inf)


def _lowest_sums(p: Problem) -> None:
    """Score + ape is -inf everywhere."""
    _lowest(p)
    assert p.given.ape is not None
    p.given.ape.fill_(-torch.finfo(torch.float32).max)


def _largest_values(p: Problem) -> None:
    """`out` is the largest bf16: sums that are not normalised overflow."""
    p.given.kv.fill_(LARGEST)
    p.given.score.fill_(0.0)
    p.given.grad_out.clamp_(-0.5, 0.5)


def _inside(p: Problem) -> tuple[int, int]:
    """A token in a middle block of the last segment, and its place in the block."""
    at = p.ratio // 2 + 1 if p.ratio > 2 else 1
    return p.packing.cu_seqlens[-2] + 2 * p.ratio + at, at


def _masked_chunk(p: Problem, value: float) -> None:
    eighth = max(p.ratio // 8, 1)
    for start in p.packing.cu_seqlens[:-1]:
        p.given.score[start : start + eighth].fill_(value)
        last = start + p.ratio + p.ratio // 2
        p.given.score[last : last + 2 * eighth].fill_(value)


OVERFLOW: dict[str, Callable[[Problem], None]] = {
    "infinite scores": _sums,
    "one infinite score": _one_sum,
    "one infinite product": _one_product,
    "lowest scores": _lowest,
    "lowest scores in a chunk": _lowest_chunk,
    "infinitely low sums": _lowest_sums,
    "scores of -inf": _minus_inf,
    "scores of -inf in a chunk": _minus_inf_chunk,
    "largest values": _largest_values,
}


def forced(case: Case, operation: str, variant: str) -> Case:
    """The case with one direction's variant forced."""
    return replace(case, kind="forced", **{operation: variant})
