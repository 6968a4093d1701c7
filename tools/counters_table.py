# SPDX-License-Identifier: Apache-2.0
"""What `tools/counters` makes of the profiler's counters: what a kernel's time went into."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from profiler import Counters, Kernel, first_of, markdown

# The sections of a report that hold these counters. Asked for by section, because no counter is
# then asked for that the profiler does not know; the names differ between its versions.
SECTIONS = (
    "SpeedOfLight", "ComputeWorkloadAnalysis", "SchedulerStats", "WarpStateStats", "LaunchStats",
    "Occupancy",
)  # fmt: skip

PERCENT = "pct_of_peak_sustained"
# Of each number the counters to take it from, the first that there is, and what it is times.
NUMBERS = {
    "us": {"gpu__time_duration.sum": 1e-3, "gpu__time_duration.avg": 1e-3},
    "ghz": {f"{unit}__cycles_elapsed.avg.per_second": 1e-9 for unit in ("sm", "gpc", "smsp")},
    "issued": {
        f"smsp__issue_active.avg.{PERCENT}_active": 1.0,
        "smsp__issue_active.avg.per_cycle_active": 100.0,
        f"sm__inst_issued.avg.{PERCENT}_active": 1.0,
    },
    "none_eligible": {f"smsp__issue_inst0.avg.{PERCENT}_active": 1.0},
    "dram": {
        f"dram__throughput.avg.{PERCENT}_elapsed": 1.0,
        f"gpu__dram_throughput.avg.{PERCENT}_elapsed": 1.0,
    },
    "l2": {f"lts__throughput.avg.{PERCENT}_elapsed": 1.0},
    "warps": {
        "sm__warps_active.avg.per_cycle_active": 1.0,
        "smsp__warps_active.avg.per_cycle_active": 4.0,
    },
    "occupancy": {f"sm__warps_active.avg.{PERCENT}_active": 1.0},
    "waves": {"launch__waves_per_multiprocessor": 1.0},
    "registers": {"launch__registers_per_thread": 1.0},
}
ACTIVE = ("sm__cycles_active.avg", "smsp__cycles_active.avg")
ELAPSED = tuple(f"{unit}__cycles_elapsed.max" for unit in ("sm", "gpc", "smsp"))
PIPE = re.compile(rf"sm__(?:inst_executed_)?pipe_(\w+?)(?:_cycles_active)?\.avg\.{PERCENT}_\w+")
STATE = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
ISSUING = "selected"  # the state of a warp that waits for nothing
TOP = 3


def shares(counters: Counters) -> dict[str, float]:
    """Percent of a warp's time in each state, the longest first; together 100."""
    states = {
        match[1]: value
        for name, value in counters.items()
        if (match := STATE.fullmatch(name)) and not match[1].endswith("_not_issued")
    }
    whole = sum(states.values())
    if not whole:
        return {}
    ranked = sorted(states.items(), key=lambda item: -item[1])
    return {state: 100.0 * value / whole for state, value in ranked}


def busiest(counters: Counters) -> tuple[str, float] | None:
    """The pipe of a multiprocessor that is closest to its peak, and how close, in percent."""
    pipes = [(match[1], v) for name, v in counters.items() if (match := PIPE.fullmatch(name))]
    return max(pipes, key=lambda pipe: pipe[1], default=None)


def record(pack: str, call: str, kernel: Kernel) -> dict[str, Any]:
    """Of one launch; None for what was not counted."""
    name, counters = kernel
    found: dict[str, Any] = {"pack": pack, "call": call, "kernel": name}
    for key, names in NUMBERS.items():
        source = next((each for each in names if each in counters), None)
        found[key] = None if source is None else counters[source] * names[source]
    active, elapsed = first_of(counters, ACTIVE), first_of(counters, ELAPSED)
    found["active"] = 100.0 * active / elapsed if active is not None and elapsed else None
    found["pipe"] = busiest(counters)
    found["warp"] = shares(counters)
    return found


def records(
    wanted: Iterable[tuple[str, str]], calls: Iterable[list[Kernel]]
) -> list[dict[str, Any]]:
    """Of all launches; wanted: pack and direction of each call, in their order."""
    return [
        record(pack, call, kernel)
        for (pack, call), kernels in zip(wanted, calls, strict=False)
        for kernel in kernels
    ]


def missing(rows: list[dict[str, Any]]) -> list[str]:
    """The numbers that no launch has."""
    keys = [*NUMBERS, "active", "pipe", "warp"]
    return [key for key in keys if all(row[key] in (None, {}) for row in rows)]


HEADINGS = (
    "ratio, coff, d, pack", "kernel", "us", "GHz", "SM active %", "issued %", "none eligible %",
    "memory %", "L2 %", "busiest pipe %", "warps (%)", "waves", "registers",
    "% of a warp's time",
)  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """A line a launch."""
    return markdown(HEADINGS, map(cells, rows))


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Of one launch."""

    def text(key: str, digits: int = 0) -> str:
        return "-" if row[key] is None else f"{row[key]:.{digits}f}"

    warp = dict(row["warp"])
    issuing = warp.pop(ISSUING, None)
    parts = [] if issuing is None else [f"issues {issuing:.0f}"]
    parts += [f"{state.replace('_', ' ')} {share:.0f}" for state, share in [*warp.items()][:TOP]]
    pipe = row["pipe"]
    return (
        row["pack"], row["kernel"].removeprefix("csa_"), text("us", 2), text("ghz", 2),
        *map(text, ("active", "issued", "none_eligible", "dram", "l2")),
        "-" if pipe is None else f"{pipe[0]} {pipe[1]:.0f}",
        f"{text('warps', 1)} ({text('occupancy')})", text("waves", 2), text("registers"),
        ", ".join(parts) or "-",
    )  # fmt: skip
