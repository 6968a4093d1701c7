# SPDX-License-Identifier: Apache-2.0
"""cupy's and numba's arrays, and bare interfaces, give torch's bits."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import csa_runtime
from support.packs import random_pack

pytestmark = [pytest.mark.gpu, pytest.mark.L1]

TYPESTR = {torch.bfloat16: "<V2", torch.float32: "<f4", torch.int32: "<i4", torch.int16: "<i2"}


@dataclass
class Interface:
    """A tensor behind `__cuda_array_interface__` alone."""

    tensor: torch.Tensor

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3; bf16 as two raw bytes, as ml_dtypes names it."""
        return {
            "shape": tuple(self.tensor.shape),
            "typestr": TYPESTR[self.tensor.dtype],
            "data": (self.tensor.data_ptr(), False),
            "strides": tuple(s * self.tensor.element_size() for s in self.tensor.stride()),
            "version": 3,
        }


@dataclass
class Exporter:
    """A tensor behind DLPack alone."""

    tensor: torch.Tensor

    def __dlpack__(self, **options: Any) -> Any:
        """The unversioned capsule."""
        return self.tensor.__dlpack__(stream=options.get("stream"))

    def __dlpack_device__(self) -> tuple[int, int]:
        """As the tensor's."""
        kind, ordinal = self.tensor.__dlpack_device__()
        return int(kind), int(ordinal)


@dataclass
class Bytes:
    """Memory that an interface describes, as 16-bit integers."""

    described: dict[str, Any]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The same memory, half-words along the last dimension."""
        shape = self.described["shape"]
        halves = int(self.described["typestr"][2:]) // 2
        return {
            "shape": (*shape[:-1], shape[-1] * halves),
            "typestr": "<i2",
            "data": (self.described["data"][0], False),
            "strides": None,
            "version": 3,
        }


def bits(array: Any) -> torch.Tensor:
    """An array's memory as int16, whatever made it."""
    if isinstance(array, torch.Tensor):
        return array.view(torch.int16)
    interface = getattr(array, "__cuda_array_interface__", None)
    assert interface is not None and interface.get("strides") is None
    return torch.as_tensor(Bytes(interface), device="cuda")


def check(wrap: Any, allocates: bool) -> None:
    """Both directions on wrapped arrays equal those on torch tensors, bit for bit."""
    pack = random_pack([40, 0, 7, 61], ratio=4, coff=2, head_dim=64, device="cuda")
    wanted = [
        csa_runtime.compressor_forward(*pack.inputs, **pack.options),
        *csa_runtime.compressor_backward(*pack.inputs, pack.grad_out, **pack.options),
    ]
    inputs, grad_out = [wrap(t) for t in pack.inputs], wrap(pack.grad_out)
    given = [torch.full_like(t, torch.nan) for t in wanted]
    size = csa_runtime.backward_workspace_bytes(
        pack.kv.shape[0], pack.total_comp, 64, ratio=4, coff=2
    )
    scratch = torch.empty(size // 4, dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()
    rows = {"total_comp": pack.total_comp}
    csa_runtime.compressor_forward(*inputs, **pack.options, **rows, out=wrap(given[0]))
    csa_runtime.compressor_backward(
        *inputs,
        grad_out,
        **pack.options,
        grads=tuple(wrap(t) for t in given[1:]),
        workspace=wrap(scratch),
    )
    torch.cuda.synchronize()
    results = [given]
    if allocates:
        results.append(
            [
                csa_runtime.compressor_forward(*inputs, **pack.options, **rows),
                *csa_runtime.compressor_backward(*inputs, grad_out, **pack.options),
            ]
        )
        assert (
            type(results[1][0]).__module__.partition(".")[0]
            == type(inputs[0]).__module__.partition(".")[0]
        )
    torch.cuda.synchronize()
    for found in results:
        for one, two in zip(found, wanted, strict=True):
            assert torch.equal(bits(one), bits(two))


def test_bare_cuda_array_interface_equals_torch() -> None:
    check(Interface, allocates=False)


def test_bare_dlpack_equals_torch() -> None:
    check(Exporter, allocates=False)


def test_cupy_arrays_equal_torch() -> None:
    cupy = pytest.importorskip("cupy")
    check(cupy.from_dlpack, allocates=True)


def test_numba_arrays_equal_torch() -> None:
    cuda = pytest.importorskip("numba.cuda")
    check(lambda tensor: cuda.as_cuda_array(Interface(tensor)), allocates=True)


def test_numpy_arrays_mixed_with_device_ones_are_a_value_error() -> None:
    numpy = pytest.importorskip("numpy")
    pack = random_pack([40], ratio=4, coff=2, head_dim=8, device="cuda")
    host = numpy.zeros(2, dtype=numpy.int32)
    with pytest.raises(ValueError, match="cu_seqlens"):
        csa_runtime.compressor_forward(
            *pack.inputs[:3], host, pack.cu_seqlens_comp, **pack.options, total_comp=10
        )
