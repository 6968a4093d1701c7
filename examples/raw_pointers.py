# SPDX-License-Identifier: Apache-2.0
"""Forward and backward on addresses. Torch only allocates: any memory of the device will do."""

import sys

import torch

import csa_runtime

RATIO, COFF, HEAD_DIM = 4, 2, 128
WIDTH = COFF * HEAD_DIM
LENGTHS = (4096, 1023, 77)


def main() -> None:
    """Runs both directions and compares with the call that takes tensors."""
    if not torch.cuda.is_available():
        sys.exit("raw_pointers.py: this example needs an NVIDIA GPU that torch can use")
    cu_seqlens = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    cu_seqlens_comp = csa_runtime.compressed_prefixes(cu_seqlens, ratio=RATIO)
    tokens, rows = sum(LENGTHS), sum(length // RATIO for length in LENGTHS)

    # kv and score are the halves of one projection's result: each row is twice as far as it is
    # wide. Strides count elements, not bytes.
    fused = torch.randn(tokens, 2 * WIDTH, device="cuda", dtype=torch.bfloat16)
    kv, score = fused[:, :WIDTH], fused[:, WIDTH:]
    ape = torch.randn(RATIO, WIDTH, device="cuda")
    out = torch.empty(rows, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    inputs = dict(
        device=0, ratio=RATIO, coff=COFF, dtype=1,  # bf16
        tokens=tokens, segments=len(LENGTHS), rows=rows, head_dim=HEAD_DIM,
        kv=kv.data_ptr(), kv_stride=kv.stride(0),
        score=score.data_ptr(), score_stride=score.stride(0),
        ape=ape.data_ptr(),
        cu_seqlens=cu_seqlens.data_ptr(), cu_seqlens_comp=cu_seqlens_comp.data_ptr(),
        stream=torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    csa_runtime.launch_forward(**inputs, out=out.data_ptr(), out_stride=HEAD_DIM)

    grad_out = torch.randn_like(out)
    grad_kv = torch.empty(tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
    grad_score, grad_ape = torch.empty_like(grad_kv), torch.empty_like(ape)
    size = csa_runtime.backward_workspace_bytes(tokens, rows, HEAD_DIM, ratio=RATIO, coff=COFF)
    workspace = torch.empty(size, device="cuda", dtype=torch.uint8)
    csa_runtime.launch_backward(
        **inputs,
        grad_out=grad_out.data_ptr(), grad_out_stride=HEAD_DIM,
        grad_kv=grad_kv.data_ptr(), grad_kv_stride=WIDTH,
        grad_score=grad_score.data_ptr(), grad_score_stride=WIDTH,
        grad_ape=grad_ape.data_ptr(),
        workspace=workspace.data_ptr(), workspace_bytes=size,
    )  # fmt: skip

    tensors = (kv, score, ape, cu_seqlens, cu_seqlens_comp)
    window = {"ratio": RATIO, "coff": COFF}
    wanted = (
        csa_runtime.compressor_forward(*tensors, **window, total_comp=rows),
        *csa_runtime.compressor_backward(*tensors, grad_out, **window),
    )
    for found, other in zip((out, grad_kv, grad_score, grad_ape), wanted, strict=True):
        assert torch.equal(found, other)
    print(f"{rows} rows and their gradients equal those of the tensor calls")


if __name__ == "__main__":
    main()
