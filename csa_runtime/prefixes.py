# SPDX-License-Identifier: Apache-2.0
"""Prefix sums of a pack: made on the device, bounded, checked."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from csa_runtime.arrays import Array, describe, library_of, refuse_masked
from csa_runtime.checks import LIMIT, integer
from csa_runtime.libraries import library


def compressed_prefixes(cu_seqlens: Any, *, ratio: int) -> Any:
    """Prefix sums of the rows each segment gives: `rows_s = len_s // ratio`.

    Runs as operations of the array's own library on its device, without a synchronisation.

    Args:
        cu_seqlens: int32 `(segments + 1,)` of torch, NumPy, cupy or jax.
        ratio: tokens of a block.

    Returns:
        int32 `(segments + 1,)`, beginning with 0, of the same library.

    Raises:
        ValueError: shape, dtype or library is another.
    """
    ratio = integer("ratio", ratio, 1)
    name = library_of(cu_seqlens)
    if name not in ("torch", "numpy", "cupy", "jax") or not hasattr(cu_seqlens, "dtype"):
        raise ValueError(
            f"cu_seqlens is a {type(cu_seqlens).__module__}.{type(cu_seqlens).__qualname__}; an "
            "array of torch, NumPy, cupy or jax is allowed: convert it, or compute the sums of "
            "(lengths // ratio) with its own operations"
        )
    refuse_masked("cu_seqlens", cu_seqlens)
    shape, dtype = tuple(cu_seqlens.shape), str(cu_seqlens.dtype)
    if len(shape) != 1 or shape[0] < 1 or not dtype.endswith("int32") or "uint" in dtype:
        raise ValueError(
            f"cu_seqlens is {dtype} {shape}; int32 (segments + 1,) is allowed: convert it"
        )
    if name == "torch":
        torch: Any = sys.modules["torch"]
        rows = torch.div(cu_seqlens[1:] - cu_seqlens[:-1], ratio, rounding_mode="floor")
        sums = torch.cumsum(rows, 0, dtype=torch.int32)
        return torch.nn.functional.pad(sums, (1, 0))
    numpy: Any = sys.modules["jax.numpy" if name == "jax" else name]
    rows = (cu_seqlens[1:] - cu_seqlens[:-1]) // ratio
    zero = numpy.zeros_like(cu_seqlens[:1])
    return numpy.concatenate([zero, numpy.cumsum(rows, dtype=cu_seqlens.dtype)])


def max_rows(total_tokens: int, segments: int, *, ratio: int) -> int:
    """Rows that no pack of this size exceeds: the static capacity for CUDA graphs.

    A segment gives `len // ratio` rows, so dividing the tokens further never adds one: the bound,
    reached by one segment that holds all tokens, is `total_tokens // ratio`, and 0 without any.

    Rows beyond a pack's own are padding, which holds the first `ratio` tokens pooled as a first
    block: leave them out of a loss. Their gradient is dropped.

    Args:
        total_tokens: tokens of the pack.
        segments: the most segments it may have; only whether there is any counts.
        ratio: tokens of a block.

    Raises:
        ValueError: a negative or other number that is no size.
    """
    tokens = integer("total_tokens", total_tokens, 0)
    return tokens // integer("ratio", ratio, 1) if integer("segments", segments, 0) else 0


def check_prefixes(
    cu_seqlens: Any,
    cu_seqlens_comp: Any,
    total_tokens: int,
    *,
    ratio: int,
    total_comp: int | None = None,
    strict: bool = False,
) -> None:
    """Read both prefixes back, waiting for the device, and check that they are well-formed.

    Args:
        cu_seqlens: int32 `(segments + 1,)`, token prefixes; an array or a list.
        cu_seqlens_comp: int32 `(segments + 1,)`, row prefixes.
        total_tokens: tokens of the pack.
        ratio: tokens of a block.
        total_comp: rows of the output, if known; looked at only if strict, because rows beyond it
            are well-formed: they are not computed.
        strict: also ask for every row that fits, `rows_s == len_s // ratio`, and for
            `cu_seqlens_comp[-1] <= total_comp`.

    Raises:
        ValueError: naming the first bad index, or an argument that is no vector or size.
    """
    total_tokens, ratio = integer("total_tokens", total_tokens, 0), integer("ratio", ratio, 1)
    if total_comp is not None:
        total_comp = integer("total_comp", total_comp, 0)
    tokens, rows = _read("cu_seqlens", cu_seqlens), _read("cu_seqlens_comp", cu_seqlens_comp)
    check_values(tokens, rows, total_tokens, ratio, total_comp, strict)


def _read(name: str, prefix: Any) -> list[int]:
    """The integers of a vector or list."""
    if isinstance(prefix, (list, tuple)):
        return [integer(f"{name}[{index}]", value, -LIMIT) for index, value in enumerate(prefix)]
    owner = library(prefix)
    stream = owner.current_stream(prefix)
    array = describe(name, prefix, stream)
    if len(array.shape) != 1 or array.dtype != "int32":
        raise ValueError(
            f"{name} is {array.dtype} {array.shape}; int32 (segments + 1,) or a list is allowed: "
            "flatten or convert it"
        )
    return read_back(prefix, array, stream, "copy it to the host and pass a list")


def read_back(prefix: Any, array: Array, stream: int, advice: str) -> list[int]:
    """Contents of a described vector, by its own library or, on the host, through NumPy.

    Raises:
        ValueError: device memory that its library cannot read; ends with `advice`.
    """
    owner = library(prefix)
    if owner.reads(prefix):
        return owner.values(prefix, stream)
    if array.device == "cpu":
        from csa_runtime.host import from_pointer

        values: list[int] = from_pointer(array).tolist()
        return values
    raise ValueError(
        f"{array.name} of {array.library!r} on {array.place} cannot be read back here; arrays of "
        f"torch, cupy, numba and others with a tolist() can: {advice}"
    )


def check_values(
    tokens: list[int],
    rows: list[int],
    total_tokens: int,
    ratio: int,
    total_comp: int | None,
    strict: bool,
) -> None:
    """`check_prefixes` on values already read back."""
    if len(tokens) != len(rows) or not tokens:
        raise ValueError(
            f"cu_seqlens has {len(tokens)} elements and cu_seqlens_comp {len(rows)}; both "
            "(segments + 1,) are allowed"
        )
    if tokens[0] < 0:
        raise ValueError(f"cu_seqlens[0] is {tokens[0]}; 0 or more is allowed")
    before, rows_before = tokens[0], 0
    for i, (token, row) in enumerate(zip(tokens, rows, strict=True)):
        length, given = token - before, row - rows_before
        if length < 0:
            raise ValueError(f"cu_seqlens[{i}] is {token}, less than the one before it")
        if token > total_tokens:
            raise ValueError(
                f"cu_seqlens[{i}] is {token}; at most the {total_tokens} tokens is allowed"
            )
        if i == 0 and row != 0:
            raise ValueError(f"cu_seqlens_comp[0] is {row}; 0 is allowed")
        if given < 0:
            raise ValueError(f"cu_seqlens_comp[{i}] is {row}, less than the one before it")
        if given * ratio > length or (strict and given != length // ratio):
            allowed = "exactly" if strict else "at most"
            raise ValueError(
                f"cu_seqlens_comp[{i}] gives segment {i - 1} {given} rows; its {length} tokens "
                f"allow {allowed} {length // ratio} at ratio {ratio}"
            )
        if strict and total_comp is not None and row > total_comp:
            raise ValueError(
                f"cu_seqlens_comp[{i}] is {row}; at most total_comp = {total_comp} is allowed"
            )
        before, rows_before = token, row


@functools.cache
def checking() -> bool:
    """Whether `CSA_RUNTIME_CHECK=1` asks for `check_prefixes` on each call; read once."""
    return os.environ.get("CSA_RUNTIME_CHECK", "") == "1"
