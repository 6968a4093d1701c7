# SPDX-License-Identifier: Apache-2.0
"""Windows of 128 tokens on which R overflows or nearly does: its NaN and infinities, no others."""

from dataclasses import replace

import pytest
import torch

from gpu import gate_cases, harness, oracle, problems, tolerance
from gpu.buffers import DEVICE, Guarded
from gpu.gate_cases import OVERFLOW, RAGGED, Case
from gpu.harness import Problem
from gpu.problems import LONG
from gpu.test_backward import Buffers

pytestmark = [pytest.mark.gpu, pytest.mark.L0]

COFFS = pytest.mark.parametrize("coff", [1, 2])
BF16 = torch.bfloat16


def forwards(p: Problem) -> list[torch.Tensor]:
    """`out` of every variant that serves the problem, written over poison."""
    out = Guarded(p.packing.rows, (p.head_dim,), BF16)
    found = []
    for variant in (None, *harness.variants("forward", p.ratio, p.coff)):
        if variant is None or harness.serves(variant, p, out.view):
            out.poison()
            harness.forward(p, out.view, variant)
            assert out.outside_untouched(), variant
            found.append(out.view.clone())
    return found


def check_masks(p: Problem, *, grad_ape: bool = True) -> None:
    """NaN and infinities of all results are R's, and zeros where nothing reads."""
    wanted = oracle.output(p.packing, p.given, p.ratio, p.coff)
    for out in forwards(p):
        assert not tolerance.masks_differ("out", out, wanted.out)
        off = (out.double() - wanted.out.double()).abs()
        assert bool((off <= wanted.bound)[wanted.out.isfinite()].all())
    near = oracle.gradients(p.packing, p.given, p.ratio, p.coff)
    buffers = Buffers(p, harness.PLAIN)
    large = (buffers.grad_kv, buffers.grad_score)
    for variant in (None, *harness.variants("backward", p.ratio, p.coff)):
        if variant is not None and not harness.serves(variant, p, *large, grad_out=True):
            continue
        bits = []
        for _ in range(2):
            buffers.poison()
            harness.backward(p, *large, buffers.grad_ape, variant)
            bits.append([t.clone() for t in (*large, buffers.grad_ape)])
        for name, one, two in zip(("grad_kv", "grad_score", "grad_ape"), *bits, strict=True):
            assert torch.equal(one.view(torch.int16), two.view(torch.int16)), variant
            if grad_ape or name != "grad_ape":
                assert not tolerance.masks_differ(name, one, getattr(near, name)), variant
        assert not tolerance.not_zeroed(p, *large), variant
        assert buffers.outside_untouched(), variant


@COFFS
@pytest.mark.parametrize("head_dim", [40, 128, 512])
@pytest.mark.parametrize("kind", OVERFLOW)
def test_masks_are_those_of_r(kind: str, head_dim: int, coff: int) -> None:
    check_masks(gate_cases.build(Case(kind, LONG, coff, head_dim, RAGGED)))


@COFFS
@pytest.mark.parametrize("head_dim", [8, 128, 512])
def test_products_beyond_fp32_reach_the_gradients_as_in_r(head_dim: int, coff: int) -> None:
    packing = problems.named_packing("padding_rows_and_tokens", LONG)
    p = harness.problem(packing, LONG, coff, head_dim, seed=head_dim)
    random = torch.Generator(DEVICE).manual_seed(4)
    for given in (p.given.kv, p.given.grad_out):
        power = torch.rand(given.shape, generator=random, device=DEVICE) * 30.0
        given.copy_(given.float() * torch.pow(10.0, power))
    # grad_ape adds addends of both signs near the largest fp32: R leaves the order open.
    check_masks(p, grad_ape=False)


@COFFS
@pytest.mark.parametrize("distribution", ["scales", "lowest", "finite_bits"])
def test_out_is_finite_wherever_it_is_in_r(distribution: str, coff: int) -> None:
    packing = problems.named_packing("padding_rows_and_tokens", LONG)
    for head_dim in (6, 128, 512):
        p = harness.problem(packing, LONG, coff, head_dim, distribution=distribution, seed=head_dim)
        wanted = oracle.output(packing, p.given, LONG, coff).out
        for out in forwards(p):
            assert bool(out.isfinite()[wanted.isfinite()].all())


@COFFS
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_largest_values_stay_finite(sign: float, coff: int) -> None:
    packing = problems.named_packing("padding_rows_and_tokens", LONG)
    p = harness.problem(packing, LONG, coff, 128)
    p.given.kv.fill_(sign * torch.finfo(BF16).max)
    for out in forwards(p):
        assert bool(out.isfinite().all())


@COFFS
def test_windows_of_the_lowest_score_give_the_mean(coff: int) -> None:
    packing = problems.packing("one", LONG, [3 * LONG])
    p = harness.problem(packing, LONG, coff, 128)
    p.given.score.fill_(torch.finfo(BF16).min)
    p.given.kv.fill_(3.0)
    p.given.kv[-64:].fill_(5.0)
    mean = 3.0 + 2.0 * 64 / (LONG * coff)
    for out in forwards(p):
        assert bool((out[:-1] == 3.0).all())
        assert bool((out[-1] == mean).all())


@COFFS
def test_windows_of_minus_infinity_give_nan_and_no_others_do(coff: int) -> None:
    packing = problems.packing("two", LONG, [LONG, LONG])
    p = harness.problem(packing, LONG, coff, 128)
    p.given.score[:LONG].fill_(-torch.inf)
    p.given.score[LONG + 1 :].fill_(-torch.inf)
    for out in forwards(p):
        assert bool(out[0].isnan().all())
        assert bool((out[1] == p.given.kv[LONG, -128:]).all())


@COFFS
@pytest.mark.parametrize("at", [0, 31, 64, 127])
def test_one_finite_score_among_minus_infinity_takes_the_window(at: int, coff: int) -> None:
    packing = problems.packing("one", LONG, [LONG])
    p = harness.problem(packing, LONG, coff, 512)
    kept = p.given.score[at].clone()
    p.given.score.fill_(-torch.inf)
    p.given.score[at].copy_(kept)
    for out in forwards(p):
        assert bool((out[0] == p.given.kv[at, -512:]).all())
    check_masks(p)


@COFFS
def test_nan_that_no_window_reads_does_no_harm(coff: int) -> None:
    packing = problems.packing("starts_late", LONG, [LONG + 5, 2 * LONG], start=LONG, after=9)
    p = harness.problem(packing, LONG, coff, 128)
    clean = oracle.output(packing, p.given, LONG, coff)
    gradients = oracle.gradients(packing, p.given, LONG, coff)
    idle = ~oracle.consumed(packing, LONG, coff).to(DEVICE)
    kv, score = (t.clone() for t in (p.given.kv, p.given.score))
    for values in (kv, score):
        values.unflatten(1, (coff, 128))[idle] = torch.nan
    spoiled = replace(p, given=replace(p.given, kv=kv, score=score))
    for out in forwards(spoiled):
        assert not tolerance.masks_differ("out", out, clean.out)
    buffers = Buffers(spoiled, harness.PLAIN)
    for variant in (None, *harness.variants("backward", LONG, coff)):
        large = (buffers.grad_kv, buffers.grad_score)
        if variant is None or harness.serves(variant, spoiled, *large, grad_out=True):
            harness.backward(spoiled, *large, buffers.grad_ape, variant)
            for name, found in zip(("grad_kv", "grad_score"), large, strict=True):
                assert not tolerance.masks_differ(name, found, getattr(gradients, name)), variant
            assert bool(buffers.grad_ape.isfinite().all())
