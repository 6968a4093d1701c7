# SPDX-License-Identifier: Apache-2.0
"""What `demo` and `check` do on a GPU, with one whose memory is the host's."""

import ctypes
from typing import Any

import numpy as np
import pytest

from csa_runtime import _demo, _device_memory, _native, _trial
from csa_runtime.__main__ import main
from csa_runtime.errors import DriverError
from csa_runtime.reference import reference_backward, reference_forward
from support import fake


def at(address: int, rows: int, columns: int, stride: int, dtype: str) -> np.ndarray:
    """The matrix that a pointer and a row stride describe."""
    kind = np.dtype(dtype)
    size = ((rows - 1) * stride + columns) * kind.itemsize
    flat = np.frombuffer((ctypes.c_char * size).from_address(address), dtype=kind)
    strides = (stride * kind.itemsize, kind.itemsize)
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), strides, writeable=True)


class Kernels:
    """The launcher's two functions on host memory, by the reference."""

    def __init__(self) -> None:
        """Nothing launched."""
        self.variants: list[str | None] = []

    def read(self, f: dict[str, Any]) -> tuple[Any, ...]:
        """Inputs in fp32."""
        width = f["head_dim"] * f["coff"]
        kv = _trial.values_of(at(f["kv"], f["tokens"], width, f["kv_stride"], "u2"))
        score = _trial.values_of(at(f["score"], f["tokens"], width, f["score_stride"], "u2"))
        ape = at(f["ape"], f["ratio"], width, width, "f4")
        count = f["segments"] + 1
        prefixes = (at(f[n], 1, count, count, "i4")[0] for n in ("cu_seqlens", "cu_seqlens_comp"))
        return kv, score, ape, *prefixes

    def forward(self, variant: str | None = None, **f: Any) -> None:
        """Write `out`."""
        self.variants.append(variant)
        out = at(f["out"], f["rows"], f["head_dim"], f["out_stride"], "u2")
        options = {"ratio": f["ratio"], "coff": f["coff"], "total_comp": f["rows"]}
        out[:] = _trial.bits_of(reference_forward(*self.read(f), **options))

    def backward(self, variant: str | None = None, **f: Any) -> None:
        """Write the gradients."""
        self.variants.append(variant)
        width = f["head_dim"] * f["coff"]
        incoming = at(f["grad_out"], f["rows"], f["head_dim"], f["grad_out_stride"], "u2")
        kv, score, ape = reference_backward(
            *self.read(f), _trial.values_of(incoming), ratio=f["ratio"], coff=f["coff"]
        )
        at(f["grad_kv"], f["tokens"], width, f["grad_kv_stride"], "u2")[:] = _trial.bits_of(kv)
        grad_score = at(f["grad_score"], f["tokens"], width, f["grad_score_stride"], "u2")
        grad_score[:] = _trial.bits_of(score)
        at(f["grad_ape"], f["ratio"], width, width, "f4")[:] = ape


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """The driver in tests/memory_driver.c; leaves nothing allocated and no context current."""
    path = str(fake.library("memory_driver.c") / "libcuda.so.1")
    monkeypatch.setattr(_device_memory, "LIBRARY", path)
    return ctypes.CDLL(path)


def left_behind(driver: ctypes.CDLL) -> tuple[int, int]:
    """Allocations, and contexts pushed."""
    names = ("memory_driver_allocations", "memory_driver_depth")
    allocations, depth = (ctypes.c_int.in_dll(driver, name).value for name in names)
    return allocations, depth


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, driver: ctypes.CDLL) -> Kernels:
    """A GPU of compute capability 9.0 that is the host."""
    kernels = Kernels()
    device = {
        "name": "Host", "compute_capability": 90, "arch": 90, "ordinal": 0, "multiprocessors": 1,
    }  # fmt: skip
    monkeypatch.setattr(_native, "driver_info", lambda: {"version": 13000, "devices": [device]})
    monkeypatch.setattr(_native, "load", lambda *_: None)
    monkeypatch.setattr(_native, "launch_forward", kernels.forward)
    monkeypatch.setattr(_native, "launch_backward", kernels.backward)
    return kernels


