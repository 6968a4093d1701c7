# SPDX-License-Identifier: Apache-2.0
"""`csa-runtime demo`: a ragged pack forward and backward, compared with the CPU reference."""

from __future__ import annotations

from csa_runtime import _native
from csa_runtime.errors import DriverError

SEGMENTS = [515, 3, 0, 128, 1021, 64]
RATIO, COFF, HEAD_DIM, PADDING = 4, 2, 128, 5


def gpu() -> tuple[str | None, str]:
    """Name of device 0 if the driver is there and has one, else None and why not."""
    try:
        devices = _native.driver_info()["devices"]
    except DriverError as error:
        return None, str(error)
    if not devices:
        return None, "the driver sees no device"
    return str(devices[0]["name"]), ""


def demo() -> int:
    """Run it and print what happened; 0 on success."""
    from csa_runtime import _trial

    problem = _trial.make(
        SEGMENTS, ratio=RATIO, coff=COFF, head_dim=HEAD_DIM, padding=PADDING, seed=0
    )
    rows = problem.grad_out.shape[0]
    print(
        f"pack: {sum(SEGMENTS)} tokens in segments of {SEGMENTS}, ratio {RATIO}, coff {COFF}, "
        f"head_dim {HEAD_DIM}: {rows} rows, {PADDING} of them padding"
    )
    reference = _trial.on_cpu(problem)
    exact = _trial.on_cpu(problem, exact=True)
    name, reason = gpu()
    if name is None:
        print(f"no GPU ({reason}): forward and backward ran on the CPU reference")
        results = reference
    else:
        results = _trial.on_gpu(problem, _trial.Memory())
        print(f"forward and backward ran on {name}; compared with the CPU reference")
    passed = True
    for key, values in results.items():
        comparison = _trial.compare(key, values, reference[key], exact[key])
        passed = passed and comparison.passed
        print(
            f"  {key:<10} {comparison.elements:>7} elements, {comparison.differing} differ from "
            f"the fp32 reference; max error against fp64 {comparison.error:.2e}"
        )
    print("demo passed" if passed else "demo FAILED")
    return 0 if passed else 1
