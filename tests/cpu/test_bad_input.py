# SPDX-License-Identifier: Apache-2.0
"""Malformed arguments: a ValueError that says what is allowed, nothing launched or written."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from csa_runtime import _native, ops
from support.array_calls import SENTINEL, OnGpu, backward, forward, results
from support.packs import Pack, random_pack


@pytest.fixture
def pack() -> Pack:
    """Two rows of padding, tails, an empty segment."""
    return random_pack([9, 0, 30, 4], ratio=4, coff=2, head_dim=6, padding=2, first=1)


def strided(t: torch.Tensor) -> torch.Tensor:
    """The same values, columns two apart."""
    return torch.stack([t, t], dim=2).flatten(1)[:, ::2]


def numpy_reversed(t: torch.Tensor) -> np.ndarray:
    """An array of bf16 whose row stride is negative."""
    return t.float().numpy().astype(ml_dtypes.bfloat16)[::-1]


def misaligned(t: torch.Tensor) -> np.ndarray:
    """An array of bf16 at an odd address."""
    raw = np.zeros(t.numel() * 2 + 1, np.uint8)[1:]
    return raw.view(ml_dtypes.bfloat16).reshape(tuple(t.shape))


INPUTS: dict[str, Callable[[Pack], dict[str, Any]]] = {
    "kv 3-D": lambda p: {"kv": p.kv[None]},
    "kv odd width": lambda p: {"kv": p.kv[:, :11]},
    "kv int": lambda p: {"kv": p.kv.int(), "score": p.kv.int()},
    "kv no columns": lambda p: {"kv": p.kv[:, :0], "score": p.kv[:, :0]},
    "kv a list": lambda p: {"kv": p.kv.tolist()},
    "kv strided columns": lambda p: {"kv": strided(p.kv)},
    "kv on another device": lambda p: {"kv": p.kv.to("meta")},
    "kv reversed rows": lambda p: {"kv": numpy_reversed(p.kv)},
    "kv misaligned": lambda p: {"kv": misaligned(p.kv)},
    "score missing": lambda _: {"score": None},
    "score shorter": lambda p: {"score": p.score[1:]},
    "score fp32": lambda p: {"score": p.score.float()},
    "score strided columns": lambda p: {"score": strided(p.score)},
    "ape bf16": lambda p: {"ape": p.ape.bfloat16()},
    "ape fp64": lambda p: {"ape": p.ape.double()},
    "ape of another ratio": lambda p: {"ape": p.ape[:2]},
    "ape of another width": lambda p: {"ape": p.ape[:, :6]},
    "ape strided": lambda p: {"ape": torch.cat([p.ape, p.ape], dim=1)[:, :12]},
    "cu_seqlens int64": lambda p: {"cu_seqlens": p.cu_seqlens.long()},
    "cu_seqlens 2-D": lambda p: {"cu_seqlens": p.cu_seqlens[None]},
    "cu_seqlens empty": lambda p: {"cu_seqlens": p.cu_seqlens[:0]},
    "cu_seqlens strided": lambda p: {"cu_seqlens": p.cu_seqlens.repeat_interleave(2)[::2]},
    "cu_seqlens_comp shorter": lambda p: {"cu_seqlens_comp": p.cu_seqlens_comp[1:]},
    "cu_seqlens_comp fp32": lambda p: {"cu_seqlens_comp": p.cu_seqlens_comp.float()},
    "ratio 0": lambda _: {"ratio": 0},
    "ratio a float": lambda _: {"ratio": 4.0},
    "ratio a bool": lambda _: {"ratio": True},
    "coff 0": lambda _: {"coff": 0},
    "coff 3": lambda _: {"coff": 3},
    "stream a string": lambda _: {"stream": "0"},
    "score on a GPU": lambda _: {"score": OnGpu((44, 12), "<V2")},
    "prefix on a GPU": lambda _: {"cu_seqlens": OnGpu((5,), "<i4")},
}
FORWARD: dict[str, Callable[[Pack], dict[str, Any]]] = {
    "total_comp negative": lambda _: {"total_comp": -1, "out": None},
    "total_comp beyond 31 bits": lambda _: {"total_comp": 2**31, "out": None},
    "total_comp a float": lambda _: {"total_comp": 3.0, "out": None},
    "total_comp not out's": lambda p: {"total_comp": p.total_comp - 1},
    "out a list": lambda _: {"out": [1]},
    "out fp32": lambda p: {"out": results(p)[0].float()},
    "out wider": lambda p: {"out": results(p)[1][: p.total_comp]},
    "out strided columns": lambda p: {"out": strided(results(p)[0])},
    "out broadcast": lambda p: {"out": results(p)[0][:1].expand(p.total_comp, 6)},
    "out in kv": lambda p: {"out": p.kv[: p.total_comp, :6]},
    "out read-only": lambda p: {"out": read_only(p)},
    "out on a GPU": lambda p: {"out": OnGpu((p.total_comp, 6), "<V2")},
    "fewer tokens than ratio": lambda p: {"kv": p.kv[:3], "score": p.score[:3]},
}
BACKWARD: dict[str, Callable[[Pack], dict[str, Any]]] = {
    "grad_out wider": lambda p: {"grad_out": p.kv},
    "grad_out fp32": lambda p: {"grad_out": p.grad_out.float()},
    "grad_out 1-D": lambda p: {"grad_out": p.grad_out[0]},
    "grad_out strided columns": lambda p: {"grad_out": strided(p.grad_out)},
    "fewer tokens than ratio": lambda p: {"kv": p.kv[:3], "score": p.score[:3]},
    "accumulate without grads": lambda _: {"grads": None, "accumulate": True},
    "accumulate into nothing": lambda p: {"grads": (*results(p)[1:3], None), "accumulate": True},
    "grads a pair": lambda p: {"grads": results(p)[1:3]},
    "grads without grad_kv": lambda p: {"grads": (None, *results(p)[2:])},
    "grad_kv shorter": lambda p: {"grads": (results(p)[1][1:], *results(p)[2:])},
    "grad_score fp32": lambda p: {"grads": (results(p)[1], results(p)[2].float(), None)},
    "grad_ape bf16": lambda p: {"grads": (*results(p)[1:3], results(p)[3].bfloat16())},
    "grad_ape without ape": lambda _: {"ape": None},
    "one buffer twice": lambda p: {"grads": (results(p)[1],) * 2 + (None,)},
    "grad_kv in kv": lambda p: {"grads": (p.kv, *results(p)[2:])},
    "grad_score in grad_out": lambda p: (
        {
            "grad_out": results(p)[1][: p.total_comp, :6],
        }
        | overlapping(p)
    ),
    "workspace strided": lambda _: {"workspace": torch.zeros(64, 2)[:, 0]},
    "workspace misaligned": lambda _: {"workspace": torch.zeros(64, dtype=torch.uint8)[1:]},
    "workspace too small": lambda _: {"workspace": torch.zeros(64, dtype=torch.uint8)},
}


def overlapping(pack: Pack) -> dict[str, Any]:
    """A grad_score whose memory holds grad_out."""
    memory = torch.full_like(pack.kv, SENTINEL)
    return {
        "grad_out": memory[: pack.total_comp, :6],
        "grads": (results(pack)[1], memory, None),
    }


def read_only(pack: Pack) -> np.ndarray:
    """An out that NumPy protects."""
    out = np.zeros((pack.total_comp, 6), ml_dtypes.bfloat16)
    out.flags.writeable = False
    return out


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch fails the test."""

    def launched(**_: Any) -> None:
        raise AssertionError("launched")

    native = SimpleNamespace(
        launch_forward=launched,
        launch_backward=launched,
        backward_workspace_bytes=_native.backward_workspace_bytes,
    )
    monkeypatch.setattr(ops, "_native", native)


