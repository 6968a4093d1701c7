# SPDX-License-Identifier: Apache-2.0
"""The torch operation on CPU tensors: autograd, tracing, registration."""

from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from csa_runtime import ops
from csa_runtime.torch import compressor
from support.eager import Result, eager
from support.packs import Pack, random_pack

SHAPES = {
    "r4c2": ([9, 0, 30, 4], 4, 2, 6),
    "r4c1": ([9, 0, 30, 4], 4, 1, 6),
    "r2c2": ([1, 2, 9, 31], 2, 2, 3),
    "r2c1": ([1, 2, 9, 31], 2, 1, 3),
    "r128c2": ([300, 127], 128, 2, 2),
}


def make(name: str = "r4c2", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Pack:
    """A pack whose kv, score and ape want gradients."""
    segments, ratio, coff, d = SHAPES[name]
    pack = random_pack(
        segments, ratio=ratio, coff=coff, head_dim=d, dtype=dtype,
        **{"padding": 2, "first": 1} | options,
    )  # fmt: skip
    for tensor in leaves(pack):
        tensor.requires_grad_()
    return pack


def leaves(pack: Pack) -> list[torch.Tensor]:
    """What gradients are taken of."""
    return [t for t in (pack.kv, pack.score, pack.ape) if t is not None]


def run(pack: Pack) -> torch.Tensor:
    """The forward."""
    return compressor(*pack.inputs, **pack.options, total_comp=pack.total_comp)


def assert_close(ours: Any, theirs: Result, **tolerance: float) -> None:
    """Output and gradients."""
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.double(), b.double(), **tolerance)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [
        (torch.bfloat16, 2.0**-7, 1e-6),
        (torch.float16, 2.0**-9, 1e-6),
        (torch.float32, 1e-5, 1e-6),
        (torch.float64, 1e-6, 1e-6),
    ],
)
def test_gradients_equal_eager_autograd(
    name: str, dtype: torch.dtype, rtol: float, atol: float
) -> None:
    """In every dtype; NaN gradients of padding rows are ignored."""
    pack = make(name, dtype)
    pack.grad_out[-1] = torch.nan
    out = run(pack)
    grads = torch.autograd.grad(out, leaves(pack), pack.grad_out)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    assert_close((out.detach(), *grads), eager(pack, compute=compute), rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_equal_finite_differences(name: str) -> None:
    """In fp64."""
    pack = make(name, torch.float64, padding=0)
    ape = pack.ape.detach().double().requires_grad_()
    fixed = (pack.cu_seqlens, pack.cu_seqlens_comp)
    assert torch.autograd.gradcheck(
        lambda kv, score, ape: compressor(
            kv, score, ape, *fixed, **pack.options, total_comp=pack.total_comp
        ),
        (pack.kv, pack.score, ape),
        fast_mode=True,
    )


def test_only_wanted_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over rows for grad_ape is the part that can be saved."""
    asked = []
    original = ops.compressor_backward

    def record(*arguments: Any, **options: Any) -> Any:
        asked.append(options["grads"])
        return original(*arguments, **options)

    monkeypatch.setattr(ops, "compressor_backward", record)
    pack = make()
    run(pack).sum().backward()
    assert asked.pop() is None
    pack.ape.requires_grad_(False)
    pack.ape.grad = pack.kv.grad = None
    run(pack).sum().backward()
    assert asked.pop()[2] is None and pack.ape.grad is None and pack.kv.grad is not None
    pack.kv.requires_grad_(False)
    pack.kv.grad = None
    run(pack).sum().backward()
    assert pack.kv.grad is None


def test_absent_ape_is_zeros() -> None:
    """And has no gradient."""
    pack = make(ape=False)
    grads = torch.autograd.grad(run(pack).sum(), leaves(pack))
    zeros = torch.zeros(4, 12, requires_grad=True)
    out = compressor(
        pack.kv, pack.score, zeros, *pack.inputs[3:], **pack.options, total_comp=pack.total_comp
    )
    expected = torch.autograd.grad(out.sum(), [pack.kv, pack.score, zeros])
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=False))


@pytest.mark.parametrize("layout", ["expanded", "one row", "transposed", "every other column"])
def test_incoming_gradients_of_any_layout(layout: str) -> None:
    """Autograd chooses it: `out.sum()` gives stride 0 in both dimensions."""
    pack = make()
    shape = pack.grad_out.shape
    grad_out = {
        "expanded": torch.ones((), dtype=torch.bfloat16).expand(shape),
        "one row": pack.grad_out[:1].expand(shape),
        "transposed": pack.grad_out.t().contiguous().t(),
        "every other column": torch.cat([pack.grad_out, pack.grad_out], dim=1)[:, ::2],
    }[layout]
    ours = torch.autograd.grad(run(pack), leaves(pack), grad_out)
    theirs = torch.autograd.grad(run(pack), leaves(pack), grad_out.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_no_rows_still_have_an_autograd_edge() -> None:
    """Empty output, zero gradients."""
    pack = random_pack([3, 2], ratio=4, coff=2, head_dim=3)
    for tensor in leaves(pack):
        tensor.requires_grad_()
    out = compressor(*pack.inputs, **pack.options)
    assert out.shape == (0, 3) and out.grad_fn is not None
    out.sum().backward()
    for tensor in leaves(pack):
        assert tensor.grad.shape == tensor.shape and (tensor.grad == 0).all()


def test_capacity_is_read_back_when_not_given() -> None:
    """total_comp=None: the real rows."""
    pack = make()
    out = compressor(*pack.inputs, **pack.options)
    assert torch.equal(out, run(pack)[: out.shape[0]])
    assert out.shape[0] == int(pack.cu_seqlens_comp[-1])


def test_no_graph_is_recorded_when_none_is_wanted() -> None:
    """Under no_grad, and for inputs without gradients."""
    pack = make()
    with torch.no_grad():
        assert not run(pack).requires_grad
    for tensor in leaves(pack):
        tensor.requires_grad_(False)
    assert not run(pack).requires_grad


def test_second_derivative_is_refused_clearly() -> None:
    """The first one with create_graph=True is fine until it is differentiated."""
    pack = make(dtype=torch.float64)
    (grad,) = torch.autograd.grad(run(pack).sum(), pack.kv, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


def test_bad_arguments_are_value_errors() -> None:
    """As in the array operations, with nothing recorded."""
    pack = make()
    with pytest.raises(ValueError, match="score is"):
        compressor(pack.kv, pack.score[1:], *pack.inputs[2:], ratio=4, coff=2, total_comp=3)
    for changes in ({"coff": 3}, {"ratio": 4.0}, {"total_comp": -1}, {"total_comp": 2**31}):
        with pytest.raises(ValueError, match=f"{next(iter(changes))} is"):
            compressor(*pack.inputs, **{"ratio": 4, "coff": 2, "total_comp": 3} | changes)
    for position, name in enumerate(("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp")):
        inputs: list[Any] = list(pack.inputs)
        inputs[position] = np.zeros(3)
        with pytest.raises(ValueError, match=f"^{name} is no torch tensor"):
            compressor(*inputs, ratio=4, coff=2)
    for rows in (pack.cu_seqlens_comp[None], pack.cu_seqlens_comp[:0]):
        with pytest.raises(ValueError, match="cu_seqlens_comp has shape"):
            compressor(*pack.inputs[:4], rows, ratio=4, coff=2)


@pytest.mark.parametrize("ape", [True, False])
def test_compiles_without_graph_breaks(ape: bool) -> None:
    """Forward and backward, with dynamic token counts, equal to eager mode."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda pack_inputs, rows: compressor(*pack_inputs, ratio=4, coff=2, total_comp=rows) * 2,
        backend=counter,
        fullgraph=True,
        dynamic=True,
    )
    for segments in ([9, 30], [5, 4, 22], [8, 8, 8, 31]):
        pack = random_pack(segments, ratio=4, coff=2, head_dim=6, padding=1, ape=ape)
        for tensor in leaves(pack):
            tensor.requires_grad_()
        out = compiled(pack.inputs, pack.total_comp)
        expected = run(pack) * 2
        assert torch.equal(out, expected)
        ours = torch.autograd.grad(out, leaves(pack), pack.grad_out)
        theirs = torch.autograd.grad(expected, leaves(pack), pack.grad_out)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert counter.frame_count == 1


