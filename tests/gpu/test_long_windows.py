# SPDX-License-Identifier: Apache-2.0
"""Windows of 128 tokens, every variant forced by name, against R, fp64 and the exact zeros."""

import random
from dataclasses import replace

import pytest
import torch

from gpu import harness, oracle, problems, tally, tolerance
from gpu.buffers import DEVICE
from gpu.harness import PLAIN, Placement, Problem
from gpu.problems import LONG
from gpu.test_backward import assert_accumulates, assert_keeps_to_workspace, backwards
from gpu.test_forward import ANYWHERE, forwards

pytestmark = [pytest.mark.gpu, pytest.mark.L0]

COFFS = pytest.mark.parametrize("coff", [1, 2])
HEAD_DIMS = (1, 2, 6, 40, 100, 128, 130, 512, 576)
BF16 = torch.bfloat16


def check_forward(p: Problem, placement: Placement = PLAIN, *, gate: bool = True) -> None:
    """The scheduled variant and every variant by name into poisoned, guarded memory."""
    wanted = oracle.output(p.packing, p.given, p.ratio, p.coff)
    for variant, out in forwards(p, placement):
        tolerance.assert_output(p, out.view, wanted, gate=gate)
        assert not tolerance.masks_differ("out", out.view, wanted.out), variant
        assert out.outside_untouched(), variant


def check_backward(p: Problem, placement: Placement = PLAIN, *, gate: bool = True) -> None:
    """As `check_forward`; tokens that no row reads get +0, bit for bit."""
    near = oracle.gradients(p.packing, p.given, p.ratio, p.coff)
    exact = oracle.gradients(p.packing, p.given, p.ratio, p.coff, torch.float64)
    for variant, buffers in backwards(p, placement):
        large = (buffers.grad_kv, buffers.grad_score)
        names = ("grad_kv", "grad_score", "grad_ape")
        for name, found in zip(names, (*large, buffers.grad_ape), strict=True):
            if found is not None:
                wanted, best = getattr(near, name), getattr(exact, name)
                tolerance.assert_tolerance(name, found, wanted, best, gate=gate)
                assert not tolerance.masks_differ(name, found, wanted), variant
        assert not tolerance.not_zeroed(p, *large), variant
        assert buffers.outside_untouched(), variant


def check(p: Problem, placement: Placement = PLAIN, *, gate: bool = True) -> None:
    """Both directions."""
    check_forward(p, placement, gate=gate)
    check_backward(p, placement, gate=gate)


@COFFS
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", problems.PACKING_NAMES)
def test_every_pack_at_every_head_dim(name: str, head_dim: int, coff: int) -> None:
    packing = problems.named_packing(name, LONG)
    check(harness.problem(packing, LONG, coff, head_dim, seed=head_dim))


@COFFS
def test_more_rows_than_a_grid_is_high(coff: int) -> None:
    """65,535 blocks lie below each other; further ones go on behind them."""
    packing = problems.packing("tall", LONG, [65_537 * LONG, 5], extra_rows=1)
    check_forward(harness.problem(packing, LONG, coff, 2))


@COFFS
@pytest.mark.parametrize(("segments", "every"), [(3_000, 1), (100_000, 150)])
def test_zeros_of_many_segments(segments: int, every: int, coff: int) -> None:
    """All of them short, or most of them empty, so that a block looks up many.

    With coff 2 there are more blocks than a thread a token makes, and several warps share the same
    tokens; with coff 1 and 3,000 segments fewer, and warps go round more than once.
    """
    dice = random.Random(segments)
    lengths = [0 if i % every else dice.randrange(3 * LONG) for i in range(segments)]
    packing = problems.packing("zeros", LONG, lengths, after=1_000, extra_rows=3)
    check_backward(harness.problem(packing, LONG, coff, 8))


@COFFS
def test_few_elements_of_the_small_packs_together_differ_from_r(coff: int) -> None:
    counts = dict.fromkeys(("out", "grad_kv", "grad_score"), 0)
    totals = dict(counts)
    for name in problems.PACKING_NAMES:
        packing = problems.named_packing(name, LONG)
        if not packing.rows:
            continue
        p = harness.problem(packing, LONG, coff, 512, seed=77)
        found = [torch.empty(packing.rows, 512, dtype=BF16, device=DEVICE)]
        found += [torch.empty_like(p.given.kv) for _ in range(2)]
        harness.forward(p, found[0])
        harness.backward(p, *found[1:], torch.empty_like(p.given.ape))
        near = oracle.gradients(packing, p.given, LONG, coff)
        wanted = oracle.output(packing, p.given, LONG, coff).out
        for tensor, one, two in zip(
            counts, found, (wanted, near.grad_kv, near.grad_score), strict=True
        ):
            counts[tensor] += int((~harness.same(one, two)).sum())
            totals[tensor] += two.numel()
    for tensor, total in totals.items():
        assert total >= tolerance.COUNTABLE
        assert counts[tensor] <= tolerance.SHARE * total, (tensor, counts[tensor], total)


