# SPDX-License-Identifier: Apache-2.0
"""Plans of the committed bundle: the launcher's account, held against the manifest's rules."""

from typing import Any

from csa_runtime import _native
from support import expected
from support.problems import backward, forward

TABLE = expected.manifest()
BY_NAME = {variant["name"]: variant for variant in TABLE["variants"]}
CALLS = {"forward": forward, "backward": backward}


def explain(operation: str, call: dict[str, Any], capability: int = 90, **more: Any) -> Any:
    """The launcher's own account."""
    return _native.explain(operation, compute_capability=capability, **call, **more)


def assert_launches(plan: Any, want: list[expected.Launch]) -> None:
    """Assert that a plan launches these kernels, and tells the driver these things of each."""
    got = [
        (x["variant"], x["grid"], x["block"], x["shared"], x["parameters"])
        for x in plan["launches"]
    ]
    assert got == [(w.variant, w.grid, w.block, w.shared, w.parameters) for w in want]


def agree(
    operation: str, call: dict[str, Any], capability: int = 90, variant: str | None = None
) -> Any:
    """Assert that the launcher plans what the manifest's rules say; return its account."""
    plan = explain(operation, call, capability, variant=variant)
    assert_launches(plan, expected.launches(operation, call, capability, TABLE, variant))
    return plan
