# SPDX-License-Identifier: Apache-2.0
"""`csa-runtime demo`: a ragged pack forward and backward, compared with the CPU reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from csa_runtime import _native
from csa_runtime.diagnostics import reason
from csa_runtime.errors import DriverError

if TYPE_CHECKING:
    from csa_runtime._native import DeviceRecord
    from csa_runtime._trial import Problem

SEGMENTS = [515, 3, 0, 128, 1021, 64]
RATIO, COFF, HEAD_DIM, PADDING = 4, 2, 128, 5


def gpu() -> tuple[DeviceRecord | None, str]:
    """Device 0 if the driver is there and has one, else None and why not."""
    try:
        devices = _native.driver_info()["devices"]
    except DriverError as error:
        return None, reason(error)
    if not devices:
        return None, "the driver sees no device"
    return devices[0], ""


def demo() -> int:
    """Run it and print what happened; 0 on success."""
    from csa_runtime import _trial

    problem = _trial.make(
        SEGMENTS, ratio=RATIO, coff=COFF, head_dim=HEAD_DIM, padding=PADDING, seed=0
    )
    print(
        f"pack: {sum(SEGMENTS)} tokens in segments of {SEGMENTS}, ratio {RATIO}, coff {COFF}, "
        f"head_dim {HEAD_DIM}: {len(problem.grad_out)} rows, {PADDING} of them padding"
    )
    device, why_not = gpu()
    passed = _on_cpu(problem, why_not) if device is None else _on_gpu(problem, device["name"])
    print("demo passed" if passed else "demo FAILED")
    return 0 if passed else 1


def _on_cpu(problem: Problem, why_not: str) -> bool:
    """The fp32 reference against the fp64 one: all there is to compare without a GPU."""
    from csa_runtime import _trial

    print(
        f"no GPU ({why_not}): CPU reference only, computed in fp32 and rounded "
        "to bf16 (grad_ape to fp32), against fp64; no kernel ran"
    )
    exact = _trial.on_cpu(problem, exact=True)
    passed = True
    for name, values in _trial.on_cpu(problem).items():
        passed = passed and _trial.rounded_once(name, values, exact[name])
        error = float(abs(values - exact[name]).max())
        print(f"  {name:<10} {values.size:>7} elements; max error against fp64 {error:.2e}")
    return passed


def _on_gpu(problem: Problem, name: str) -> bool:
    from csa_runtime import _trial

    results = _trial.on_gpu(problem)
    print(f"forward and backward ran on {name}; compared with the CPU reference")
    passed = True
    for found in _trial.compare(results, problem):
        passed = passed and found.passed
        print(
            f"  {found.name:<10} {found.elements:>7} elements, {found.differing} differ from "
            f"the fp32 reference; max error against fp64 {found.error:.2e}"
        )
    return passed
