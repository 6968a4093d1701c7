# SPDX-License-Identifier: Apache-2.0
"""What can go wrong besides malformed arguments, which are `ValueError`s.

All are `RuntimeError`s and survive pickling, so that a worker process can report them.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own would import typing
if TYPE_CHECKING:
    from typing import Any


class UnsupportedArch(RuntimeError):
    """No image in the bundle runs on the device's compute capability."""


class BundleError(RuntimeError):
    """The bundle is damaged, of another schema, or was chosen after its first use."""


class DriverError(RuntimeError):
    """A call of the CUDA driver failed, or there is no driver to call.

    Attributes:
        name: the driver's name of the error, such as `CUDA_ERROR_INVALID_CONTEXT`.
        code: its number.
        call: the driver function that returned it.
    """

    def __init__(self, message: str, name: str = "", code: int = 0, call: str = "") -> None:
        """Keep the parts beside the message."""
        super().__init__(message)
        self.name = name
        self.code = code
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from all four parts: the default would forget three of them."""
        return type(self), (str(self), self.name, self.code, self.call)
