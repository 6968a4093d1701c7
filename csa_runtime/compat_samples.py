# SPDX-License-Identifier: Apache-2.0
"""Samples of a call's arrays: what they say of its sizes and device, and calls held against it."""

from __future__ import annotations

import sys
from typing import Any

from csa_runtime import checks
from csa_runtime.arrays import Array, describe

CPU = -1
_COMPARED = (0, 3, 5)  # kv, cu_seqlens, and the last
_NAMES = ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp")


class Samples:
    """Descriptions of the samples, none of their memory.

    Attributes:
        ordinal: of the CUDA device, once checked; `CPU`, or None where no sample names a device.
    """

    def __init__(
        self, inputs: tuple[Any, ...], last: tuple[str, Any], ratio: Any, coff: Any
    ) -> None:
        """Describe them; only ape may be None.

        Args:
            inputs: kv, score, ape, cu_seqlens and cu_seqlens_comp.
            last: name and sample of `out` or `grad_out`.
            ratio: tokens of a block.
            coff: 1 or 2.

        Raises:
            ValueError: a sample that is no array.
        """
        named = [*zip(_NAMES, inputs, strict=True), last]
        self._all = [
            None if name == "ape" and array is None else _describe(name, array)
            for name, array in named
        ]
        self._shapes = tuple(self._kept(index).shape for index in _COMPARED)
        self._window = ratio, coff
        self._written = last[0] == "out"
        # Objects of any library that name kv's dtype, as met.
        self._dtypes: set[Any] = set()
        self.ordinal: int | None = None

    @property
    def ape(self) -> bool:
        """Whether there is one."""
        return self._all[2] is not None

    @property
    def segments(self) -> int:
        """Of the pack; checked samples only."""
        return self._kept(3).shape[0] - 1

    def _kept(self, index: int) -> Array:
        """One that is not absent."""
        sample = self._all[index]
        assert sample is not None
        return sample

    def check(self) -> dict[str, Any]:
        """Check them against each other; returns total_tokens, total_comp, head_dim and dtype.

        Raises:
            ValueError: malformed samples.
        """
        ratio, coff = checks.window(*self._window)
        place, self.ordinal = _device([sample for sample in self._all if sample is not None])
        kv, score, ape, starts, sums, out = (
            None if sample is None else _placed(sample, place, self.ordinal) for sample in self._all
        )
        assert kv and score and starts and sums and out
        head_dim = checks.inputs(kv, score, ape, starts, sums, ratio, coff)
        rows = out.shape[0] if out.shape else 0
        checks.matrix(out, (rows, head_dim), kv.dtype, "kv")
        if self._written and rows > 1 and out.strides[0] < head_dim:
            raise ValueError(
                f"{out.name} has row stride {out.strides[0]}; at least its width {head_dim} is "
                "allowed: rows of a result may not overlap"
            )
        checks.same_device(kv, (out,))
        checks.enough_tokens(kv.shape[0], checks.integer("total_comp", rows, 0), ratio)
        sizes = {"total_tokens": kv.shape[0], "total_comp": rows, "head_dim": head_dim}
        return {**sizes, "dtype": kv.dtype}

    def compare(self, kv: Any, cu_seqlens: Any, out: Any) -> None:
        """Check a call's arrays against the samples; how they go together others look at.

        These three give the rest: the others have kv's shape and dtype, or the prefixes'.

        Raises:
            ValueError: another shape, dtype or device than the sample's.
        """
        try:
            alike = (kv.shape, cu_seqlens.shape, out.shape) == self._shapes
        except AttributeError:
            alike = False
        if not alike:
            self._check_shapes(kv, cu_seqlens, out)
        if getattr(kv, "dtype", None) not in self._dtypes:
            self._check_dtype(kv)
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(kv, torch.Tensor) or self.ordinal is None:
            return
        if kv.get_device() != self.ordinal:
            place = "the CPU" if self.ordinal == CPU else f"cuda:{self.ordinal}"
            raise ValueError(
                f"kv is on {kv.device}; {place}, as the samples were, is allowed: move it"
            )

    def _check_shapes(self, *arrays: Any) -> None:
        """Check the shapes of those that have one; of which kind they are others look at."""
        for array, index, wanted in zip(arrays, _COMPARED, self._shapes, strict=True):
            shape = tuple(getattr(array, "shape", wanted))
            if shape != wanted:
                raise ValueError(
                    f"{self._kept(index).name} has shape {shape}; its sample's {wanted} is "
                    "allowed: make an object from samples of this shape, or call the wrapper"
                )

    def _check_dtype(self, kv: Any) -> None:
        """Check kv's dtype by name, and remember the object that has it."""
        dtype = getattr(kv, "dtype", None)
        wanted = self._kept(0).dtype
        if dtype is not None and str(dtype).rpartition(".")[2] != wanted:
            raise ValueError(
                f"kv is {dtype}; its sample's {wanted} is allowed: convert it, or make an object "
                "from samples of this dtype"
            )
        self._dtypes.add(dtype)


def _describe(name: str, array: Any) -> Array:
    """A description that keeps nothing alive; a meta tensor has no memory to point to."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor) or not array.is_meta:
        return describe(name, array, -1)._replace(owner=None)
    shape, strides = tuple(array.shape), tuple(array.stride())
    dtype = str(array.dtype).partition(".")[2]
    return Array(name, 0, shape, strides, dtype, "meta", -1, "torch", True, None, None)


def _device(samples: list[Array]) -> tuple[str, int | None]:
    """Where the samples are that are somewhere; without any, the current device."""
    real = [sample for sample in samples if sample.device != "meta"]
    if real and real[0].device == "cpu":
        return "cpu", CPU
    ordinals = [sample.ordinal for sample in real if sample.ordinal >= 0]
    if ordinals:
        return "cuda", ordinals[0]
    torch = sys.modules.get("torch")
    if not real and torch is not None and torch.cuda.is_available():
        return "cuda", int(torch.cuda.current_device())
    return "cuda", None


def _placed(sample: Array, device: str, ordinal: int | None) -> Array:
    """A meta sample as if it were where the others are."""
    if sample.device != "meta":
        return sample
    return sample._replace(device=device, ordinal=-1 if ordinal is None else ordinal)
