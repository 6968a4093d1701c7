# SPDX-License-Identifier: Apache-2.0
"""A record's times set side by side: beside a copy, a limit, or one segment."""

from __future__ import annotations

from csa_runtime.bench.limits import share
from csa_runtime.bench.record import COPY, EAGER, OURS, PEER, TWIN, Key, Record

SLOW = "*"  # marks the time of a copy that is no yardstick


def number(us: float | None) -> str:
    """Microseconds in a table; "-" where there are none."""
    return "-" if us is None else f"{us:.0f}" if us >= 1000 else f"{us:.2f}"


class Times:
    """A record's times, ready to be set side by side."""

    def __init__(self, record: Record) -> None:
        """Of all sections."""
        self.record = record
        self.found = record.times()
        self.slow = record.slow_copies()
        self.others = [name for name in (EAGER, PEER) if any(k.system == name for k in self.found)]

    def us(self, section: str, pack: str, system: str, call: str) -> float | None:
        """Microseconds, if measured."""
        return self.found.get(Key(section, pack, system, call))

    def valid(self, section: str, pack: str, system: str, call: str) -> float | None:
        """`us`, but of no copy that says nothing."""
        slow = Key(section, pack, system, call) in self.slow
        return None if slow else self.us(section, pack, system, call)

    def shown(self, section: str, pack: str, system: str, call: str) -> str:
        """`us` in a table."""
        slow = Key(section, pack, system, call) in self.slow
        return number(self.us(section, pack, system, call)) + SLOW * slow

    def yardsticks(self, section: str) -> tuple[str, ...]:
        """The copy, and the twin where the section has it."""
        twin = any((k.section, k.system) == (section, TWIN) for k in self.found)
        return (COPY, TWIN) if twin else (COPY,)

    def beside(self, section: str, pack: str, system: str, call: str) -> str:
        """`25.33 (0.96, 1.02)`: us, and how many times each yardstick of the same bytes."""
        us, names = self.us(section, pack, system, call), self.yardsticks(section)
        if us is None or not any(self.us(section, pack, name, call) for name in names):
            return number(us)
        others = [self.valid(section, pack, name, call) for name in names]
        return f"{number(us)} ({', '.join(f'{us / o:.2f}' if o else '-' for o in others)})"

    def share(self, section: str, pack: str, call: str, system: str = OURS) -> float | None:
        """Of its limit; None where it has none, or it or a valid copy was not measured."""
        us, copy = (self.valid(section, pack, name, call) for name in (system, COPY))
        sizes = self.record.packs[pack]
        if us is None or copy is None:
            return None
        return share(call, sizes.ratio, sizes.bytes[call], us, copy)

    def over_one(self, pack: str, system: str, call: str) -> float | None:
        """Time over bytes moved, relative to the same tokens in one segment."""
        one, many = (
            self._rate(name, system, call) for name in (self._one_segment(pack) or pack, pack)
        )
        return None if one is None or many is None else many / one

    def _one_segment(self, pack: str) -> str | None:
        sizes = self.record.packs[pack]
        for name in self.record.packs_of("segments"):
            other = self.record.packs[name]
            same = (other.window, other.tokens) == (sizes.window, sizes.tokens)
            if same and other.segments == 1:
                return name
        return None

    def _rate(self, pack: str, system: str, call: str) -> float | None:
        us = self.us("segments", pack, system, call)
        return None if us is None else us / self.record.packs[pack].bytes[call]
