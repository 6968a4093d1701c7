# SPDX-License-Identifier: Apache-2.0
"""The pointer API's first call inside a capture begun through cuda.bindings, without torch.

Arguments: the capture mode, and "alone" or "beside" another thread that captures globally.
"""

import sys
import threading
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

from csa_runtime import backward_workspace_bytes, launch_backward, launch_forward
from gpu.scripts.hostile import driver

RATIO, COFF, HEAD_DIM, TOKENS, ROWS = 4, 2, 128, 64, 12
WIDTH = COFF * HEAD_DIM
MODES = {
    name: getattr(cu.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{name.upper()}")
    for name in ("global", "thread_local", "relaxed")
}
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
PACKS = (((0, 40, 47, 64), (0, 10, 11, 12)), ((0, 3, 40, 64), (0, 0, 9, 12)))


def upload(array: "np.ndarray[Any, Any]") -> int:
    """A device copy."""
    pointer = int(driver(cu.cuMemAlloc(array.nbytes)))
    driver(cu.cuMemcpyHtoD(pointer, array.ctypes.data, array.nbytes))
    return pointer


def main(mode: str, company: str) -> None:
    """Captures, replays under two packs, and compares with direct calls."""
    driver(cu.cuInit(0))
    context = driver(cu.cuDevicePrimaryCtxRetain(driver(cu.cuDeviceGet(0))))
    driver(cu.cuCtxSetCurrent(context))
    stream = driver(cu.cuStreamCreate(NON_BLOCKING))
    random = np.random.default_rng(2)

    def bf16(rows: int, columns: int) -> "np.ndarray[Any, Any]":
        values = random.standard_normal((rows, columns), dtype=np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    scratch = backward_workspace_bytes(TOKENS, ROWS, HEAD_DIM, ratio=RATIO, coff=COFF)
    sizes = {
        "out": ROWS * HEAD_DIM * 2,
        "grad_kv": TOKENS * WIDTH * 2,
        "grad_score": TOKENS * WIDTH * 2,
        "grad_ape": RATIO * WIDTH * 4,
    }
    results = {name: upload(np.full(size, 0xFF, np.uint8)) for name, size in sizes.items()}
    prefixes = [upload(np.array(entries, np.int32)) for entries in PACKS[0]]
    common: dict[str, Any] = dict(
        device=0, ratio=RATIO, coff=COFF, dtype=1, tokens=TOKENS, segments=3, rows=ROWS,
        head_dim=HEAD_DIM, kv=upload(bf16(TOKENS, WIDTH)), score=upload(bf16(TOKENS, WIDTH)),
        ape=upload(random.standard_normal((RATIO, WIDTH), dtype=np.float32)),
        cu_seqlens=prefixes[0], cu_seqlens_comp=prefixes[1],
        kv_stride=WIDTH, score_stride=WIDTH, stream=int(stream),
    )  # fmt: skip
    grad_out = upload(bf16(ROWS, HEAD_DIM))
    workspace = upload(np.full(scratch, 0xFF, np.uint8))
    driver(cu.cuCtxSynchronize())

    def call() -> None:
        launch_forward(**common, out=results["out"], out_stride=HEAD_DIM)
        launch_backward(
            **common, grad_out=grad_out, grad_out_stride=HEAD_DIM, grad_kv=results["grad_kv"],
            grad_kv_stride=WIDTH, grad_score=results["grad_score"], grad_score_stride=WIDTH,
            grad_ape=results["grad_ape"], workspace=workspace, workspace_bytes=scratch,
        )  # fmt: skip

    def take() -> list[bytes]:
        driver(cu.cuStreamSynchronize(stream))
        taken = []
        for name, size in sizes.items():
            host = np.empty(size, np.uint8)
            driver(cu.cuMemcpyDtoH(host.ctypes.data, results[name], size))
            driver(cu.cuMemsetD8(results[name], 0xFF, size))
            taken.append(host.tobytes())
        driver(cu.cuCtxSynchronize())
        return taken

    end_other, other_began = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def capture_globally() -> None:
        try:
            driver(cu.cuCtxSetCurrent(context))
            mine = driver(cu.cuStreamCreate(NON_BLOCKING))
            driver(cu.cuStreamBeginCapture(mine, MODES["global"]))
            other_began.set()
            end_other.wait(60)
            driver(cu.cuStreamEndCapture(mine))
        except BaseException as error:
            failures.append(error)
            other_began.set()

    other = threading.Thread(target=capture_globally)
    if company == "beside":
        other.start()
        other_began.wait(60)
    driver(cu.cuStreamBeginCapture(stream, MODES[mode]))
    call()
    graph = driver(cu.cuStreamEndCapture(stream))
    end_other.set()
    if company == "beside":
        other.join()
    if failures:
        raise failures[0]
    executable = driver(cu.cuGraphInstantiate(graph, 0))

    for number, entries in enumerate(PACKS):
        for pointer, prefix in zip(prefixes, entries, strict=True):
            host = np.array(prefix, np.int32)
            driver(cu.cuMemcpyHtoD(pointer, host.ctypes.data, host.nbytes))
        driver(cu.cuCtxSynchronize())
        taken = []
        for _ in range(2):
            driver(cu.cuGraphLaunch(executable, stream))
            taken.append(take())
        call()
        taken.append(take())
        assert taken[0] == taken[1] == taken[2], f"pack {number}"
        assert taken[0][0] != b"\xff" * sizes["out"]
    print(f"replays equal direct calls: {mode} {company}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
