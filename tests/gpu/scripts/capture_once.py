# SPDX-License-Identifier: Apache-2.0
"""The process's first call of the library, inside a capture begun through cuda.bindings; no torch.

Captures one direction, then replays it for several packs, all inputs changed in place, and
compares every byte with a direct call.
"""

import argparse
import threading
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

import csa_runtime
from csa_runtime import _native
from gpu.scripts.hostile import driver

Array = np.ndarray[Any, Any]
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
# Lengths of a pack's segments, in quarters of a block: a ragged one, a few, one, none that fits.
PACKS = ((40, 7, 0, 30, 3), (5, 60, 4, 0, 11), (0, 0, 0, 0, 80), (1, 2, 3, 2, 1))
PADDING = 2  # rows beyond those of a pack of one segment


class Memory:
    """Device memory by name, of the current context."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.places: dict[str, int] = {}
        self.sizes: dict[str, int] = {}

    def put(self, name: str, values: Array) -> None:
        """A copy of `values`: in place from the second time on."""
        if name not in self.places:
            self.places[name] = int(driver(cu.cuMemAlloc(values.nbytes)))
            self.sizes[name] = values.nbytes
        assert self.sizes[name] == values.nbytes
        driver(cu.cuMemcpyHtoD(self.places[name], values.ctypes.data, values.nbytes))

    def take(self, name: str) -> bytes:
        """Contents; poisoned from now on."""
        host = np.empty(self.sizes[name], np.uint8)
        driver(cu.cuMemcpyDtoH(host.ctypes.data, self.places[name], host.nbytes))
        driver(cu.cuMemsetD8(self.places[name], 0xFF, host.nbytes))
        return host.tobytes()


class Problem:
    """One direction's tensors at static capacities, and the call."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Allocates everything and uploads the first pack."""
        self.options, self.memory = options, Memory()
        self.random = np.random.default_rng(options.ratio)
        self.tokens, self.width = 20 * options.ratio, options.coff * options.head_dim
        self.rows = 20 + PADDING
        poison = {"out": self.rows * options.head_dim * 2}
        if options.direction == "backward":
            wide = self.tokens * self.width * 2
            poison = {"grad_kv": wide, "grad_score": wide}
            poison["grad_ape"] = options.ratio * self.width * 4
            self.scratch = csa_runtime.backward_workspace_bytes(
                self.tokens, self.rows, options.head_dim, ratio=options.ratio, coff=options.coff
            )
            self.memory.put("workspace", np.full(self.scratch, 0xFF, np.uint8))
        self.results = tuple(poison)
        for name, size in poison.items():
            self.memory.put(name, np.full(size, 0xFF, np.uint8))
        self.fill(PACKS[0])

    def normal(self, *shape: int) -> Array:
        """Of N(0, 1), fp32."""
        return self.random.standard_normal(shape, dtype=np.float32)

    def bf16(self, *shape: int) -> Array:
        """Of N(0, 1), as raw bf16."""
        return (self.normal(*shape).view(np.uint32) >> 16).astype(np.uint16)

    def fill(self, quarters: tuple[int, ...]) -> None:
        """Other values and prefixes in the same memory."""
        lengths = [number * self.options.ratio // 4 for number in quarters]
        rows = [length // self.options.ratio for length in lengths]
        self.memory.put("cu_seqlens", np.cumsum([0, *lengths], dtype=np.int32))
        self.memory.put("cu_seqlens_comp", np.cumsum([0, *rows], dtype=np.int32))
        self.memory.put("kv", self.bf16(self.tokens, self.width))
        self.memory.put("score", self.bf16(self.tokens, self.width))
        self.memory.put("ape", self.normal(self.options.ratio, self.width))
        if self.options.direction == "backward":
            self.memory.put("grad_out", self.bf16(self.rows, self.options.head_dim))
        driver(cu.cuCtxSynchronize())

    def call(self, stream: int) -> None:
        """The library's."""
        options = self.options
        launch = getattr(csa_runtime, f"launch_{options.direction}")
        strides = {
            f"{name}_stride": options.head_dim if name.endswith("out") else self.width
            for name in ("kv", "score", *self.results, "grad_out")
            if name in self.memory.places and name != "grad_ape"
        }
        launch(
            device=0, ratio=options.ratio, coff=options.coff, dtype=1, tokens=self.tokens,
            segments=len(PACKS[0]), rows=self.rows, head_dim=options.head_dim,
            **self.memory.places, **strides, stream=stream, variant=options.variant,
            workspace_bytes=self.scratch if options.direction == "backward" else 0,
        )  # fmt: skip


def elsewhere(call: Any) -> None:
    """Calls from a new thread, which has no current context."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            assert int(driver(cu.cuCtxGetCurrent())) == 0
            call()
            assert int(driver(cu.cuCtxGetCurrent())) == 0
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mode", choices=("global", "thread_local", "relaxed"), default="global")
    parser.add_argument("--direction", choices=("forward", "backward"), required=True)
    parser.add_argument("--ratio", type=int, required=True)
    parser.add_argument("--coff", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--variant", help="force it")
    parser.add_argument("--expect", help="a variant that the call must launch")
    parser.add_argument("--bare", action="store_true", help="call in a thread without a context")
    return parser.parse_args()


def main() -> None:
    """Captures, replays and compares."""
    options = arguments()
    driver(cu.cuInit(0))
    driver(cu.cuCtxSetCurrent(driver(cu.cuDevicePrimaryCtxRetain(driver(cu.cuDeviceGet(0))))))
    stream = driver(cu.cuStreamCreate(NON_BLOCKING))
    problem = Problem(options)

    def call() -> None:
        problem.call(int(stream))

    kind = f"CU_STREAM_CAPTURE_MODE_{options.mode.upper()}"
    driver(cu.cuStreamBeginCapture(stream, getattr(cu.CUstreamCaptureMode, kind)))
    if options.bare:
        elsewhere(call)
    else:
        call()
    graph = driver(cu.cuStreamEndCapture(stream))
    executable = driver(cu.cuGraphInstantiate(graph, 0))
    counts = _native.launch_counts()
    assert set(counts.values()) == {1}, f"not the first call: {counts}"
    wanted = options.expect or options.variant
    assert wanted in (None, *(name for name, _ in counts)), f"launched {sorted(counts)}"

    for number, quarters in enumerate(PACKS):
        problem.fill(quarters)
        taken = []
        for run in ("replay", "replay", "direct"):
            if run == "replay":
                driver(cu.cuGraphLaunch(executable, stream))
            else:
                call()
            driver(cu.cuStreamSynchronize(stream))
            taken.append([problem.memory.take(name) for name in problem.results])
            driver(cu.cuCtxSynchronize())
        assert taken[0] == taken[1] == taken[2], f"pack {number}: a replay is no direct call"
        for name, result in zip(problem.results, taken[0], strict=True):
            assert b"\xff" * 16 not in result, f"pack {number}: {name} was not all written"
    print(f"replays equal direct calls: {sorted(name for name, _ in counts)}")


if __name__ == "__main__":
    main()
