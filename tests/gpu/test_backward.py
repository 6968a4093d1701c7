# SPDX-License-Identifier: Apache-2.0
"""Backward, every variant forced by name: R's bits, and the sums of R's own addends."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from gpu import harness, oracle, problems
from gpu.buffers import DEVICE, Guarded
from gpu.harness import PLAIN, Placement, Problem
from gpu.test_forward import ANYWHERE, CONFIGS

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


def backwards(p: Problem, placement: Placement) -> Iterator[tuple[str | None, Buffers]]:
    """As `test_forward.forwards`, gradients."""
    buffers = Buffers(p, placement)
    large = (buffers.grad_kv, buffers.grad_score)
    for variant in (None, *harness.variants("backward", p.ratio, p.coff)):
        buffers.poison()
        if variant is not None and not harness.serves(variant, p, *large, grad_out=True):
            if p.packing.rows:
                with pytest.raises(ValueError, match=variant):
                    harness.backward(p, *large, buffers.grad_ape, variant)
                assert buffers.untouched()
            continue
        harness.backward(p, *large, buffers.grad_ape, variant)
        yield variant, buffers


def assert_accumulates(p: Problem, variant: str | None) -> None:
    """Each call with `accumulate` adds the sum once to what `grad_ape` holds."""
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


def assert_keeps_to_workspace(p: Problem) -> None:
    """The scheduled variant and every other that serves write nothing around the workspace."""
    size = harness.workspace(p).numel()
    guarded = Guarded(1, (size // 4,), torch.float32)
    scratch = guarded.view[0].view(torch.uint8)
    buffers = Buffers(p, PLAIN)
    large = (buffers.grad_kv, buffers.grad_score)
    for variant in (None, *harness.variants("backward", p.ratio, p.coff)):
        if variant is None or harness.serves(variant, p, *large, grad_out=True):
            harness.backward(p, *large, buffers.grad_ape, variant, scratch=scratch)
            assert guarded.outside_untouched(), variant


def check(p: Problem, placement: Placement = PLAIN, *, gate: bool = False) -> None:
    """Runs the scheduled variant and every variant by name into poisoned, guarded gradients."""
    wanted = oracle.gradients(p.packing, p.given, p.ratio, p.coff)
    for variant, buffers in backwards(p, placement):
        harness.assert_equal("grad_kv", buffers.grad_kv, wanted.grad_kv)
        harness.assert_equal("grad_score", buffers.grad_score, wanted.grad_score)
        if buffers.grad_ape is not None:
            harness.assert_grad_ape(buffers.grad_ape, wanted, p.packing.computed, gate=gate)
        assert buffers.outside_untouched(), variant


@CONFIGS
@pytest.mark.parametrize("head_dim", problems.HEAD_DIMS)
@pytest.mark.parametrize("name", problems.PACKING_NAMES)
def test_every_pack_at_every_head_dim(name: str, head_dim: int, ratio: int, coff: int) -> None:
    check(harness.narrowed_problem(name, ratio, coff, head_dim), gate=True)


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
@ANYWHERE
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


@pytest.mark.parametrize("head_dim", [6, 8, 128, 512])
@pytest.mark.parametrize("ratio", [2, 4])
def test_first_blocks_do_not_read_the_previous_halfs_ape(ratio: int, head_dim: int) -> None:
    for name in ("random", "padding_rows_for_tails"):
        p = harness.problem(problems.named_packing(name, ratio), ratio, 2, head_dim)
        p.given.ape[:, :head_dim:2] = torch.nan
        check(p)


@pytest.mark.parametrize("tokens", [65_536, 65_536 + 9])
@pytest.mark.parametrize("head_dim", [64, 128, 200, 512])
def test_many_rows_a_warp_of_one_segment(head_dim: int, tokens: int) -> None:
    """Whether or not the first ones are where rows without tails would be."""
    for ratio, coff in problems.CONFIGS:
        lengths = [tokens // (coff * head_dim // 64)]
        packing = problems.packing("one_long", ratio, lengths, start=tokens % ratio)
        check(harness.problem(packing, ratio, coff, head_dim), gate=True)


@CONFIGS
@pytest.mark.parametrize("name", ["random", "no_rows_asked"])
def test_accumulate_adds_the_sum_once(name: str, ratio: int, coff: int) -> None:
    p = harness.problem(problems.named_packing(name, ratio), ratio, coff, 128)
    for variant in harness.variants("backward", ratio, coff):
        assert_accumulates(p, variant)


@CONFIGS
def test_workspace_is_never_overrun(ratio: int, coff: int) -> None:
    assert_keeps_to_workspace(
        harness.problem(problems.named_packing("many_short", ratio), ratio, coff, 130)
    )


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
