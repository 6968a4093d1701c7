# SPDX-License-Identifier: Apache-2.0
"""Memory that the array operations take: whose it is, and how long it lives."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import csa_runtime
from csa_runtime import streams
from support.packs import Pack, random_pack

pytestmark = [pytest.mark.gpu, pytest.mark.L0]


@pytest.fixture
def pack() -> Pack:
    """Some windows."""
    return random_pack([40, 0, 7, 61], ratio=4, coff=2, head_dim=64, device="cuda")


def gradients(pack: Pack, **options: object) -> tuple[torch.Tensor, ...]:
    """The backward."""
    return csa_runtime.compressor_backward(*pack.inputs, pack.grad_out, **pack.options, **options)


@contextmanager
def capture_behind_torch(stream: torch.cuda.Stream) -> Iterator[None]:
    """A driver's capture of the stream, which torch's allocator is not told of."""
    from cuda.bindings import driver as cu

    relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    assert int(cu.cuStreamBeginCapture(stream.cuda_stream, relaxed)[0]) == 0
    try:
        yield
    finally:
        error, graph = cu.cuStreamEndCapture(stream.cuda_stream)
        assert int(error) == 0
        cu.cuGraphDestroy(graph)


def test_capture_behind_torch_needs_a_workspace(pack: Pack) -> None:
    """Ordinary memory of the allocator may be anyone's when the graph is replayed."""
    pytest.importorskip("cuda.bindings")
    wanted = gradients(pack)
    size = csa_runtime.backward_workspace_bytes(
        pack.kv.shape[0], pack.total_comp, 64, ratio=4, coff=2
    )
    scratch = torch.empty(size, dtype=torch.uint8, device="cuda")
    grads = tuple(torch.empty_like(grad) for grad in wanted)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for current in (True, False):
        with torch.cuda.stream(stream if current else torch.cuda.current_stream()):
            explicit = None if current else stream
            with capture_behind_torch(stream):
                with pytest.raises(ValueError, match="pass workspace="):
                    gradients(pack, grads=grads, stream=explicit)
                with pytest.raises(ValueError, match="pass total_comp="):
                    csa_runtime.compressor_forward(*pack.inputs, **pack.options, stream=explicit)
                gradients(pack, grads=grads, workspace=scratch, stream=explicit)


def test_workspace_of_a_torch_capture_is_the_graphs_own(pack: Pack) -> None:
    """Memory taken elsewhere between replays never overlaps it."""
    wanted = gradients(pack)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = gradients(pack)
    fills = [torch.full((1 << 18,), 7.0, device="cuda") for _ in range(64)]
    graph.replay()
    torch.cuda.synchronize()
    assert all(bool((fill == 7.0).all()) for fill in fills)
    for one, two in zip(grads, wanted, strict=True):
        assert torch.equal(one, two)


def test_results_on_another_stream_are_not_reused_too_early(pack: Pack) -> None:
    """Dropped at once, while that stream is still busy: the allocator waits for it."""
    csa_runtime.load()  # loading may wait for the device
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
    out = csa_runtime.compressor_forward(*pack.inputs, **pack.options, total_comp=25, stream=side)
    address = out.data_ptr()
    size = out.numel()
    del out
    taken = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for _ in range(8)]
    assert address not in [t.data_ptr() for t in taken]
    side.synchronize()


def test_empty_problems_can_be_captured() -> None:
    """No rows need no workspace."""
    pack = random_pack([3, 2, 1], ratio=4, coff=2, head_dim=8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    gradients(pack)
    with torch.cuda.graph(graph):
        grads = gradients(pack)
    for grad in grads:
        grad.fill_(torch.nan)
    graph.replay()
    for grad in grads:
        assert not bool(grad.any())


def test_prefix_checks_are_skipped_in_a_capture(
    pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CSA_RUNTIME_CHECK=1 reads back, which only a stream outside capture allows."""
    monkeypatch.setattr("csa_runtime.prefixes.checking", lambda: True)
    bad = pack.cu_seqlens_comp + 1
    options = {**pack.options, "total_comp": pack.total_comp}
    with pytest.raises(ValueError, match=r"cu_seqlens_comp\[0\] is 1"):
        csa_runtime.compressor_forward(*pack.inputs[:4], bad, **options)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        csa_runtime.compressor_forward(*pack.inputs[:4], bad, **options)


def test_results_do_not_lie_where_the_current_stream_still_writes(pack: Pack) -> None:
    """Freed memory is handed on in one stream's order, which another need not keep."""
    csa_runtime.load()
    wanted = gradients(pack)
    side = torch.cuda.Stream()
    gradients(pack, stream=side)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for tensor in wanted:
        for _ in range(4):  # freed at once, written later
            torch.empty_like(tensor).fill_(7.0)
    found = gradients(pack, stream=side)
    side.synchronize()
    for one, two in zip(found, wanted, strict=True):
        assert torch.equal(one, two)


def test_one_is_the_legacy_default_stream_to_torch_too(pack: Pack) -> None:
    """By its lowest bit torch would take that handle for a stream of its own pool."""
    assert streams.in_torch(torch, 1, pack.inputs[0].device).cuda_stream == 0
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = gradients(pack, stream=1)
    torch.cuda.synchronize()
    for one, two in zip(found, gradients(pack), strict=True):
        assert torch.equal(one, two)
