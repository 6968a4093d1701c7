# SPDX-License-Identifier: Apache-2.0
"""The drop-in on the GPU: the array operations' bits, and buffers of the caller's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import csa_runtime
from csa_runtime import CSACompressorForward, compat
from gpu.buffers import Guarded
from gpu.compat_calls import WINDOWS, assert_same, backward, compiled, forward, make, wrapped
from support.packs import random_pack

pytestmark = [pytest.mark.gpu]


@pytest.mark.L0
@pytest.mark.parametrize(("ratio", "coff", "head_dim"), WINDOWS)
def test_wrappers_equal_the_array_operations(ratio: int, coff: int, head_dim: int) -> None:
    pack = make(ratio, coff, head_dim)
    assert_same(wrapped(pack, head_dim=head_dim), (forward(pack), *backward(pack)))


@pytest.mark.L0
@pytest.mark.parametrize(("ratio", "coff", "head_dim"), WINDOWS)
def test_classes_equal_the_array_operations(ratio: int, coff: int, head_dim: int) -> None:
    """From meta samples; NaN in what need not be initialised, zeros in grad_ape."""
    pack = make(ratio, coff, head_dim)
    direct = (forward(pack), *backward(pack))
    ahead, back = compiled(pack)
    found = [torch.full_like(tensor, torch.nan) for tensor in direct]
    found[3].zero_()
    ahead.execute(*pack.inputs, found[0])
    back.execute(*pack.inputs, pack.grad_out, *found[1:])
    assert_same(found, direct)
    back.execute(*pack.inputs, pack.grad_out, *found[1:])
    assert_same(found, (*direct[:3], direct[3] * 2))


@pytest.mark.L0
@pytest.mark.parametrize("ratio", [4, 128])
def test_a_workspace_of_the_size_asked_for_suffices(ratio: int) -> None:
    pack = make(ratio)
    _, back = compiled(pack, deterministic=True)
    guarded = Guarded(1, (back.scratch_workspace_bytes() // 4,), torch.float32)
    grads = [torch.full_like(tensor, torch.nan) for tensor in (pack.kv, pack.score, pack.ape)]
    workspace = guarded.view[0].view(torch.uint8)
    back.execute(*pack.inputs, pack.grad_out, *grads, None, workspace)
    assert_same(grads, backward(pack))
    assert guarded.outside_untouched()


@pytest.mark.L0
@pytest.mark.parametrize("ratio", [2, 128])
def test_strided_and_misaligned_tensors(ratio: int) -> None:
    """Halves of one buffer, 2 bytes off every alignment, with gaps between rows."""
    pack = make(ratio)
    tokens, width = pack.kv.shape
    both = Guarded(tokens, (width, width), torch.bfloat16, pad=3, offset=2)
    for view, value in zip(both.views, (pack.kv, pack.score), strict=True):
        view.copy_(value)
    inputs = (*both.views, *pack.inputs[2:])
    options = {**pack.options, "total_comp": pack.total_comp}
    out = compat.csa_compressor_forward_wrapper(*inputs, **options)["out"]
    found, direct = (
        Guarded(tokens, (width, width), torch.bfloat16, pad=5, offset=6) for _ in range(2)
    )
    sums = [torch.zeros(ratio, width, device="cuda") for _ in range(2)]
    _, back = compiled(pack)
    back.execute(*inputs, pack.grad_out, *found.views, sums[0])
    csa_runtime.compressor_backward(
        *inputs, pack.grad_out, **pack.options, grads=(*direct.views, sums[1])
    )
    assert_same((out,), (csa_runtime.compressor_forward(*inputs, **options),))
    assert_same((*found.views, sums[0]), (*direct.views, sums[1]))
    assert found.outside_untouched()
    aligned = wrapped(pack)
    for ours, theirs in zip((out, *found.views, sums[0]), aligned, strict=True):
        assert float((ours.float() - theirs.float()).abs().max()) <= 1.6e-2


@pytest.mark.L0
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("warn_only", [False, True])
def test_deterministic_mode_is_no_obstacle(warn_only: bool) -> None:
    pack = make()
    direct = wrapped(pack)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        found = wrapped(pack)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(found, direct)


@pytest.mark.L0
def test_no_rows_give_zeros() -> None:
    """Into buffers that hold NaN; to grad_ape nothing is added."""
    pack = random_pack([3, 2], ratio=4, coff=2, head_dim=64, device="cuda")
    out, *grads = wrapped(pack)
    assert out.shape == (0, 64) and not any(bool(grad.any()) for grad in grads)
    ahead, back = compiled(pack)
    ahead.execute(*pack.inputs, out)
    into = [torch.full_like(grad, torch.nan) for grad in grads[:2]]
    sums = torch.full_like(grads[2], 7.0)
    back.execute(*pack.inputs, pack.grad_out, *into, sums)
    assert_same((*into, sums), (*grads[:2], torch.full_like(sums, 7.0)))


@pytest.mark.L0
def test_tensors_elsewhere_than_the_samples_are_value_errors() -> None:
    pack = make()
    here = CSACompressorForward(*pack.inputs, pack.grad_out, **pack.options)
    here.compile()
    away = pack.to("cpu")
    calls: list[Callable[[], Any]] = [
        lambda: here.execute(*away.inputs, torch.empty_like(away.grad_out)),
        lambda: here.execute(away.kv, *pack.inputs[1:], torch.empty_like(pack.grad_out)),
        lambda: here.execute(
            pack.kv, away.score, *pack.inputs[2:], torch.empty_like(pack.grad_out)
        ),
        lambda: compat.csa_compressor_forward_wrapper(away.kv, *pack.inputs[1:], total_comp=1),
        lambda: CSACompressorForward(
            away.kv, *pack.inputs[1:], pack.grad_out, **pack.options
        ).check_support(),
    ]
    for call in calls:
        with pytest.raises(ValueError):
            call()


@pytest.mark.L0
@pytest.mark.multi_gpu
def test_classes_keep_to_the_device_of_their_samples() -> None:
    pack = make()
    other = pack.to("cuda:1")
    made = CSACompressorForward(*other.inputs, other.grad_out, **other.options)
    made.compile()
    out = torch.empty_like(other.grad_out)
    made.execute(*other.inputs, out)
    assert_same((out.cpu(),), (forward(pack).cpu(),))
    with pytest.raises(ValueError, match="cuda:1"):
        made.execute(*pack.inputs, torch.empty_like(pack.grad_out))
