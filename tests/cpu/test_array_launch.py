# SPDX-License-Identifier: Apache-2.0
"""What the array operations hand to the launcher, with arrays that no GPU holds."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import csa_runtime
from csa_runtime import calls, libraries, ops, prefixes
from support.array_calls import OnGpu

TOKENS, ROWS, D, RATIO, COFF, SEGMENTS = 44, 9, 6, 4, 2, 3
WIDTH = COFF * D


class Recorder:
    """Stands for the native module."""

    def __init__(self) -> None:
        """Nothing launched."""
        self.launches: list[tuple[str, dict[str, Any]]] = []

    def launch_forward(self, **fields: Any) -> None:
        """Remember."""
        self.launches.append(("forward", fields))

    def launch_backward(self, **fields: Any) -> None:
        """Remember."""
        self.launches.append(("backward", fields))

    @staticmethod
    def backward_workspace_bytes(*_: int) -> int:
        """A size that only this gives."""
        return 1792


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """The recorder in place of the module."""
    recorder = Recorder()
    monkeypatch.setattr(ops, "_native", recorder)
    monkeypatch.setattr(calls, "visible_devices", lambda: 1)
    return recorder


def array(
    number: int, shape: tuple[int, ...], typestr: str, kind: type = OnGpu, **more: Any
) -> Any:
    """The array at its own address."""
    return kind(shape, typestr, data=(number << 32, False), **more)


def inputs(kind: type = OnGpu, **more: Any) -> dict[str, Any]:
    """Arguments of both directions."""
    return {
        "kv": array(1, (TOKENS, WIDTH), "<V2", kind, strides=(2 * 40, 2), **more),
        "score": array(2, (TOKENS, WIDTH), "<V2", kind, **more),
        "ape": array(3, (RATIO, WIDTH), "<f4", kind, **more),
        "cu_seqlens": array(4, (SEGMENTS + 1,), "<i4", kind, **more),
        "cu_seqlens_comp": array(5, (SEGMENTS + 1,), "<i4", kind, **more),
        "ratio": RATIO,
        "coff": COFF,
    }


COMMON = {
    "device": 0, "ratio": RATIO, "coff": COFF, "dtype": 1, "tokens": TOKENS, "segments": SEGMENTS,
    "rows": ROWS, "head_dim": D, "kv": 1 << 32, "score": 2 << 32, "ape": 3 << 32,
    "cu_seqlens": 4 << 32, "cu_seqlens_comp": 5 << 32, "kv_stride": 40, "score_stride": WIDTH,
}  # fmt: skip


def test_forward_passes_every_field(native: Recorder) -> None:
    """Pointers, strides in elements, sizes, and the stream asked for."""
    out = array(6, (ROWS, D), "<V2")
    assert csa_runtime.compressor_forward(**inputs(), out=out, stream=99) is out
    expected = COMMON | {"out": 6 << 32, "out_stride": D, "stream": 99}
    assert native.launches == [("forward", expected)]


def test_backward_passes_every_field(native: Recorder) -> None:
    """The flag, and the workspace with its size in bytes."""
    grads = (
        array(7, (TOKENS, WIDTH), "<V2"),
        array(8, (TOKENS, WIDTH), "<V2", strides=(2 * 50, 2)),
        array(9, (RATIO, WIDTH), "<f4"),
    )
    result = csa_runtime.compressor_backward(
        **inputs(), grad_out=array(6, (ROWS, D), "<V2", strides=(0, 2)), grads=grads,
        workspace=array(10, (500,), "<f4"), accumulate=True, stream=99,
    )  # fmt: skip
    assert result == grads
    expected = COMMON | {
        "grad_out": 6 << 32, "grad_out_stride": 0, "grad_kv": 7 << 32, "grad_kv_stride": WIDTH,
        "grad_score": 8 << 32, "grad_score_stride": 50, "grad_ape": 9 << 32,
        "workspace": 10 << 32, "workspace_bytes": 2000, "flags": 1, "stream": 99,
    }  # fmt: skip
    assert native.launches == [("backward", expected)]


def test_absent_arrays_are_null(native: Recorder) -> None:
    """Without an APE there is no workspace either, and nothing has to allocate one."""
    grads = (array(7, (TOKENS, WIDTH), "<V2"), array(8, (TOKENS, WIDTH), "<V2"), None)
    csa_runtime.compressor_backward(
        **inputs() | {"ape": None}, grad_out=array(6, (ROWS, D), "<V2"), grads=grads
    )
    fields = native.launches[0][1]
    assert [fields[name] for name in ("ape", "grad_ape", "workspace")] == [None] * 3
    assert (fields["workspace_bytes"], fields["flags"]) == (0, 0)


def test_results_of_strangers_must_be_given(native: Recorder) -> None:
    """Their arrays cannot be made here; nothing is launched."""
    with pytest.raises(ValueError, match=r"pass out="):
        csa_runtime.compressor_forward(**inputs(), total_comp=ROWS)
    with pytest.raises(ValueError, match=r"workspace="):
        csa_runtime.compressor_backward(**inputs(), grad_out=array(6, (ROWS, D), "<V2"))
    assert not native.launches


def test_current_stream_is_the_interfaces(native: Recorder) -> None:
    """stream=None: the stream kv's interface names; another array's must be the same."""
    out = array(6, (ROWS, D), "<V2")
    csa_runtime.compressor_forward(**inputs(stream=77), out=out)
    csa_runtime.compressor_forward(**inputs(), out=out)
    assert [fields["stream"] for _, fields in native.launches] == [77, 0]
    mixed = inputs(stream=77) | {"score": array(2, (TOKENS, WIDTH), "<V2", stream=78)}
    with pytest.raises(ValueError, match="score is pending on stream 0x4e"):
        csa_runtime.compressor_forward(**mixed, out=out)
    csa_runtime.compressor_forward(**mixed, out=out, stream=5)
    assert native.launches[-1][1]["stream"] == 5


def test_results_on_another_stream_are_refused(native: Recorder) -> None:
    """Like inputs: out, the gradients and the workspace."""
    pending = {"stream": 78}
    with pytest.raises(ValueError, match="out is pending on stream 0x4e"):
        csa_runtime.compressor_forward(**inputs(), out=array(6, (ROWS, D), "<V2", **pending))
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "grad_out": ((ROWS, D), "<V2"), "grad_kv": ((TOKENS, WIDTH), "<V2"),
        "grad_score": ((TOKENS, WIDTH), "<V2"), "grad_ape": ((RATIO, WIDTH), "<f4"),
        "workspace": ((500,), "<f4"),
    }  # fmt: skip
    for late in shapes:
        made = {
            name: array(number, *shape, **pending if name == late else {})
            for number, (name, shape) in enumerate(shapes.items(), start=6)
        }
        grads = (made["grad_kv"], made["grad_score"], made["grad_ape"])
        given: dict[str, Any] = {"grads": grads, "workspace": made["workspace"]}
        with pytest.raises(ValueError, match=f"{late} is pending on stream 0x4e"):
            csa_runtime.compressor_backward(**inputs(), grad_out=made["grad_out"], **given)
    assert not native.launches


def test_device_comes_from_any_array_that_names_it(
    native: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bare interface names none: with several devices, none is picked in silence."""
    monkeypatch.setattr(calls, "visible_devices", lambda: 2)
    out = array(6, (ROWS, D), "<V2")
    with pytest.raises(ValueError, match=r"which of 2 devices .* pass one"):
        csa_runtime.compressor_forward(**inputs(), out=out)
    assert not native.launches
    out.device = SimpleNamespace(id=1)
    csa_runtime.compressor_forward(**inputs(), out=out)
    given = inputs()
    given["score"].device = SimpleNamespace(id=1)
    csa_runtime.compressor_forward(**given, out=array(6, (ROWS, D), "<V2"))
    assert [fields["device"] for _, fields in native.launches] == [1, 1]
    given["ape"].device = SimpleNamespace(id=0)
    with pytest.raises(ValueError, match=r"devices \[0, 1\]"):
        csa_runtime.compressor_forward(**given, out=array(6, (ROWS, D), "<V2"))


