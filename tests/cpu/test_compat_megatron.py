# SPDX-License-Identifier: Apache-2.0
"""The training framework's dispatch replaced, on a stub of it: what is served and what is not."""

import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from csa_runtime import megatron_dispatch
from csa_runtime.compat import install_megatron, uninstall_megatron
from csa_runtime.megatron_dispatch import Dispatch
from csa_runtime.torch import compressor
from support import fake, frameworks
from support.packs import Pack, random_pack

pytestmark = pytest.mark.L0

RATIO, COFF, D = 4, 2, 6


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Nothing stays installed."""
    yield
    uninstall_megatron()


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve CPU tensors too: the reference stands for the kernels."""
    monkeypatch.setattr(megatron_dispatch, "_ordinal", lambda _: 0)
    monkeypatch.setattr(Dispatch, "_device_refuses", lambda *_: None)


def pack(**options: Any) -> Pack:
    """A ragged pack whose kv, score and ape want gradients."""
    made = random_pack([9, 0, 30, 4], ratio=RATIO, coff=COFF, head_dim=D, padding=2, **options)
    for tensor in (made.kv, made.score, made.ape):
        assert tensor is not None
        tensor.requires_grad_()
    return made


def arguments(p: Pack, **changes: Any) -> dict[str, Any]:
    """The framework's call of its dispatch function."""
    return {
        "kv": p.kv[:, None], "score": p.score[:, None], "ape": p.ape, "cu_seqlens": p.cu_seqlens,
        "cu_seqlens_comp": p.cu_seqlens_comp, "total_comp": p.total_comp, "ratio": p.ratio,
        "head_dim": p.head_dim, "coff": p.coff,
    } | changes  # fmt: skip


def direct(p: Pack) -> torch.Tensor:
    """The same without the framework."""
    return compressor(*p.inputs, **p.options, total_comp=p.total_comp)


@pytest.mark.parametrize(
    ("name", "switch"), [(frameworks.NEW, True), (frameworks.OLD, True), (frameworks.OLD, False)]
)
def test_every_known_version_is_served(name: str, switch: bool, anywhere: None) -> None:
    """Where its capability gate keeps it eager without."""
    p = pack()
    with frameworks.framework(frameworks.make(name, switch)) as caller:
        assert caller.pool(**arguments(p)) == "eager"
        with install_megatron() as installed:
            out = caller.pool(**arguments(p))
            assert out.shape == (p.total_comp, 1, D)
            assert torch.equal(out[:, 0], direct(p))
            assert (installed.module, installed.version) == (name, "0.18.0rc1")
            assert installed.served == 1 and not installed.declined
            assert "1 calls served" in installed.report()


def test_gradients_reach_the_frameworks_tensors(anywhere: None) -> None:
    """kv, score and ape, as without the framework."""
    p = pack()
    leaves = [p.kv, p.score, p.ape]
    with frameworks.framework(frameworks.make()) as caller, install_megatron():
        grads = torch.autograd.grad(caller.pool(**arguments(p))[:, 0], leaves, p.grad_out)
    for ours, wanted in zip(grads, torch.autograd.grad(direct(p), leaves, p.grad_out), strict=True):
        assert torch.equal(ours, wanted)


def test_deterministic_mode_is_served(anywhere: None) -> None:
    """The framework's own gate, even on a GPU it likes, keeps that eager."""
    p = pack()
    with frameworks.framework(frameworks.make(capability=10)) as caller:
        torch.use_deterministic_algorithms(True)
        try:
            assert caller.pool(**arguments(p)) == "eager"
            install_megatron()
            assert torch.equal(caller.pool(**arguments(p))[:, 0], direct(p))
        finally:
            torch.use_deterministic_algorithms(False)


def test_a_compiled_caller_is_served_in_one_graph(anywhere: None) -> None:
    """Calls under torch.compile are traced once, whatever is counted outside."""
    p = pack()
    with frameworks.framework(frameworks.make()) as caller, install_megatron() as installed:
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(caller.maybe_compress_thd_fused, backend=counter, fullgraph=True)
        for _ in range(3):
            assert torch.equal(compiled(**arguments(p))[:, 0], direct(p))
        assert counter.frame_count == 1 and installed.served == 0


