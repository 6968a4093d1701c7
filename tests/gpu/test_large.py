# SPDX-License-Identifier: Apache-2.0
"""More than 2**31 elements: what an index product in 32 bits gets wrong."""

from dataclasses import dataclass, fields, replace

import pytest
import torch

from gpu import harness, oracle, problems
from gpu.buffers import DEVICE
from gpu.harness import Problem
from gpu.problems import Packing, Values

pytestmark = [pytest.mark.gpu, pytest.mark.L1]

RATIO, COFF, HEAD_DIM = 4, 2, 512
WIDTH = COFF * HEAD_DIM
TOKENS = (2**31 + 2**24) // WIDTH
LEAD, AFTER = 5, 3  # a first segment that shifts all blocks off multiples of 4; padding tokens
BLOCKS = (TOKENS - LEAD - AFTER) // RATIO
MIDDLE = (2**31 // WIDTH - LEAD) // RATIO  # the block that holds element 2**31
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Slice:
    """Some tokens and rows of the large problem as a small one with the same answers.

    skip: leading rows whose previous block lies outside the slice.
    """

    packing: Packing
    token: int
    row: int
    skip: int

    def of(self, given: Values) -> Values:
        """The slice's inputs."""
        tokens = slice(self.token, self.token + self.packing.tokens)
        rows = slice(self.row, self.row + self.packing.rows)
        return Values(given.kv[tokens], given.score[tokens], given.ape, given.grad_out[rows])


def inner(first: int, blocks: int, after: int) -> Slice:
    """Blocks of the second segment from number `first` on."""
    packing = problems.packing("inner", RATIO, [blocks * RATIO], after=after)
    return Slice(packing, LEAD + first * RATIO, 1 + first, 1)


SLICES = (
    Slice(problems.packing("first", RATIO, [LEAD, 64 * RATIO]), 0, 0, 0),
    inner(MIDDLE - 32, 64, 0),
    inner(BLOCKS - 64, 64, AFTER),
)


@pytest.fixture(scope="module")
def large() -> Problem:
    """Random inputs; grad_out is zero outside the slices, so that grad_ape is theirs alone."""
    packing = problems.packing("large", RATIO, [LEAD, BLOCKS * RATIO], after=AFTER)
    assert packing.tokens == TOKENS and packing.rows == BLOCKS + 1
    random = torch.Generator(DEVICE).manual_seed(3)
    kv, score = (
        torch.empty(TOKENS, WIDTH, dtype=BF16, device=DEVICE).normal_(0, std, generator=random)
        for std in (1.0, 1.5)
    )
    ape = torch.empty(RATIO, WIDTH, device=DEVICE).normal_(0, 0.25, generator=random)
    grad_out = torch.zeros(packing.rows, HEAD_DIM, dtype=BF16, device=DEVICE)
    for part in SLICES:
        rows = slice(part.row + part.skip, part.row + part.packing.rows)
        grad_out[rows].normal_(generator=random)
    prefixes = (harness.prefix(packing.cu_seqlens), harness.prefix(packing.cu_seqlens_comp))
    return Problem(packing, Values(kv, score, ape, grad_out), RATIO, COFF, *prefixes)


def test_forward_beyond_two_to_the_31(large: Problem) -> None:
    out = torch.empty(large.packing.rows, HEAD_DIM, dtype=BF16, device=DEVICE)
    for variant in (None, *harness.variants("forward", RATIO, COFF)):
        out.fill_(torch.nan)
        harness.forward(large, out, variant)
        assert not bool(out.isnan().any())
        for part in SLICES:
            wanted = oracle.output(part.packing, part.of(large.given), RATIO, COFF)
            rows = out[part.row : part.row + part.packing.rows]
            kept = oracle.Output(*(getattr(wanted, f.name)[part.skip :] for f in fields(wanted)))
            harness.assert_output(large, rows[part.skip :], kept, gate=True)


def test_backward_beyond_two_to_the_31(large: Problem) -> None:
    grad_kv, grad_score = (torch.empty_like(large.given.kv) for _ in range(2))
    grad_ape = torch.empty_like(large.given.ape)
    wanted = [oracle.gradients(part.packing, part.of(large.given), RATIO, COFF) for part in SLICES]
    total = replace(
        wanted[0],
        **{
            name: sum(getattr(w, name) for w in wanted)
            for name in ("grad_ape", "grad_ape_sum", "grad_ape_scale")
        },
    )
    for variant in (None, *harness.variants("backward", RATIO, COFF)):
        for poisoned in (grad_kv, grad_score, grad_ape):
            poisoned.fill_(torch.nan)
        harness.backward(large, grad_kv, grad_score, grad_ape, variant)
        harness.assert_grad_ape(grad_ape, total, large.packing.computed)
        for part, gradients in zip(SLICES, wanted, strict=True):
            tokens = slice(part.token, part.token + part.packing.tokens)
            harness.assert_equal("grad_kv", grad_kv[tokens], gradients.grad_kv)
            harness.assert_equal("grad_score", grad_score[tokens], gradients.grad_score)
            grad_kv[tokens] = 0
            grad_score[tokens] = 0
        # Everything else is +0: written, and without a gradient.
        assert not bool(grad_kv.any()) and not bool(grad_score.any())


def test_rows_that_lie_further_apart_than_two_to_the_31_elements() -> None:
    stride = 2**20
    packing = problems.packing("apart", 4, [2**11 + 9], extra_rows=1)
    near = harness.problem(packing, 4, 2, 64)
    inputs, outputs = (
        torch.full((packing.tokens, stride), torch.nan, dtype=BF16, device=DEVICE) for _ in range(2)
    )
    kv, score = inputs[:, :128], inputs[:, 128:256]
    kv.copy_(near.given.kv)
    score.copy_(near.given.score)
    p = replace(near, given=replace(near.given, kv=kv, score=score))
    wanted = oracle.output(packing, near.given, 4, 2)
    gradients = oracle.gradients(packing, near.given, 4, 2)
    for variant in harness.variants("forward", 4, 2):
        out = outputs[: packing.rows, :64].fill_(torch.nan)
        harness.forward(p, out, variant)
        harness.assert_output(p, out, wanted, gate=True)
    for variant in harness.variants("backward", 4, 2):
        grad_kv, grad_score = (outputs[:, at : at + 128].fill_(torch.nan) for at in (0, 128))
        grad_ape = torch.full_like(p.given.ape, torch.nan)
        harness.backward(p, grad_kv, grad_score, grad_ape, variant)
        harness.assert_equal("grad_kv", grad_kv, gradients.grad_kv)
        harness.assert_equal("grad_score", grad_score, gradients.grad_score)
        harness.assert_grad_ape(grad_ape, gradients, packing.computed, gate=True)


def results(p: Problem) -> list[torch.Tensor]:
    """Of every variant that serves it: out, and the three gradients."""
    found = []
    for variant in harness.variants("forward", p.ratio, p.coff):
        out = torch.full((p.packing.rows, p.head_dim), torch.nan, dtype=BF16, device=DEVICE)
        harness.forward(p, out, variant)
        found.append(out)
    for variant in harness.variants("backward", p.ratio, p.coff):
        kv, score, ape = (torch.full_like(t, torch.nan) for t in (*[p.given.kv] * 2, p.given.ape))
        harness.backward(p, kv, score, ape, variant)
        found += [kv, score, ape]
    return found


@pytest.mark.parametrize(("ratio", "coff"), [(4, 2), (128, 2)])
def test_as_many_segments_as_31_bits_count(ratio: int, coff: int) -> None:
    """All but one are empty: the results are, bit for bit, those of the one alone."""
    alone = harness.problem(
        problems.packing("alone", ratio, [3 * ratio + 1], after=2), ratio, coff, 128
    )
    wanted = results(alone)
    assert not any(bool(tensor.isnan().any()) for tensor in wanted)
    segments = 2**31 - 1
    prefixes = [torch.zeros(segments + 1, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    crowd = replace(alone, cu_seqlens=prefixes[0], cu_seqlens_comp=prefixes[1])
    for place in (segments - 1, segments // 2, 0):
        for entries, end in zip(prefixes, (3 * ratio + 1, 3), strict=True):
            entries[place + 1 :] = end
        for found, want in zip(results(crowd), wanted, strict=True):
            assert torch.equal(found.view(torch.uint8), want.view(torch.uint8))
