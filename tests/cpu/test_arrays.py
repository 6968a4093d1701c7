# SPDX-License-Identifier: Apache-2.0
"""Arrays and streams of several libraries, described without importing any."""

import gc
import weakref
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from csa_runtime import dlpack
from csa_runtime.arrays import describe, library_of
from csa_runtime.streams import handle_of, same
from support.array_calls import Exporter


class Interface:
    """A stranger's array on a GPU: `__cuda_array_interface__` alone."""

    def __init__(self, **interface: Any) -> None:
        """Override fields of a plain one."""
        self.__cuda_array_interface__ = {
            "shape": (4, 6), "typestr": "<f4", "data": (4096, False), "version": 3,
        } | interface  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int32", "uint8"])
def test_torch_tensors_by_their_own_methods(dtype: str) -> None:
    """Pointer, strides in elements, dtype, of a view too."""
    base = torch.zeros((6, 10), dtype=getattr(torch, dtype))
    view = base[1:, 2:8]
    found = describe("kv", view)
    assert found.pointer == base.data_ptr() + 12 * base.element_size()
    assert found.shape == (5, 6) and found.strides == (10, 1)
    assert (found.dtype, found.device, found.library) == (dtype, "cpu", "torch")
    assert found.writable


def test_torch_is_never_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that need a gradient refuse DLPack; here they are read like any other."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("exported")

    monkeypatch.setattr(torch.Tensor, "__dlpack__", refuse)
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    assert describe("kv", parameter).pointer == parameter.data_ptr()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
def test_numpy_arrays_and_views(dtype: Any) -> None:
    """Strides may be negative here: the checks refuse them, the description does not."""
    base = np.zeros((6, 10), dtype=dtype)
    found = describe("kv", base[::-2, 2:])
    assert found.strides == (-20, 1)
    assert found.pointer == base.ctypes.data + (5 * 10 + 2) * base.itemsize
    assert found.dtype == np.dtype(dtype).name
    base.flags.writeable = False
    assert not describe("kv", base).writable


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_dlpack_capsules_of_both_forms(versioned: bool, dtype: torch.dtype) -> None:
    """Read in place, with the stream the standard asks for on the CPU: none."""
    tensor = torch.zeros((4, 8), dtype=dtype)[1:, 3:]
    stranger = Exporter(tensor, versioned)
    found = describe("kv", stranger, 77)
    assert stranger.asked["stream"] is None
    assert ("max_version" in stranger.asked) is versioned
    assert found.pointer == tensor.data_ptr()
    assert (found.shape, found.strides) == ((3, 5), (8, 1))
    assert found.dtype == str(dtype).removeprefix("torch.")
    assert found.device == "cpu"


def test_dlpack_read_only_flag_is_seen() -> None:
    """NumPy sets it in the versioned form."""
    array = np.zeros((2, 2), np.float32)
    array.flags.writeable = False
    assert not describe("out", Exporter(array)).writable


def test_dlpack_memory_lives_as_long_as_the_description() -> None:
    """And no longer: the capsule's own destructor frees it."""
    tensor = torch.zeros(4)
    alive = weakref.ref(tensor.untyped_storage())
    found = describe("kv", Exporter(tensor))
    array = np.zeros(4, np.float32)
    watched = weakref.ref(array)
    described = describe("kv", Exporter(array))
    del array, tensor
    gc.collect()
    assert watched() is not None and found.owner is not None
    del described
    gc.collect()
    assert watched() is None
    del found, alive


@pytest.mark.parametrize(("stream", "asked"), [(0, 1), (1, 1), (2, 2), (4660, 4660)])
def test_dlpack_streams_of_cuda_are_numbered_as_the_standard_does(stream: int, asked: int) -> None:
    """0 is ambiguous there and forbidden: the legacy default is 1."""
    stranger = Exporter(np.zeros(3, np.float32))
    dlpack.export(stranger, stream)
    assert stranger.asked["stream"] == asked


def test_what_is_no_capsule_is_refused() -> None:
    """As is one of a device that is neither CPU nor CUDA."""
    with pytest.raises(ValueError, match="capsule"):
        dlpack.read(object())
    stranger = SimpleNamespace(__dlpack__=None, __dlpack_device__=lambda: (8, 0))
    with pytest.raises(ValueError, match="device type 8"):
        describe("kv", stranger)


