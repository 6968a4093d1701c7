# SPDX-License-Identifier: Apache-2.0
"""Drop-in calls on a stream that is not torch's current one.

torch hands out memory in the order of one stream. So results and workspace are taken on the stream
that will write them, and whatever either stream may still use stays allocated until both are done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from csa_runtime import streams
from csa_runtime.arrays import library_of
from csa_runtime.libraries import library


def on_stream(
    call: Callable[[Any], tuple[Any, ...]], arrays: tuple[Any, ...], stream: Any
) -> tuple[Any, ...]:
    """Run `call(stream)`, in a way that torch knows of where its tensors meet a foreign stream.

    Args:
        call: takes what to pass on as `stream=`; returns arrays.
        arrays: what it reads and writes, kv first; None for those that are absent.
        stream: as the caller gave it.

    Raises:
        ValueError: what is no stream, and all that `call` raises.
    """
    foreign = None if stream is None else _foreign(arrays[0], stream)
    if foreign is None:
        return call(stream)
    torch: Any = sys.modules["torch"]
    current = torch.cuda.current_stream(arrays[0].device)
    with torch.cuda.stream(foreign):
        results = call(None)
    _record(results, current)
    _record(arrays, foreign)
    return results


def _foreign(kv: Any, stream: Any) -> Any:
    """The stream as torch's own object, if torch's allocator must be told of it."""
    handle = streams.handle_of(stream)
    if library_of(kv) != "torch" or not kv.is_cuda:
        return None
    owner = library(kv)
    # Memory of a graph is kept by whoever keeps the graph, and an event recorded for it later would
    # become part of a capture: the array operations decide what is possible there.
    if streams.same(handle, owner.current_stream(kv)) or owner.capturing(kv, handle):
        return None
    return streams.in_torch(sys.modules["torch"], handle, kv.device)


def _record(arrays: tuple[Any, ...], stream: Any) -> None:
    for array in arrays:
        if array is not None and library_of(array) == "torch" and array.is_cuda:
            array.record_stream(stream)
