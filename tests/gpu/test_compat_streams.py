# SPDX-License-Identifier: Apache-2.0
"""The drop-in on streams that are not torch's current one, and in captures."""

import contextlib
from typing import Any

import pytest
import torch

import csa_runtime
from csa_runtime import compat
from gpu.compat_calls import assert_same, backward, compiled, forward, make, wrapped
from gpu.processes import SCRIPTS, finish, start
from support.packs import prefixes

pytestmark = [pytest.mark.gpu]

MODES = ("global", "thread_local", "relaxed")
RACE = 200_000_000  # cycles for which a stream is kept busy, about 0.1 s


def as_object(kind: str, side: torch.cuda.Stream) -> Any:
    """The stream as the kinds of objects that name one."""
    if kind == "cuda.bindings":
        from cuda.bindings import driver

        return driver.CUstream(side.cuda_stream)
    if kind == "protocol":
        return type("S", (), {"__cuda_stream__": lambda self: (0, side.cuda_stream)})()
    return {"torch": side, "int": side.cuda_stream, "current": None}[kind]


@pytest.mark.L0
@pytest.mark.parametrize("kind", ["torch", "int", "cuda.bindings", "protocol", "current"])
def test_work_is_ordered_on_the_stream_given(kind: str) -> None:
    """Of what arrives late, on that stream; nothing waits for it elsewhere."""
    csa_runtime.load()  # loading may wait for the device
    pack = make()
    wanted = wrapped(pack)
    late = torch.full_like(pack.kv, torch.nan)
    inputs = (late, *pack.inputs[1:])
    ahead, back = compiled(pack)
    side = torch.cuda.Stream()
    stream = as_object(kind, side)
    into = [torch.zeros_like(tensor) for tensor in wanted]
    wrapped(pack, stream=side)  # allocating for the first time may wait for the device
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(RACE)
        late.copy_(pack.kv)
    with torch.cuda.stream(side) if kind == "current" else contextlib.nullcontext():
        window = pack.options | {"stream": stream}
        out = compat.csa_compressor_forward_wrapper(*inputs, **window, total_comp=pack.total_comp)[
            "out"
        ]
        grads = compat.csa_compressor_backward_wrapper(*inputs, pack.grad_out, **window)
        ahead.execute(*inputs, into[0], stream)
        back.execute(*inputs, pack.grad_out, *into[1:], current_stream=stream)
    assert not side.query()
    side.synchronize()
    assert_same((out, *grads), wanted)
    assert_same(into, wanted)


@pytest.mark.L0
@pytest.mark.parametrize("handle", [0, 1, 2])
def test_special_handles_from_a_side_stream(handle: int) -> None:
    """The legacy default by both of its names, and the thread's own."""
    pack = make()
    wanted = wrapped(pack)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        found = wrapped(pack, stream=handle)
    assert_same(found, wanted)


@pytest.mark.L0
def test_memory_stays_allocated_until_the_given_stream_is_done() -> None:
    """Inputs and results that the caller drops while their launch is still to come."""
    csa_runtime.load()
    pack = make()
    wanted = wrapped(pack)
    side = torch.cuda.Stream()
    ahead, _ = compiled(pack)
    inputs = tuple(tensor.clone() for tensor in pack.inputs)
    out = torch.empty_like(wanted[0])
    wrapped(pack, stream=side)  # allocating for the first time may wait for the device
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(RACE)
    ahead.execute(*inputs, out, side)
    dropped = compat.csa_compressor_forward_wrapper(
        *inputs, **pack.options, total_comp=pack.total_comp, stream=side
    )["out"]
    places = {tensor.data_ptr() for tensor in (*inputs, dropped)}
    shapes = [(tensor.shape, tensor.dtype) for tensor in (*inputs, dropped)] * 4
    del inputs, dropped
    taken = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in shapes]
    assert not side.query()
    assert not places & {tensor.data_ptr() for tensor in taken}
    side.synchronize()
    assert_same((out,), wanted[:1])


@pytest.mark.L0
def test_results_do_not_lie_where_the_current_stream_still_writes() -> None:
    """Freed memory is handed on in one stream's order, which another need not keep."""
    csa_runtime.load()
    pack = make()
    wanted = wrapped(pack)
    side = torch.cuda.Stream()
    wrapped(pack, stream=side)
    torch.cuda.synchronize()
    torch.cuda._sleep(RACE)
    for tensor in wanted:
        for _ in range(4):  # freed at once, written later
            torch.empty_like(tensor).fill_(7.0)
    found = wrapped(pack, stream=side)
    side.synchronize()
    assert_same(found, wanted)


@pytest.mark.L1
@pytest.mark.parametrize("api", ["wrappers", "classes"])
@pytest.mark.parametrize("mode", MODES)
def test_the_first_call_of_a_process_may_be_captured(mode: str, api: str) -> None:
    script = SCRIPTS / "compat_in_capture.py"
    assert "replays equal direct calls" in finish(start(script, mode, api), seconds=120)


@pytest.mark.L0
@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_captured_class_backward_replays_to_the_same_grad_ape(
    ratio: int, deterministic: bool
) -> None:
    """Zeroed inside the graph where it is added to, and not where it is overwritten."""
    pack = make(ratio)
    _, back = compiled(pack, deterministic=deterministic)
    grads = [torch.full_like(tensor, torch.nan) for tensor in (pack.kv, pack.score, pack.ape)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if not deterministic:
            grads[2].zero_()
        back.execute(*pack.inputs, pack.grad_out, *grads)
    for segments in ([100 * ratio // 4], [3, 50 * ratio // 4, 0, 1, 2]):
        changed = prefixes([*segments, *[0] * (5 - len(segments))], ratio=ratio, device="cuda")
        for tensor, values in zip(pack.inputs[3:], changed, strict=True):
            tensor.copy_(values)
        direct = backward(pack)
        for _ in range(3):
            graph.replay()
            assert_same(grads, direct)


@pytest.mark.L0
def test_rows_read_back_under_capture_spoil_nothing() -> None:
    pack = make(padding=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="total_comp"):
            compat.csa_compressor_forward_wrapper(*pack.inputs, **pack.options)
        found = wrapped(pack)
    graph.replay()
    assert_same(found, (forward(pack), *backward(pack)))
