# SPDX-License-Identifier: Apache-2.0
"""Which stream's order torch's memory is taken in, on a stub of torch's allocator."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from csa_runtime.libraries import Torch

CURRENT, OTHER = 0x10, 0x20
KV = SimpleNamespace(
    dtype="bf16", device=SimpleNamespace(index=0), is_cuda=True, get_device=lambda: 0
)


def external(handle: int, device: Any) -> int:
    """Like torch's: what it takes for no handle, or for one of its pool, is another stream."""
    return 0xBAD if handle in (0, 1) else handle


def owner(log: list[Any], *, capturing: bool = False, current: int = CURRENT) -> Torch:
    """The library over a torch that logs streams entered, memory taken and streams recorded."""

    @contextmanager
    def stream(handle: int) -> Any:
        log.append(("enter", handle))
        yield
        log.append(("exit", handle))

    memory = SimpleNamespace(record_stream=lambda handle: log.append(("record", handle)))

    def empty(shape: tuple[int, ...], **_: Any) -> Any:
        log.append("empty")
        return memory

    found = object.__new__(Torch)
    found.torch = SimpleNamespace(
        empty=empty,
        cuda=SimpleNamespace(
            default_stream=lambda device: 0,
            ExternalStream=external,
            stream=stream,
            current_stream=lambda device: current,
            current_device=lambda: 0,
            is_current_stream_capturing=lambda: capturing,
            memory_snapshot=list,
        ),
    )
    found.raw_stream = lambda index: current
    return found


def test_the_current_streams_memory_is_taken_as_it_is() -> None:
    log: list[Any] = []
    owner(log).empty(KV, (4,), None, CURRENT)
    assert log == ["empty"]


def test_another_streams_memory_is_taken_on_it_and_the_current_one_recorded() -> None:
    log: list[Any] = []
    owner(log).empty(KV, (4,), None, OTHER)
    taken = log.index("empty")
    assert log[taken - 1 : taken + 2] == [("enter", OTHER), "empty", ("exit", OTHER)]
    assert log[-1] == ("record", CURRENT)


@pytest.mark.parametrize("handle", [0, 1])
def test_the_legacy_default_stream_is_torchs_own_object_for_it(handle: int) -> None:
    log: list[Any] = []
    owner(log).empty(KV, (4,), None, handle)
    taken = log.index("empty")
    assert log[taken - 1 : taken + 2] == [("enter", 0), "empty", ("exit", 0)]
    log.clear()
    owner(log, current=0).empty(KV, (4,), None, handle)
    assert log == ["empty"]


def test_a_foreign_capture_is_refused_before_anything_is_recorded() -> None:
    log: list[Any] = []
    library = owner(log, capturing=True)
    library.graph_owns = lambda memory: False  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="under a capture"):
        library.empty(KV, (4,), None, OTHER)
    assert not [entry for entry in log if entry[0] == "record"]
