# SPDX-License-Identifier: Apache-2.0
"""Ragged and malformed prefixes through every variant, each tensor an allocation of its own.

Run under compute-sanitizer: no torch, whose caching allocator would hide a stray access.
Argument: the sanitizer's tool, which decides how much to run.
"""

import sys
from typing import Any

TOKENS = 61
BIG = 2**31 - 1
SOUND = (0, 17, 17, 40, 57)
# name: (cu_seqlens, cu_seqlens_comp); all of four segments, meant for TOKENS tokens and nine rows.
HOSTILE: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "negative": ((-9, -3, 8, 20, 40), (0, 2, 4, 6, 8)),
    "all_negative": ((-BIG - 1,) * 5, (0, 2, 4, 6, 8)),
    "decreasing": ((57, 40, 17, 17, 0), (0, 4, 4, 8, 9)),
    "beyond_the_last_token": ((0, 50, 70, 200, 4000), (0, 2, 4, 6, 9)),
    "huge": ((0, BIG, BIG, BIG, BIG), (0, 2, 4, 6, 9)),
    "huge_from_the_start": ((BIG,) * 5, (0, 2, 4, 6, 9)),
    "near_the_end": ((TOKENS - 1,) * 5, (0, 2, 4, 6, 9)),
    "negative_rows": (SOUND, (-7, -3, -1, 2, 9)),
    "all_rows_negative": (SOUND, (-BIG - 1,) * 5),
    "rows_start_late": (SOUND, (3, 4, 5, 8, 9)),
    "decreasing_rows": (SOUND, (9, 6, 4, 2, 0)),
    "zigzag_rows": (SOUND, (0, 9, 1, 8, 9)),
    "more_rows_than_tokens": (SOUND, (0, 40, 80, 120, 160)),
    "huge_rows": (SOUND, (0, BIG, BIG, BIG, BIG)),
    "rows_overflow_when_multiplied": (SOUND, (0, 2**30, 2**30 + 3, BIG - 1, BIG)),
    "everything_huge": ((BIG,) * 5, (BIG,) * 5),
    "everything_lowest": ((-BIG - 1,) * 5, (-BIG - 1,) * 5),
    "mixed_extremes": ((-BIG - 1, BIG, -BIG - 1, BIG, 0), (0, -BIG - 1, BIG, -1, BIG)),
}
RAGGED = {
    "sound": (SOUND, (0, 4, 4, 6, 9)),
    "padding": ((0, 5, 5, 9, 12), (0, 1, 1, 2, 2)),
    "one": ((0, 36, 36, 36, 36), (0, 9, 9, 9, 9)),
}
ROWS = 9
# Rows of which a forward loads blocks before it sees the prefixes, if they are all tokens.
FILLING = 64


def blocks(ratio: int) -> int:
    """How many times the prefixes of tokens, and TOKENS, are to be taken at a ratio."""
    return max(ratio // 4, 1)


def times(entries: tuple[int, ...], factor: int) -> tuple[int, ...]:
    """A prefix of tokens stretched, kept within int32."""
    return tuple(max(-BIG - 1, min(BIG, entry * factor)) for entry in entries)


def driver(result: tuple[Any, ...]) -> Any:
    """The value of a cuda.bindings call, which must have succeeded."""
    status, *values = result
    if status.value != 0:
        raise RuntimeError(f"driver: {status!r}")
    return values[0] if values else None


def main(tool: str) -> None:
    """Runs everything, or less under the slower tools."""
    import numpy as np
    from cuda.bindings import driver as cu

    from csa_runtime import backward_workspace_bytes, launch_backward, launch_forward
    from gpu.names import alignment, family, shipped

    driver(cu.cuInit(0))
    device = driver(cu.cuDeviceGet(0))
    driver(cu.cuCtxSetCurrent(driver(cu.cuDevicePrimaryCtxRetain(device))))
    packs = {**RAGGED, **HOSTILE} if tool == "memcheck" else RAGGED
    head_dims = (1, 6, 136) if tool == "memcheck" else (8, 136)
    random = np.random.default_rng(1)
    launches = 0

    def upload(array: "np.ndarray[Any, Any]") -> int:
        pointer = int(driver(cu.cuMemAlloc(max(array.nbytes, 1))))
        driver(cu.cuMemcpyHtoD(pointer, array.ctypes.data, array.nbytes))
        return pointer

    def blank(size: int) -> int:
        return int(driver(cu.cuMemAlloc(max(size, 1))))

    def bf16(rows: int, columns: int) -> "np.ndarray[Any, Any]":
        values = random.standard_normal((rows, columns), dtype=np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    for ratio in (2, 4, 128):
        for coff in (1, 2):
            forward, backward = (family(x, ratio, coff) for x in ("forward", "backward"))
            sizes = [(TOKENS * blocks(ratio), ROWS, d, forward + backward) for d in head_dims]
            sizes.append((FILLING * ratio, FILLING, head_dims[-1], forward))
            for tokens, rows, d, names in sizes:
                width = coff * d
                needed = backward_workspace_bytes(tokens, rows, d, ratio=ratio, coff=coff)
                keep = {
                    "kv": upload(bf16(tokens, width)),
                    "score": upload(bf16(tokens, width)),
                    "ape": upload(random.standard_normal((ratio, width), dtype=np.float32)),
                    "grad_out": upload(bf16(rows, d)),
                    "out": blank(rows * d * 2),
                    "grad_kv": blank(tokens * width * 2),
                    "grad_score": blank(tokens * width * 2),
                    "grad_ape": blank(ratio * width * 4),
                    "workspace": blank(needed),
                }
                common = dict(
                    device=0, ratio=ratio, coff=coff, dtype=1, tokens=tokens, segments=4,
                    rows=rows, head_dim=d, kv=keep["kv"], score=keep["score"], ape=keep["ape"],
                    kv_stride=width, score_stride=width,
                )  # fmt: skip
                for cu_seqlens, comp in packs.values():
                    prefixes = [
                        upload(np.array(entries, dtype=np.int64).astype(np.int32))
                        for entries in (times(cu_seqlens, blocks(ratio)), comp)
                    ]
                    common["cu_seqlens"], common["cu_seqlens_comp"] = prefixes
                    for name in names:
                        if d % alignment(name):
                            continue
                        if "forward" in name:
                            launch_forward(**common, out=keep["out"], out_stride=d, variant=name)
                        else:
                            launch_backward(
                                **common, grad_out=keep["grad_out"], grad_out_stride=d,
                                grad_kv=keep["grad_kv"], grad_kv_stride=width,
                                grad_score=keep["grad_score"], grad_score_stride=width,
                                grad_ape=keep["grad_ape"], workspace=keep["workspace"],
                                workspace_bytes=needed, variant=name,
                            )  # fmt: skip
                        launches += 1
                    driver(cu.cuCtxSynchronize())
                    for pointer in prefixes:
                        driver(cu.cuMemFree(pointer))
                for pointer in keep.values():
                    driver(cu.cuMemFree(pointer))
    print(f"ran {launches} launches of {len(shipped())} variants")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "memcheck")
