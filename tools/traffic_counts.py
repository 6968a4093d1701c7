# SPDX-License-Identifier: Apache-2.0
"""What `tools/traffic` makes of the profiler's counters: read, summed per call, and judged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from profiler import Kernel, first_of
from profiler import markdown as table

SECTOR = 32  # bytes
READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
# Sectors that the multiprocessors wrote; those of all sources, which count what one half of the
# second-level cache passes to the other twice, where there is no such counter.
STORED = ("lts__t_sectors_srcunit_tex_op_write.sum", "lts__t_sectors_op_write.sum")
LOADED = ("lts__t_sectors_srcunit_tex_op_read.sum", "lts__t_sectors_op_read.sum")
USED = "smsp__sass_average_data_bytes_per_sector_mem_global_op_{}.pct"
# Sectors that such instructions ask for: "ld" are plain loads here, "ldgsts" asynchronous copies.
ASKED = "smsp__sass_l1tex_t_sectors_pipe_lsu_mem_global_op_{}.sum"
SECTORS = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_{}.ratio"
TOLERANCE = 0.01
# Percent of a sector's bytes that the first kernel's requests use, at least: what a row looks up
# (prefixes, 4 bytes each) is among the loads.
FULL = {"ld": 95.0, "ldgsts": 95.0, "st": 99.0}
# Where asynchronous copies bring so much of what is read, little is left to load but the prefixes:
# loads of less than TOLERANCE of all bytes moved are not judged there.
COPIED = 0.9
REQUESTS = ("ld", "st")  # of which the sectors of a request are shown, "ld" with "ldgsts"
METRICS = (
    READ, WRITTEN, *STORED, *LOADED,
    *(name.format(op) for name in (USED, ASKED) for op in FULL),
    *(SECTORS.format(op) for op in REQUESTS),
)  # fmt: skip


class Expected(NamedTuple):
    """Bytes that one call must read and write.

    pack, call: which. read, written: of the tensors that `csa-runtime bench` counts. aside: of the
    APE, the prefixes and the workspace, which are read, and of grad_ape and the workspace, which
    are written. cache: bytes of the second-level one, which may keep as many of those written.
    """

    pack: str
    call: str
    read: int
    written: int
    aside_read: int
    aside_written: int
    cache: int


def total(kernels: list[Kernel], names: tuple[str, ...]) -> float | None:
    """Of all kernels of a call; None where one has none of these counters."""
    values = [first_of(counters, names) for _, counters in kernels]
    return None if None in values else sum(value for value in values if value is not None)


def judge(expected: Expected, kernels: list[Kernel]) -> dict[str, Any]:
    """What was counted over what was expected, and what is wrong with it."""
    read = expected.read + expected.aside_read
    written = expected.written + expected.aside_written
    stored, loaded = (total(kernels, names) for names in (STORED, LOADED))
    found: dict[str, Any] = {
        **expected._asdict(),
        "dram_read": total(kernels, (READ,)),
        "dram_written": total(kernels, (WRITTEN,)),
        "loaded": None if loaded is None else loaded * SECTOR,
        "stored": None if stored is None else stored * SECTOR,
    }
    first = kernels[0][1]
    used = {op: first.get(USED.format(op)) for op in FULL}
    asked = {op: first.get(ASKED.format(op)) for op in FULL}
    copied = (asked["ldgsts"] or 0.0) * SECTOR
    unjudged = [] if copied else ["ldgsts"]
    if used["ldgsts"] is not None and asked["ld"] is not None and copied >= COPIED * read:
        if asked["ld"] * SECTOR < TOLERANCE * (read + written):
            unjudged.append("ld")
    found |= {f"used_{op}": value for op, value in used.items()} | {"unjudged": unjudged}
    for op in REQUESTS:
        found[f"sectors_{op}"] = first.get(SECTORS.format(op))
    wrong = []
    for name, counted, wanted in (
        ("read from memory", found["dram_read"], read),
        ("written to the cache", found["stored"], written),
    ):
        if counted is None:
            wrong.append(f"bytes {name} were not counted")
        elif abs(counted / wanted - 1) > TOLERANCE:
            wrong.append(f"{counted / wanted - 1:+.1%} bytes {name}")
    # What the cache still holds at the end reaches memory later, and some of what it held before
    # does now: more than a hundredth of a small output, but not of all bytes moved.
    least, most = written - expected.cache, written + TOLERANCE * (read + written)
    if found["dram_written"] is not None and not least <= found["dram_written"] <= most:
        wrong.append(f"{found['dram_written'] / written - 1:+.1%} bytes written to memory")
    for op, least_used in FULL.items():
        if op not in unjudged and (share := used[op]) is not None and share < least_used:
            wrong.append(f"{op}: {share:.1f}% of a sector used")
    found["wrong"] = wrong
    return found


HEADINGS = (
    "ratio, coff, d, pack", "call", "MB read", "read / wanted", "MB written", "stored / wanted",
    "to memory", "ld, ldgsts, st % of sector", "ld, st sectors", "wrong",
)  # fmt: skip


def markdown(rows: list[dict[str, Any]]) -> str:
    """A line a call."""
    return table(HEADINGS, map(cells, rows))


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Of one call; in brackets what was not judged."""
    read, written = row["read"] + row["aside_read"], row["written"] + row["aside_written"]

    def over(value: float | None, wanted: int) -> str:
        return "-" if value is None else f"{value / wanted:.4f}"

    def each(name: str, ops: Iterable[str], unjudged: Iterable[str] = ()) -> str:
        values = ((op, row[f"{name}_{op}"]) for op in ops)
        shown = ((op, "-" if value is None else f"{value:.1f}") for op, value in values)
        return ", ".join(f"({text})" if op in unjudged else text for op, text in shown)

    return (
        row["pack"], row["call"], f"{read / 1e6:.1f}", over(row["dram_read"], read),
        f"{written / 1e6:.1f}", over(row["stored"], written), over(row["dram_written"], written),
        each("used", FULL, row["unjudged"]), each("sectors", REQUESTS),
        "; ".join(row["wrong"]) or "-",
    )  # fmt: skip