@pytest.mark.parametrize(
    ("typestr", "dtype"), [("<f4", "float32"), ("<V2", "bfloat16"), ("|u1", "uint8")]
)
def test_cuda_array_interface(typestr: str, dtype: str) -> None:
    """Strides in bytes become elements; bf16 has no code of its own and comes as void."""
    size = int(typestr[2:])
    found = describe("kv", Interface(typestr=typestr, strides=(16 * size, size), stream=7))
    assert (found.pointer, found.shape, found.strides) == (4096, (4, 6), (16, 1))
    assert (found.dtype, found.device, found.ordinal) == (dtype, "cuda", -1)
    assert found.stream == 7
    assert describe("kv", Interface(typestr=typestr, strides=None)).strides == (6, 1)


@pytest.mark.parametrize(
    "interface",
    [
        {"typestr": ">f4"},
        {"typestr": "<c8"},
        {"strides": (25, 4)},
        {"mask": object()},
        {"typestr": 4},
        {"shape": 3},
        {"shape": (1.5,)},
        {"data": None},
        {"strides": ("4",)},
        {"strides": (4,)},
        {"typestr": "|V2", "descr": [("a", "|i1"), ("b", "|i1")]},
        {"stream": "7"},
    ],
    ids=[
        "big endian",
        "complex",
        "odd stride",
        "masked",
        "typestr",
        "shape",
        "extent",
        "data",
        "strides",
        "one stride of two",
        "structure",
        "stream",
    ],
)
def test_interfaces_that_cannot_be_read_are_refused(interface: dict[str, Any]) -> None:
    """Rather than read wrongly."""
    with pytest.raises(ValueError, match="kv"):
        describe("kv", Interface(**interface))


@pytest.mark.parametrize("thing", [None, 3, [1.0], "kv", object()], ids=repr)
def test_what_is_no_array_is_refused(thing: Any) -> None:
    """With the type given and the kinds allowed."""
    with pytest.raises(ValueError, match=r"kv is a .* is allowed"):
        describe("kv", thing)


def test_tensors_elsewhere_are_refused() -> None:
    """Meta and sparse tensors have no memory to read."""
    with pytest.raises(ValueError, match="meta"):
        describe("kv", torch.zeros(3, device="meta"))
    with pytest.raises(ValueError, match="sparse"):
        describe("kv", torch.zeros(3, 3).to_sparse())


def test_libraries_are_told_by_type() -> None:
    """The arrays of jax live in jaxlib."""
    strange = type("ArrayImpl", (), {"__module__": "jaxlib._jax"})
    assert library_of(strange()) == "jax"
    assert library_of(torch.nn.Parameter(torch.zeros(1))) == "torch"
    assert library_of(np.zeros(1)) == "numpy"


class Number:
    """What converts to an int, as cuda.bindings' and numba's streams do."""

    def __int__(self) -> int:
        """The handle."""
        return 42


@pytest.mark.parametrize(
    "stream",
    [
        42,
        SimpleNamespace(__cuda_stream__=lambda: (0, 42)),
        SimpleNamespace(__cuda_stream__=(0, 42)),
        SimpleNamespace(cuda_stream=42),
        SimpleNamespace(ptr=42),
        Number(),
        np.uint64(42),
    ],
    ids=["int", "protocol", "property", "torch", "cupy", "__int__", "numpy"],
)
def test_streams_of_every_kind(stream: Any) -> None:
    """One handle."""
    assert handle_of(stream) == 42


def test_streams_of_cuda_bindings() -> None:
    """The type of the CUDA driver's own Python binding."""
    driver = pytest.importorskip("cuda.bindings.driver")
    assert handle_of(driver.CUstream(0x7F00)) == 0x7F00


@pytest.mark.parametrize(
    "stream",
    [
        True,
        1.0,
        "7",
        -1,
        1 << 64,
        object(),
        SimpleNamespace(__cuda_stream__=lambda: (1, 42)),
        np.array([1, 2]),
        np.float32(1.5),
        Decimal(2),
        np.bool_(True),
        SimpleNamespace(__cuda_stream__=(0,)),
        SimpleNamespace(__cuda_stream__=lambda: (0, "7")),
        np.int64(-1),
    ],
    ids=[
        "bool",
        "float",
        "str",
        "negative",
        "too large",
        "object",
        "version 1",
        "vector",
        "NumPy float",
        "decimal",
        "NumPy bool",
        "half a protocol",
        "text protocol",
        "negative NumPy",
    ],
)
def test_what_is_no_stream_is_refused(stream: Any) -> None:
    """Before anything is launched on it."""
    with pytest.raises(ValueError, match="stream"):
        handle_of(stream)


def test_the_legacy_default_stream_has_two_names() -> None:
    """0 and 1; 2 is another."""
    assert same(0, 1) and same(7, 7)
    assert not same(0, 2)
