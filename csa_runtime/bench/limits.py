# SPDX-License-Identifier: Apache-2.0
"""How long a call may take, by the bytes it moves: times of a copy, or microseconds."""

from __future__ import annotations

from typing import NamedTuple


class Limit(NamedTuple):
    """Whichever allows more: this many times a copy of the same bytes, or this many us."""

    over_copy: float
    us: float = 0.0


class Band(NamedTuple):
    """Limits from this many MB (10**6 bytes) on; None is no limit."""

    megabytes: float
    forward: Limit
    backward: Limit | None


BANDS = (
    Band(500, Limit(0.97), Limit(1.04)),
    Band(200, Limit(1.00), Limit(1.07)),
    Band(100, Limit(1.00), Limit(1.12)),
    Band(30, Limit(1.08), Limit(1.20)),
    Band(8, Limit(1.40, 3.2), Limit(1.70, 6.5)),
    Band(0, Limit(2.00, 2.6), None),
)
LONG_RATIO, LONG_FORWARD = 128, Limit(0.99)  # in the first band


def limit(call: str, ratio: int, moved: int) -> Limit | None:
    """The limit of "forward" or "backward" at this ratio for this many bytes moved, if any."""
    band = next(band for band in BANDS if moved >= band.megabytes * 1e6)
    if call == "backward":
        return band.backward
    if ratio == LONG_RATIO and band is BANDS[0]:
        return LONG_FORWARD
    return band.forward


def share(call: str, ratio: int, moved: int, us: float, copy_us: float) -> float | None:
    """Time over its limit: 1 is at the limit and less is better; None where there is no limit.

    Args:
        call: "forward" or "backward".
        ratio: tokens of a block.
        moved: bytes read and written.
        us: of the call, microseconds.
        copy_us: of a copy that moves the same bytes, microseconds.
    """
    allowed = limit(call, ratio, moved)
    return None if allowed is None else us / max(allowed.over_copy * copy_us, allowed.us)
