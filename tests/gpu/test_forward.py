# SPDX-License-Identifier: Apache-2.0
"""Forward, every variant forced by name, against R and fp64 on the same GPU."""

from collections.abc import Iterator

import pytest
import torch

from csa_runtime import launch_forward
from gpu import harness, oracle, problems
from gpu.buffers import DEVICE, Guarded
from gpu.harness import PLAIN, Placement, Problem

pytestmark = [pytest.mark.gpu, pytest.mark.L0]

CONFIGS = pytest.mark.parametrize(("ratio", "coff"), problems.CONFIGS)
PLACEMENTS = (
    Placement("rows_apart", pad=8),
    Placement("rows_apart_by_an_odd_number", pad=3),
    Placement("halves_of_one_buffer", fused=True),
    Placement("halves_of_one_wider_buffer", pad=4, fused=True),
    Placement("two_bytes_off", offset=2),
    Placement("four_bytes_off", offset=4),
    Placement("eight_bytes_off", pad=4, offset=8),
)
ANYWHERE = pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: placement.name)
BF16 = torch.bfloat16


def forwards(p: Problem, placement: Placement) -> Iterator[tuple[str | None, Guarded]]:
    """Output of the scheduled variant, then of every variant by name, launched into poison.

    A variant that does not serve the call is not given: it must refuse it and write nothing.
    """
    out = Guarded(p.packing.rows, (p.head_dim,), BF16, placement.pad, placement.offset)
    for variant in (None, *harness.variants("forward", p.ratio, p.coff)):
        out.poison()
        if variant is not None and not harness.serves(variant, p, out.view):
            if p.packing.rows:
                with pytest.raises(ValueError, match=variant):
                    harness.forward(p, out.view, variant)
                assert out.untouched()
            continue
        harness.forward(p, out.view, variant)
        yield variant, out


def check(p: Problem, placement: Placement = PLAIN, *, gate: bool = False) -> None:
    """Runs the scheduled variant and every variant by name into poisoned, guarded outputs."""
    wanted = oracle.output(p.packing, p.given, p.ratio, p.coff)
    for variant, out in forwards(p, placement):
        harness.assert_output(p, out.view, wanted, gate=gate)
        assert out.outside_untouched(), variant


@CONFIGS
@pytest.mark.parametrize("head_dim", problems.HEAD_DIMS)
@pytest.mark.parametrize("name", problems.PACKING_NAMES)
def test_every_pack_at_every_head_dim(name: str, head_dim: int, ratio: int, coff: int) -> None:
    check(harness.narrowed_problem(name, ratio, coff, head_dim), gate=True)


@CONFIGS
def test_few_elements_of_the_small_packs_together_differ_from_r(ratio: int, coff: int) -> None:
    differ = total = 0
    for name in problems.PACKING_NAMES:
        for head_dim in (6, 127, 576, 1000):
            packing = problems.named_packing(name, ratio)
            if packing.rows * head_dim >= harness.COUNTABLE:
                continue
            p = harness.problem(packing, ratio, coff, head_dim, seed=head_dim)
            out = Guarded(packing.rows, (head_dim,), BF16)
            harness.forward(p, out.view, None)
            wanted = oracle.output(p.packing, p.given, ratio, coff).out
            differ += int((~harness.same(out.view, wanted)).sum())
            total += wanted.numel()
    assert total >= harness.COUNTABLE
    assert differ <= 2e-4 * total


@CONFIGS
@pytest.mark.parametrize("head_dim", [2, 6, 128, 576])
@pytest.mark.parametrize("distribution", problems.FINITE)
def test_finite_inputs_of_any_size_stay_in_the_bound(
    distribution: str, head_dim: int, ratio: int, coff: int
) -> None:
    packing = problems.named_packing("random", ratio)
    p = harness.problem(packing, ratio, coff, head_dim, distribution=distribution, seed=head_dim)
    check(p)


@CONFIGS
@pytest.mark.parametrize("head_dim", [1, 6, 8, 127, 512])
@ANYWHERE
def test_views_anywhere_in_memory(
    placement: Placement, head_dim: int, ratio: int, coff: int
) -> None:
    packing = problems.named_packing("random", ratio)
    check(harness.problem(packing, ratio, coff, head_dim, placement=placement), placement)


