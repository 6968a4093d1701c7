# SPDX-License-Identifier: Apache-2.0
"""A record as pictures: shares of the limits, time against tokens, time against segments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from csa_runtime.bench.packs import CALLS
from csa_runtime.bench.record import COPY, EAGER, OURS, PEER, TWIN, Record
from csa_runtime.bench.times import Times

COLOURS = {OURS: "#0b6e99", EAGER: "#c2703d", PEER: "#7a5195", COPY: "#8c8c8c", TWIN: "#3a7d44"}
CALL_COLOURS = {"forward": "#0b6e99", "backward": "#d1495b"}
INK, FAINT = "#222222", "#dddddd"
DOTS = 160  # per inch
SEGMENTS_LIMIT = 1.05  # of one segment's time per byte
LARGE = 3.0  # from this factor on a logarithmic scale shows more


def draw(record: Record, folder: Path) -> list[Path]:
    """PNG files of what the record has; returns their paths.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    times, written = Times(record), []
    for name, figure in (
        ("share_of_limit", shares(times)),
        ("time_by_tokens", by_tokens(times)),
        ("time_by_segments", by_segments(times)),
    ):
        if figure is not None:
            written.append(folder / f"{name}.png")
            FigureCanvasAgg(figure)
            figure.savefig(written[-1], dpi=DOTS)
    return written


def canvas(
    times: Times, title: str, size: tuple[float, float], rows: int = 1, columns: int = 1
) -> tuple[Any, Any]:
    """A figure of `size` in inches and its axes, in a grid; below, what was measured on."""
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    machine = times.record.machine
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    figure.supxlabel(
        f"{machine.get('gpu', '')}, torch {machine.get('torch', '')}, one call inside a CUDA graph",
        x=0.01, ha="left", fontsize=8, color="#666666",
    )  # fmt: skip
    axes = figure.subplots(rows, columns, squeeze=False, sharex="col", sharey=True)
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)
        each.spines[["left", "bottom"]].set_color("#999999")
        each.tick_params(labelsize=9, colors=INK, length=0)
        each.grid(True, color=FAINT, linewidth=0.6)
        each.set_axisbelow(True)
    return figure, axes


def shares(times: Times) -> Any:
    """A line a shape, a dot a direction, the limit a vertical line."""
    found = [
        (pack, {call: 100 * part for call in CALLS if (part := times.share("graph", pack, call))})
        for pack in times.record.packs_of("graph")
    ]
    found = [(pack, parts) for pack, parts in found if parts]
    if not found:
        return None
    title = "Time as a share of its limit: left of the line keeps it"
    figure, ((axis,),) = canvas(times, title, (8.5, 1.6 + 0.33 * len(found)))
    places = range(len(found))
    for place, (_, parts) in zip(places, found, strict=True):
        axis.plot(
            [min(parts.values()), max(parts.values())],
            [place, place],
            color="#bbbbbb",
            linewidth=2,
            zorder=1,
        )
    for call in CALLS:
        dots = [(p[call], y) for y, (_, p) in zip(places, found, strict=True) if call in p]
        axis.scatter(*zip(*dots, strict=True), s=46, color=CALL_COLOURS[call], label=call, zorder=2)
    axis.axvline(100, color=INK, linewidth=1.2)
    axis.set_yticks(places, [pack for pack, _ in found])
    axis.invert_yaxis()
    axis.grid(False, axis="y")
    axis.set_ylabel("ratio, coff, head_dim, segments x tokens", fontsize=9, color=INK)
    axis.set_xlabel("% of the limit", fontsize=9, color=INK)
    axis.legend(frameon=False, fontsize=9, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    return figure


def panels(times: Times, title: str, section: str) -> tuple[Any, list[tuple[Any, str, str]]]:
    """A column a window, a row a direction: a figure, and each panel with its window and call."""
    names = times.record.packs_of(section)
    windows = list(dict.fromkeys(times.record.packs[name].window for name in names))
    if not windows:
        return None, []
    figure, axes = canvas(times, title, (3.6 * len(windows) + 0.8, 6.4), len(CALLS), len(windows))
    grid = [
        (axes[row, column], window, call)
        for row, call in enumerate(CALLS)
        for column, window in enumerate(windows)
    ]
    for axis, window, call in grid:
        axis.set_title(f"{call}: {window}", fontsize=9.5, loc="left", color=INK)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_locator(LogLocator(base=4 if section == "tokens" else 8))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    for axis in axes[-1]:
        axis.set_xlabel(section, fontsize=9, color=INK)
    return figure, grid


def by_tokens(times: Times) -> Any:
    """A line a system, both scales logarithmic."""
    figure, grid = panels(times, "Time by tokens (ratio, coff, head_dim)", "tokens")
    for axis, window, call in grid:
        for system in (*times.yardsticks("tokens"), OURS, *times.others):
            points = [
                (times.record.packs[pack].tokens, us)
                for pack in times.record.packs_of("tokens")
                if times.record.packs[pack].window == window
                and (us := times.us("tokens", pack, system, call)) is not None
            ]
            line(axis, points, system, COLOURS[system], dashed=system in (COPY, TWIN))
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(FuncFormatter(lambda us, _: f"{us:g}"))
        axis.set_ylabel("microseconds" if axis is grid[0][0] else "", fontsize=9, color=INK)
    if grid:
        grid[0][0].legend(frameon=False, fontsize=8)
    return figure


def by_segments(times: Times) -> Any:
    """Time per byte moved, 1 where it is as in one segment; a line a system and kind of lengths."""
    title = "Time per byte moved, one segment's being 1 (ratio, coff, head_dim)"
    figure, grid = panels(times, title, "segments")
    for axis, window, call in grid:
        for system in (OURS, *times.others):
            for ragged in (False, True):
                points = list(_relative(times, window, system, call, ragged))
                name = f"{system}, {'ragged' if ragged else 'alike'}"
                line(axis, points, name, COLOURS[system], dashed=ragged)
        axis.axhline(SEGMENTS_LIMIT, color=INK, linewidth=1.0)
    if grid:
        first = grid[0][0]
        first.set_ylabel(f"times one segment's (line: {SEGMENTS_LIMIT})", fontsize=9, color=INK)
        first.legend(frameon=False, fontsize=8)
        if first.get_ylim()[1] > LARGE:
            first.set_yscale("log")
            first.yaxis.set_major_formatter(FuncFormatter(lambda factor, _: f"{factor:g}"))
    return figure


def _relative(
    times: Times, window: str, system: str, call: str, ragged: bool
) -> Iterator[tuple[int, float]]:
    for pack in times.record.packs_of("segments"):
        sizes = times.record.packs[pack]
        if sizes.window == window and (sizes.segments == 1 or ("ragged" in pack) == ragged):
            over = times.over_one(pack, system, call)
            if over is not None:
                yield sizes.segments, over


def line(
    axis: Any, points: list[tuple[int, float]], name: str, colour: str, *, dashed: bool
) -> None:
    """Points and what joins them; nothing where there are none."""
    if points:
        style = "--" if dashed else "-"
        axis.plot(
            *zip(*sorted(points), strict=True), style, color=colour, label=name, linewidth=1.6,
            marker="o", markersize=3.5,
        )  # fmt: skip
