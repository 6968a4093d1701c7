# SPDX-License-Identifier: Apache-2.0
"""Buffers of one pack on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from csa_runtime.bench.packs import Pack
from csa_runtime.diagnostics import backward_workspace_bytes

COPY_PIECE = 1 << 16  # bytes, the most that a copy is rounded up to
COPY_SURPLUS = 100  # a copy is rounded up by less than this part of it


class Problem:
    """Random inputs of a pack, room for its results, and the arguments of both pointer calls.

    All prefixes are full: a row for each `ratio` tokens of a segment, and no padding.
    """

    def __init__(self, pack: Pack, device: str = "cuda") -> None:
        """Allocates on the current device.

        Raises:
            ValueError: nothing serves the pack.
            RuntimeError: torch's, where the memory does not suffice.
        """
        self.pack = pack
        ratio, coff, d, lengths = pack
        width, tokens, rows = coff * d, pack.tokens, pack.rows
        prefixes = [0, *accumulate(lengths)], [0, *accumulate(n // ratio for n in lengths)]

        def make(*shape: int, dtype: torch.dtype = torch.bfloat16, std: float = 1.0) -> Any:
            return (torch.randn(shape, device=device) * std).to(dtype)

        self.kv, self.score = make(tokens, width), make(tokens, width, std=1.5)
        self.grad_out = make(rows, d)
        self.ape = make(ratio, width, dtype=torch.float32, std=0.25)
        self.cu_seqlens, self.cu_seqlens_comp = (
            torch.tensor(prefix, dtype=torch.int32, device=device) for prefix in prefixes
        )
        self.out, self.grad_ape = torch.empty_like(self.grad_out), torch.empty_like(self.ape)
        self.grad_kv, self.grad_score = torch.empty_like(self.kv), torch.empty_like(self.kv)
        scratch = backward_workspace_bytes(tokens, rows, d, ratio=ratio, coff=coff)
        self.workspace = torch.empty(max(scratch, 16), dtype=torch.uint8, device=device)

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Of forward, in the order of every signature."""
        return self.kv, self.score, self.ape, self.cu_seqlens, self.cu_seqlens_comp

    @property
    def arguments(self) -> dict[str, dict[str, Any]]:
        """Keywords of `launch_forward` and `launch_backward`, all but the stream."""
        ratio, coff, d, _ = self.pack
        names = ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp")
        common = dict(
            device=self.kv.get_device(), ratio=ratio, coff=coff, dtype=1, tokens=self.pack.tokens,
            segments=self.pack.segments, rows=self.pack.rows, head_dim=d, kv_stride=coff * d,
            score_stride=coff * d,
        )  # fmt: skip
        common |= {name: getattr(self, name).data_ptr() for name in names}
        written = ("grad_kv", "grad_score", "grad_ape", "workspace")
        backward = {name: getattr(self, name).data_ptr() for name in ("grad_out", *written)}
        strides = dict.fromkeys(("grad_kv_stride", "grad_score_stride"), coff * d)
        strides |= {"grad_out_stride": d, "workspace_bytes": self.workspace.numel()}
        return {
            "forward": common | {"out": self.out.data_ptr(), "out_stride": d},
            "backward": common | backward | strides,
        }


def copy_sizes(moved: int) -> tuple[int, ...]:
    """Bytes to copy so that `moved` are read and written: half of them, and that rounded up.

    The driver copies some sizes at two thirds of its speed, and rounding may spare it that: of
    both the faster byte by byte counts. A piece is at most a hundredth of the copy.
    """
    half = -(-moved // 2)
    piece = min(COPY_PIECE, 1 << max(half // COPY_SURPLUS, 1).bit_length() - 1)
    return tuple(sorted({half, -(-half // piece) * piece}))


def copy_of(half: int) -> Callable[[], None]:
    """A copy of so many bytes, on the current stream."""
    source, target = (
        torch.randint(0, 255, (half,), dtype=torch.uint8, device="cuda") for _ in range(2)
    )

    def run() -> None:
        target.copy_(source)

    return run
