# SPDX-License-Identifier: Apache-2.0
"""Calls of the drop-in and of the array operations on one pack, and their comparison."""

from typing import Any

import torch

import csa_runtime
from csa_runtime import CSACompressorBackward, CSACompressorForward, compat
from gpu import tally
from support.packs import Pack, random_pack

WINDOWS = [(2, 1, 96), (2, 2, 33), (4, 1, 64), (4, 2, 128), (128, 1, 128), (128, 2, 512)]


def make(ratio: int = 4, coff: int = 2, head_dim: int = 128, **options: Any) -> Pack:
    """Tails, an empty segment, one shorter than a block, padding, tokens outside segments."""
    segments = [quarters * ratio // 4 for quarters in (40, 0, 3, 61, 4)]
    sizes = {"padding": 2, "first": 1, "after": 3} | options
    return random_pack(segments, ratio=ratio, coff=coff, head_dim=head_dim, device="cuda", **sizes)


def forward(pack: Pack, **options: Any) -> torch.Tensor:
    """The array operation."""
    given = pack.options | {"total_comp": pack.total_comp} | options
    return csa_runtime.compressor_forward(*pack.inputs, **given)


def backward(pack: Pack, **options: Any) -> tuple[torch.Tensor, ...]:
    """The array operation."""
    given = pack.options | options
    return csa_runtime.compressor_backward(*pack.inputs, pack.grad_out, **given)


def wrapped(pack: Pack, **options: Any) -> tuple[torch.Tensor, ...]:
    """Both wrappers."""
    window = pack.options | options
    inputs = pack.inputs
    result = compat.csa_compressor_forward_wrapper(*inputs, **window, total_comp=pack.total_comp)
    grads = compat.csa_compressor_backward_wrapper(*inputs, pack.grad_out, **window)
    return result["out"], *grads


def samples(pack: Pack) -> tuple[Any, ...]:
    """Meta tensors like the pack's."""
    return tuple(tensor.to("meta") for tensor in (*pack.inputs, pack.grad_out))


def compiled(pack: Pack, **options: Any) -> tuple[Any, Any]:
    """Both classes, ready."""
    made = (
        CSACompressorForward(*samples(pack), **pack.options),
        CSACompressorBackward(*samples(pack), **pack.options, **options),
    )
    for operation in made:
        assert operation.check_support() is True
        operation.compile()
    return made


def assert_same(found: Any, wanted: Any) -> None:
    """Bit for bit."""
    torch.cuda.synchronize()
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        kind = torch.int16 if ours.dtype == torch.bfloat16 else torch.int32
        assert torch.equal(ours.contiguous().view(kind), theirs.contiguous().view(kind))
        tally.count("bitwise", ours.numel())
