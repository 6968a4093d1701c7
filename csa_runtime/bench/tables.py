# SPDX-License-Identifier: Apache-2.0
"""A record as Markdown: one table a section."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from csa_runtime.bench.packs import BOTH, CALLS, TWELVE
from csa_runtime.bench.record import COPY, EAGER, OURS, SLOW_COPY, Key, Record
from csa_runtime.bench.times import SLOW, Times, number

NAMES = {"forward": "fwd", "backward": "bwd", "both": "fwd + bwd"}
PACK = "ratio, coff, d, pack"
Lines = Iterator[str]


def table(headings: list[str], rows: Iterable[list[str]]) -> Lines:
    """Markdown, numbers to the right; nothing where there is no row."""
    body = [f"| {' | '.join(cells)} |" for cells in rows]
    if body:
        yield f"| {' | '.join(headings)} |"
        words = (PACK, "call", "system")
        yield f"| {' | '.join('---' if name in words else '---:' for name in headings)} |"
        yield from body


def graph(times: Times) -> Lines:
    """This library beside a copy and its limits, then beside the others."""
    yield from limits(times, "graph", "fwd + bwd us", forward_and_backward(times))
    if times.others:
        yield ""
        yield from beside(times, "graph", BOTH)


def forward_and_backward(times: Times) -> Callable[[str], str]:
    """Of a pack, in one graph."""
    return lambda pack: number(times.us("graph", pack, OURS, "both"))


def limits(
    times: Times,
    section: str,
    heading: str,
    last: Callable[[str], str],
    only: set[str] | None = None,
) -> Lines:
    """Each call, and its share of its limit; `last` makes the last column of a pack."""

    def rows() -> Iterator[list[str]]:
        for pack in times.record.packs_of(section):
            if only is not None and pack not in only:
                continue
            cells = [pack, megabytes(times, pack)]
            cells += [both(times, section, pack, name) for name in times.yardsticks(section)]
            for call in CALLS:
                part = times.share(section, pack, call)
                cells += [times.beside(section, pack, OURS, call)]
                cells += [percent(part)]
            yield [*cells, last(pack)]

    sticks = [f"{name} us" for name in times.yardsticks(section)]
    calls = [text for c in CALLS for text in (us_over(times, section, NAMES[c]), "of its limit")]
    yield from table([PACK, "MB fwd / bwd", *sticks, *calls, heading], rows())
    yield from footnote(times, section, only)


def footnote(times: Times, section: str, only: set[str] | None = None) -> Lines:
    """What the mark says, where a copy bears it."""
    if any(key.section == section and (only is None or key.pack in only) for key in times.slow):
        yield ""
        yield (
            f"Marked {SLOW}: a copy at less than {SLOW_COPY:.0%} of the speed of another, as large "
            "or larger; it is no yardstick."
        )


def beside(times: Times, section: str, calls: tuple[str, ...]) -> Lines:
    """Each call of each other system: us, and how many times ours."""

    def rows() -> Iterator[list[str]]:
        for pack in times.record.packs_of(section):
            cells = [pack]
            for system in times.others:
                for call in calls:
                    us, ours = (times.us(section, pack, name, call) for name in (system, OURS))
                    over = "" if us is None or ours is None else f" ({us / ours:.1f})"
                    cells.append(number(us) + over)
            yield cells

    headings = [f"{system} {NAMES[call]}" for system in times.others for call in calls]
    yield from table([PACK, *(f"{name} us (x ours)" for name in headings)], rows())


def kernels(times: Times) -> Lines:
    """As `graph`, and a backward's kernels one by one."""
    parts = {row.key: row.kernels for row in times.record.rows}

    def last(pack: str) -> str:
        each = parts.get(Key("kernels", pack, OURS, "backward"), {}).values()
        return " + ".join(number(us) for us in sorted(each, reverse=True)) or "-"

    yield from limits(times, "kernels", "bwd's kernels us", last)
    if times.others:
        yield ""
        yield from beside(times, "kernels", CALLS)


def wall(times: Times) -> Lines:
    """Every system side by side."""
    systems = [OURS, *times.others]
    headings = [f"{system} {' / '.join(NAMES[c] for c in BOTH)}" for system in systems]
    yield from table(
        [PACK, *headings],
        (
            [
                pack,
                *(" / ".join(number(times.us("wall", pack, s, c)) for c in BOTH) for s in systems),
            ]
            for pack in times.record.packs_of("wall")
        ),
    )


def host(times: Times) -> Lines:
    """One row a way to call."""
    keys = [key for key in times.found if key.section == "host"]
    yield from table(
        [PACK, "system", "call", "host us", "until done us"],
        (
            [k.pack, k.system, k.call, number(times.found[k]), number(times.us("alone", *k[1:]))]
            for k in keys
        ),
    )


