# SPDX-License-Identifier: Apache-2.0
"""GPU memory for `demo` and `check`, of the driver alone: they need no framework.

The launcher takes addresses and never allocates, so its own driver table (native/) has no such
calls; what only these two commands use stays out of it.
"""

from __future__ import annotations

import ctypes
from typing import Any

from csa_runtime.errors import DriverError

LIBRARY = "libcuda.so.1"
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cuMemAlloc_v2": (ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t),
    "cuMemFree_v2": (ctypes.c_uint64,),
    "cuMemcpyHtoD_v2": (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t),
    "cuMemcpyDtoH_v2": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class Memory:
    """Memory on one device, freed when the `with` block ends.

    Within the block the device's primary context is current. It is retained once and never
    released, so that the launcher's kernels in it stay loaded.
    """

    def __init__(self, device: int = 0) -> None:
        """Start the driver.

        Raises:
            DriverError: there is none, or a call failed.
        """
        try:
            self._driver = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise DriverError(f"{LIBRARY} cannot be opened: {error}", call="dlopen") from error
        for name, arguments in _SIGNATURES.items():
            getattr(self._driver, name).argtypes = arguments
        handle = ctypes.c_int()
        self._context = ctypes.c_void_p()
        self._addresses: list[int] = []
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)

    def __enter__(self) -> Memory:
        """Make the primary context current."""
        self._call("cuCtxPushCurrent_v2", self._context)
        return self

    def __exit__(self, *_: object) -> None:
        """Free what was allocated; the former context is current again."""
        try:
            while self._addresses:
                self._call("cuMemFree_v2", self._addresses.pop())
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def upload(self, values: Any) -> int:
        """Address of a copy of a contiguous NumPy array."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), max(values.nbytes, 1))
        self._addresses.append(address.value)
        if values.nbytes:
            self._call("cuMemcpyHtoD_v2", address, values.ctypes.data, values.nbytes)
        return address.value

    def download(self, address: int, into: Any) -> None:
        """Fill a contiguous NumPy array, behind everything pending on the default stream."""
        if into.nbytes:
            self._call("cuMemcpyDtoH_v2", into.ctypes.data, address, into.nbytes)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code == 0:
            return
        text = ctypes.c_char_p()
        known = self._driver.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value
        error = text.value.decode() if known and text.value else "unknown error"
        raise DriverError(f"{name}: {error} ({code})", error, code, name)
