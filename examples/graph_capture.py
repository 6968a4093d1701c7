# SPDX-License-Identifier: Apache-2.0
"""A graph whose capture is the process's first call, replayed for packs of other lengths."""

import sys

import torch

import csa_runtime

RATIO, COFF, HEAD_DIM = 4, 2, 128
WIDTH = COFF * HEAD_DIM
TOKENS, SEGMENTS = 8192, 16  # capacities: the most that a pack may have
ROWS = csa_runtime.max_rows(TOKENS, SEGMENTS, ratio=RATIO)
PACKS = ([4096, 1023, 77], [8192], [3, 2, 1], [512] * 16)


def main() -> None:
    """Captures both directions, then replays them for every pack."""
    if not torch.cuda.is_available():
        sys.exit("graph_capture.py: this example needs an NVIDIA GPU that torch can use")
    kv = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    score, ape = torch.randn_like(kv), torch.randn(RATIO, WIDTH, device="cuda")
    grad_out = torch.randn(ROWS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    # No pack yet: all segments are empty.
    cu_seqlens = torch.zeros(SEGMENTS + 1, device="cuda", dtype=torch.int32)
    window = {"ratio": RATIO, "coff": COFF}

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Part of the graph, so that each replay derives the rows' prefixes from the tokens'.
        cu_seqlens_comp = csa_runtime.compressed_prefixes(cu_seqlens, ratio=RATIO)
        inputs = (kv, score, ape, cu_seqlens, cu_seqlens_comp)
        out = csa_runtime.compressor_forward(*inputs, **window, total_comp=ROWS)
        grads = csa_runtime.compressor_backward(*inputs, grad_out, **window)

    for lengths in PACKS:
        # Segments that a pack does not have are empty ones at its end.
        full = lengths + [0] * (SEGMENTS - len(lengths))
        cu_seqlens.copy_(torch.tensor([0, *full]).cumsum(0))
        kv.normal_()
        graph.replay()

        rows = int(cu_seqlens_comp[-1])
        direct = csa_runtime.compressor_forward(*inputs, **window, total_comp=rows)
        assert torch.equal(out[:rows], direct)
        for found, wanted in zip(
            grads, csa_runtime.compressor_backward(*inputs, grad_out, **window), strict=True
        ):
            assert torch.equal(found, wanted)
        print(f"{len(lengths)} segments: {rows} rows, {ROWS - rows} of padding, equal direct calls")


if __name__ == "__main__":
    main()
