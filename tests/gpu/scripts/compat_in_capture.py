# SPDX-License-Identifier: Apache-2.0
"""The drop-in's first call of a process, inside torch.cuda.graph. Arguments: mode, API."""

import gc
import sys
from typing import Any

import torch

from csa_runtime import CSACompressorBackward, CSACompressorForward, compat
from support.packs import Pack, prefixes, random_pack

WINDOWS = [(4, 2, 64), (2, 1, 33), (128, 1, 128)]
# In quarters of a block.
SEGMENTS = ([40, 7, 0, 30, 3], [5, 60, 4, 0, 11], [1, 2, 3, 2, 1])


def by_wrappers(pack: Pack) -> list[torch.Tensor]:
    """Memory of the graph's own."""
    inputs, window = pack.inputs, pack.options
    result = compat.csa_compressor_forward_wrapper(*inputs, **window, total_comp=pack.total_comp)
    return [
        result["out"],
        *compat.csa_compressor_backward_wrapper(*inputs, pack.grad_out, **window),
    ]


def by_classes(pack: Pack) -> list[torch.Tensor]:
    """Objects made, compiled and dropped where they are used; grad_ape zeroed with the rest."""
    samples = (*pack.inputs, pack.grad_out)
    assert pack.ape is not None
    like = (pack.grad_out, pack.kv, pack.score, pack.ape)
    found: list[Any] = [torch.empty_like(tensor) for tensor in like]
    found[3].zero_()
    for kind, rest in (
        (CSACompressorForward, found[:1]),
        (CSACompressorBackward, [pack.grad_out, *found[1:]]),
    ):
        operation: Any = kind(*samples, **pack.options)
        operation.compile()
        operation.execute(*pack.inputs, *rest)
    return found


def main(mode: str, api: str) -> None:
    """Captures all windows first, then replays with other contents and compares."""
    call = {"wrappers": by_wrappers, "classes": by_classes}[api]
    packs = []
    for ratio, coff, d in WINDOWS:
        lengths = [quarters * ratio // 4 for quarters in SEGMENTS[0]]
        packs.append(
            random_pack(lengths, ratio=ratio, coff=coff, head_dim=d, padding=2, device="cuda")
        )
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        captured = [call(pack) for pack in packs]
        gc.collect()
    for number, segments in enumerate(SEGMENTS):
        for pack in packs:
            lengths = [quarters * pack.ratio // 4 for quarters in segments]
            changed = prefixes(lengths, ratio=pack.ratio, device="cuda")
            pack.cu_seqlens.copy_(changed[0])
            pack.cu_seqlens_comp.copy_(changed[1])
            for tensor in (pack.kv, pack.score, pack.ape, pack.grad_out):
                assert tensor is not None
                tensor.normal_(0.0, 1.0 + number)
        for found in captured:
            for tensor in found:
                tensor.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for pack, found in zip(packs, captured, strict=True):
            for ours, direct in zip(found, call(pack), strict=True):
                assert torch.equal(ours.view(torch.int16), direct.view(torch.int16)), pack.options
    print(f"replays equal direct calls: {mode} {api}")


if __name__ == "__main__":
    main(*sys.argv[1:])
