# SPDX-License-Identifier: Apache-2.0
"""Calls of the array operations with single arguments replaced, and arrays that no GPU holds."""

from typing import Any

import torch

import csa_runtime
from support.packs import Pack

SENTINEL = 7.0


def forward(pack: Pack, **changes: Any) -> Any:
    """`compressor_forward` of a pack, arguments replaced by name."""
    names = ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp")
    arguments = {name: getattr(pack, name) for name in names} | pack.options
    arguments |= {"total_comp": pack.total_comp}
    return csa_runtime.compressor_forward(**arguments | changes)


def backward(pack: Pack, **changes: Any) -> Any:
    """`compressor_backward` of a pack, arguments replaced by name."""
    names = ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp", "grad_out")
    arguments = {name: getattr(pack, name) for name in names} | pack.options
    return csa_runtime.compressor_backward(**arguments | changes)


def results(pack: Pack) -> tuple[torch.Tensor, ...]:
    """Memory for out and the three gradients, full of a value that no test computes."""
    like = (pack.grad_out, pack.kv, pack.score, pack.ape)
    return tuple(torch.full_like(t, SENTINEL) for t in like)


class OnGpu:
    """An array that says it is on a GPU, at an address nothing may touch."""

    def __init__(self, shape: tuple[int, ...], typestr: str, **more: Any) -> None:
        """Contiguous."""
        self.shape = shape
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": typestr, "data": (1 << 40, False), "version": 3,
        } | more  # fmt: skip


class Exporter:
    """A stranger's array: DLPack alone, which says what it was asked for."""

    def __init__(self, array: Any, versioned: bool = True) -> None:
        """Wrap an array of any library."""
        self.array, self.versioned = array, versioned
        self.asked: dict[str, Any] = {}

    def __dlpack__(self, **options: Any) -> Any:
        """The capsule; like an old exporter, knows no max_version unless versioned."""
        if not self.versioned and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.asked = dict(options)
        options.pop("stream")
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The CPU, as an int."""
        return 1, 0
