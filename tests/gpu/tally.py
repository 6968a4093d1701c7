# SPDX-License-Identifier: Apache-2.0
"""How much the suite compared, and the worst it saw: printed and put into the evidence."""

from collections import Counter

COMPARED: Counter[str] = Counter()
WORST: dict[str, float] = {}


def count(kind: str, elements: int) -> None:
    """Adds `elements` compared for `kind`."""
    COMPARED[kind] += elements


def worst(name: str, value: float) -> None:
    """Keeps the largest `value` seen under `name`."""
    WORST[name] = max(WORST.get(name, 0.0), value)
