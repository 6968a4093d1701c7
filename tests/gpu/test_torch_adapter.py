# SPDX-License-Identifier: Apache-2.0
"""The differentiable operation against torch's eager autograd on the same GPU."""

from dataclasses import replace

import pytest
import torch

import csa_runtime
from csa_runtime import ops
from csa_runtime.torch import compressor
from gpu import harness, tally
from gpu.problems import CONFIGS
from support.eager import eager
from support.packs import Pack, random_pack

pytestmark = [pytest.mark.gpu, pytest.mark.L0]

SEGMENTS = [40, 0, 7, 3, 61, 4]


def leaves(pack: Pack) -> Pack:
    """The same pack with inputs that want gradients."""
    inputs = {name: getattr(pack, name) for name in ("kv", "score", "ape")}
    fresh = {n: None if t is None else t.clone().requires_grad_() for n, t in inputs.items()}
    return replace(pack, **fresh)


def assert_gradients(pack: Pack, wanted: Pack) -> None:
    """R's bits for kv and score, 1e-3 for ape."""
    exact = eager(wanted)
    harness.assert_equal("grad_kv", pack.kv.grad, exact.grad_kv)
    harness.assert_equal("grad_score", pack.score.grad, exact.grad_score)
    if pack.ape is not None:
        assert float((pack.ape.grad - exact.grad_ape).abs().max()) <= 1e-3


@pytest.mark.parametrize(("ratio", "coff"), CONFIGS)
@pytest.mark.parametrize("ape", [True, False], ids=["ape", "no_ape"])
def test_gradients_equal_eager_autograd(ape: bool, ratio: int, coff: int) -> None:
    options = {"first": 3, "after": 2, "padding": 2, "ape": ape, "device": "cuda"}
    for head_dim in (2, 96, 513):
        pack = random_pack(SEGMENTS, ratio=ratio, coff=coff, head_dim=head_dim, **options)
        mine = leaves(pack)
        out = compressor(*mine.inputs, **mine.options, total_comp=mine.total_comp)
        out.backward(mine.grad_out)
        assert_gradients(mine, pack)
        plain = csa_runtime.compressor_forward(*pack.inputs, **pack.options)
        assert torch.equal(out.detach()[: len(plain)], plain)
        tally.count("bitwise", plain.numel())


@pytest.mark.parametrize(("ratio", "coff"), CONFIGS)
def test_sum_backward_broadcasts_its_gradient(ratio: int, coff: int) -> None:
    pack = random_pack(SEGMENTS, ratio=ratio, coff=coff, head_dim=64, device="cuda")
    mine = leaves(pack)
    compressor(*mine.inputs, **mine.options).sum().backward()
    assert_gradients(mine, replace(pack, grad_out=torch.ones_like(pack.grad_out)))


def test_no_rows_keep_the_autograd_edge() -> None:
    pack = random_pack([3, 2, 1], ratio=4, coff=2, head_dim=8, device="cuda")
    mine = leaves(pack)
    out = compressor(*mine.inputs, **mine.options)
    assert out.shape == (0, 8) and out.requires_grad
    out.sum().backward()
    for leaf in (mine.kv, mine.score, mine.ape):
        assert not bool(leaf.grad.any())


def test_compiles_as_one_graph() -> None:
    def step(pack_inputs: tuple[torch.Tensor, ...], weight: torch.Tensor) -> torch.Tensor:
        return compressor(*pack_inputs, ratio=4, coff=2, total_comp=25) * weight

    pack = random_pack([40, 60], ratio=4, coff=2, head_dim=64, device="cuda")
    weight = torch.full((64,), 2.0, dtype=torch.bfloat16, device="cuda")
    plain, compiled = leaves(pack), leaves(pack)
    step(plain.inputs, weight).backward(pack.grad_out)
    whole = torch.compile(step, fullgraph=True, backend="aot_eager")
    whole(compiled.inputs, weight).backward(pack.grad_out)
    for one, two in zip(plain.inputs[:3], compiled.inputs[:3], strict=True):
        assert torch.equal(one.grad, two.grad)


def test_works_under_deterministic_algorithms() -> None:
    pack = random_pack(SEGMENTS, ratio=4, coff=2, head_dim=64, device="cuda")
    found = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            mine = leaves(pack)
            out = compressor(*mine.inputs, **mine.options, total_comp=pack.total_comp)
            out.backward(pack.grad_out)
            found.append((out.detach(), mine.kv.grad, mine.score.grad, mine.ape.grad))
    finally:
        torch.use_deterministic_algorithms(False)
    for one, two in zip(*found, strict=True):
        assert torch.equal(one.view(torch.int16), two.view(torch.int16))


def test_gradients_reach_a_side_stream() -> None:
    pack = random_pack(SEGMENTS, ratio=2, coff=2, head_dim=64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        mine = leaves(pack)
        compressor(*mine.inputs, **mine.options).backward(mine.grad_out)
    side.synchronize()
    assert_gradients(mine, pack)


def test_the_native_module_serves_usual_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a torch that describes its tensors to C; results are those of the way through Python."""
    pack = random_pack(SEGMENTS, ratio=4, coff=2, head_dim=128, device="cuda")
    rows = {"total_comp": pack.total_comp}
    csa_runtime.compressor_forward(*pack.inputs, **pack.options, **rows)
    served = []
    for name in ("torch_forward", "torch_backward"):
        own = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *a, own=own: served.append(own(*a)) or served[-1])
    found = csa_runtime.compressor_forward(*pack.inputs, **pack.options, **rows)
    gradients = csa_runtime.compressor_backward(*pack.inputs, pack.grad_out, **pack.options)
    native = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert [made is not None for made in served] == [native, native]
    for name in ("torch_forward", "torch_backward"):
        monkeypatch.setattr(ops, name, lambda *_: None)
    assert torch.equal(found, csa_runtime.compressor_forward(*pack.inputs, **pack.options, **rows))
    others = csa_runtime.compressor_backward(*pack.inputs, pack.grad_out, **pack.options)
    for one, two in zip(gradients, others, strict=True):
        assert torch.equal(one, two)