def test_a_device_is_asked_while_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver says is a constant of the graph; a refusal leaves the call to be traced."""
    asked: list[tuple[Any, ...]] = []

    def refusal(*key: Any) -> str | None:
        asked.append(key)
        return None if os.getpid() and key[1] == RATIO else "no image"

    monkeypatch.setattr(megatron_dispatch, "_refusal", refusal)
    monkeypatch.setattr(megatron_dispatch, "_ordinal", lambda _: 0)
    p = pack()
    with frameworks.framework(frameworks.make()) as caller, install_megatron():
        compiled = torch.compile(caller.pool, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(**arguments(p))[:, 0], direct(p))
        assert asked == [(0, RATIO, COFF, 128)]
        for ratio in (2, 3):
            other = random_pack([9], ratio=ratio, coff=COFF, head_dim=D)
            assert compiled(**arguments(other)) == "eager"
        assert {key[1] for key in asked} == {RATIO, 2}


def test_int64_prefixes_and_strided_rows_are_served(anywhere: None) -> None:
    """The framework converts the first and copies the second."""
    p = pack()
    wide = torch.cat([p.kv, p.score], 1).detach()
    with frameworks.framework(frameworks.make()) as caller, install_megatron():
        out = caller.pool(
            **arguments(
                p,
                kv=wide[:, None, : p.kv.shape[1]],
                score=wide[:, None, p.kv.shape[1] :],
                cu_seqlens=p.cu_seqlens.long(),
                cu_seqlens_comp=p.cu_seqlens_comp.long(),
            )
        )
    assert torch.equal(out[:, 0], direct(p))


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("bf16", {"dtype": torch.float32}),
        ("ape", {"ape": torch.bfloat16}),
        ("tokens, 1,", {"flat": True}),
        ("tokens, 1,", {"head_dim": D + 1}),
        ("no rows", {"total_comp": 0}),
        ("shape", {"short": True}),
    ],
)
def test_what_is_not_served_is_left_eager_with_a_reason(
    why: str, changes: dict[str, Any], anywhere: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Counted each time, logged once."""
    p = pack(dtype=changes.pop("dtype", torch.bfloat16))
    call = arguments(p)
    if "ape" in changes:
        changes["ape"] = call["ape"].to(changes["ape"])
    if changes.pop("flat", False):
        changes["kv"] = p.kv
    if changes.pop("short", False):
        changes["score"] = call["score"][1:]
    with frameworks.framework(frameworks.make()) as caller, install_megatron() as installed:
        with caplog.at_level(logging.WARNING, "csa_runtime"):
            for _ in range(2):
                assert caller.pool(**call | changes) == "eager"
        assert [*installed.declined.values()] == [2] and why in next(iter(installed.declined))
        assert len(caplog.records) == 1 and why in installed.report()


def test_cpu_tensors_stay_eager() -> None:
    """As in the framework."""
    with frameworks.framework(frameworks.make()) as caller, install_megatron() as installed:
        assert caller.pool(**arguments(pack())) == "eager"
        assert "GPU" in installed.report()


def test_the_callers_switch_is_kept(anywhere: None) -> None:
    """enabled=False, and in the oldest version its variable: no reason to warn."""
    p = pack()
    with frameworks.framework(frameworks.make()) as caller, install_megatron() as installed:
        assert caller.pool(**arguments(p, enabled=False)) == "eager"
        assert not installed.declined
    old = frameworks.make(frameworks.OLD, switch=False)
    with frameworks.framework(old) as caller, install_megatron():
        old.enabled = False  # type: ignore[attr-defined]
        assert caller.pool(**arguments(p)) == "eager"


def test_no_gpu_is_nobodys_availability() -> None:
    """What the framework asks before it calls."""
    module: Any = frameworks.make(capability=10)
    with frameworks.framework(module), install_megatron():
        assert module.fused_compressor_available() is torch.cuda.is_available()
        assert not module.fused_compressor_available(torch.device("cpu"))
    assert module.fused_compressor_available()


def test_a_driver_error_is_no_reason_to_go_on_eagerly() -> None:
    """It is raised; what the device does not serve is a reason, asked for once."""
    ask = "from csa_runtime.megatron_dispatch import _refusal\n"
    failed = fake.run(ask + "emit(attempt(_refusal, 0, 4, 2, 128))", driver=False)
    assert failed.output["type"] == "DriverError"
    code = "emit([_refusal(0, r, 2, 64) for r in (4, 4, 3, 3)])"
    served = fake.run(ask + code)
    assert served.output[:2] == [None, None]
    assert "ratio 3" in served.output[2] and served.output[3] == served.output[2]
