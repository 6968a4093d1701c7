# SPDX-License-Identifier: Apache-2.0
"""Arrays of the CPU as NumPy arrays, and results back into their own library.

NumPy is imported by whoever calls: the reference, which says so where it is missing.
"""

from __future__ import annotations

import sys
from typing import Any

from csa_runtime.arrays import ITEMSIZE, Array, library_of


def host(array: Any) -> Any:
    """The values as a NumPy array; bf16 tensors become fp32, which changes no value."""
    if array is None or library_of(array) != "torch":
        return array
    array = array.detach()
    narrow = str(array.dtype) == "torch.bfloat16"
    return (array.float() if narrow else array).numpy()


class _Pointed:
    """Memory as NumPy's own interface describes it, with what keeps it alive."""

    def __init__(self, array: Array) -> None:
        self.owner = array.owner
        itemsize = ITEMSIZE[array.dtype]
        code = {"b": "V", "f": "f", "i": "i", "u": "u"}[array.dtype[0]]
        self.__array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "typestr": f"{'|' if code == 'V' else '<'}{code}{itemsize}",
            "data": (array.pointer, not array.writable),
            "strides": tuple(step * itemsize for step in array.strides),
        }


def from_pointer(array: Array) -> Any:
    """A described array of the CPU as a NumPy array over the same memory."""
    import numpy as np

    values = np.asarray(_Pointed(array))
    if array.dtype != "bfloat16":
        return values
    import ml_dtypes

    return values.view(ml_dtypes.bfloat16)


def store(values: Any, like: Any, into: Any) -> Any:
    """Round once, to nearest even, into `into` or a new array with `like`'s library and dtype."""
    like = like if into is None else into
    if library_of(like) == "torch":
        rounded = sys.modules["torch"].from_numpy(values).to(like.dtype)
        if into is None:
            return rounded
        into.detach().copy_(rounded)
        return into
    if into is None:
        return values.astype(like.dtype)
    into[...] = values.astype(like.dtype)
    return into
