# SPDX-License-Identifier: Apache-2.0
"""Ragged packs with the gate's random values, on any torch device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Pack:
    """One problem: inputs of both directions, and the options that go with them."""

    kv: torch.Tensor
    score: torch.Tensor
    ape: torch.Tensor | None
    cu_seqlens: torch.Tensor
    cu_seqlens_comp: torch.Tensor
    grad_out: torch.Tensor
    ratio: int
    coff: int
    total_comp: int

    @property
    def head_dim(self) -> int:
        """Columns of `out`."""
        return self.kv.shape[1] // self.coff

    @property
    def options(self) -> dict[str, int]:
        """The keyword arguments both directions share."""
        return {"ratio": self.ratio, "coff": self.coff}

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The positional arguments of the forward."""
        return self.kv, self.score, self.ape, self.cu_seqlens, self.cu_seqlens_comp

    def to(self, device: torch.device | str) -> Pack:
        """The same pack on another device."""
        names = ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp", "grad_out")
        values = {name: getattr(self, name) for name in names}
        return replace(
            self, **{name: v if v is None else v.to(device) for name, v in values.items()}
        )


def prefixes(
    segments: list[int], *, ratio: int, first: int = 0, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 `cu_seqlens`, `cu_seqlens_comp` of segments of these lengths from token `first` on."""
    tokens, rows = [first], [0]
    for length in segments:
        tokens.append(tokens[-1] + length)
        rows.append(rows[-1] + length // ratio)
    make = lambda values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    return make(tokens), make(rows)


def random_pack(
    segments: list[int],
    *,
    ratio: int,
    coff: int,
    head_dim: int,
    padding: int = 0,
    first: int = 0,
    after: int = 0,
    ape: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    score_std: float = 1.5,
    ape_std: float = 0.25,
) -> Pack:
    """A pack whose values follow the gate's distribution.

    kv, grad_out ~ N(0, 1), score ~ N(0, score_std**2), ape ~ N(0, ape_std**2).

    Args:
        segments: tokens of each segment.
        ratio: tokens of a block.
        coff: 1 or 2.
        head_dim: columns of `out`.
        padding: rows of static capacity beyond the real ones.
        first: tokens before the first segment.
        after: tokens after the last segment.
        ape: whether there is one.
        dtype: of kv, score and grad_out.
        device: where all tensors are made.
        seed: of the generator, which belongs to `device`.
        score_std: standard deviation of the scores.
        ape_std: standard deviation of the APE.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(shape: tuple[int, int], std: float, kind: torch.dtype) -> torch.Tensor:
        # In bf16 steps whatever the dtype, so that one seed is one problem in all of them.
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        values = values.mul_(std)
        return values.to(kind) if kind == torch.float32 else values.bfloat16().to(kind)

    cu_seqlens, cu_seqlens_comp = prefixes(segments, ratio=ratio, first=first, device=device)
    tokens = first + sum(segments) + after
    rows = sum(length // ratio for length in segments) + padding
    width = coff * head_dim
    return Pack(
        kv=normal((tokens, width), 1.0, dtype),
        score=normal((tokens, width), score_std, dtype),
        ape=normal((ratio, width), ape_std, torch.float32) if ape else None,
        cu_seqlens=cu_seqlens,
        cu_seqlens_comp=cu_seqlens_comp,
        grad_out=normal((rows, head_dim), 1.0, dtype),
        ratio=ratio,
        coff=coff,
        total_comp=rows,
    )
