# SPDX-License-Identifier: Apache-2.0
"""The training framework's dispatch replaced on a GPU that its own gate refuses, on a stub."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from csa_runtime.compat import install_megatron
from csa_runtime.torch import compressor
from support import frameworks
from support.packs import Pack, random_pack

pytestmark = [pytest.mark.gpu, pytest.mark.L0]


@pytest.fixture
def caller() -> Iterator[Any]:
    """Its pool is eager on this GPU until the dispatch is replaced."""
    with frameworks.framework(frameworks.make(capability=9)) as made:
        yield made


def make(ratio: int, coff: int, head_dim: int) -> Pack:
    """Ragged, with padding, its leaves wanting gradients."""
    segments = [quarters * ratio // 4 for quarters in (40, 0, 3, 61)]
    pack = random_pack(
        segments, ratio=ratio, coff=coff, head_dim=head_dim, padding=2, device="cuda"
    )
    for tensor in leaves(pack):
        tensor.requires_grad_()
    return pack


def leaves(pack: Pack) -> list[torch.Tensor]:
    """What gradients are taken of."""
    assert pack.ape is not None
    return [pack.kv, pack.score, pack.ape]


def call(pool: Any, pack: Pack) -> Any:
    """As the framework calls it."""
    return pool(
        pack.kv[:, None], pack.score[:, None], pack.ape, pack.cu_seqlens, pack.cu_seqlens_comp,
        pack.total_comp, pack.ratio, pack.head_dim, pack.coff,
    )  # fmt: skip


def direct(pack: Pack) -> torch.Tensor:
    """Without the framework."""
    return compressor(*pack.inputs, **pack.options, total_comp=pack.total_comp)


@pytest.mark.parametrize(("ratio", "coff", "head_dim"), [(4, 2, 128), (2, 1, 64), (128, 1, 512)])
def test_output_and_gradients_are_the_compressors(
    caller: Any, ratio: int, coff: int, head_dim: int
) -> None:
    pack = make(ratio, coff, head_dim)
    assert call(caller.pool, pack) == "eager"
    with install_megatron() as installed:
        out = call(caller.pool, pack)
        assert installed.served == 1 and not installed.declined
    wanted = direct(pack)
    assert torch.equal(out[:, 0], wanted)
    grads = torch.autograd.grad(out[:, 0], leaves(pack), pack.grad_out)
    for ours, theirs in zip(
        grads, torch.autograd.grad(wanted, leaves(pack), pack.grad_out), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_every_gate_is_passed(caller: Any) -> None:
    """Compute capability, deterministic mode, torch.compile, and a capture of it all."""
    pack = make(4, 2, 128)
    wanted = direct(pack).detach()
    with install_megatron():
        torch.use_deterministic_algorithms(True)
        try:
            assert torch.equal(call(caller.pool, pack)[:, 0], wanted)
        finally:
            torch.use_deterministic_algorithms(False)
        compiled = torch.compile(
            caller.maybe_compress_thd_fused, backend="aot_eager", fullgraph=True
        )
        assert torch.equal(call(compiled, pack)[:, 0], wanted)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.no_grad():
            captured = call(caller.pool, pack)
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured[:, 0], wanted)


def test_the_device_is_available_afterwards(caller: Any) -> None:
    module: Any = sys.modules[frameworks.NEW]
    assert not module.fused_compressor_available(torch.device("cuda", 0))
    with install_megatron():
        assert module.fused_compressor_available(torch.device("cuda", 0))
        assert module.fused_compressor_available()
        assert not module.fused_compressor_available(torch.device("cpu"))
    assert not module.fused_compressor_available()


def test_what_no_image_serves_is_left_to_the_framework(caller: Any) -> None:
    """With the reason."""
    pack = random_pack([40], ratio=3, coff=1, head_dim=64, device="cuda")
    with install_megatron() as installed:
        assert call(caller.pool, pack) == "eager"
        assert "ratio 3" in installed.report()
