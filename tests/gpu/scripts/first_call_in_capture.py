# SPDX-License-Identifier: Apache-2.0
"""A process whose first call of the library is inside torch.cuda.graph.

Arguments: the capture mode, ratio, and what is captured: a name of CAPTURED, "both" if left out.
"""

import gc
import sys
from typing import Any

import torch

import csa_runtime
from csa_runtime.torch import compressor
from gpu import engine
from support.packs import Pack, prefixes, random_pack

COFF = 2
# In quarters of a block.
SEGMENTS = ([40, 7, 0, 30, 3], [5, 60, 4, 0, 11], [0, 0, 0, 0, 80], [1, 2, 3, 2, 1])

Results = tuple[torch.Tensor, ...]


def forward(pack: Pack) -> Results:
    """The array call."""
    return (
        csa_runtime.compressor_forward(*pack.inputs, **pack.options, total_comp=pack.total_comp),
    )


def backward(pack: Pack) -> Results:
    """The array call, which takes its own workspace."""
    return csa_runtime.compressor_backward(*pack.inputs, pack.grad_out, **pack.options)


def both(pack: Pack) -> Results:
    """Forward and backward."""
    return (*forward(pack), *backward(pack))


def autograd(pack: Pack) -> Results:
    """Through the differentiable operation: backward runs on torch's autograd thread."""
    leaves = [t.detach().requires_grad_() for t in pack.inputs[:3]]
    prefix = (pack.cu_seqlens, pack.cu_seqlens_comp)
    out = compressor(*leaves, *prefix, **pack.options, total_comp=pack.total_comp)
    return (out.detach(), *torch.autograd.grad(out, leaves, pack.grad_out))


def classes(pack: Pack) -> Results:
    """The drop-in classes, made, loaded, used and dropped."""
    out = pack.kv.new_empty((pack.total_comp, pack.head_dim))
    grads = [torch.empty_like(t) for t in pack.inputs[:3]]
    forward = csa_runtime.CSACompressorForward(*pack.inputs, out, **pack.options)
    backward = csa_runtime.CSACompressorBackward(
        *pack.inputs, pack.grad_out, **pack.options, deterministic=True
    )
    forward.compile()
    forward.execute(*pack.inputs, out)
    backward.compile()
    backward.execute(*pack.inputs, pack.grad_out, *grads)
    return (out, *grads)


def littered(pack: Pack) -> Results:
    """Forward and backward after arrays, streams and handles were dropped and collected."""
    for _ in range(3):
        cycle: list[Any] = [both(pack), classes(pack), torch.cuda.Stream()]
        cycle.append(cycle)
        del cycle
        gc.collect()
    return both(pack)


CALLS = (forward, backward, both, autograd, classes, littered)
CAPTURED = {call.__name__: call for call in CALLS}


def main(mode: str, ratio: int, what: str = "both") -> None:
    """Captures first, then replays with other contents and compares with direct calls."""
    call = CAPTURED[what]
    segments = [[quarters * ratio // 4 for quarters in lengths] for lengths in SEGMENTS]
    d = 64 if ratio <= 4 else 128
    pack = random_pack(segments[0], ratio=ratio, coff=COFF, head_dim=d, padding=2, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        results = call(pack)
    for number, lengths in enumerate(segments):
        for target, value in zip(
            (pack.cu_seqlens, pack.cu_seqlens_comp),
            prefixes(lengths, ratio=ratio, device="cuda"),
            strict=True,
        ):
            target.copy_(value)
        for tensor in (pack.kv, pack.score, pack.ape, pack.grad_out):
            tensor.normal_(0.0, 1.0 + number)
        replays = []
        for _ in range(2):
            for result in results:
                result.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            replays.append([result.clone() for result in results])
        direct = call(pack)
        for first, second, third in zip(*replays, direct, strict=True):
            for other in (second, third):
                assert torch.equal(first.view(torch.int16), other.view(torch.int16)), lengths
    if what == autograd.__name__:
        engine.settle()
    print(f"replays equal direct calls: {mode} {ratio} {what}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:4])