def cold(times: Times) -> Lines:
    """Cold beside hot, which is the graph's, where that was measured."""

    def rows() -> Iterator[list[str]]:
        for pack in times.record.packs_of("cold"):
            cells = [
                f"{times.beside('graph', pack, system, call)} / "
                f"{times.beside('cold', pack, system, call)}"
                for call in CALLS
                for system in (OURS, *times.others)
            ]
            yield [pack, *(both(times, "cold", pack, name) for name in sticks), *cells]

    sticks = times.yardsticks("cold")
    headings = [
        f"{us_over(times, 'cold', f'{s} {NAMES[c]}')}, hot / cold"
        for c in CALLS
        for s in (OURS, *times.others)
    ]
    yield from table([PACK, *(f"{name} us, cold" for name in sticks), *headings], rows())
    yield from footnote(times, "cold")


def segments(times: Times) -> Lines:
    """Beside a copy, and per byte moved over one segment's."""
    systems = [OURS, *(name for name in times.others if name != EAGER)]

    def rows() -> Iterator[list[str]]:
        for pack in times.record.packs_of("segments"):
            cells = [pack, megabytes(times, pack), both(times, "segments", pack, COPY)]
            for system in systems:
                for call in CALLS:
                    over = times.over_one(pack, system, call)
                    cells.append(times.beside("segments", pack, system, call))
                    cells.append("-" if over is None else f"{over:.3f}")
            yield cells

    headings = [
        text
        for system in systems
        for call in CALLS
        for text in (
            us_over(times, "segments", f"{system} {NAMES[call]}"),
            "per byte over one segment's",
        )
    ]
    yield from table([PACK, "MB fwd / bwd", "copy us", *headings], rows())
    yield from footnote(times, "segments")


def tokens(times: Times) -> Lines:
    """Every system side by side, what moves the same bytes, and what of its limits ours takes."""
    systems = [*times.yardsticks("tokens"), OURS, *times.others]

    def rows() -> Iterator[list[str]]:
        for pack in times.record.packs_of("tokens"):
            parts = " / ".join(percent(times.share("tokens", pack, call)) for call in CALLS)
            cells = [both(times, "tokens", pack, system) for system in systems]
            yield [pack, megabytes(times, pack), *cells, parts]

    headings = [f"{system} fwd / bwd us" for system in systems]
    yield from table([PACK, "MB fwd / bwd", *headings, "of its limits"], rows())
    yield from footnote(times, "tokens")


def megabytes(times: Times, pack: str) -> str:
    """Moved by each call, 10**6 bytes."""
    return " / ".join(f"{times.record.packs[pack].bytes[call] / 1e6:.1f}" for call in CALLS)


def both(times: Times, section: str, pack: str, system: str) -> str:
    """Forward and backward."""
    return " / ".join(times.shown(section, pack, system, call) for call in CALLS)


def percent(part: float | None) -> str:
    """Of a limit; near 100 % with up to two decimals, which tell on which side."""
    if part is None:
        return "-"
    texts = [f"{part:.{digits}%}" for digits in range(3)]
    return next((text for text in texts if float(text[:-1]) != 100.0), texts[-1])


def us_over(times: Times, section: str, name: str) -> str:
    """A heading over what `Times.beside` makes."""
    return f"{name} us ({', '.join(f'x {stick}' for stick in times.yardsticks(section))})"


PARTS: dict[str, tuple[str, Callable[[Times], Lines]]] = {
    "graph": (
        "Time per call inside a graph. Limits depend on the bytes moved; up to 100% keeps one.",
        graph,
    ),
    "kernels": ("Sums of kernel durations per call.", kernels),
    "wall": ("Time per call by the host's clock, us, calls one after the other.", wall),
    "host": ("What a call costs the calling thread, and one call until its kernels end.", host),
    "cold": ("As in a graph, over buffers of three times the second-level cache in turn.", cold),
    "segments": ("The same tokens in many segments, inside a graph.", segments),
    "tokens": ("One segment of more and more tokens, inside a graph.", tokens),
}


def short(record: Record) -> str:
    """The packs that were published from the start, inside a graph: for a first page."""
    times, named = Times(record), {pack.name for pack in TWELVE}
    return "\n".join(limits(times, "graph", "fwd + bwd us", forward_and_backward(times), named))


def failures(record: Record) -> Lines:
    """What could not be measured, and why."""
    for row in record.rows:
        if row.error:
            yield f"- {row.section}, {row.pack}, {row.system}, {row.call}: {row.error}"


def machine(record: Record) -> str:
    """What all times depend on, in a line."""
    said = ", ".join(f"{name} {value}" for name, value in record.machine.items() if name != "gpu")
    return f"{record.machine.get('gpu', 'unknown GPU')}: {said}"


def render(record: Record) -> str:
    """All of it: what was measured, a table a section, and what failed."""
    lines = [machine(record)]
    lines += ["", *(f"- {name}: {text}" for name, text in record.systems.items())]
    times = Times(record)
    for section, (text, part) in PARTS.items():
        body = list(part(times))
        if body:
            took = record.seconds.get(section)
            lines += ["", f"## {section.capitalize()}", "", text, "", *body]
            lines += ["", f"{took} s"] if took is not None else []
    failed = list(failures(record))
    if failed:
        lines += ["", "## Not measured", "", *failed]
    return "\n".join(lines)
