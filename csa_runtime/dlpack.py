# SPDX-License-Identifier: Apache-2.0
"""Reads the description out of a DLPack capsule, versioned or not, without copying anything.

The capsule is never renamed, so it is not consumed: its own destructor frees the exporter's tensor
once the capsule is dropped. Whoever keeps the capsule keeps the memory.
Source of the layout: dlpack.h 1.0.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from csa_runtime.arrays import contiguous_strides

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool"}
_READ_ONLY = 1


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


class View(NamedTuple):
    """What a capsule holds; strides in elements, `capsule` keeps the memory alive."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device_type: int
    ordinal: int
    read_only: bool
    capsule: Any


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_get_pointer.restype = ctypes.c_void_p


def export(array: Any, stream: int | None) -> View:
    """Ask an object for its capsule and read it.

    Args:
        array: an object with `__dlpack__` and `__dlpack_device__`.
        stream: the CUDA stream (a handle, 0 the legacy default) that will use the memory; the
            exporter makes it wait for what is pending; -1: nothing waits. None on the CPU.
    """
    # The standard forbids 0 for CUDA as ambiguous, and numbers the legacy default stream 1.
    wanted = None if stream is None else (stream or 1)
    try:
        capsule = array.__dlpack__(stream=wanted, max_version=(1, 0))
    except TypeError:
        capsule = array.__dlpack__(stream=wanted)
    return read(capsule)


def read(capsule: Any) -> View:
    """Describe a capsule's tensor.

    Raises:
        ValueError: it is no unused DLPack capsule, or of a major version other than 1.
    """
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_get_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != 1:
            raise ValueError(
                f"DLPack version {versioned.major}.{versioned.minor} given, 1.x or the unversioned "
                "form allowed: pass the array through another interface"
            )
        return _view(versioned.tensor, bool(versioned.flags & _READ_ONLY), capsule)
    if _is_valid(capsule, b"dltensor"):
        tensor = _Tensor.from_address(_get_pointer(capsule, b"dltensor"))
        return _view(tensor, False, capsule)
    raise ValueError("__dlpack__ returned something that is not an unused DLPack capsule")


def _view(tensor: _Tensor, read_only: bool, capsule: Any) -> View:
    ndim = tensor.ndim
    shape = tuple(tensor.shape[:ndim])
    strides = tuple(tensor.strides[:ndim]) if tensor.strides else contiguous_strides(shape)
    kind = tensor.dtype
    dtype = f"{_CODES.get(kind.code, f'code{kind.code}_')}{kind.bits}"
    if kind.lanes != 1:
        dtype += f"x{kind.lanes}"
    return View(
        tensor.data + tensor.byte_offset if tensor.data else 0,
        shape,
        strides,
        dtype,
        tensor.device.type,
        tensor.device.id,
        read_only,
        capsule,
    )
