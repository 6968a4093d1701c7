# SPDX-License-Identifier: Apache-2.0
"""A fresh process may capture its first call; replays with new contents equal direct calls."""

from collections.abc import Iterator
from subprocess import Popen

import pytest
import torch

import csa_runtime
from gpu.processes import SCRIPTS, finish, start
from support.packs import prefixes, random_pack

pytestmark = [pytest.mark.gpu, pytest.mark.L1]

MODES = ("global", "thread_local", "relaxed")
TORCH = tuple((mode, ratio) for ratio in ("4", "128") for mode in MODES)
RAW = tuple((mode, company) for mode in MODES for company in ("alone", "beside"))


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[tuple[str, ...], Popen[str]]]:
    """All fresh processes at once: most of their time is importing."""
    started: dict[tuple[str, ...], Popen[str]] = {
        pair: start(SCRIPTS / "first_call_in_capture.py", *pair) for pair in TORCH
    }
    started.update({pair: start(SCRIPTS / "raw_capture.py", *pair) for pair in RAW})
    yield started
    for process in started.values():
        if process.poll() is None:
            process.kill()


@pytest.mark.parametrize(("mode", "ratio"), TORCH)
def test_first_call_inside_a_torch_graph(
    mode: str, ratio: str, processes: dict[tuple[str, ...], Popen[str]]
) -> None:
    assert "replays equal direct calls" in finish(processes[(mode, ratio)], seconds=120)


@pytest.mark.parametrize(("mode", "company"), RAW)
def test_first_call_inside_a_driver_capture(
    mode: str, company: str, processes: dict[tuple[str, ...], Popen[str]]
) -> None:
    assert "replays equal direct calls" in finish(processes[(mode, company)], seconds=120)


@pytest.mark.parametrize("ratio", [4, 128])
def test_every_replay_gives_the_same_bits_and_follows_the_prefixes(ratio: int) -> None:
    pack = random_pack([4000, 3, 5000], ratio=ratio, coff=2, head_dim=512, padding=3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = csa_runtime.compressor_forward(
            *pack.inputs, **pack.options, total_comp=pack.total_comp
        )
        grads = csa_runtime.compressor_backward(*pack.inputs, pack.grad_out, **pack.options)
    for lengths in ([4000, 3, 5000], [9000, 0, 0], [17, 8900, 80]):
        cu_seqlens, cu_seqlens_comp = prefixes(lengths, ratio=ratio, device="cuda")
        pack.cu_seqlens.copy_(cu_seqlens)
        pack.cu_seqlens_comp.copy_(cu_seqlens_comp)
        direct = (
            csa_runtime.compressor_forward(
                *pack.inputs, **pack.options, total_comp=pack.total_comp
            ),
            *csa_runtime.compressor_backward(*pack.inputs, pack.grad_out, **pack.options),
        )
        for _ in range(3):
            for result in (out, *grads):
                result.fill_(torch.nan)
            graph.replay()
            for result, wanted in zip((out, *grads), direct, strict=True):
                assert torch.equal(result.view(torch.int16), wanted.view(torch.int16))


def test_rows_read_back_under_capture_is_a_value_error_that_spoils_nothing() -> None:
    pack = random_pack([40, 8], ratio=4, coff=1, head_dim=8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="total_comp"):
            csa_runtime.compressor_forward(*pack.inputs, **pack.options)
        out = csa_runtime.compressor_forward(
            *pack.inputs, **pack.options, total_comp=pack.total_comp
        )
    graph.replay()
    direct = csa_runtime.compressor_forward(*pack.inputs, **pack.options)
    assert torch.equal(out, direct)