@pytest.mark.parametrize("bad", [*INPUTS, *FORWARD])
@pytest.mark.usefixtures("no_launch")
def test_forward_refuses_and_writes_nothing(pack: Pack, bad: str) -> None:
    """Saying what is allowed."""
    out = results(pack)[0]
    changes = {"out": out} | (INPUTS | FORWARD)[bad](pack)
    before = pack.kv.clone()
    with pytest.raises(ValueError, match=r"allow|must be|pass|needs"):
        forward(pack, **changes)
    assert (out == SENTINEL).all()
    assert torch.equal(pack.kv, before)


@pytest.mark.parametrize("bad", [*INPUTS, *BACKWARD])
@pytest.mark.usefixtures("no_launch")
def test_backward_refuses_and_writes_nothing(pack: Pack, bad: str) -> None:
    """Saying what is allowed."""
    grads = results(pack)[1:]
    changes = {"grads": grads} | (INPUTS | BACKWARD)[bad](pack)
    before = pack.kv.clone()
    with pytest.raises(ValueError, match=r"allow|must be|pass|needs"):
        backward(pack, **changes)
    for grad in (*grads, *(changes["grads"] or ())):
        assert grad is None or grad.data_ptr() == pack.kv.data_ptr() or (grad == SENTINEL).all()
    assert torch.equal(pack.kv, before)
