# SPDX-License-Identifier: Apache-2.0
"""Eight threads, none with a current context, race the library's first call; then a serial one."""

import torch

from gpu import harness, problems
from gpu.processes import race

THREADS = 8


def main() -> None:
    """Every thread forward and backward on its own stream, or on handle 0, must equal serial."""
    found = []
    for number in range(THREADS):
        ratio, coff = problems.CONFIGS[number % len(problems.CONFIGS)]
        packing = problems.named_packing("random", ratio)
        p = harness.problem(packing, ratio, coff, (64, 6, 128, 3)[number // 2], seed=number)
        out = torch.full((packing.rows, p.head_dim), torch.nan, dtype=torch.bfloat16, device="cuda")
        large = [torch.full_like(p.given.kv, torch.nan) for _ in range(2)]
        grads = [*large, torch.full_like(p.given.ape, torch.nan)]
        stream = torch.cuda.Stream().cuda_stream if number % 4 else 0
        found.append((p, out, grads, harness.workspace(p), stream))
    torch.cuda.synchronize()

    def work(number: int) -> None:
        p, out, grads, scratch, stream = found[number]
        for _ in range(20):
            harness.forward(p, out, on=stream)
            harness.backward(p, *grads, scratch=scratch, on=stream)

    race(work, THREADS)
    torch.cuda.synchronize()
    for p, out, grads, scratch, _ in found:
        again = [torch.full_like(t, torch.nan) for t in (out, *grads)]
        harness.forward(p, again[0])
        harness.backward(p, *again[1:], scratch=scratch)
        for one, two in zip((out, *grads), again, strict=True):
            assert torch.equal(one.view(torch.int16), two.view(torch.int16))
            assert not bool(one.isnan().any())
    print(f"{THREADS} threads equal serial")


if __name__ == "__main__":
    main()
