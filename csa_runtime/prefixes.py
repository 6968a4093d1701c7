# SPDX-License-Identifier: Apache-2.0
"""Prefix sums of a pack: made on the device, bounded, checked."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from csa_runtime.arrays import library_of
from csa_runtime.checks import integer
from csa_runtime.libraries import library

_LIMIT = 1 << 31


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
        values = list(prefix)
    else:
        shape = tuple(getattr(prefix, "shape", ()))
        if len(shape) != 1:
            raise ValueError(
                f"{name} is a {type(prefix).__qualname__} of shape {shape}; int32 (segments + 1,) "
                "is allowed: flatten it"
            )
        owner = library(prefix)
        values = owner.values(prefix, owner.current_stream(prefix))
    return [integer(f"{name}[{index}]", value, -_LIMIT) for index, value in enumerate(values)]


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
    if rows[0] != 0:
        raise ValueError(f"cu_seqlens_comp[0] is {rows[0]}; 0 is allowed")
    for i in range(1, len(tokens)):
        length, given = tokens[i] - tokens[i - 1], rows[i] - rows[i - 1]
        if length < 0:
            raise ValueError(f"cu_seqlens[{i}] is {tokens[i]}, less than the one before it")
        if given < 0:
            raise ValueError(f"cu_seqlens_comp[{i}] is {rows[i]}, less than the one before it")
        if given * ratio > length or (strict and given != length // ratio):
            allowed = "exactly" if strict else "at most"
            raise ValueError(
                f"cu_seqlens_comp[{i}] gives segment {i - 1} {given} rows; its {length} tokens "
                f"allow {allowed} {length // ratio} at ratio {ratio}"
            )
        if tokens[i] > total_tokens:
            raise ValueError(
                f"cu_seqlens[{i}] is {tokens[i]}; at most the {total_tokens} tokens is allowed"
            )
    if tokens[0] > total_tokens:
        raise ValueError(f"cu_seqlens[0] is {tokens[0]}; at most {total_tokens} is allowed")
    if strict and total_comp is not None and rows[-1] > total_comp:
        raise ValueError(
            f"cu_seqlens_comp[{len(rows) - 1}] is {rows[-1]}; at most total_comp = {total_comp} "
            "is allowed"
        )


@functools.cache
def checking() -> bool:
    """Whether `CSA_RUNTIME_CHECK=1` asks for `check_prefixes` on each call; read once."""
    return os.environ.get("CSA_RUNTIME_CHECK", "") == "1"
