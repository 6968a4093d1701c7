# SPDX-License-Identifier: Apache-2.0
"""Streams, threads, contexts and devices other than the ones that happen to be current."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import csa_runtime
from gpu import harness, problems
from gpu.buffers import DEVICE
from gpu.processes import SCRIPTS, finish, start
from support.eager import eager
from support.packs import random_pack

pytestmark = [pytest.mark.gpu]

BF16 = torch.bfloat16


@pytest.mark.L1
def test_threads_racing_the_first_call_equal_serial() -> None:
    assert "threads equal serial" in finish(start(SCRIPTS / "threads.py"), seconds=120)


@pytest.mark.L1
def test_backward_on_the_autograd_thread_of_eight_forwards_equals_serial() -> None:
    log = finish(start(SCRIPTS / "autograd_threads.py"), seconds=120)
    assert "8 threads equal serial" in log


@pytest.mark.L0
def test_a_thread_without_a_context_may_call() -> None:
    p = harness.problem(problems.named_packing("random", 4), 4, 2, 128)
    out = torch.full((p.packing.rows, 128), torch.nan, dtype=BF16, device=DEVICE)
    direct = torch.empty_like(out)
    harness.forward(p, direct)
    for handle in (0, torch.cuda.Stream(DEVICE).cuda_stream):
        out.fill_(torch.nan)
        torch.cuda.synchronize()
        failures: list[BaseException] = []

        def work(handle: int = handle, failures: list[BaseException] = failures) -> None:
            try:
                harness.forward(p, out, on=handle)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        torch.cuda.synchronize()
        assert not failures
        assert torch.equal(out, direct)


@pytest.mark.L0
@pytest.mark.parametrize("kind", ["object", "handle", "current"])
def test_work_is_ordered_on_the_given_stream(kind: str) -> None:
    pack = random_pack([9000], ratio=4, coff=2, head_dim=128, device="cuda")
    wanted = csa_runtime.compressor_forward(*pack.inputs, **pack.options)
    late = torch.full_like(pack.kv, torch.nan)
    side = torch.cuda.Stream()
    out = torch.empty_like(wanted)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late.copy_(pack.kv)
    chosen = {"object": side, "handle": side.cuda_stream, "current": None}[kind]
    with torch.cuda.stream(side) if kind == "current" else contextlib.nullcontext():
        csa_runtime.compressor_forward(
            late, *pack.inputs[1:], **pack.options, out=out, stream=chosen
        )
    side.synchronize()
    assert torch.equal(out, wanted)


@contextlib.contextmanager
def second_context() -> Iterator[Any]:
    """Another context on device 0, not current; the current one is restored."""
    from cuda.bindings import driver as cu

    from gpu.scripts.hostile import driver

    before = driver(cu.cuCtxGetCurrent())
    device = driver(cu.cuDeviceGet(0))
    try:
        context = driver(cu.cuCtxCreate(None, 0, device))
    except TypeError:
        context = driver(cu.cuCtxCreate(0, device))
    driver(cu.cuCtxSetCurrent(before))
    yield context
    driver(cu.cuCtxSetCurrent(before))
    driver(cu.cuCtxDestroy(context))


@pytest.mark.L0
def test_a_call_runs_in_its_streams_own_context() -> None:
    from cuda.bindings import driver as cu

    from gpu.scripts.hostile import driver

    pack = random_pack([40, 21], ratio=4, coff=2, head_dim=64, device="cuda")
    wanted = csa_runtime.compressor_forward(*pack.inputs, **pack.options)
    hosts = {
        name: getattr(pack, name).view(torch.uint8).cpu()
        for name in ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp")
    }
    result = torch.zeros(wanted.numel() * 2, dtype=torch.uint8)
    with second_context() as context:
        current = driver(cu.cuCtxGetCurrent())
        driver(cu.cuCtxSetCurrent(context))
        stream = driver(cu.cuStreamCreate(1))  # CU_STREAM_NON_BLOCKING
        places = {}
        for name, host in hosts.items():
            places[name] = int(driver(cu.cuMemAlloc(host.numel())))
            driver(cu.cuMemcpyHtoD(places[name], host.data_ptr(), host.numel()))
        out = int(driver(cu.cuMemAlloc(result.numel())))
        driver(cu.cuCtxSynchronize())
        driver(cu.cuCtxSetCurrent(current))
        csa_runtime.launch_forward(
            device=0, ratio=4, coff=2, dtype=1, tokens=61, segments=2, rows=pack.total_comp,
            head_dim=64, **places, out=out, kv_stride=128, score_stride=128, out_stride=64,
            stream=int(stream),
        )  # fmt: skip
        assert int(driver(cu.cuCtxGetCurrent())) == int(current)
        driver(cu.cuCtxSetCurrent(context))
        driver(cu.cuStreamSynchronize(stream))
        driver(cu.cuMemcpyDtoH(result.data_ptr(), out, result.numel()))
    assert torch.equal(result.view(BF16).view(wanted.shape), wanted.cpu())


@pytest.mark.L0
@pytest.mark.multi_gpu
def test_tensors_on_a_device_that_is_not_current() -> None:
    pack = random_pack([40, 21], ratio=4, coff=2, head_dim=64, device="cuda:1")
    wanted = eager(pack)
    torch.cuda.set_device(0)
    out = csa_runtime.compressor_forward(*pack.inputs, **pack.options)
    grads = csa_runtime.compressor_backward(*pack.inputs, pack.grad_out, **pack.options)
    assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    assert float((out.float() - wanted.out.float()).abs().max()) < 0.02
    harness.assert_equal("grad_kv", grads[0], wanted.grad_kv)
    harness.assert_equal("grad_score", grads[1], wanted.grad_score)
