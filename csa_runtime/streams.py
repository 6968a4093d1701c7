# SPDX-License-Identifier: Apache-2.0
"""A stream of any library as the integer the driver knows it by."""

from __future__ import annotations

import contextlib
import operator
from typing import Any


def handle_of(stream: Any) -> int:
    """The CUstream handle of a stream object.

    Takes an int, the `__cuda_stream__` protocol, `torch.cuda.Stream` (`cuda_stream`),
    `cupy.cuda.Stream` (`ptr`), and what converts to an int: cuda.bindings' and numba's streams.
    0 and 1 are the legacy default stream, 2 the calling thread's.

    Raises:
        ValueError: none of these.
    """
    if type(stream) is int:
        return _checked(stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # A method in the protocol's final form, a property in its first.
        try:
            version, handle = protocol() if callable(protocol) else protocol
            handle = operator.index(handle)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"stream has a __cuda_stream__ that cannot be read ({error}); (0, handle) is "
                "allowed: pass the handle"
            ) from error
        if version != 0:
            raise ValueError(f"__cuda_stream__ version {version} given, 0 allowed; pass the handle")
        return _checked(handle)
    for name in ("cuda_stream", "ptr"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return _checked(handle)
    kind = type(stream)
    # Streams convert to an int alone. What has a __float__ too is a number or an array: whole ones
    # pass as handles, and others would lose their fraction.
    convert: Any = None
    if kind is not bool and hasattr(kind, "__index__"):
        convert = operator.index
    elif hasattr(kind, "__int__") and not hasattr(kind, "__float__"):
        convert = int
    if convert is not None:
        with contextlib.suppress(TypeError, ValueError):
            return _checked(convert(stream))
    raise ValueError(
        f"stream is a {type(stream).__module__}.{type(stream).__qualname__}; a handle (int), a "
        "stream of torch, cupy, numba or cuda.bindings, an object with __cuda_stream__, or None "
        "for the current stream is allowed"
    )


def same(first: int, second: int) -> bool:
    """Whether two handles name one stream: 0 and 1 are both the legacy default."""
    return (first or 1) == (second or 1)


def in_torch(torch: Any, handle: int, device: Any) -> Any:
    """A stream of the device as torch's own object.

    The legacy default stream has a call of its own: of the handles that name it, torch takes 0 for
    no handle at all and 1 for a stream of its pool, and would give a new stream for either.
    """
    if same(handle, 0):
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)


def _checked(handle: int) -> int:
    if 0 <= handle < 1 << 64:
        return handle
    raise ValueError(f"stream handle {handle} given; 0 to 2**64 - 1 is allowed")