@COFFS
@pytest.mark.parametrize("head_dim", [6, 128, 512])
@pytest.mark.parametrize("distribution", ["gaps", "masks", "subnormal"])
def test_finite_inputs_of_other_kinds_are_as_near_to_fp64_as_r(
    distribution: str, head_dim: int, coff: int
) -> None:
    packing = problems.named_packing("padding_rows_and_tokens", LONG)
    check(
        harness.problem(packing, LONG, coff, head_dim, distribution=distribution, seed=head_dim),
        gate=False,
    )


@COFFS
@pytest.mark.parametrize("head_dim", [1, 6, 100, 128, 512])
@ANYWHERE
def test_views_anywhere_in_memory(placement: Placement, head_dim: int, coff: int) -> None:
    packing = problems.named_packing("ragged", LONG)
    check(harness.problem(packing, LONG, coff, head_dim, placement=placement), placement)


@COFFS
@pytest.mark.parametrize("head_dim", [2, 128, 512])
def test_absent_ape_is_zeros_and_has_no_gradient(head_dim: int, coff: int) -> None:
    packing = problems.named_packing("ragged", LONG)
    check(harness.problem(packing, LONG, coff, head_dim, ape=False))


@COFFS
@pytest.mark.parametrize("head_dim", [1, 40, 128, 512])
def test_one_row_of_grad_out_and_of_kv_broadcasts(head_dim: int, coff: int) -> None:
    packing = problems.named_packing("padding_rows_and_tokens", LONG)
    p = harness.problem(packing, LONG, coff, head_dim)
    row = p.given.grad_out[:1].expand(packing.rows, -1)
    check_backward(replace(p, given=replace(p.given, grad_out=row)))
    row = p.given.kv[:1].clone().expand(packing.tokens, -1)
    check(replace(p, given=replace(p.given, kv=row)), gate=False)


@COFFS
@pytest.mark.parametrize("head_dim", [128, 512])
def test_padding_rows_ignore_their_gradient_nan_included(head_dim: int, coff: int) -> None:
    packing = problems.named_packing("padding_rows_and_tokens", LONG)
    p = harness.problem(packing, LONG, coff, head_dim)
    p.given.grad_out[packing.computed :].fill_(torch.nan)
    check_backward(p)


@COFFS
@pytest.mark.parametrize("name", ["random", "no_rows_asked"])
def test_accumulate_adds_the_sum_once(name: str, coff: int) -> None:
    p = harness.problem(problems.named_packing(name, LONG), LONG, coff, 128)
    for variant in (None, *harness.variants("backward", LONG, coff)):
        assert_accumulates(p, variant)


@COFFS
@pytest.mark.parametrize("head_dim", [128, 512])
def test_workspace_is_never_overrun(head_dim: int, coff: int) -> None:
    assert_keeps_to_workspace(
        harness.problem(problems.named_packing("many_short", LONG), LONG, coff, head_dim)
    )


@COFFS
@pytest.mark.parametrize("head_dim", [6, 128, 512])
def test_repeats_give_the_same_bits_on_any_stream_and_workspace(head_dim: int, coff: int) -> None:
    packing = problems.packing("long", LONG, [20_000, 3, 9000], extra_rows=2)
    p = harness.problem(packing, LONG, coff, head_dim)

    def run(variants: tuple[str | None, str | None], offset: int) -> list[torch.Tensor]:
        out = torch.full((packing.rows, head_dim), torch.nan, dtype=BF16, device=DEVICE)
        found = [torch.full_like(p.given.kv, torch.nan) for _ in range(2)]
        found.append(torch.full_like(p.given.ape, torch.nan))
        scratch = harness.workspace(p, offset)
        on = torch.cuda.Stream(DEVICE).cuda_stream if offset else None
        torch.cuda.synchronize()
        if variants[0] is None or harness.serves(variants[0], p, out):
            harness.forward(p, out, variants[0], on)
        if variants[1] is None or harness.serves(variants[1], p, *found[:2], grad_out=True):
            harness.backward(p, *found, variants[1], scratch=scratch, on=on)
        torch.cuda.synchronize()
        return [out, *found]

    forward, backward = (harness.variants(x, LONG, coff) for x in ("forward", "backward"))
    count = max(len(forward), len(backward))
    pairs = [(forward[i % len(forward)], backward[i % len(backward)]) for i in range(count)]
    for variants in ((None, None), *pairs):
        first = run(variants, 0)
        for offset in (16, 123456 * 16):
            for one, two in zip(first, run(variants, offset), strict=True):
                assert torch.equal(one.view(torch.int16), two.view(torch.int16)), variants
                tally.count("long windows, bits of a repeat", one.numel())
