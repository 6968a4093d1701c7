# SPDX-License-Identifier: Apache-2.0
"""Backward, every variant forced by name: R's bits, and the sums of R's own addends."""

from dataclasses import replace

import pytest
import torch

from gpu import harness, oracle, problems
from gpu.buffers import DEVICE, Guarded
from gpu.harness import PLAIN, Placement, Problem
from gpu.test_forward import CONFIGS, PLACEMENTS

pytestmark = [pytest.mark.gpu, pytest.mark.L0]

BF16 = torch.bfloat16


class Buffers:
    """Poisoned, guarded gradients, the two large ones apart or fused."""

    def __init__(self, p: Problem, placement: Placement) -> None:
        """Allocates."""
        tokens, width = p.packing.tokens, p.width
        pad, offset = placement.pad, placement.offset
        if placement.fused:
            self.large = [Guarded(tokens, (width, width), BF16, pad, offset)]
            self.grad_kv, self.grad_score = self.large[0].views
        else:
            self.large = [Guarded(tokens, (width,), BF16, pad, offset) for _ in range(2)]
            self.grad_kv, self.grad_score = (g.view for g in self.large)
        self.planes = Guarded(p.ratio, (width,), torch.float32, 0, offset // 4 * 4)
        self.grad_ape = None if p.given.ape is None else self.planes.view

    def poison(self) -> None:
        """Poisons everything again."""
        for guarded in (*self.large, self.planes):
            guarded.poison()

    def outside_untouched(self) -> bool:
        """Whether no guard byte changed, nor grad_ape where none was asked for."""
        planes = self.planes
        quiet = planes.untouched() if self.grad_ape is None else planes.outside_untouched()
        return quiet and all(g.outside_untouched() for g in self.large)

    def untouched(self) -> bool:
        """Whether nothing at all was written."""
        return all(g.untouched() for g in (*self.large, self.planes))


def check(p: Problem, placement: Placement = PLAIN, *, gate: bool = False) -> None:
    """Runs the scheduled variant and every variant by name into poisoned, guarded gradients."""
    wanted = oracle.gradients(p.packing, p.given, p.ratio, p.coff)
    buffers = Buffers(p, placement)
    for variant in (None, *harness.variants("backward", p.ratio, p.coff)):
        buffers.poison()
        outputs = (buffers.grad_kv, buffers.grad_score)
        if variant is not None and not harness.serves(variant, p, *outputs, grad_out=True):
            if p.packing.rows:
                with pytest.raises(ValueError, match=variant):
                    harness.backward(p, *outputs, buffers.grad_ape, variant)
                assert buffers.untouched()
            continue
        harness.backward(p, *outputs, buffers.grad_ape, variant)
        harness.assert_equal("grad_kv", buffers.grad_kv, wanted.grad_kv)
        harness.assert_equal("grad_score", buffers.grad_score, wanted.grad_score)
        if buffers.grad_ape is not None:
            harness.assert_grad_ape(buffers.grad_ape, wanted, p.packing.computed, gate=gate)
        assert buffers.outside_untouched(), variant


@CONFIGS
@pytest.mark.parametrize("head_dim", problems.HEAD_DIMS)
@pytest.mark.parametrize("name", problems.PACKING_NAMES)
def test_every_pack_at_every_head_dim(name: str, head_dim: int, ratio: int, coff: int) -> None:
    if name == "many_short" and head_dim > 576:
        head_dim //= 8
    p = harness.problem(problems.named_packing(name, ratio), ratio, coff, head_dim, seed=head_dim)
    check(p, gate=True)


@CONFIGS
@pytest.mark.parametrize("head_dim", [2, 6, 128, 576])
@pytest.mark.parametrize("distribution", problems.DISTRIBUTIONS)
def test_any_input_whatever_its_size(
    distribution: str, head_dim: int, ratio: int, coff: int
) -> None:
    for name in ("random", "padding_rows_and_tokens"):
        packing = problems.named_packing(name, ratio)
        check(
            harness.problem(
                packing, ratio, coff, head_dim, distribution=distribution, seed=head_dim
            )
        )


@CONFIGS
@pytest.mark.parametrize("distribution", ["gaps", "scales", "overflow"])
def test_tiny_quotients_over_millions_of_elements(distribution: str, ratio: int, coff: int) -> None:
    packing = problems.packing("long", ratio, [8192 + 1, 4096, 77], extra_rows=3)
    check(harness.problem(packing, ratio, coff, 512, distribution=distribution, seed=7))


@CONFIGS
@pytest.mark.parametrize("head_dim", [1, 6, 8, 127, 512])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: placement.name)
def test_views_anywhere_in_memory(
    placement: Placement, head_dim: int, ratio: int, coff: int
) -> None:
    packing = problems.named_packing("random", ratio)
    check(harness.problem(packing, ratio, coff, head_dim, placement=placement), placement)


