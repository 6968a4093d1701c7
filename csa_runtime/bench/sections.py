# SPDX-License-Identifier: Apache-2.0
"""The sections of a run: which packs, which calls, timed how."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from csa_runtime.bench import clock, packs
from csa_runtime.bench.clock import Call, in_turn
from csa_runtime.bench.packs import BOTH, CALLS, Pack
from csa_runtime.bench.problem import Problem, copy_of, copy_sizes
from csa_runtime.bench.record import COPY, EAGER, TWIN, Key, Row, said
from csa_runtime.bench.twin import Twin

ATTEMPTS = 3  # the profiler may lose records
COLD = 3  # buffers in turn hold this many times the second-level cache
MOST_SETS = 64  # of buffers in turn
ROUNDS = 3  # over the packs of the section segments; odd
FEW_KERNELS = 4  # of longer lists only the sum is kept
HOST_LOOPS = {"batches": 20, "batch": 20, "alone": 60}


class System(Protocol):
    """What is measured."""

    def calls(self, problem: Problem) -> dict[str, Call]:
        """Forward, backward and both, which a graph can capture."""

    def host_calls(self, problem: Problem) -> dict[str, Call]:
        """The ways to call it from Python."""


Systems = dict[str, System]


@dataclass(frozen=True)
class Scope:
    """What a section measures.

    chosen: packs of the sections graph, kernels, wall and cold. cache: bytes of the second-level
    one. twin: where it could be compiled.
    """

    systems: Systems
    chosen: tuple[Pack, ...]
    cache: int
    twin: Twin | None = None


Found = float | dict[str, float]
Clock = Callable[[Call, int], Found]  # a call and the bytes it moves
Rows = Iterator[tuple[Pack, Row]]


def timed(
    section: str, pack: Pack, system: str, call: str, tick: Clock, run: Call, moved: int
) -> Row:
    """A row of what the clock finds, or of what the call raises."""
    try:
        found = tick(run, moved)
    except Exception as error:  # of any kind, it may be another system's: the rest goes on
        return Row(section, pack.name, system, call, None, error=said(error))
    if not isinstance(found, dict):
        return Row(section, pack.name, system, call, found)
    kernels = found if len(found) <= FEW_KERNELS else {}
    return Row(section, pack.name, system, call, sum(found.values()), kernels)


def copy_row(section: str, pack: Pack, call: str, tick: Clock, sets: int) -> Row:
    """The fastest copy of the bytes that a call moves; one of more bytes by its time per byte."""
    moved, rows = pack.bytes(call), []
    for half in copy_sizes(moved):
        run = in_turn([copy_of(half) for _ in range(sets)])
        row = timed(section, pack, COPY, call, tick, run, moved)
        us = None if row.us is None else row.us * moved / (2 * half)
        rows.append(replace(row, us=us, kernels={}, note=f"timed on {half} bytes"))
    return min(rows, key=lambda row: float("inf") if row.us is None else row.us)


def twin_row(
    section: str, pack: Pack, call: str, tick: Clock, twin: Twin, problems: list[Problem]
) -> Row:
    """The twin in its best shape."""
    try:
        run, shape = twin.best(problems, call)
    except Exception as error:
        return Row(section, pack.name, TWIN, call, None, error=said(error))
    row = timed(section, pack, TWIN, call, tick, run, pack.bytes(call))
    named = ", ".join(f"{name} {value}" for name, value in shape._asdict().items())
    return replace(row, kernels={}, note=named)


def pack_rows(
    section: str,
    pack: Pack,
    systems: Systems,
    tick: Clock,
    calls: tuple[str, ...] = CALLS,
    sets: int = 1,
    twin: Twin | None = None,
) -> Rows:
    """Copies of the bytes that a pack moves, then each system's calls, on `sets` of buffers."""
    for call in CALLS:
        yield pack, copy_row(section, pack, call, tick, sets)
    problems = [Problem(pack) for _ in range(sets)]
    if twin is not None:
        for call in CALLS:
            yield pack, twin_row(section, pack, call, tick, twin, problems)
    yield from system_rows(section, problems, systems, tick, calls)


