# SPDX-License-Identifier: Apache-2.0
"""`csa-runtime check`: the bundle, and on a GPU every variant, against R and fp64."""

from __future__ import annotations

from typing import TYPE_CHECKING

from csa_runtime import _native
from csa_runtime._demo import gpu

if TYPE_CHECKING:
    from csa_runtime._native import VariantRecord

SEGMENTS = [0, 37, 1, 260, 8, 0, 131]


def check() -> int:
    """Check and print a table; 0 if everything passed."""
    bundle = _native.bundle_info()
    images = bundle["images"]
    print(
        f"bundle {bundle['source']}: sha256 {bundle['sha256'][:16]}, {len(bundle['variants'])} "
        f"variants, {len(images)} images, digest of its tables agrees"
    )
    name, reason = gpu()
    if name is None:
        print(f"no GPU ({reason}): no variant ran")
        return 0
    device = _native.driver_info()["devices"][0]
    print(f"{name}, compute capability {device['compute_capability']}, images of {device['arch']}")
    if device["arch"] is None:
        print("check FAILED: the bundle has no image for this device")
        return 1
    _native.load(0, None)
    here = {image["variant"] for image in images if image["arch"] == device["arch"]}
    passed = _check_variants([v for v in bundle["variants"] if v["name"] in here])
    print("check passed" if passed else "check FAILED")
    return 0 if passed else 1


def _check_variants(variants: list[VariantRecord]) -> bool:
    from csa_runtime import _trial

    memory = _trial.Memory()
    print(f"{'variant':<32} {'result':<11} {'elements':>9} {'!= R':>5} {'vs fp64':>9} {'R':>9}")
    passed = True
    for seed, variant in enumerate(variants):
        if variant["operation"] == "reduce":
            continue  # runs within every backward below, and grad_ape shows what it did
        for head_dim in _head_dims(variant["columns"]):
            problem = _trial.make(
                _segments(variant["ratio"]), ratio=variant["ratio"], coff=variant["coff"],
                head_dim=head_dim, padding=3, seed=seed,
            )  # fmt: skip
            results = _trial.on_gpu(
                problem, memory, directions=(variant["operation"],),
                **{variant["operation"]: variant["name"]},
            )  # fmt: skip
            reference, exact = _trial.on_cpu(problem), _trial.on_cpu(problem, exact=True)
            for name, values in results.items():
                found = _trial.compare(name, values, reference[name], exact[name])
                passed = passed and found.passed
                print(
                    f"{variant['name']:<32} {name:<11} {found.elements:>9} {found.differing:>5} "
                    f"{found.error:>9.2e} {found.reference_error:>9.2e}"
                    f"{'' if found.passed else '  FAILED'}"
                )
    return passed


def _segments(ratio: int) -> list[int]:
    """Lengths that leave tails at any ratio and give long windows a few rows."""
    return SEGMENTS if ratio <= 8 else [length * ratio // 8 for length in SEGMENTS]


def _head_dims(columns: int) -> tuple[int, ...]:
    """One narrow and one wide, which the columns of a thread divide."""
    return columns * 3, columns * 37