def test_checks_refuse_device_memory_that_nobody_reads(
    native: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CSA_RUNTIME_CHECK=1 with a bare interface."""
    monkeypatch.setattr(prefixes, "checking", lambda: True)
    given, out = inputs(), array(6, (ROWS, D), "<V2")
    with pytest.raises(
        ValueError, match=r"cu_seqlens of .* cannot be read back.*CSA_RUNTIME_CHECK"
    ):
        csa_runtime.compressor_forward(**given, out=out)
    assert not native.launches


class CupyArray(OnGpu):
    """An array of the stand-in for cupy below."""

    device = SimpleNamespace(id=0)
    dtype = "bf16"

    def __getitem__(self, _: slice) -> "CupyArray":
        """The last element, which is all anyone asks for."""
        return self

    def tolist(self) -> list[int]:
        """What a read-back gives."""
        return [ROWS]


CupyArray.__module__ = "cupy"


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A stand-in for cupy: what was allocated on which stream, and whether it captures."""
    state = SimpleNamespace(streams=[321], capturing=False, made=[])

    @contextmanager
    def external(handle: int, _: int) -> Iterator[None]:
        state.streams.append(handle)
        yield
        state.streams.pop()

    @contextmanager
    def device(_: int) -> Iterator[None]:
        yield

    def empty(shape: tuple[int, ...], dtype: str) -> CupyArray:
        state.made.append((shape, dtype, state.streams[-1]))
        typestr = {"bf16": "<V2", "float32": "<f4", "uint8": "|u1"}[dtype]
        return array(20 + len(state.made), shape, typestr, CupyArray)

    module: Any = ModuleType("cupy")
    module.empty = empty
    module.cuda = SimpleNamespace(
        Device=device,
        ExternalStream=external,
        get_current_stream=lambda: SimpleNamespace(ptr=state.streams[-1]),
        runtime=SimpleNamespace(streamIsCapturing=lambda _: state.capturing),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    libraries._KNOWN.pop("cupy", None)
    yield state
    libraries._KNOWN.pop("cupy", None)


def test_cupy_results_come_from_the_stream_in_use(native: Recorder, cupy: SimpleNamespace) -> None:
    """Its pool has an arena per stream: memory of another would be handed out too early."""
    csa_runtime.compressor_forward(**inputs(CupyArray))
    csa_runtime.compressor_forward(**inputs(CupyArray), stream=5)
    assert cupy.made == [((ROWS, D), "bf16", 321), ((ROWS, D), "bf16", 5)]
    assert [fields["stream"] for _, fields in native.launches] == [321, 5]


def test_cupy_backward_takes_a_workspace(native: Recorder, cupy: SimpleNamespace) -> None:
    """Of the size the launcher names, and three gradients."""
    grad_out = array(6, (ROWS, D), "<V2", CupyArray)
    csa_runtime.compressor_backward(**inputs(CupyArray), grad_out=grad_out)
    assert [made[:2] for made in cupy.made] == [
        ((1792,), "uint8"),
        ((RATIO, WIDTH), "float32"),
        ((TOKENS, WIDTH), "bf16"),
        ((TOKENS, WIDTH), "bf16"),
    ]
    assert native.launches[0][1]["workspace_bytes"] == 1792


def test_exporters_never_wait_inside_a_capture(native: Recorder, cupy: SimpleNamespace) -> None:
    """Waiting for work outside it would spoil the capture: the standard's -1."""
    asked = []

    class Exporting(CupyArray):
        def __dlpack__(self, *, stream: int, **_: Any) -> Any:
            asked.append(stream)
            return np.zeros(self.shape, np.float32).__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    Exporting.__module__ = "cupy"
    given = inputs(CupyArray) | {"score": Exporting((TOKENS, WIDTH), "<V2")}
    for capturing, stream in ((False, None), (False, 5), (True, 5)):
        cupy.capturing = capturing
        with pytest.raises(ValueError, match="score is"):
            csa_runtime.compressor_forward(**given, total_comp=ROWS, stream=stream)
    assert asked == [321, 5, -1] and not native.launches


def test_captures_outside_torch_need_capacity_and_workspace(
    native: Recorder, cupy: SimpleNamespace
) -> None:
    """Nothing could read back, and nothing keeps pool memory for the graph's lifetime."""
    cupy.capturing = True
    with pytest.raises(ValueError, match="pass total_comp="):
        csa_runtime.compressor_forward(**inputs(CupyArray))
    grad_out = array(6, (ROWS, D), "<V2", CupyArray)
    with pytest.raises(ValueError, match="pass workspace="):
        csa_runtime.compressor_backward(**inputs(CupyArray), grad_out=grad_out)
    assert not native.launches and not cupy.made
