# SPDX-License-Identifier: Apache-2.0
"""The two operations as objects made from samples: check, load, execute.

Samples give shapes, dtypes and devices; meta tensors will do. Nothing is compiled: `compile()`
loads the device's kernels, and a launch that finds them not loaded loads them itself.
"""

from __future__ import annotations

import functools
from typing import Any

from csa_runtime import diagnostics, ops
from csa_runtime.compat_samples import CPU, Samples
from csa_runtime.compat_streams import on_stream

# The CPU stands for any GPU: what no image of this architecture serves is refused there too.
_STAND_IN = 90


class _Compressor:
    """What both directions share: samples, checks of them, and the state of being loaded."""

    _operation = ""
    _last = ""

    def __init__(
        self,
        sample_kv: Any,
        sample_score: Any,
        sample_ape: Any,
        sample_cu_seqlens: Any,
        sample_cu_seqlens_comp: Any,
        sample_out: Any,
        ratio: int = 4,
        coff: int = 2,
    ) -> None:
        """Take descriptions of the samples, none of their memory.

        Args:
            sample_kv: `(T, coff * head_dim)` bf16.
            sample_score: as kv.
            sample_ape: `(ratio, coff * head_dim)` fp32; None if there will be none.
            sample_cu_seqlens: int32 `(segments + 1,)`.
            sample_cu_seqlens_comp: int32 `(segments + 1,)`.
            sample_out: `(total_comp, head_dim)` as kv: forward's result, backward's `grad_out`.
            ratio: tokens of a block.
            coff: 1 or 2.

        Raises:
            ValueError: a sample that is no array.
        """
        self.ratio, self.coff = ratio, coff
        samples = (sample_kv, sample_score, sample_ape, sample_cu_seqlens, sample_cu_seqlens_comp)
        self._samples = Samples(samples, (self._last, sample_out), ratio, coff)
        self._supported = self._compiled = False

    def check_support(self) -> bool:
        """Check the samples, and that the device has an image for them.

        Raises:
            ValueError: malformed samples, or a window, dtype or size that nothing serves.
            RuntimeError: no driver, or no image for the device's compute capability.
        """
        samples = self._samples
        sizes = samples.check()
        diagnostics.explain(
            self._operation,
            **sizes,
            ratio=self.ratio,
            coff=self.coff,
            segments=samples.segments,
            ape=samples.ape,
            alignment=diagnostics.ELEMENT,
            device=max(0, samples.ordinal or 0),
            compute_capability=_STAND_IN if samples.ordinal == CPU else None,
        )
        self._supported = True
        return True

    def compile(self) -> None:
        """Load and finish the device's kernels, as `execute` asks for.

        Allowed inside a capture where the driver is CUDA 12.3 or newer.

        Raises:
            ValueError: as `check_support`, which runs first if it has not.
            RuntimeError: as `check_support`, or a failed load.
        """
        if not self._supported:
            self.check_support()
        if not self._compiled and self._samples.ordinal != CPU:
            diagnostics.load(self._samples.ordinal)
        self._compiled = True

    def scratch_workspace_bytes(self) -> int:
        """0: forward takes no workspace."""
        return 0

    def _check_call(self, kv: Any, cu_seqlens: Any, out: Any) -> None:
        if not self._compiled:
            raise ValueError(
                f"{type(self).__name__} has no kernels loaded; execute() is allowed after "
                "compile(): call check_support() and compile() first"
            )
        self._samples.compare(kv, cu_seqlens, out)


class CSACompressorForward(_Compressor):
    """Forward for the shapes of its samples."""

    _operation, _last = "forward", "out"

    def execute(
        self,
        kv: Any,
        score: Any,
        ape: Any,
        cu_seqlens: Any,
        cu_seqlens_comp: Any,
        out: Any,
        current_stream: Any = None,
    ) -> None:
        """Write `out`, all of it; rows of all arrays may be strided.

        Args:
            kv: as its sample, and so all others.
            score: as kv.
            ape: fp32, or None for zeros.
            cu_seqlens: token prefixes.
            cu_seqlens_comp: row prefixes.
            out: `(total_comp, head_dim)`, written.
            current_stream: a handle or stream object; None is torch's current one.

        Raises:
            ValueError: before `compile()`, or arrays that are not as their samples.
            RuntimeError: a failed launch.
        """
        self._check_call(kv, cu_seqlens, out)
        if out is None:
            raise ValueError(
                "out is None; an array of (total_comp, head_dim) to write into is allowed: pass "
                "one, or call csa_compressor_forward_wrapper, which makes it"
            )
        inputs = (kv, score, ape, cu_seqlens, cu_seqlens_comp)

        def forward(stream: Any) -> tuple[Any, ...]:
            options = {"ratio": self.ratio, "coff": self.coff, "out": out, "stream": stream}
            ops.compressor_forward(*inputs, **options)
            return ()

        on_stream(forward, (*inputs, out), current_stream)


