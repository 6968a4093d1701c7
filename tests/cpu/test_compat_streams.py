# SPDX-License-Identifier: Apache-2.0
"""What torch is told of a call on a stream other than its current one, on a stub of its streams."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from csa_runtime import compat_streams
from csa_runtime.compat_streams import on_stream

pytestmark = pytest.mark.L0

CURRENT = 0x500
Log = list[tuple[str, Any]]


class Tensor(SimpleNamespace):
    """On a GPU, as far as it is asked."""

    is_cuda = True
    device = "cuda:0"

    def record_stream(self, stream: Any) -> None:
        """Remember."""
        self.log.append((self.name, stream))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """What happened, in order; streams are their handles."""
    events: Log = []

    def external(handle: int, device: Any) -> int:
        return 0xBAD if handle in (0, 1) else handle

    @contextmanager
    def stream(handle: Any) -> Iterator[None]:
        events.append(("enter", handle))
        yield
        events.append(("exit", handle))

    owner = SimpleNamespace(current_stream=lambda _: CURRENT, capturing=lambda _, s: s == 0xCA0)
    monkeypatch.setattr(compat_streams, "library", lambda _: owner)
    monkeypatch.setattr(compat_streams, "library_of", lambda _: "torch")
    monkeypatch.setattr(torch.cuda, "ExternalStream", external)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: CURRENT)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return events


def run(log: Log, stream: Any) -> None:
    """A call with two inputs, one absent, and one result."""

    def call(given: Any) -> tuple[Tensor]:
        log.append(("call", given))
        return (Tensor(name="out", log=log),)

    on_stream(call, (Tensor(name="kv", log=log), None, Tensor(name="score", log=log)), stream)


def test_a_foreign_stream_is_made_current_and_both_keep_what_they_use(log: Log) -> None:
    """Results are taken in its order, and kept for the stream that was current."""
    run(log, 0xF00)
    assert log[:3] == [("enter", 0xF00), ("call", None), ("exit", 0xF00)]
    assert sorted(log[3:]) == [("kv", 0xF00), ("out", CURRENT), ("score", 0xF00)]


@pytest.mark.parametrize("handle", [0, 1])
def test_the_legacy_default_is_torchs_own_object_for_it(log: Log, handle: int) -> None:
    """Of an external stream's handles torch takes neither for the legacy default."""
    run(log, handle)
    assert log[0] == ("enter", 0)


@pytest.mark.parametrize("stream", [None, CURRENT, 0xCA0], ids=["none", "same", "captured"])
def test_other_streams_are_passed_on(log: Log, stream: int | None) -> None:
    """The current one, and one under capture, whose memory others decide on."""
    run(log, stream)
    assert log == [("call", stream)]


def test_arrays_of_other_libraries_are_passed_on(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    """Their memory is no concern of torch."""
    monkeypatch.setattr(compat_streams, "library_of", lambda _: "cupy")
    run(log, 0xF00)
    assert log == [("call", 0xF00)]


def test_what_is_no_stream_is_refused(log: Log) -> None:
    """Before anything is called."""
    with pytest.raises(ValueError, match="stream"):
        run(log, "0xF00")
    assert not log
