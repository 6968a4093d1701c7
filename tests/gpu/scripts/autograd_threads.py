# SPDX-License-Identifier: Apache-2.0
"""Eight threads train on one GPU: forward on their own, backward on torch's autograd thread.

They race the library's first call; then each repeats alone and must get the same bits.
"""

import threading
from typing import Any

import torch

from csa_runtime.torch import compressor
from gpu import engine
from gpu.processes import race
from support.packs import Pack, random_pack

THREADS, REPEATS = 8, 10
WINDOWS = ((4, 2, 128), (128, 2, 128), (2, 1, 6), (128, 1, 512))
DEVICE = "cuda"

Results = tuple[torch.Tensor, ...]


def step(pack: Pack, backward_threads: set[int]) -> Results:
    """`out` and the gradients of one forward and backward."""
    leaves = [t.detach().clone().requires_grad_() for t in pack.inputs[:3]]
    prefix = (pack.cu_seqlens, pack.cu_seqlens_comp)
    out = compressor(*leaves, *prefix, **pack.options, total_comp=pack.total_comp)

    def note(grad: torch.Tensor) -> None:
        backward_threads.add(threading.get_ident())

    leaves[0].register_hook(note)
    out.backward(pack.grad_out)
    return (out.detach(), *(leaf.grad for leaf in leaves))


def main() -> None:
    """Compares the threads' results with serial ones."""
    packs = []
    for number in range(THREADS):
        ratio, coff, d = WINDOWS[number % len(WINDOWS)]
        lengths = [40 * ratio, 7, 0, 21 * ratio + 1]
        packs.append(
            random_pack(
                lengths, ratio=ratio, coff=coff, head_dim=d, padding=2, device=DEVICE, seed=number
            )
        )
    streams: list[Any] = [torch.cuda.Stream() for _ in packs]
    torch.cuda.synchronize()
    found: list[list[Results]] = [[] for _ in packs]
    backward_threads: set[int] = set()

    def work(number: int) -> None:
        with torch.cuda.stream(streams[number]):
            for _ in range(REPEATS):
                found[number].append(step(packs[number], backward_threads))
        streams[number].synchronize()

    idents = {thread.ident for thread in race(work, THREADS)}
    assert backward_threads and not backward_threads & idents, "backward was not on another thread"
    for pack, results in zip(packs, found, strict=True):
        serial = step(pack, backward_threads)
        assert len(results) == REPEATS
        for result in results:
            for one, two in zip(result, serial, strict=True):
                assert torch.equal(one.view(torch.int16), two.view(torch.int16))
                assert not bool(one.isnan().any())
    engine.settle()
    print(f"{THREADS} threads equal serial, backward on {len(backward_threads)} other")


if __name__ == "__main__":
    main()
