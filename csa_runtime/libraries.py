# SPDX-License-Identifier: Apache-2.0
"""What only an array's own library can do: its current stream, memory, a value read back.

Libraries are found in `sys.modules` by the arrays they made; none is imported here.

| library | current stream | results and workspace | capture |
| --- | --- | --- | --- |
| torch | of the array's device | `torch.empty` on that stream, the current one recorded | known |
| cupy | of the array's device | `cupy.empty` in the arena of the stream in use | known |
| numba | that of the interface, else the legacy default | `device_array` | not known |
| others | that of the interface, else the legacy default | must be given | not known |

Memory handed to a stream other than the library's current one stays alive until the work is done:
torch is told both streams, cupy returns the memory to that stream's own arena, and numba frees with
a call that waits for the device.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from csa_runtime import streams
from csa_runtime.arrays import library_of


class Library:
    """One that can neither allocate nor tell a capture: results and workspace must be given."""

    name = "unknown"
    keeps_graph_memory = False

    def current_stream(self, array: Any) -> int:
        """Handle of the stream the library works on, for the array's device."""
        interface = getattr(array, "__cuda_array_interface__", None)
        # Whether the interface can be read is for whoever describes the array to say.
        stream = interface.get("stream") if isinstance(interface, dict) else None
        return stream if isinstance(stream, int) else 0

    def capturing(self, array: Any, stream: int) -> bool:
        """Whether the stream is being captured into a graph; False where nobody can tell."""
        return False

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str | None, stream: int) -> Any:
        """Uninitialised memory on `like`'s device for use on `stream`; dtype None is `like`'s.

        Raises:
            ValueError: the library's arrays cannot be made or written from outside.
        """
        raise ValueError(
            f"arrays of {self.name!r} cannot be allocated and written by this library; pass out= "
            "(forward) or grads= and workspace= (backward), made by torch, cupy or numba"
        )

    def reads(self, array: Any) -> bool:
        """Whether `values` can read this array."""
        return hasattr(array, "tolist")

    def values(self, array: Any, stream: int) -> list[int]:
        """Contents of an integer vector, read back behind what is pending on `stream`."""
        with self._on(array, stream):
            values: list[int] = array.tolist()
            return values

    def _on(self, array: Any, stream: int) -> contextlib.AbstractContextManager[Any]:
        """Makes `stream`, and the array's device, the library's current ones."""
        return contextlib.nullcontext()

    def graph_owns(self, memory: Any) -> bool:
        """Whether memory taken during a capture lives as long as the graph."""
        return False


class Torch(Library):
    """Found by `sys.modules`; memory for a foreign stream is taken on it."""

    keeps_graph_memory = True

    def __init__(self) -> None:
        """Bind the cheap forms of what a call asks for (0.1 us against 4)."""
        self.torch = sys.modules["torch"]
        raw = getattr(self.torch._C, "_cuda_getCurrentRawStream", None)
        self.raw_stream = raw or (lambda i: self.torch.cuda.current_stream(i).cuda_stream)

    def current_stream(self, array: Any) -> int:
        """Of the tensor's device; 0 for a CPU tensor."""
        index = array.get_device()  # -1 on the CPU
        return int(self.raw_stream(index)) if index >= 0 else 0

    def _on(self, array: Any, stream: int) -> contextlib.AbstractContextManager[Any]:
        index = array.device.index
        if not array.is_cuda or (
            streams.same(stream, self.raw_stream(index))
            and index == self.torch.cuda.current_device()
        ):
            return contextlib.nullcontext()
        external = streams.in_torch(self.torch, stream, array.device)
        guard: contextlib.AbstractContextManager[Any] = self.torch.cuda.stream(external)
        return guard

    def capturing(self, array: Any, stream: int) -> bool:
        """Asks the driver through torch."""
        if not array.is_cuda:
            return False
        with self._on(array, stream):
            return bool(self.torch.cuda.is_current_stream_capturing())

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str | None, stream: int) -> Any:
        """From torch's caching allocator, in the order of the stream that will write it.

        Taken in the current stream's order it could still be in use there. That stream, which may
        read what was written, is recorded.
        """
        kind = like.dtype if dtype is None else getattr(self.torch, dtype)
        if streams.same(stream, self.current_stream(like)):
            return self.torch.empty(shape, dtype=kind, device=like.device)
        with self._on(like, stream):
            memory = self.torch.empty(shape, dtype=kind, device=like.device)
        # Recorded on a capture that torch does not know of, the allocator's event would be part of
        # the graph, and asking for its state an error for whoever allocates next.
        if self.capturing(like, stream) and not self.graph_owns(memory):
            raise ValueError(
                "memory for another stream under a capture cannot be taken from torch; pass "
                "workspace= and grads= (backward) or out= (forward)"
            )
        memory.record_stream(self.torch.cuda.current_stream(like.device))
        return memory

    def graph_owns(self, memory: Any) -> bool:
        """Whether it came from a private pool, which `torch.cuda.graph` keeps for its graph.

        A capture begun behind torch's back gets ordinary memory, which the next caller may get too.
        """
        address = memory.data_ptr()
        try:
            segments = self.torch.cuda.memory_snapshot()
        except RuntimeError:  # another allocator than torch's own: nobody can tell
            return False
        for segment in segments:
            if segment["address"] <= address < segment["address"] + segment["total_size"]:
                return tuple(segment.get("segment_pool_id", (0, 1))) != (0, 0)
        return False


class Cupy(Library):
    """Its pool has an arena for each stream: memory is taken from the one in use."""

    def _on(self, array: Any, stream: int) -> contextlib.ExitStack:
        cuda = sys.modules["cupy"].cuda
        stack = contextlib.ExitStack()
        stack.enter_context(cuda.Device(array.device.id))
        if stream != cuda.get_current_stream().ptr:
            stack.enter_context(cuda.ExternalStream(stream, array.device.id))
        return stack

    def current_stream(self, array: Any) -> int:
        """Of the array's device."""
        cuda = sys.modules["cupy"].cuda
        with cuda.Device(array.device.id):
            return int(cuda.get_current_stream().ptr)

    def capturing(self, array: Any, stream: int) -> bool:
        """Asks the driver through cupy."""
        return bool(sys.modules["cupy"].cuda.runtime.streamIsCapturing(stream))

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str | None, stream: int) -> Any:
        """From cupy's pool."""
        with self._on(like, stream):
            return sys.modules["cupy"].empty(shape, dtype=like.dtype if dtype is None else dtype)


class Numba(Library):
    """Device arrays; a capture shows only when the driver refuses the allocation."""

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str | None, stream: int) -> Any:
        """From the current context."""
        kind = like.dtype if dtype is None else dtype
        return sys.modules["numba"].cuda.device_array(shape, dtype=kind)

    def reads(self, array: Any) -> bool:
        """Whether it is one of the package's arrays, and no stranger by a subclass."""
        return hasattr(array, "copy_to_host")

    def values(self, array: Any, stream: int) -> list[int]:
        """Copies to the host."""
        cuda = sys.modules["numba"].cuda
        if stream:
            cuda.external_stream(stream).synchronize()
        values: list[int] = array.copy_to_host().tolist()
        return values


_KINDS: dict[str, type[Library]] = {"torch": Torch, "cupy": Cupy, "numba": Numba}
_KNOWN: dict[str, Library] = {}


def library(array: Any) -> Library:
    """The library that made an array."""
    name = library_of(array)
    known = _KNOWN.get(name)
    if known is None:
        known = _KINDS.get(name, Library)()
        known.name = name
        _KNOWN[name] = known
    return known
