# SPDX-License-Identifier: Apache-2.0
"""torch tensors that say they are on a GPU, without one: their memory is the host's.

For processes of their own on the fake driver: torch is told that CUDA is there.
"""

import ctypes
from typing import Any

import torch

CODES = {
    torch.bfloat16: (4, 16),
    torch.float32: (2, 32),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
}
KEPT: list[Any] = []


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


def on_gpu(tensor: torch.Tensor, device: int = 0) -> torch.Tensor:
    """The same memory as a tensor of a CUDA device; it is never freed."""
    extents = ctypes.c_int64 * tensor.dim()
    shape, strides = extents(*tensor.shape), extents(*tensor.stride())
    offset = tensor.storage_offset() * tensor.element_size() if tensor.numel() else 0
    managed = _Managed(
        tensor.data_ptr() - offset, 2, device, tensor.dim(), *CODES[tensor.dtype], 1,
        ctypes.addressof(shape), ctypes.addressof(strides), offset,
    )  # fmt: skip
    KEPT.append((tensor, shape, strides, managed))
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    made: torch.Tensor = torch._C._from_dlpack(
        capsule(ctypes.addressof(managed), b"dltensor", None)
    )
    return made


def current_stream(device: int) -> int:
    """The handle that `current_stream.stream` was set to; the calling thread's default at first."""
    return getattr(current_stream, "stream", 2)


def set_up() -> None:
    """Make torch believe in a GPU: its memory, its current stream, no capture."""
    torch.cuda._lazy_init = lambda: None
    torch._C._cuda_getCurrentRawStream = current_stream
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.current_device = lambda: 0

    def empty(size: Any, dtype: Any = None, **_: Any) -> torch.Tensor:
        return on_gpu(torch.empty(size, dtype=dtype, device="cpu"))

    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", empty, "CUDA")
    KEPT.append(library)
