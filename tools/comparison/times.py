# SPDX-License-Identifier: Apache-2.0
"""Times of both systems in one process: the host's cost of calls, and kernels beside a copy."""

from collections.abc import Callable, Iterator
from typing import Any

from comparison.systems import OURS, PEER, System
from csa_runtime.bench.clock import host_times, raise_clocks
from csa_runtime.bench.packs import HOST, TWELVE, Pack
from csa_runtime.bench.peer import Operations
from csa_runtime.bench.problem import Problem, copy_of, copy_sizes
from csa_runtime.bench.record import said
from csa_runtime.bench.sections import in_kernels


def made_for(
    systems: tuple[System, System], pack: Pack, record: dict[str, Any]
) -> dict[str, Operations]:
    """What each system does on a pack's buffers; a refusal is recorded."""
    problem, found = Problem(pack), {}
    for system in systems:
        try:
            found[system.name] = Operations(system, problem)
            record[system.name] = {"compile_seconds": found[system.name].compile_seconds}
        except Exception as error:
            record[system.name] = {"error": said(error)}
    return found


def profiled(call: Callable[[], Any], moved: int) -> dict[str, Any]:
    """Kernel durations of a call that moves so many bytes, or why there are none."""
    try:
        kernels = in_kernels(call, moved)
    except Exception as error:
        return {"error": said(error)}
    return {"total_us": sum(kernels.values()), "kernels_us": kernels}


def host_records(systems: tuple[System, System]) -> Iterator[dict[str, Any]]:
    """Per call: both systems' host cost and time until done."""
    for pack in HOST:
        record: dict[str, Any] = {"pack": pack.name}
        made = made_for(systems, pack, record)
        for path in ("classes", "wrappers"):
            for name in ("forward", "backward", "deterministic"):
                calls = {who: getattr(each, path)[name] for who, each in made.items()}
                try:
                    times: dict[str, Any] = host_times(calls)
                except Exception as error:
                    times = {"error": said(error)}
                yield {**record, "path": path, "operation": name, "times": times}


def kernel_record(systems: tuple[System, System], pack: Pack) -> dict[str, Any]:
    """Kernel durations of one pack for both systems, and of copies that move the same bytes."""
    record: dict[str, Any] = {"pack": pack.name, "copy": {}, "bytes": {}}
    made = made_for(systems, pack, record)
    for name in ("forward", "backward"):
        moved = pack.bytes(name)
        record["bytes"][name] = moved
        record["copy"][name] = profiled(copy_of(copy_sizes(moved)[0]), moved)
    for who, each in made.items():
        for name, call in each.kernels.items():
            moved = pack.bytes("forward" if name == "forward" else "backward")
            record[who][name] = profiled(call, moved)
    return record


def compare_times(
    systems: tuple[System, System], show: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    """Host cost, then kernels of every pack."""
    raise_clocks()
    show('Microseconds per call, medians. "host": the Python call in an unsynchronised loop;')
    show('"alone": one call until its kernels have finished. "deterministic" is the backward so')
    show("made or asked for.\n")
    both = f"{PEER} / {OURS}"
    heading = ("ratio, coff, d, pack", "call", f"host: {both}", f"alone: {both}", "failed")
    show(f"| {' | '.join(heading)} |")
    show(f"| {' | '.join(['---'] * len(heading))} |")
    host = []
    for record in host_records(systems):
        host.append(record)
        show(host_line(record))
    show("\nSums of kernel durations per call, microseconds (times that of a copy). The backward's")
    show("zero-fill of grad_ape is counted; the deterministic one needs none.\n")
    columns = [f"{who} {name}" for name in ("fwd", "bwd", "det") for who in (PEER, OURS)]
    heading = ("ratio, coff, d, pack", "MB fwd / bwd", "copy fwd / bwd", *columns)
    show(f"| {' | '.join(heading)} |")
    show(f"| {' | '.join(['---'] * len(heading))} |")
    kernels = []
    for pack in TWELVE:
        kernels.append(kernel_record(systems, pack))
        show(kernel_line(kernels[-1]))
    show("\nSeconds of check_support() and compile(), the first of each window in this process:\n")
    show(f"| ratio, coff, d | {PEER} fwd / bwd / det | {OURS} fwd / bwd / det |")
    show("| --- | --- | --- |")
    for text in compile_lines([*host, *kernels]):
        show(text)
    return {"host": host, "kernels": kernels}


def compile_lines(records: list[dict[str, Any]]) -> Iterator[str]:
    """A row for each window, from the first pack that has it."""
    seen = set()
    for record in records:
        window = record["pack"].rpartition(", ")[0]
        if window not in seen:
            seen.add(window)
            cells = [
                " / ".join(f"{s:.3f}" for s in record[who].get("compile_seconds", {}).values())
                for who in (PEER, OURS)
            ]
            yield f"| {window} | {' | '.join(cells)} |"


def host_line(record: dict[str, Any]) -> str:
    """A row of the first table."""
    times = record["times"]
    cells = [
        " / ".join(f"{times[who][kind]:.1f}" if who in times else "-" for who in (PEER, OURS))
        for kind in ("host", "alone")
    ]
    failed = [times.get("error"), *(record[who].get("error") for who in (PEER, OURS))]
    words = "; ".join(text for text in failed if text)
    kind = "class" if record["path"] == "classes" else "wrapper"
    call = f"{kind}, {record['operation']}"
    return f"| {' | '.join([record['pack'], call, *cells, words])} |"


def kernel_line(record: dict[str, Any]) -> str:
    """A row of the second table."""
    copies = {name: each.get("total_us") for name, each in record["copy"].items()}
    sizes = " / ".join(f"{size / 1e6:.1f}" for size in record["bytes"].values())
    cells = [sizes, " / ".join(f"{us:.2f}" if us else "-" for us in copies.values())]
    for name in ("forward", "backward", "deterministic"):
        copied = copies["forward" if name == "forward" else "backward"]
        for who in (PEER, OURS):
            found = record[who].get(name, {})
            us = found.get("total_us")
            error = found.get("error") or record[who].get("error", "-")
            over = f" ({us / copied:.2f})" if us and copied else ""
            cells.append(f"{us:.2f}{over}" if us else error)
    return f"| {record['pack']} | {' | '.join(cells)} |"
