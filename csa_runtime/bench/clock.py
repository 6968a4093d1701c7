# SPDX-License-Identifier: Apache-2.0
"""Ways to time a call that is made on torch's current stream. All times are microseconds."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]
TARGET_US = 20000.0  # of GPU time per measurement
# In graphs of this many calls, replayed this often, up to this many us a call; longer ones once.
GRAPHS = ((500.0, 50, 7), (20000.0, 10, 3))
QUICK = 30
FILLING = 256 << 20  # bytes, more than a second-level cache holds


def raise_clocks() -> None:
    """Keeps the GPU busy for 0.3 s, so that its clocks are up, with little work: see `rest`."""
    few = torch.zeros(1 << 16, device="cuda")
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        for _ in range(100):
            few.add_(1.0)
        torch.cuda.synchronize()


def rest(busy: float) -> None:
    """Waits as long as the GPU has just been busy, us.

    Calls that move hundreds of megabytes take a GPU to its power limit, where after some tenths of
    a second it lowers its clocks: the next measurement would pay for this one.
    """
    time.sleep(busy / 1e6)


def fill_cache() -> None:
    """Fills the second-level cache with what no call reads.

    What a kernel loads as the first to leave that cache does not displace it: such a kernel would
    be found as fast as one that ran before it on the same buffers.
    """
    torch.empty(FILLING, dtype=torch.uint8, device="cuda").fill_(1)


def loops_for(moved: int) -> int:
    """Calls of one measurement, fewer where a call moves many bytes."""
    return max(20, min(200, int(TARGET_US / (moved / 4e6))))


def in_turn(calls: list[Call]) -> Call:
    """A call that is the first of them, then the second, and so on in a circle."""
    if len(calls) == 1:
        return calls[0]
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def by_events(run: Call) -> float:
    """From the first to the last thing that one call gives the GPU."""
    event: Any = torch.cuda.Event
    begin, end = (event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end) * 1000.0)


def graph_time(run: Call) -> float:
    """One call inside a graph: a graph of 100 minus one of 50, over 50; the median of seven.

    Of calls over 500 us graphs of 20 and 10, three times; over 20 ms one call without a graph. The
    current stream must not be the default one.

    Raises:
        RuntimeError: the call cannot be captured.
    """
    fill_cache()
    for _ in range(3):
        run()
    once = by_events(run)
    chosen = next((each[1:] for each in GRAPHS if once <= each[0]), None)
    if chosen is None:
        return once
    few, repeats = chosen
    graphs = [captured(run, calls) for calls in (few, 2 * few)]
    pairs = [[by_events(graph.replay) for graph in graphs] for _ in range(repeats)]
    rest(sum(map(sum, pairs)))
    return statistics.median((longer - shorter) / few for shorter, longer in pairs)


def captured(run: Call, calls: int) -> Any:
    """A graph of so many calls, replayed once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(calls):
            run()
    graph.replay()
    return graph


def quick_time(run: Call) -> float:
    """One call inside a graph of `QUICK`, the least of three: to choose among calls, too high."""
    fill_cache()
    run()
    graph = captured(run, QUICK)
    found = [by_events(graph.replay) for _ in range(3)]
    rest(sum(found))
    return min(found) / QUICK


def kernel_times(run: Call, loops: int) -> dict[str, float]:
    """Sum of durations per call, by kernel (or copy) name, from torch's profiler.

    Raises:
        RuntimeError: the profiler lost more than a twentieth of a kernel's launches.
    """
    from torch.profiler import ProfilerActivity, profile

    fill_cache()
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(loops):
            run()
        torch.cuda.synchronize()
    durations: dict[str, list[float]] = defaultdict(list)
    inner: Any = profiler.profiler
    for event in inner.kineto_results.events():
        if event.device_type() == torch._C._autograd.DeviceType.CUDA:
            durations[event.name()].append(event.duration_ns() / 1000.0)
    rest(sum(map(sum, durations.values())))
    return per_call(durations, loops)


def per_call(durations: dict[str, list[float]], loops: int) -> dict[str, float]:
    """Sum of each kernel's durations in one of `loops` calls, all of which launch the same.

    Raises:
        RuntimeError: a kernel was seen neither hardly ever nor once, twice and so on a call. The
            profiler may lose a record and adds one for the synchronisation; a sum without a kernel
            would be no time.
    """
    few = loops // 20
    seen = {name: len(times) for name, times in durations.items()}
    launches = {name: max(1, round(count / loops)) for name, count in seen.items() if count > few}
    if not launches or any(
        abs(seen[name] - loops * times) > few * times for name, times in launches.items()
    ):
        raise RuntimeError(f"{loops} calls, but the profiler saw {seen}")
    return {name: statistics.fmean(durations[name]) * launches[name] for name in sorted(launches)}


def wall_time(run: Call, loops: int, repeats: int = 3) -> float:
    """By the host's clock, until the GPU is done, over `loops` calls; the median of repeats."""
    found = []
    run()
    torch.cuda.synchronize()
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        for _ in range(loops):
            run()
        torch.cuda.synchronize()
        found.append((time.perf_counter_ns() - begin) / loops / 1000)
    return statistics.median(found)


def host_times(
    calls: dict[str, Call], batches: int = 40, batch: int = 50, alone: int = 200
) -> dict[str, dict[str, float]]:
    """What calls cost the calling thread, batches of them in turn.

    Returns:
        By name, "host": of the Python call alone, median of unsynchronised batches; "alone": until
        its kernels have finished, median of single calls.
    """
    clock, wait = time.perf_counter_ns, torch.cuda.synchronize
    batched: dict[str, list[float]] = {name: [] for name in calls}
    single: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(batch):
            call()
    wait()
    for _ in range(batches):
        for name, call in calls.items():
            begin = clock()
            for _ in range(batch):
                call()
            batched[name].append((clock() - begin) / batch / 1000)
            wait()
    for _ in range(alone):
        for name, call in calls.items():
            begin = clock()
            call()
            wait()
            single[name].append((clock() - begin) / 1000)
    return {
        name: {"host": statistics.median(batched[name]), "alone": statistics.median(single[name])}
        for name in calls
    }
