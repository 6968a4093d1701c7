# SPDX-License-Identifier: Apache-2.0
"""A process whose first call of the library is inside torch.cuda.graph. Arguments: mode, ratio."""

import sys

import torch

import csa_runtime
from support.packs import prefixes, random_pack

COFF = 2
# In quarters of a block.
SEGMENTS = ([40, 7, 0, 30, 3], [5, 60, 4, 0, 11], [0, 0, 0, 0, 80], [1, 2, 3, 2, 1])


def main(mode: str, ratio: int) -> None:
    """Captures both directions first, then replays with other contents and compares."""
    segments = [[quarters * ratio // 4 for quarters in lengths] for lengths in SEGMENTS]
    d = 64 if ratio <= 4 else 128
    pack = random_pack(segments[0], ratio=ratio, coff=COFF, head_dim=d, padding=2, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        out = csa_runtime.compressor_forward(
            *pack.inputs, **pack.options, total_comp=pack.total_comp
        )
        grads = csa_runtime.compressor_backward(*pack.inputs, pack.grad_out, **pack.options)
    results = (out, *grads)
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
        direct = [
            csa_runtime.compressor_forward(
                *pack.inputs, **pack.options, total_comp=pack.total_comp
            ),
            *csa_runtime.compressor_backward(*pack.inputs, pack.grad_out, **pack.options),
        ]
        for first, second, third in zip(*replays, direct, strict=True):
            for other in (second, third):
                assert torch.equal(first.view(torch.int16), other.view(torch.int16)), lengths
    print(f"replays equal direct calls: {mode} {ratio}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