@pytest.mark.parametrize("ape", [True, False])
def test_registration_passes_torchs_own_checks(ape: bool) -> None:
    """Schema, autograd registration, fake shapes, ahead-of-time dispatch."""
    pack = make(ape=ape)
    forward, backward = (
        torch.ops.csa_runtime.compressor_forward.default,
        torch.ops.csa_runtime.compressor_backward.default,
    )
    torch.library.opcheck(forward, (*pack.inputs, 4, 2, pack.total_comp))
    plain = [t if t is None else t.detach() for t in pack.inputs]
    torch.library.opcheck(backward, (*plain, pack.grad_out, 4, 2, ape))


def test_tracers_and_modes_see_the_operator() -> None:
    """Plain calls spare the dispatcher; whatever watches it does not miss them."""
    pack = make()
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, _: Any, arguments: Any = (), options: Any = None
        ) -> Any:
            seen.append(str(function))
            return function(*arguments, **options or {})

    with Watch():
        out = run(pack)
        torch.autograd.grad(out, leaves(pack), pack.grad_out)
        with torch.no_grad():
            run(pack)
    ours = [name for name in seen if "csa_runtime" in name]
    forward = "csa_runtime.compressor_forward.default"
    assert ours == [forward, "csa_runtime.compressor_backward.default", forward]


def test_meta_tensors_give_shapes() -> None:
    """As every operator's do."""
    pack = make().to("meta")
    assert run(pack).shape == (pack.total_comp, 6)
    assert run(pack).device.type == "meta"


def test_operator_called_directly_is_differentiable() -> None:
    """What exported programs hold."""
    pack = make()
    out = torch.ops.csa_runtime.compressor_forward(*pack.inputs, 4, 2, pack.total_comp)
    ours = torch.autograd.grad(out, leaves(pack), pack.grad_out)
    theirs = torch.autograd.grad(run(pack), leaves(pack), pack.grad_out)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_gradients_accumulate_over_two_uses() -> None:
    """Saved tensors serve both, and retain_graph works."""
    pack = make(dtype=torch.float32)
    out = run(pack)
    out.sum().backward(retain_graph=True)
    once = pack.kv.grad.clone()
    out.sum().backward()
    assert torch.equal(pack.kv.grad, 2 * once)
