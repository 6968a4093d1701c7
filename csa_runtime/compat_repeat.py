# SPDX-License-Identifier: Apache-2.0
"""The class backward's usual call: torch tensors that look like those of an earlier one.

Describing ten tensors in Python costs more than both launches. So after a call that was described,
checked and launched, torch's own compiled guard, the one `torch.compile` asks, keeps what the
tensors look like: type, dtype, device, sizes, strides, views of negatives, wish for a gradient.
Where it recognises the next call's, only their addresses are new, and those the launcher checks.
Anything else is described again.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any, NamedTuple

from csa_runtime import _native, checks, prefixes, streams
from csa_runtime._native import launch_backward, torch_usual
from csa_runtime.libraries import Torch, library

# kv, score, ape, cu_seqlens, cu_seqlens_comp, grad_out, grad_kv, grad_score, grad_ape
Tensors = tuple[Any, Any, Any, Any, Any, Any, Any, Any, Any]
_FIRST_RESULT = 6
# There from the start, so that each call only overwrites.
_EACH_TIME = (
    "kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp", "grad_out", "grad_kv", "grad_score",
    "grad_ape", "workspace", "stream", "flags",
)  # fmt: skip
_ACCUMULATE = 1
_FIRST_CAPTURABLE = 2  # the legacy default stream, 0 or 1, cannot be captured


class _Known(NamedTuple):
    """What calls that look alike share."""

    looks_like: Any
    owner: Torch
    ordinal: int
    fields: dict[str, Any]
    elements: int  # of fp32, of the workspace to take; 0 where one is given


class Repeats:
    """Of one backward object, its calls that look alike; those with a workspace apart."""

    def __init__(self, ratio: int, coff: int) -> None:
        """Know of no call yet. window: the one they are all of."""
        self.window = ratio, coff
        self._known: dict[bool, _Known] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy knows of no call: guards have none."""
        return Repeats, self.window

    def launch(self, tensors: Tensors, accumulate: bool, stream: Any, workspace: Any) -> bool:
        """Launch a call that looks like an earlier one; False: not done, nothing has happened.

        Args:
            tensors: what `execute` was given, in its order.
            accumulate: whether `grad_ape` is added to.
            stream: as `execute` was given it.
            workspace: as `execute` was given it.

        Raises:
            ValueError: what is no stream, and what the launcher refuses: addresses, overlap.
            RuntimeError: a failed launch.
        """
        known = self._known.get(workspace is not None)
        if known is None:
            return False
        looks_like, owner, ordinal, fields, elements = known
        memory = workspace
        if not (looks_like(*tensors) if memory is None else looks_like(*tensors, memory)):
            return False
        handle = owner.raw_stream(ordinal)
        if stream is not None and not streams.same(streams.handle_of(stream), handle):
            return False
        kv, score, ape, starts, sums, grad_out, grad_kv, grad_score, grad_ape = tensors
        if elements:
            # Memory of a graph is for the array operation to take.
            if handle >= _FIRST_CAPTURABLE and not owner.uncaptured(ordinal):
                return False
            memory = ape.new_empty(elements)
        # Overwriting a copy costs a third of adding keywords to a call.
        call = fields.copy()
        call["kv"] = kv.data_ptr()
        call["score"] = score.data_ptr()
        call["ape"] = ape.data_ptr()
        call["cu_seqlens"] = starts.data_ptr()
        call["cu_seqlens_comp"] = sums.data_ptr()
        call["grad_out"] = grad_out.data_ptr()
        call["grad_kv"] = grad_kv.data_ptr()
        call["grad_score"] = grad_score.data_ptr()
        call["grad_ape"] = grad_ape.data_ptr()
        if memory is not None:
            call["workspace"] = memory.data_ptr()
        if accumulate:
            call["flags"] = _ACCUMULATE
        call["stream"] = handle
        launch_backward(**call)
        return True

    def learn(self, tensors: Tensors, workspace: Any) -> None:
        """Remember what a call looks like that has been served."""
        given = workspace is not None
        everything = (*tensors, workspace) if given else tensors
        if prefixes.checking() or not torch_usual(*everything) or tensors[2] is None:
            return
        if any(result.requires_grad for result in everything[_FIRST_RESULT:]):
            return  # served under no_grad alone
        known = self._known.get(given)
        if known is not None and known.looks_like(*everything):
            return
        guard = _guard(everything) if _trusted() else None
        if guard is None:
            self._known.pop(given, None)
            return
        fields, size = self._sizes(tensors)
        elements = 0 if given else -(-size // 4)
        fields["workspace_bytes"] = workspace.nbytes if given else 4 * elements
        owner = library(tensors[0])
        assert isinstance(owner, Torch)
        self._known[given] = _Known(guard, owner, fields["device"], fields, elements)

    def _sizes(self, tensors: Tensors) -> tuple[dict[str, Any], int]:
        """The launch's numbers, and the bytes of workspace that always suffice for them."""
        ratio, coff = self.window
        kv, score, _, starts, _, grad_out, grad_kv, grad_score, _ = tensors
        tokens, width = kv.shape
        rows, head_dim = grad_out.shape
        dtype = checks.DTYPE_CODES[str(kv.dtype).rpartition(".")[2]]
        size = _native.backward_workspace_bytes(tokens, rows, head_dim, ratio, coff, dtype)
        numbers = {
            "device": kv.get_device(),
            "ratio": ratio,
            "coff": coff,
            "dtype": dtype,
            "tokens": tokens,
            "segments": starts.shape[0] - 1,
            "rows": rows,
            "head_dim": width // coff,
            "kv_stride": _pitch(kv),
            "score_stride": _pitch(score),
            "grad_out_stride": _pitch(grad_out),
            "grad_kv_stride": _pitch(grad_kv),
            "grad_score_stride": _pitch(grad_score),
        }
        return {**numbers, **dict.fromkeys(_EACH_TIME, 0)}, size


def _pitch(tensor: Any) -> int:
    """From row to row, in elements; a single row has none that counts."""
    return int(tensor.stride(0) if tensor.shape[0] > 1 else tensor.shape[1])


def _guard(tensors: tuple[Any, ...]) -> Any:
    """What says whether as many others look like these; None where this torch has none."""
    torch: Any = sys.modules["torch"]
    with contextlib.suppress(Exception):  # of any kind: the call itself has been served
        check = torch._C._dynamo.guards.TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
        ).check
        if check(*tensors):
            return check
    return None


@functools.cache
def _trusted() -> bool:
    """Whether this torch's guard, which it documents nowhere, knows tensors apart."""
    torch: Any = sys.modules["torch"]
    with contextlib.suppress(Exception):  # of any kind: the call itself has been served
        with torch.inference_mode(False), torch.enable_grad():
            one = torch.zeros(4, 6, dtype=torch.bfloat16, device="cpu")
            check, same = _guard((one, one[:2])), one.clone()
            others = (
                one[:3], one[:, :5], one[0], one.float(), one.half(), one.t().contiguous().t(),
                torch.cat([one, one], 1)[:, :6], torch._neg_view(one), one.to("meta"),
                one.clone().requires_grad_(), torch.nn.Parameter(one), None,
            )  # fmt: skip
            return bool(check and check(same, same[:2])) and not any(
                check(other, same[:2]) or check(same, other) for other in others
            )
    return False
