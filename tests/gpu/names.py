# SPDX-License-Identifier: Apache-2.0
"""What a variant's name says, and which variants run on the GPU at hand. Imports no framework."""

import functools
import re

from csa_runtime import _native

_COLUMNS = re.compile(r"_v(\d+)")
_ALIGNMENT = re.compile(r"_a(\d+)(?:_|$)")


def columns(variant: str) -> int:
    """Adjacent columns of a thread."""
    found = _COLUMNS.search(variant)
    assert found, f"{variant} does not say its columns"
    return int(found[1])


def alignment(variant: str) -> int:
    """Elements that head_dim and 16-bit base addresses and row strides are multiples of."""
    found = _ALIGNMENT.search(variant)
    return int(found[1]) if found else columns(variant)


@functools.cache
def device() -> tuple[int, int, int]:
    """Device 0: its images' architecture, compute capability, shared memory of a block in bytes."""
    found = _native.driver_info()["devices"][0]
    assert found["arch"] is not None, f"the bundle has no images for {found['name']}"
    return found["arch"], found["compute_capability"], found["shared_limit"]


@functools.cache
def shipped() -> tuple[str, ...]:
    """Variants with an image for device 0 whose shared memory fits there."""
    arch, _, limit = device()
    bundle = _native.bundle_info()
    dynamic = {variant["name"]: variant["dynamic_shared"] for variant in bundle["variants"]}
    return tuple(
        sorted(
            image["variant"]
            for image in bundle["images"]
            if image["arch"] == arch and image["static_shared"] + dynamic[image["variant"]] <= limit
        )
    )


@functools.cache
def family(operation: str, ratio: int, coff: int) -> tuple[str, ...]:
    """Those of one operation and window."""
    stem = f"csa_{operation}_r{ratio}_c{coff}_bf16_v"
    found = tuple(name for name in shipped() if name.startswith(stem))
    assert found, f"no {operation} variant for ratio {ratio}, coff {coff} in the bundle"
    return found
