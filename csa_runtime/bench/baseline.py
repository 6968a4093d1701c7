# SPDX-License-Identifier: Apache-2.0
"""What became slower than a stored run on the same kind of GPU."""

from __future__ import annotations

from typing import NamedTuple

from csa_runtime.bench.record import COPY, OURS, Key, Record

TOLERANCE = 0.03
# Times of the GPU. The host's vary by more than that from run to run.
COMPARED = ("graph", "kernels", "cold", "segments", "tokens")


class Change(NamedTuple):
    """One time then and now, us, and how the copy beside it changed, as a factor if it is known."""

    key: Key
    before: float
    now: float
    copy: float | None

    @property
    def factor(self) -> float:
        """Above 1 is slower."""
        return self.now / self.before


def changes(before: Record, now: Record) -> list[Change]:
    """This library's times that both runs have, the worst first.

    Raises:
        ValueError: the runs are of different GPUs, or share no time.
    """
    gpus = [record.machine.get("gpu") for record in (before, now)]
    if gpus[0] != gpus[1]:
        raise ValueError(f"it was measured on {gpus[0]}, this run on {gpus[1]}")
    then, times = before.times(), now.times()
    slow, found = before.slow_copies() | now.slow_copies(), []
    for key, us in times.items():
        if key.system == OURS and key.section in COMPARED and key in then:
            copy = key._replace(system=COPY)
            known = copy in times and copy in then and copy not in slow
            beside = times[copy] / then[copy] if known else None
            found.append(Change(key, then[key], us, beside))
    if not found:
        raise ValueError("it has no time in common with this run")
    return sorted(found, key=lambda change: -change.factor)


def report(found: list[Change]) -> tuple[str, bool]:
    """Markdown that lists what is slower by more than `TOLERANCE`, and whether anything is."""
    slower = [change for change in found if change.factor > 1 + TOLERANCE]
    faster = sum(change.factor < 1 - TOLERANCE for change in found)
    lines = [
        f"{len(found)} times compared with the baseline: {len(slower)} slower and {faster} faster "
        f"by more than {TOLERANCE:.0%}."
    ]
    if slower:
        lines += [
            "",
            "| section | ratio, coff, d, pack | call | before, us | now, us | slower by "
            "| the copy beside it |",
            "| --- | --- | --- | ---: | ---: | ---: | ---: |",
        ]
    for change in slower:
        section, pack, _, call = change.key
        beside = "-" if change.copy is None else f"{change.copy - 1:+.1%}"
        lines.append(
            f"| {section} | {pack} | {call} | {change.before:.2f} | {change.now:.2f} "
            f"| {change.factor - 1:.1%} | {beside} |"
        )
    return "\n".join(lines), bool(slower)
