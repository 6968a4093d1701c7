# SPDX-License-Identifier: Apache-2.0
"""Malformed arguments: a ValueError that says what is allowed, nothing launched or written."""

from collections.abc import Callable
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import csa_runtime
from csa_runtime import _native, ops
from support.array_calls import SENTINEL, Exporter, OnGpu, backward, forward, results
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


def masked(t: torch.Tensor) -> Any:
    """An array of NumPy's with a mask, in the same dtype."""
    bf16 = t.dtype == torch.bfloat16
    values = t.float().numpy().astype(ml_dtypes.bfloat16) if bf16 else t.numpy()
    return np.ma.masked_array(values)


class Refusing(Exporter):
    """An array that cannot be exported."""

    def __init__(self, array: Any, error: Exception) -> None:
        """Raise `error` when asked."""
        super().__init__(array)
        self.error = error

    def __dlpack__(self, **_: Any) -> Any:
        """Refuse."""
        raise self.error


class Claiming(Exporter):
    """An array on the CPU that says it is on a GPU."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """CUDA."""
        return 2, 0


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
    "stream an array": lambda _: {"stream": np.array([1, 2])},
    "stream a float of NumPy": lambda _: {"stream": np.float32(1.5)},
    "stream a decimal": lambda _: {"stream": Decimal("1.5")},
    "cu_seqlens a list": lambda _: {"cu_seqlens": [0, 4]},
    "cu_seqlens masked": lambda p: {"cu_seqlens": masked(p.cu_seqlens)},
    "kv masked": lambda p: {"kv": masked(p.kv)},
    "kv a negative": lambda p: {"kv": p.kv._neg_view()},
    "kv of structures": lambda p: {"kv": np.zeros(tuple(p.kv.shape), "i1,i1")},
    "kv of void": lambda p: {"kv": np.zeros(tuple(p.kv.shape), "V2")},
    "kv an empty interface": lambda _: {"kv": SimpleNamespace(__cuda_array_interface__={})},
    "kv a false interface": lambda _: {"kv": SimpleNamespace(__cuda_array_interface__=5)},
    "score an empty interface": lambda _: {"score": SimpleNamespace(__cuda_array_interface__={})},
    "score without export": lambda p: {"score": Refusing(p.score, BufferError("no"))},
    "score of another export": lambda p: {"score": Refusing(p.score, TypeError("no"))},
    "score said to be on a GPU": lambda p: {"score": Claiming(p.score)},
    "score on a GPU": lambda _: {"score": OnGpu((44, 12), "<V2")},
    "prefix on a GPU": lambda _: {"cu_seqlens": OnGpu((5,), "<i4")},
}
FORWARD: dict[str, Callable[[Pack], dict[str, Any]]] = {
    "total_comp negative": lambda _: {"total_comp": -1, "out": None},
    "total_comp beyond 31 bits": lambda _: {"total_comp": 2**31, "out": None},
    "total_comp a float": lambda _: {"total_comp": 3.0, "out": None},
    "total_comp not out's": lambda p: {"total_comp": p.total_comp - 1},
    "out a list": lambda _: {"out": [1]},
    "out a number": lambda _: {"out": 5, "total_comp": None},
    "out a string": lambda _: {"out": "x", "total_comp": None},
    "out a list, no total_comp": lambda _: {"out": [1], "total_comp": None},
    "out 1-D, no total_comp": lambda p: {"out": results(p)[0][0], "total_comp": None},
    "out a scalar": lambda p: {"out": results(p)[0][0, 0], "total_comp": None},
    "out masked": lambda p: {"out": masked(p.grad_out)},
    "out a negative": lambda p: {"out": torch.zeros_like(p.grad_out)._neg_view()},
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


@pytest.mark.parametrize(
    "bad",
    [
        None,
        5,
        [0, 4],
        "x",
        Exporter(np.zeros(3, np.int32)),
        np.ma.masked_array([0, 4], dtype=np.int32),
    ],
    ids=["None", "number", "list", "string", "DLPack alone", "masked"],
)
def test_row_prefixes_of_no_array_are_refused(bad: Any) -> None:
    """Before anything is computed."""
    with pytest.raises(ValueError, match=r"cu_seqlens is .* allowed"):
        csa_runtime.compressed_prefixes(bad, ratio=4)


@pytest.mark.parametrize(
    "changes",
    [
        {"alignment": "16"},
        {"alignment": 16.0},
        {"alignment": None},
        {"dtype": ["a"]},
        {"dtype": None},
        {"variant": 5},
        {"variant": b"x"},
        {"compute_capability": "90"},
        {"compute_capability": 9.0},
        {"compute_capability": ["9", 0]},
        {"shared_limit": "0"},
        {"shared_limit": -1},
        {"operation": ["forward"]},
        {"operation": None},
        {"head_dim": "6"},
        {"ratio": None},
    ],
    ids=repr,
)
def test_explain_refuses_what_is_of_another_type(changes: dict[str, Any]) -> None:
    """With the argument's name."""
    good: dict[str, Any] = {
        "operation": "backward", "ratio": 4, "coff": 2, "head_dim": 128, "total_tokens": 64,
        "total_comp": 16, "compute_capability": 90,
    }  # fmt: skip
    assert csa_runtime.explain(**good)["variant"]
    with pytest.raises(ValueError, match=f"{next(iter(changes))}.* is .* allowed"):
        csa_runtime.explain(**good | changes)


@pytest.mark.parametrize("dtype", [["bfloat16"], None, 1, "bf16"], ids=repr)
def test_workspace_of_no_dtype_is_refused(dtype: Any) -> None:
    """By the names that are served."""
    with pytest.raises(ValueError, match=r"dtype is .* bfloat16"):
        csa_runtime.backward_workspace_bytes(64, 16, 128, ratio=4, coff=2, dtype=dtype)


@pytest.mark.parametrize(
    "options", [{"bundle": 5}, {"bundle": b"x"}, {"device": "0"}, {"device": 1.0}], ids=repr
)
def test_loading_refuses_what_is_no_path_or_ordinal(options: dict[str, Any]) -> None:
    """Before the bundle is chosen or the driver started."""
    with pytest.raises(ValueError, match=f"{next(iter(options))} is .* allowed"):
        csa_runtime.load(**options)
