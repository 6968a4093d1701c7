# SPDX-License-Identifier: Apache-2.0
"""What stands in for Megatron-LM's dispatch function: a call served, or None and the reason."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any, Protocol

from csa_runtime import _native, diagnostics
from csa_runtime.errors import UnsupportedArch

_logger = logging.getLogger(__name__)
_COLUMNS = 128  # a head_dim that stands for any
# Why this device does not serve this window, by (ordinal, ratio, coff, head_dim); None: it does.
_answers: dict[tuple[int, int, int, int], str | None] = {}


class Counts(Protocol):
    """Where calls are counted."""

    served: int
    declined: Any


class Dispatch:
    """The framework's two functions, by its names and parameters."""

    def __init__(self, module: ModuleType, counts: Counts) -> None:
        """Take the framework's module and where to count."""
        from csa_runtime import torch as adapter

        torch: Any = sys.modules["torch"]
        self._torch, self._counts = torch, counts
        self._compressor = adapter.compressor
        # Of older versions: an environment variable, read at each call.
        self._switch = getattr(module, "_dispatch_enabled", None)
        self._constant_refusal = torch.compiler.assume_constant_result(_refusal)
        variants = _native.bundle_info()["variants"]
        windows = {(one["ratio"], one["coff"]) for one in variants if one["ratio"]}
        self._windows = tuple(sorted(windows))

    def compress(
        self,
        kv: Any,
        score: Any,
        ape: Any,
        cu_seqlens: Any,
        cu_seqlens_comp: Any,
        total_comp: int,
        ratio: int,
        head_dim: int,
        coff: int,
        enabled: bool = True,
    ) -> Any:
        """The pooled rows, or None: the framework's eager code is to run.

        Args:
            kv: `(tokens, 1, coff * head_dim)` bf16; rows may be strided.
            score: as kv.
            ape: `(ratio, coff * head_dim)` fp32.
            cu_seqlens: `(segments + 1,)` of an integer dtype, token prefixes.
            cu_seqlens_comp: `(segments + 1,)` of an integer dtype, row prefixes.
            total_comp: rows of the result.
            ratio: tokens of a block.
            head_dim: columns of the result.
            coff: 1 or 2.
            enabled: the caller's switch.

        Returns:
            `(total_comp, 1, head_dim)` bf16, differentiable; or None.
        """
        if not enabled or (self._switch is not None and not self._switch()):
            return None
        why = self._why_not(kv, score, ape, total_comp, ratio, head_dim, coff)
        if not self._torch.compiler.is_compiling():  # a count would be a guard
            self._count(why)
        if why is not None:
            return None
        int32 = self._torch.int32
        out = self._compressor(
            _rows(kv),
            _rows(score),
            ape.contiguous(),
            cu_seqlens.to(int32).contiguous(),
            cu_seqlens_comp.to(int32).contiguous(),
            ratio=ratio,
            coff=coff,
            total_comp=total_comp,
        )
        return out.unsqueeze(1)

    def available(self, device: Any = None) -> bool:
        """Whether the device, or the current one, is a GPU that the images serve."""
        torch = self._torch
        if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
            return False
        index = None if device is None else device.index
        ordinal = torch.cuda.current_device() if index is None else index
        return _refusal(ordinal, *self._windows[0], _COLUMNS) is None

    def _why_not(
        self, kv: Any, score: Any, ape: Any, total_comp: int, ratio: int, head_dim: int, coff: int
    ) -> str | None:
        """What keeps a call from being served; what the framework's own checks let pass is not."""
        torch = self._torch
        if kv.dim() != 3 or kv.shape[1] != 1 or kv.shape[2] != coff * head_dim:
            return "kv is not (tokens, 1, coff * head_dim)"
        if score.shape != kv.shape:
            return "score has not kv's shape"
        if kv.dtype != torch.bfloat16 or score.dtype != torch.bfloat16:
            return "kv or score is not bf16"
        if ape.dtype != torch.float32:
            return "ape is not fp32"
        if total_comp <= 0 or kv.shape[0] < ratio:
            return "no rows, or fewer tokens than a row pools"
        ordinal = _ordinal(kv)
        if ordinal is None:
            return "kv is not on a GPU"
        return self._device_refuses(ordinal, ratio, coff, head_dim)

    def _device_refuses(self, ordinal: int, ratio: int, coff: int, head_dim: int) -> str | None:
        if not self._torch.compiler.is_compiling():
            return _refusal(ordinal, ratio, coff, head_dim)
        # In a trace the numbers may be symbols; these are not, and the answer is a constant.
        for known in self._windows:
            if ratio == known[0] and coff == known[1]:
                refusal: str | None = self._constant_refusal(ordinal, *known, _COLUMNS)
                return refusal
        return "no image for this ratio and coff"

    def _count(self, why: str | None) -> None:
        """Count a call; the first of each reason is also logged."""
        if why is None:
            self._counts.served += 1
            return
        if why not in self._counts.declined:
            _logger.warning("a call is left to the framework's eager compressor: %s", why)
        self._counts.declined[why] += 1


def _ordinal(tensor: Any) -> int | None:
    """Of the tensor's GPU, if it is on one."""
    return tensor.device.index if tensor.device.type == "cuda" else None


def _rows(tensor: Any) -> Any:
    """`(tokens, width)`, without a copy unless the columns are strided."""
    rows = tensor.squeeze(1)
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _refusal(ordinal: int, ratio: int, coff: int, head_dim: int) -> str | None:
    """Why the device has no image for a window, in both directions; asked once for each.

    Raises:
        RuntimeError: the driver's or the bundle's errors: they are nobody's reason to go on.
    """
    key = (ordinal, ratio, coff, head_dim)
    if key not in _answers:
        answer = None
        for operation in ("forward", "backward"):
            try:
                diagnostics.explain(
                    operation,
                    ratio=ratio,
                    coff=coff,
                    head_dim=head_dim,
                    total_tokens=ratio,
                    total_comp=1,
                    alignment=diagnostics.ELEMENT,
                    device=ordinal,
                )
            except (ValueError, UnsupportedArch) as error:
                answer = str(error)
                break
        _answers[key] = answer
    return _answers[key]
