# SPDX-License-Identifier: Apache-2.0
"""Times of both systems in one process: the host's cost of calls, and kernels beside a copy."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from measure import LONG, PACKS, Problem, kernel_times, loops_for, raise_clocks

from comparison.systems import OURS, PEER, System, said

# ratio, coff, d, lengths: a launch dominates the first and the third, kernels the second.
HOST_PACKS = ((4, 2, 128, (64,)), (4, 2, 128, (8192,)), (128, 1, 128, (512,)))
BATCHES, BATCH, ALONE = 40, 50, 200
ATTEMPTS = 3  # the profiler may lose records
Calls = dict[str, Callable[[], Any]]


class Operations:
    """One system's calls on the buffers of one problem, by class and by wrapper."""

    def __init__(self, system: System, problem: Problem, ratio: int, coff: int) -> None:
        """Compiles, and notes how long that took."""
        import torch

        kv, score, grad_out, ape, cu_seqlens, cu_seqlens_comp, out, *grads, _ = problem.keep
        grad_ape, grad_kv, grad_score = grads
        window = {"ratio": ratio, "coff": coff}
        inputs = (kv, score, ape, cu_seqlens, cu_seqlens_comp)
        self.compile_seconds: dict[str, float] = {}
        made = {
            "forward": system.Forward(*inputs, out, **window),
            "backward": system.Backward(*inputs, grad_out, **window),
            "deterministic": system.Backward(*inputs, grad_out, **window, deterministic=True),
        }
        for name, operation in made.items():
            begin = time.perf_counter()
            operation.check_support()
            operation.compile()
            self.compile_seconds[name] = time.perf_counter() - begin
        size = made["deterministic"].scratch_workspace_bytes()
        workspace = torch.empty(max(16, size), dtype=torch.uint8, device=kv.device)
        written = (*inputs, grad_out, grad_kv, grad_score, grad_ape)

        def backward() -> None:
            grad_ape.zero_()
            made["backward"].execute(*written)

        self.classes: Calls = {
            "forward": lambda: made["forward"].execute(*inputs, out),
            "backward": lambda: made["backward"].execute(*written),
            "deterministic": lambda: made["deterministic"].execute(*written, workspace=workspace),
        }
        # What a caller of the adding class runs: its zero-fill belongs to it.
        self.kernels: Calls = {**self.classes, "backward": backward}
        rows, head_dim = out.shape
        window["head_dim"] = head_dim
        self.wrappers: Calls = {
            "forward": lambda: system.forward(*inputs, **window, total_comp=rows),
            "backward": lambda: system.backward(*inputs, grad_out, **window),
            "deterministic": lambda: system.backward(
                *inputs, grad_out, **window, deterministic=True
            ),
        }


def made_for(
    systems: tuple[System, System], pack: tuple[Any, ...], record: dict[str, Any]
) -> tuple[Problem, dict[str, Operations]]:
    """Buffers of a pack and what each system does on them; a refusal is recorded."""
    ratio, coff, d, lengths = pack
    problem, found = Problem(d, lengths, ratio, coff), {}
    for system in systems:
        try:
            found[system.name] = Operations(system, problem, ratio, coff)
            record[system.name] = {"compile_seconds": found[system.name].compile_seconds}
        except Exception as error:
            record[system.name] = {"error": said(error)}
    return problem, found


def host_times(calls: Calls) -> dict[str, dict[str, float]]:
    """Microseconds per call, batches of the systems in turn.

    host: of the Python call alone, median of unsynchronised batches. alone: until its kernels have
    finished, median of single calls.
    """
    import torch

    clock, wait = time.perf_counter_ns, torch.cuda.synchronize
    batches: dict[str, list[float]] = {name: [] for name in calls}
    single: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(BATCH):
            call()
    wait()
    for _ in range(BATCHES):
        for name, call in calls.items():
            begin = clock()
            for _ in range(BATCH):
                call()
            batches[name].append((clock() - begin) / BATCH / 1000)
            wait()
    for _ in range(ALONE):
        for name, call in calls.items():
            begin = clock()
            call()
            wait()
            single[name].append((clock() - begin) / 1000)
    return {
        name: {"host": statistics.median(batches[name]), "alone": statistics.median(single[name])}
        for name in calls
    }


def profiled(call: Callable[[], Any], loops: int) -> dict[str, Any]:
    """Kernel durations, tried again where the profiler lost records."""
    for attempt in range(ATTEMPTS):
        try:
            kernels = kernel_times(call, loops)
            return {"total_us": sum(kernels.values()), "kernels_us": kernels}
        except RuntimeError as error:
            if attempt == ATTEMPTS - 1:
                return {"error": said(error)}
    return {}


def title(pack: tuple[Any, ...]) -> str:
    """A pack in a table."""
    ratio, coff, d, lengths = pack
    return f"{ratio}, {coff}, {d}, {len(lengths)}x{lengths[0]}"


def host_records(systems: tuple[System, System]) -> Iterator[dict[str, Any]]:
    """Per call: both systems' host cost and time until done."""
    for pack in HOST_PACKS:
        record: dict[str, Any] = {"pack": title(pack)}
        _, made = made_for(systems, pack, record)
        for path in ("classes", "wrappers"):
            for name in ("forward", "backward", "deterministic"):
                calls = {who: getattr(each, path)[name] for who, each in made.items()}
                try:
                    times: dict[str, Any] = host_times(calls)
                except Exception as error:
                    times = {"error": said(error)}
                yield {**record, "path": path, "operation": name, "times": times}


def kernel_record(systems: tuple[System, System], pack: tuple[Any, ...]) -> dict[str, Any]:
    """Kernel durations of one pack for both systems, and of copies that move the same bytes."""
    record: dict[str, Any] = {"pack": title(pack), "copy": {}, "bytes": {}}
    problem, made = made_for(systems, pack, record)
    for name in ("forward", "backward"):
        moved = problem.nominal[name]
        record["bytes"][name] = moved
        record["copy"][name] = profiled(problem.copy(moved), loops_for(moved))
    for who, each in made.items():
        for name, call in each.kernels.items():
            moved = problem.nominal["forward" if name == "forward" else "backward"]
            try:
                record[who][name] = profiled(call, loops_for(moved))
            except Exception as error:
                record[who][name] = {"error": said(error)}
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
    for pack in (*((4, 2, *pack) for pack in PACKS), *LONG):
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