class CSACompressorBackward(_Compressor):
    """Backward for the shapes of its samples; the same bits every time."""

    _operation, _last = "backward", "grad_out"

    def __init__(
        self,
        sample_kv: Any,
        sample_score: Any,
        sample_ape: Any,
        sample_cu_seqlens: Any,
        sample_cu_seqlens_comp: Any,
        sample_out: Any,
        ratio: int = 4,
        coff: int = 2,
        deterministic: bool = False,
    ) -> None:
        """As the forward, `sample_out` standing for `grad_out`.

        Args:
            sample_kv: as in the forward.
            sample_score: as in the forward.
            sample_ape: as in the forward.
            sample_cu_seqlens: as in the forward.
            sample_cu_seqlens_comp: as in the forward.
            sample_out: `(total_comp, head_dim)` as kv.
            ratio: tokens of a block.
            coff: 1 or 2.
            deterministic: whether `execute` overwrites `grad_ape`; otherwise it adds to it, once,
                the finished sum, and the caller zeroes it first. Both give the same bits.
        """
        samples = (sample_kv, sample_score, sample_ape, sample_cu_seqlens, sample_cu_seqlens_comp)
        super().__init__(*samples, sample_out, ratio=ratio, coff=coff)
        self.deterministic = bool(deterministic)

    def scratch_workspace_bytes(self) -> int:
        """Bytes that suffice for `execute(workspace=)`, for every device and alignment; no driver.

        Raises:
            ValueError: malformed samples.
        """
        sizes = self._samples.check()
        if not self._samples.ape:
            return 0
        return diagnostics.backward_workspace_bytes(**sizes, ratio=self.ratio, coff=self.coff)

    def execute(
        self,
        kv: Any,
        score: Any,
        ape: Any,
        cu_seqlens: Any,
        cu_seqlens_comp: Any,
        grad_out: Any,
        grad_kv: Any,
        grad_score: Any,
        grad_ape: Any,
        current_stream: Any = None,
        workspace: Any = None,
    ) -> None:
        """Write `grad_kv` and `grad_score`, which may be uninitialised, and `grad_ape`.

        Without rows all three get zeros, an added `grad_ape` nothing.

        Args:
            kv: as its sample, and so all others.
            score: as kv.
            ape: fp32, or None; then `grad_ape` is None too.
            cu_seqlens: token prefixes.
            cu_seqlens_comp: row prefixes.
            grad_out: `(total_comp, head_dim)`.
            grad_kv: as kv, written.
            grad_score: as kv, written.
            grad_ape: as ape, added to; overwritten if the object was made with deterministic=True.
            current_stream: a handle or stream object; None is torch's current one.
            workspace: contiguous uint8, 16-byte aligned, of `scratch_workspace_bytes()`; None takes
                one from kv's library.

        Raises:
            ValueError: before `compile()`, or arrays that are not as their samples.
            RuntimeError: a failed launch.
        """
        inputs = (kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out)
        grads = (grad_kv, grad_score, grad_ape)
        self._check_call(kv, cu_seqlens, grad_out)
        if grad_ape is None and ape is not None:
            raise ValueError(
                "grad_ape is None beside an ape; an array like ape to write into is allowed: pass "
                "one, or call compressor_backward, whose grads= may lack it"
            )
        if workspace is not None and not _of_bytes(getattr(workspace, "dtype", "uint8")):
            raise ValueError(
                f"workspace is {workspace.dtype}; contiguous uint8 is allowed: allocate "
                "scratch_workspace_bytes() of it"
            )

        def backward(stream: Any) -> tuple[Any, ...]:
            ops.compressor_backward(
                *inputs,
                ratio=self.ratio,
                coff=self.coff,
                grads=grads,
                workspace=workspace,
                accumulate=not self.deterministic,
                stream=stream,
            )
            return ()

        on_stream(backward, (*inputs, *grads, workspace), current_stream)


@functools.cache
def _of_bytes(dtype: Any) -> bool:
    """Whether any library's dtype is uint8."""
    return str(dtype).endswith("uint8")