def system_rows(
    section: str,
    problems: list[Problem],
    systems: Systems,
    tick: Clock,
    calls: tuple[str, ...] = CALLS,
) -> Rows:
    """Each system's calls on these buffers of one pack, in turn."""
    pack = problems[0].pack
    moved = {call: pack.bytes(call) for call in CALLS}
    moved["both"] = sum(moved.values())
    for name, system in systems.items():
        try:
            made = [system.calls(problem) for problem in problems]
        except Exception as error:
            yield pack, Row(section, pack.name, name, "all", None, error=said(error))
            continue
        for call in calls:
            run = in_turn([each[call] for each in made])
            yield pack, timed(section, pack, name, call, tick, run, moved[call])


def in_graph(run: Call, moved: int) -> Found:
    """Time per call inside a graph."""
    return clock.graph_time(run)


def in_kernels(run: Call, moved: int) -> dict[str, float]:
    """Sums of kernel durations, tried again where the profiler lost records."""
    for _ in range(ATTEMPTS - 1):
        try:
            return clock.kernel_times(run, clock.loops_for(moved))
        except RuntimeError:
            continue
    return clock.kernel_times(run, clock.loops_for(moved))


def by_the_wall(run: Call, moved: int) -> Found:
    """Until the GPU is done, by the host's clock."""
    return clock.wall_time(run, clock.loops_for(moved))


def graph(scope: Scope) -> Rows:
    """Time per call, and of a forward with its backward."""
    for pack in scope.chosen:
        yield from pack_rows("graph", pack, scope.systems, in_graph, BOTH, twin=scope.twin)


def kernels(scope: Scope) -> Rows:
    """Sums of kernel durations."""
    for pack in scope.chosen:
        yield from pack_rows("kernels", pack, scope.systems, in_kernels, twin=scope.twin)


def wall(scope: Scope) -> Rows:
    """Time per call, launched one by one."""
    for pack in scope.chosen:
        yield from pack_rows("wall", pack, scope.systems, by_the_wall, BOTH)


def cold(scope: Scope) -> Rows:
    """As `graph`, of packs that the second-level cache could keep otherwise.

    Not of those that move so little that thousands would be needed to fill it.
    """
    for pack in scope.chosen:
        sets = -(-COLD * scope.cache // pack.bytes("forward"))
        if 1 < sets <= MOST_SETS:
            yield from pack_rows("cold", pack, scope.systems, in_graph, CALLS, sets, scope.twin)


def segments(scope: Scope) -> Rows:
    """The same tokens in many segments; eager torch does the same work for any number of them.

    These times are compared with each other, so what drifts in a run should meet all packs alike:
    of several rounds over the packs the median counts. Copies are timed once, before. A system that
    refuses a pack in any round has no times of it.
    """
    others = {name: system for name, system in scope.systems.items() if name != EAGER}
    chosen = tuple(packs.segments())
    for pack in chosen:
        for call in CALLS:
            yield pack, copy_row("segments", pack, call, in_graph, 1)
    rounds: dict[Key, list[tuple[Pack, Row]]] = defaultdict(list)
    for _ in range(ROUNDS):
        for pack in chosen:
            for each in system_rows("segments", [Problem(pack)], others, in_graph):
                rounds[each[1].key].append(each)
    for key, rows in rounds.items():
        refused = key._replace(call="all")
        if key == refused or refused not in rounds:
            yield middle(rows)


def middle(rows: list[tuple[Pack, Row]]) -> tuple[Pack, Row]:
    """Of one row a round, an odd number, that of the median time, or the first that has none."""
    failed = (each for each in rows if each[1].us is None)
    return next(failed, sorted(rows, key=lambda each: each[1].us or 0.0)[len(rows) // 2])


def tokens(scope: Scope) -> Rows:
    """One segment of more and more tokens."""
    for pack in packs.TOKENS:
        yield from pack_rows("tokens", pack, scope.systems, in_graph, twin=scope.twin)


def host(scope: Scope) -> Rows:
    """What a call costs the calling thread ("host"), and until its kernels are done ("alone")."""
    for pack in packs.HOST:
        problem = Problem(pack)
        for name, system in scope.systems.items():
            try:
                found = clock.host_times(system.host_calls(problem), **HOST_LOOPS)
            except Exception as error:
                yield pack, Row("host", pack.name, name, "all", None, error=said(error))
                continue
            for call, times in found.items():
                for section, us in times.items():
                    yield pack, Row(section, pack.name, name, call, us)


SECTIONS: dict[str, Callable[[Scope], Rows]] = {
    "graph": graph,
    "wall": wall,
    "host": host,
    "cold": cold,
    "segments": segments,
    "tokens": tokens,
    "kernels": kernels,
}
