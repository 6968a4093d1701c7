# SPDX-License-Identifier: Apache-2.0
"""The torch operation under vmap, torch.func and forward mode: right, or refused."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from csa_runtime.torch import compressor
from support.packs import Pack, random_pack

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


@pytest.fixture
def pack() -> Pack:
    """In fp32, two rows of padding."""
    return random_pack([9, 30], ratio=4, coff=2, head_dim=3, padding=2, dtype=torch.float32)


def of_kv(pack: Pack) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward as a function of kv."""
    return lambda kv: compressor(kv, *pack.inputs[1:], **pack.options, total_comp=pack.total_comp)


def operator_of_kv(pack: Pack) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same through torch.ops."""
    operator = torch.ops.csa_runtime.compressor_forward
    return lambda kv: operator(
        kv, *pack.inputs[1:], pack.options["ratio"], pack.options["coff"], pack.total_comp
    )


def gradient(pack: Pack, grad_out: torch.Tensor) -> torch.Tensor:
    """Of kv, in plain reverse mode."""
    kv = pack.kv.clone().requires_grad_()
    return torch.autograd.grad(of_kv(pack)(kv), kv, grad_out)[0]


@pytest.mark.parametrize("make", [of_kv, operator_of_kv], ids=["compressor", "operator"])
def test_dual_tensors_are_refused(pack: Pack, make: Any) -> None:
    """Their tangents would be dropped: a derivative of zero without a word."""
    with (
        forward_ad.dual_level(),
        pytest.raises(RuntimeError, match="no forward-mode derivative"),
    ):
        make(pack)(forward_ad.make_dual(pack.kv, torch.ones_like(pack.kv)))


def test_dual_tensors_that_require_a_gradient_are_refused(pack: Pack) -> None:
    """As are those of the bias, and plain tensors in a dual level are not."""
    with forward_ad.dual_level():
        of_kv(pack)(pack.kv)
        ape = forward_ad.make_dual(pack.ape, torch.ones_like(pack.ape))
        biased = dataclasses.replace(pack, ape=ape)
        with pytest.raises(RuntimeError, match="forward-mode"):
            of_kv(biased)(pack.kv.clone().requires_grad_())


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.jacfwd(f)(x),
        lambda f, x: torch.func.jvp(torch.func.grad(lambda kv: f(kv).square().sum()), (x,), (x,)),
        lambda f, x: torch.autograd.functional.jacobian(
            f, x, vectorize=True, strategy="forward-mode"
        ),
        lambda f, x: torch.func.jvp(torch.func.vmap(f), (x[None],), (x[None],)),
    ],
    ids=["jvp", "jacfwd", "jvp of grad", "jacobian", "jvp of vmap"],
)
@pytest.mark.parametrize("make", [of_kv, operator_of_kv], ids=["compressor", "operator"])
def test_forward_mode_transforms_are_refused(pack: Pack, transform: Any, make: Any) -> None:
    """Whoever asks, of the bare operator too."""
    with pytest.raises(RuntimeError, match=r"forward.mode|Batching rule|jvp"):
        transform(make(pack), pack.kv)


def test_forward_mode_through_the_backward_operator_is_refused(pack: Pack) -> None:
    operator = torch.ops.csa_runtime.compressor_backward
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(
            lambda grad_out: operator(*pack.inputs, grad_out, 4, 2, True)[0],
            (pack.grad_out,), (pack.grad_out,),
        )  # fmt: skip


@pytest.mark.parametrize("make", [of_kv, operator_of_kv], ids=["compressor", "operator"])
def test_batched_incoming_gradients(pack: Pack, make: Any) -> None:
    """is_grads_batched: a batch looks like a tensor and has no memory."""
    batch = torch.stack([pack.grad_out, 2 * pack.grad_out, -pack.grad_out])
    kv = pack.kv.clone().requires_grad_()
    ours = torch.autograd.grad(make(pack)(kv), kv, batch, is_grads_batched=True)[0]
    assert torch.equal(ours, torch.stack([gradient(pack, grad_out) for grad_out in batch]))


def test_vectorized_jacobians_equal_row_by_row(pack: Pack) -> None:
    """torch.autograd's and torch.func's."""
    row_by_row = torch.autograd.functional.jacobian(of_kv(pack), pack.kv)
    vectorized = torch.autograd.functional.jacobian(of_kv(pack), pack.kv, vectorize=True)
    assert torch.equal(vectorized, row_by_row)
    assert torch.equal(torch.func.jacrev(of_kv(pack))(pack.kv), row_by_row)


def test_func_transforms_equal_autograd(pack: Pack) -> None:
    """grad, vjp, and vmap of both directions."""
    run = of_kv(pack)
    expected = gradient(pack, 2 * run(pack.kv))
    grad = torch.func.grad(lambda kv: run(kv).square().sum())
    assert torch.equal(grad(pack.kv), expected)
    assert torch.equal(torch.func.vjp(run, pack.kv)[1](2 * run(pack.kv))[0], expected)
    kvs = torch.stack([pack.kv, pack.score])
    assert torch.equal(torch.func.vmap(run)(kvs), torch.stack([run(kv) for kv in kvs]))
    assert torch.equal(torch.func.vmap(grad)(kvs)[0], expected)


def test_second_derivatives_of_transforms_are_refused(pack: Pack) -> None:
    """As in eager mode."""
    first = torch.func.grad(lambda kv: of_kv(pack)(kv).square().sum())
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.func.grad(lambda kv: first(kv).sum())(pack.kv)


def test_operator_refuses_gradients_of_another_shape(pack: Pack) -> None:
    """As a ValueError, like any malformed argument."""
    backward = torch.ops.csa_runtime.compressor_backward
    for grad_out in (pack.grad_out[0], pack.grad_out[None]):
        with pytest.raises(ValueError, match="grad_out is"):
            backward(*pack.inputs, grad_out, 4, 2, True)
