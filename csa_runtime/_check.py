# SPDX-License-Identifier: Apache-2.0
"""`csa-runtime check`: the bundle, and on a GPU every variant, against the reference and fp64."""

from __future__ import annotations

from typing import TYPE_CHECKING

from csa_runtime import _native
from csa_runtime._demo import gpu

if TYPE_CHECKING:
    from csa_runtime._native import VariantRecord

# Lengths of a few windows that leave tails: 3 rows of padding come after them.
SEGMENTS = [0, 37, 1, 260, 8, 0, 131]


def check() -> int:
    """Check and print a table; 0 if everything that could be checked passed."""
    bundle = _native.bundle_info()
    images = bundle["images"]
    print(
        f"bundle {bundle['source']}: sha256 {bundle['sha256'][:16]}, {len(bundle['variants'])} "
        f"variants, {len(images)} images, digest of its tables agrees"
    )
    device, why_not = gpu()
    if device is None:
        print(
            f"no GPU ({why_not}): no variant ran, no image was loaded\n"
            "check passed for the bundle's tables, the only thing checked"
        )
        return 0
    name = device["name"]
    major, minor = divmod(device["compute_capability"], 10)
    if device["arch"] is None:
        print(
            f"check FAILED: the bundle has no image for {name}, compute capability {major}.{minor}"
        )
        return 1
    print(f"{name}, compute capability {major}.{minor}, images of sm_{device['arch']}")
    _native.load(0, None)
    here = {image["variant"] for image in images if image["arch"] == device["arch"]}
    passed = _check_variants([v for v in bundle["variants"] if v["name"] in here])
    print("check passed" if passed else "check FAILED")
    return 0 if passed else 1


def _check_variants(variants: list[VariantRecord]) -> bool:
    from csa_runtime import _trial

    width = max(len(variant["name"]) for variant in variants)
    print(
        "!= ref: elements that differ from the fp32 CPU reference; "
        "vs fp64, ref: largest error of the kernel and of the reference against fp64\n"
        f"{'variant':<{width}} {'result':<11} {'elements':>9} {'!= ref':>6} {'vs fp64':>9} "
        f"{'ref':>9}"
    )
    passed = True
    for seed, variant in enumerate(variants):
        if variant["operation"] == "finish":
            continue  # runs within every backward below, and grad_ape shows what it did
        long = variant["kind"] == "long"
        for head_dim in _head_dims(variant):
            problem = _trial.make(
                _segments(variant), ratio=variant["ratio"], coff=variant["coff"],
                head_dim=head_dim, padding=3, seed=seed,
            )  # fmt: skip
            results = _trial.on_gpu(
                problem, directions=(variant["operation"],),
                **{variant["operation"]: variant["name"]},
            )  # fmt: skip
            for found in _trial.compare(results, problem, long=long):
                passed = passed and found.passed
                print(
                    f"{variant['name']:<{width}} {found.name:<11} {found.elements:>9} "
                    f"{found.differing:>6} {found.error:>9.2e} {found.reference_error:>9.2e}"
                    f"{'' if found.passed else '  FAILED'}"
                )
    return passed


def _segments(variant: VariantRecord) -> list[int]:
    """Lengths that leave tails; long windows get few rows, since their reference is slow."""
    ratio = variant["ratio"]
    if variant["kind"] != "long":
        return SEGMENTS
    return [0, 2 * ratio + 44, 1, ratio, 5 * ratio + 3, 0, ratio // 2, 3 * ratio + 77]


def _head_dims(variant: VariantRecord) -> tuple[int, ...]:
    """For short windows one narrow and one wide that the variant serves, for long ones theirs."""
    if variant["kind"] != "long":
        return variant["alignment"] * 3, variant["alignment"] * 37
    return 128, 512
