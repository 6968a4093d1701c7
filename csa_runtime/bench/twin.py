# SPDX-License-Identifier: Apache-2.0
"""The traffic twin: a kernel that reads and writes what a call does and computes nothing.

As many streams as the call, each as long, 16 bytes at a time. A copy moves the same bytes as one
stream in and one out, by the driver's own kernel; the twin shows what a kernel with this mix of
reads and writes can reach. It is compiled while the bench runs, by whatever compiler is at hand:
the bench alone needs one, and goes without a twin where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import torch

from csa_runtime.bench.clock import Call, in_turn, quick_time
from csa_runtime.bench.packs import CALLS, Pack
from csa_runtime.bench.problem import Problem
from csa_runtime.bench.record import said

WORD = 16  # bytes
LINE = 8  # words: a block's part of the narrow stream starts at a whole 128 bytes
# kv and score are in, their gradients out; the narrow stream is out (written) or grad_out (read).
# `seen` makes every load matter, also in threads that write nothing; words are folded last loaded
# first, or the assembler waits for one before it issues the next.
SOURCE = """
static __device__ void fold(uint4& into, uint4 word) {
  into.x ^= word.x, into.y ^= word.y, into.z ^= word.z, into.w ^= word.w;
}

extern "C" __global__ void __launch_bounds__(512) twin(
    const uint4* kv, const uint4* score, uint4* narrow, uint4* grad_kv, uint4* grad_score,
    int inputs, int narrows, int grads, int span, int tiles) {
  uint4 seen = {};
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    uint4 a[UNROLL], b[UNROLL], sum = {};
    const int first = tile * UNROLL * blockDim.x + threadIdx.x;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int i = first + u * blockDim.x;
      a[u] = i < inputs ? kv[i] : uint4{};
      b[u] = i < inputs ? score[i] : uint4{};
    }
#if !BACKWARD
#pragma unroll
    for (int u = UNROLL; u--;) fold(sum, b[u]), fold(sum, a[u]);
    fold(seen, sum);
#endif
    for (int j = threadIdx.x; j < span; j += blockDim.x) {
      const int i = tile * span + j;
      if (i >= narrows) break;
#if BACKWARD
      fold(sum, narrow[i]);
#else
      narrow[i] = sum;
#endif
    }
#if BACKWARD
    fold(a[0], sum);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int i = first + u * blockDim.x;
      if (i < grads) grad_kv[i] = a[u], grad_score[i] = b[u];
    }
#endif
  }
  if (!BACKWARD && (seen.x & seen.y & seen.z & seen.w) == 0xffffffff) narrow[0] = seen;
}
"""

Kernel = Callable[[int, int, tuple[Any, ...]], None]  # blocks, threads, tensors and 32-bit integers
Compiler = Callable[[str], Kernel]


class Shape(NamedTuple):
    """How a launch deals words to threads.

    unroll: words of each input that a thread loads before it waits. blocks: of a multiprocessor,
    which take tile after tile; 0: a block for each tile.
    """

    unroll: int
    threads: int
    blocks: int


SHAPES = tuple(Shape(*each) for each in product((1, 2, 4), (256, 512), (1, 2, 4, 8, 0)))


class Words(NamedTuple):
    """Lengths of the streams: of kv and of score, of out or grad_out, and of each gradient."""

    inputs: int
    narrows: int
    grads: int

    def tiling(self, shape: Shape) -> tuple[int, int]:
        """Tiles, and the words of the narrow stream in each."""
        tile = shape.unroll * shape.threads
        longest = max(self.inputs, self.grads, 1)
        span = -(-self.narrows * tile // longest)
        return -(-longest // tile), -(-span // LINE) * LINE


def words(pack: Pack, call: str) -> Words:
    """What "forward" or "backward" moves."""
    row = 2 * pack.head_dim
    grads = pack.tokens * pack.coff * row if call == "backward" else 0
    return Words(pack.used * row // WORD, pack.rows * row // WORD, grads // WORD)


def by_torch(source: str) -> Kernel:
    """With torch's own use of the compiler (2.9 and later)."""
    made = torch.cuda._compile_kernel(source, "twin")
    return lambda blocks, threads, given: made((blocks, 1, 1), (threads, 1, 1), [*given])


def by_cupy(source: str) -> Kernel:
    """With CuPy's."""
    cupy: Any = import_module("cupy")
    made = cupy.RawKernel(source, "twin")
    made.compile()

    def run(blocks: int, threads: int, given: tuple[Any, ...]) -> None:
        plain = [cupy.int32(v) if isinstance(v, int) else v.data_ptr() for v in given]
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            made((blocks,), (threads,), tuple(plain))

    return run


COMPILERS: tuple[Compiler, ...] = (by_torch, by_cupy)


class Twin:
    """Both directions, compiled for each number of loads in flight."""

    def __init__(self) -> None:
        """Compiles for the current device.

        Raises:
            RuntimeError: no compiler is at hand.
        """
        self.multiprocessors = torch.cuda.get_device_properties().multi_processor_count
        self._chosen: dict[tuple[str, str, int], Shape] = {}
        failed = []
        for compiler in COMPILERS:
            try:
                self._kernels = {
                    (call, unroll): compiler(
                        f"#define UNROLL {unroll}\n#define BACKWARD {int(call == 'backward')}\n"
                        + SOURCE
                    )
                    for call in CALLS
                    for unroll in {shape.unroll for shape in SHAPES}
                }
                self.compiler = compiler.__name__.removeprefix("by_")
                return
            except Exception as error:  # whatever a missing compiler raises
                failed.append(said(error))
        raise RuntimeError(f"no compiler: {'; '.join(failed)}")

    def launch(self, problem: Problem, call: str, shape: Shape) -> Call:
        """One launch on a problem's buffers; its inputs stay, its results become meaningless."""
        lengths = words(problem.pack, call)
        tiles, span = lengths.tiling(shape)
        narrow = problem.grad_out if call == "backward" else problem.out
        grads = (problem.grad_kv, problem.grad_score)
        given = (problem.kv, problem.score, narrow, *grads, *lengths, span, tiles)
        blocks = min(tiles, shape.blocks * self.multiprocessors or tiles)
        kernel = self._kernels[call, shape.unroll]
        return lambda: kernel(blocks, shape.threads, given)

    def best(self, problems: list[Problem], call: str) -> tuple[Call, Shape]:
        """The launch of the fastest shape, on these buffers in turn."""
        key = (problems[0].pack.name, call, len(problems))
        calls = {
            shape: in_turn([self.launch(problem, call, shape) for problem in problems])
            for shape in ((self._chosen[key],) if key in self._chosen else SHAPES)
        }
        if key not in self._chosen:
            self._chosen[key] = min(SHAPES, key=lambda shape: quick_time(calls[shape]))
        return calls[self._chosen[key]], self._chosen[key]