@pytest.mark.parametrize(("ratio", "coff"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_results_come_back_from_every_pointer(kernels: Kernels, ratio: int, coff: int) -> None:
    """Each array where the launcher was told it is, bit for bit."""
    problem = _trial.make([9, 0, 12], ratio=ratio, coff=coff, head_dim=5, padding=2, seed=1)
    results = _trial.on_gpu(problem, forward="a", backward="b")
    expected = _trial.on_cpu(problem)
    assert list(results) == list(_trial.RESULTS)
    for name, values in results.items():
        np.testing.assert_array_equal(values, expected[name])
    assert kernels.variants == ["a", "b"]


def test_demo_names_the_gpu_it_ran_on(
    kernels: Kernels, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And compares with the reference."""
    monkeypatch.setattr(_demo, "SEGMENTS", [9, 3])
    assert main(["demo"]) == 0
    text = capsys.readouterr().out
    assert "ran on Host" in text and text.endswith("demo passed\n")
    assert kernels.variants == [None, None]


@pytest.mark.parametrize("kind", ["short", "long"])
def test_check_gives_each_kind_of_window_rows_to_pool(
    kind: str,
    kernels: Kernels,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tails, padding and several blocks, at head_dims that its variants serve."""
    ratio = {"short": 4, "long": 128}[kind]
    common = {"ratio": ratio, "coff": 2, "dtype": "bf16", "kind": kind, "columns": 2}
    common |= {"alignment": 2, "threads": 128, "dynamic_shared": 0}
    names = [f"csa_{operation}_r{ratio}" for operation in ("forward", "backward")]
    variants = [{"name": n, "operation": n.split("_")[1], **common} for n in names]
    images = [{"variant": name, "arch": 90} for name in names]
    bundle = {"source": "here", "sha256": "0" * 64, "variants": variants, "images": images}
    monkeypatch.setattr(_native, "bundle_info", lambda: bundle)
    monkeypatch.setattr(_native, "backward_workspace_bytes", lambda *_: 1024)
    assert main(["check"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "csa_" in line]
    heads = {"short": (6, 74), "long": (128, 512)}[kind]
    pooled = {"short": 9 + 65 + 2 + 32, "long": 2 + 1 + 5 + 3}[kind] + 3
    assert [int(row[2]) for row in rows if row[1] == "out"] == [pooled * d for d in heads]
    assert kernels.variants == [name for name in names for _ in heads]


@pytest.mark.usefixtures("kernels")
def test_info_shows_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    """With the images it would use."""
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "CUDA 13.0" in text
    assert "Host, compute capability 9.0, 1 multiprocessors: images of sm_90" in text


@pytest.mark.usefixtures("kernels")
def test_memory_is_freed_and_the_context_left(driver: ctypes.CDLL) -> None:
    """After a run, and after one that failed."""
    problem = _trial.make([9], ratio=4, coff=1, head_dim=5, padding=0, seed=1)
    _trial.on_gpu(problem)
    assert left_behind(driver) == (0, 0)
    with pytest.raises(TypeError), _device_memory.Memory() as memory:
        memory.upload(np.zeros(3))
        assert left_behind(driver) == (1, 1)
        raise TypeError
    assert left_behind(driver) == (0, 0)


def test_memory_keeps_empty_arrays(driver: ctypes.CDLL) -> None:
    """Which the driver would refuse to allocate or copy."""
    with _device_memory.Memory() as memory:
        empty = np.zeros((0, 3), np.float32)
        memory.download(memory.upload(empty), empty)
    assert left_behind(driver) == (0, 0)


@pytest.mark.parametrize("call", ["cuInit", "cuDevicePrimaryCtxRetain", "cuMemAlloc_v2",
                                  "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2"])  # fmt: skip
def test_a_failed_call_is_named(
    call: str, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the driver's name of the error and its number."""
    monkeypatch.setenv("MEMORY_DRIVER_FAIL", call)
    values = np.zeros(3)
    with pytest.raises(DriverError, match="OUT_OF_MEMORY") as raised:
        with _device_memory.Memory() as memory:
            memory.download(memory.upload(values), values)
    error = raised.value
    assert (error.call, error.code, error.name) == (call, 2, "CUDA_ERROR_OUT_OF_MEMORY")
    assert left_behind(driver) == (0, 0)


def test_memory_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an OSError."""
    monkeypatch.setattr(_device_memory, "LIBRARY", "libcuda-not-here.so.1")
    with pytest.raises(DriverError, match="cannot be opened") as raised:
        _device_memory.Memory()
    assert raised.value.call == "dlopen"


@pytest.mark.parametrize("command", ["demo", "check"])
def test_the_command_reports_a_full_device(
    command: str,
    kernels: Kernels,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one line, rather than a quiet run on the CPU."""
    monkeypatch.setenv("MEMORY_DRIVER_FAIL", "cuMemAlloc_v2")
    assert main([command]) == 1
    assert "CUDA_ERROR_OUT_OF_MEMORY (2)" in capsys.readouterr().err
    assert not kernels.variants