@CONFIGS
@pytest.mark.parametrize("head_dim", [3, 128])
def test_absent_ape_is_zeros(head_dim: int, ratio: int, coff: int) -> None:
    packing = problems.named_packing("ragged", ratio)
    check(harness.problem(packing, ratio, coff, head_dim, ape=False))


@CONFIGS
def test_one_row_of_kv_broadcasts_to_every_token(ratio: int, coff: int) -> None:
    packing = problems.named_packing("ragged", ratio)
    p = harness.problem(packing, ratio, coff, 64)
    row = p.given.kv[:1].clone()
    given = problems.Values(
        row.expand(packing.tokens, -1), p.given.score, p.given.ape, p.given.grad_out
    )
    check(Problem(packing, given, ratio, coff, p.cu_seqlens, p.cu_seqlens_comp))


@CONFIGS
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_largest_values_stay_finite(sign: float, ratio: int, coff: int) -> None:
    packing = problems.named_packing("padding_rows_and_tokens", ratio)
    p = harness.problem(packing, ratio, coff, 64)
    p.given.kv.fill_(sign * torch.finfo(BF16).max)
    out = Guarded(packing.rows, (64,), BF16)
    for variant in harness.variants("forward", ratio, coff):
        out.poison()
        harness.forward(p, out.view, variant)
        assert bool(out.view.isfinite().all())
    check(p)


@CONFIGS
def test_windows_of_the_lowest_score_give_the_mean(ratio: int, coff: int) -> None:
    packing = problems.packing("one", ratio, [3 * ratio])
    p = harness.problem(packing, ratio, coff, 8)
    p.given.score.fill_(torch.finfo(BF16).min)
    p.given.kv.fill_(3.0)
    p.given.kv[-1].fill_(4.0)
    out = Guarded(packing.rows, (8,), BF16)
    for variant in harness.variants("forward", ratio, coff):
        out.poison()
        harness.forward(p, out.view, variant)
        last = torch.tensor(3.0 + 1.0 / (ratio * coff), device=DEVICE).to(BF16)
        assert bool((out.view[:-1] == 3.0).all())
        assert bool((out.view[-1] == last).all())


@CONFIGS
def test_windows_of_minus_infinity_give_nan_and_no_others_do(ratio: int, coff: int) -> None:
    packing = problems.packing("two", ratio, [ratio, ratio])
    p = harness.problem(packing, ratio, coff, 8)
    p.given.score[:ratio].fill_(-torch.inf)
    p.given.score[ratio + 1 :].fill_(-torch.inf)
    out = Guarded(packing.rows, (8,), BF16)
    for variant in harness.variants("forward", ratio, coff):
        out.poison()
        harness.forward(p, out.view, variant)
        assert bool(out.view[0].isnan().all())
        assert bool((out.view[1] == p.given.kv[ratio, -8:]).all())


@CONFIGS
def test_repeats_give_the_same_bits_on_any_stream(ratio: int, coff: int) -> None:
    packing = problems.named_packing("random", ratio)
    p = harness.problem(packing, ratio, coff, 130)
    first = torch.empty(packing.rows, 130, dtype=BF16, device=DEVICE)
    harness.forward(p, first)
    for _ in range(3):
        side = torch.cuda.Stream(DEVICE)
        side.wait_stream(torch.cuda.current_stream(DEVICE))
        again = torch.empty_like(first)
        harness.forward(p, again, on=side.cuda_stream)
        side.synchronize()
        assert torch.equal(again.view(torch.int16), first.view(torch.int16))


def test_unknown_variant_is_a_value_error_and_writes_nothing() -> None:
    p = harness.problem(problems.named_packing("ragged", 4), 4, 2, 64)
    out = Guarded(p.packing.rows, (64,), BF16)
    for name in ("no_such_variant", "csa_backward_r4_c2_bf16_v1", "csa_forward_r2_c2_bf16_v1"):
        with pytest.raises(ValueError, match=name):
            launch_forward(
                **p.pointers(),
                out=out.view.data_ptr(),
                out_stride=64,
                stream=harness.stream(),
                variant=name,
            )
    torch.cuda.synchronize()
    assert out.untouched()
