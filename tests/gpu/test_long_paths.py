# SPDX-License-Identifier: Apache-2.0
"""Windows of 128 tokens in views anywhere in memory: every way in gives the pointer call's bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import csa_runtime
from csa_runtime.torch import compressor
from gpu import harness, problems, tally
from gpu.buffers import DEVICE
from gpu.harness import Placement, Problem
from gpu.problems import LONG
from gpu.test_backward import Buffers
from gpu.test_forward import ANYWHERE
from gpu.test_interop import Exporter, Interface

pytestmark = [pytest.mark.gpu, pytest.mark.L0]


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """NaN patterns and signs of zeros included."""
    as_bytes = [t.contiguous().view(torch.uint8) for t in (found, wanted)]
    assert torch.equal(*as_bytes)
    tally.count("long windows, bits of another way in", found.numel())


def tensors(p: Problem) -> tuple[torch.Tensor, ...]:
    """The calls' positional arguments."""
    given = p.given
    return given.kv, given.score, given.ape, p.cu_seqlens, p.cu_seqlens_comp


def through_arrays(p: Problem, placement: Placement, wrap: Callable[[torch.Tensor], Any]) -> None:
    """Array calls into results placed as the inputs are."""
    direct, made = Buffers(p, placement), Buffers(p, placement)
    shape = (p.packing.rows, p.head_dim)
    outs = [torch.full(shape, torch.nan, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    harness.forward(p, outs[0])
    harness.backward(p, direct.grad_kv, direct.grad_score, direct.grad_ape)
    inputs, scratch = [wrap(t) for t in tensors(p)], harness.workspace(p)
    window = {"ratio": p.ratio, "coff": p.coff}
    csa_runtime.compressor_forward(*inputs, **window, out=wrap(outs[1]))
    csa_runtime.compressor_backward(
        *inputs,
        wrap(p.given.grad_out),
        **window,
        grads=tuple(wrap(t) for t in (made.grad_kv, made.grad_score, made.grad_ape)),
        workspace=wrap(scratch.view(torch.float32)),
    )
    assert_same_bits(outs[1], outs[0])
    for name in ("grad_kv", "grad_score", "grad_ape"):
        assert_same_bits(getattr(made, name), getattr(direct, name))
    assert made.outside_untouched()


def through_autograd(p: Problem) -> tuple[torch.Tensor, ...]:
    """The differentiable operation."""
    leaves = [t.detach().requires_grad_() for t in tensors(p)[:3]]
    out = compressor(
        *leaves, *tensors(p)[3:], ratio=p.ratio, coff=p.coff, total_comp=p.packing.rows
    )
    return (out.detach(), *torch.autograd.grad(out, leaves, p.given.grad_out))


def through_wrappers(p: Problem) -> tuple[torch.Tensor, ...]:
    """The drop-in functions."""
    window = {"ratio": p.ratio, "coff": p.coff}
    rows = {"total_comp": p.packing.rows}
    out = csa_runtime.csa_compressor_forward_wrapper(*tensors(p), **window, **rows)["out"]
    grads = csa_runtime.csa_compressor_backward_wrapper(*tensors(p), p.given.grad_out, **window)
    return (out, *grads)


def through_classes(p: Problem) -> tuple[torch.Tensor, ...]:
    """The drop-in classes."""
    window = {"ratio": p.ratio, "coff": p.coff}
    out, *grads = empty_results(p)
    forward = csa_runtime.CSACompressorForward(*tensors(p), out, **window)
    backward = csa_runtime.CSACompressorBackward(
        *tensors(p), p.given.grad_out, **window, deterministic=True
    )
    for handle in (forward, backward):
        handle.compile()
    forward.execute(*tensors(p), out)
    backward.execute(*tensors(p), p.given.grad_out, *grads)
    return (out, *grads)


def empty_results(p: Problem) -> list[torch.Tensor]:
    """Contiguous memory for `out` and the gradients."""
    out = torch.empty(p.packing.rows, p.head_dim, dtype=torch.bfloat16, device=DEVICE)
    return [out, *(torch.empty(t.shape, dtype=t.dtype, device=DEVICE) for t in tensors(p)[:3])]


@pytest.mark.parametrize("coff", [1, 2])
@pytest.mark.parametrize("head_dim", [128, 512])
@ANYWHERE
def test_every_way_in_takes_views_anywhere_in_memory(
    placement: Placement, head_dim: int, coff: int
) -> None:
    packing = problems.named_packing("padding_rows_and_tokens", LONG)
    p = harness.problem(packing, LONG, coff, head_dim, placement=placement)
    for wrap in (lambda tensor: tensor, Interface, Exporter):
        through_arrays(p, placement, wrap)
    out, *grads = empty_results(p)
    harness.forward(p, out)
    harness.backward(p, *grads)
    for way in (through_autograd, through_wrappers, through_classes):
        for found, wanted in zip(way(p), (out, *grads), strict=True):
            assert_same_bits(found, wanted)