@CONFIGS
@pytest.mark.parametrize("head_dim", [3, 128])
def test_absent_ape_is_zeros_and_has_no_gradient(head_dim: int, ratio: int, coff: int) -> None:
    packing = problems.named_packing("ragged", ratio)
    check(harness.problem(packing, ratio, coff, head_dim, ape=False))


@CONFIGS
@pytest.mark.parametrize("head_dim", [1, 20, 256])
def test_one_row_of_grad_out_broadcasts(head_dim: int, ratio: int, coff: int) -> None:
    packing = problems.named_packing("padding_rows_and_tokens", ratio)
    p = harness.problem(packing, ratio, coff, head_dim)
    row = p.given.grad_out[:1].expand(packing.rows, -1)
    check(replace(p, given=replace(p.given, grad_out=row)), gate=True)


@CONFIGS
def test_padding_rows_ignore_their_gradient_nan_included(ratio: int, coff: int) -> None:
    packing = problems.named_packing("padding_rows_and_tokens", ratio)
    p = harness.problem(packing, ratio, coff, 64)
    p.given.grad_out[packing.computed :].fill_(torch.nan)
    check(p, gate=True)


@CONFIGS
@pytest.mark.parametrize("name", ["random", "no_rows_asked"])
def test_accumulate_adds_the_sum_once(name: str, ratio: int, coff: int) -> None:
    p = harness.problem(problems.named_packing(name, ratio), ratio, coff, 128)
    for variant in harness.variants("backward", ratio, coff):
        buffers = Buffers(p, PLAIN)
        large = (buffers.grad_kv, buffers.grad_score)
        harness.backward(p, *large, buffers.grad_ape, variant)
        alone = buffers.grad_ape.clone()
        before = torch.randn_like(alone)
        buffers.grad_ape.copy_(before)
        for _ in range(2):
            harness.backward(p, *large, buffers.grad_ape, variant, accumulate=True)
        harness.assert_equal("grad_ape", buffers.grad_ape, (before + alone) + alone)
        assert buffers.outside_untouched()


@CONFIGS
def test_workspace_is_never_overrun(ratio: int, coff: int) -> None:
    p = harness.problem(problems.named_packing("many_short", ratio), ratio, coff, 130)
    size = harness.workspace(p).numel()
    for variant in harness.variants("backward", ratio, coff):
        guarded = Guarded(1, (size // 4,), torch.float32)
        buffers = Buffers(p, PLAIN)
        if not harness.serves(variant, p, buffers.grad_kv, buffers.grad_score, grad_out=True):
            continue
        harness.backward(
            p,
            buffers.grad_kv,
            buffers.grad_score,
            buffers.grad_ape,
            variant,
            scratch=guarded.view[0].view(torch.uint8),
        )
        assert guarded.outside_untouched()


@CONFIGS
@pytest.mark.parametrize("head_dim", [6, 512])
def test_repeats_give_the_same_bits_on_any_stream_and_workspace(
    head_dim: int, ratio: int, coff: int
) -> None:
    packing = problems.packing("long", ratio, [5000, 3, 6000], extra_rows=2)
    p = harness.problem(packing, ratio, coff, head_dim)

    def run(on: int | None, offset: int) -> list[torch.Tensor]:
        found = [torch.full_like(p.given.kv, torch.nan) for _ in range(2)]
        found.append(torch.full_like(p.given.ape, torch.nan))
        scratch = harness.workspace(p, offset)
        torch.cuda.synchronize()
        harness.backward(p, *found, scratch=scratch, on=on)
        torch.cuda.synchronize()
        return found

    first = run(None, 0)
    for offset in (16, 4096, 123456 * 16):
        for one, two in zip(first, run(torch.cuda.Stream(DEVICE).cuda_stream, offset), strict=True):
            assert torch.equal(one.view(torch.int16), two.view(torch.int16))


def test_gradients_are_as_near_to_fp64_as_r() -> None:
    for ratio, coff in problems.CONFIGS:
        packing = problems.named_packing("random", ratio)
        p = harness.problem(packing, ratio, coff, 128)
        near = oracle.gradients(packing, p.given, ratio, coff)
        exact = oracle.gradients(packing, p.given, ratio, coff, torch.float64)
        buffers = Buffers(p, PLAIN)
        found = (buffers.grad_kv, buffers.grad_score, buffers.grad_ape)
        harness.backward(p, *found)
        for name, x in zip(("grad_kv", "grad_score", "grad_ape"), found, strict=True):
            best = getattr(exact, name)
            off = float((x.double() - best).abs().max())
            assert (
                off <= float((getattr(near, name).double() - best).abs().max()) * (1 + 1e-6) + 1e-4
            )
