# SPDX-License-Identifier: Apache-2.0
"""A record as pictures: shares of the limits, time against tokens, time against segments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from csa_runtime.bench.packs import CALLS
from csa_runtime.bench.record import COPY, EAGER, OURS, PEER, TWIN, Record
from csa_runtime.bench.tables import percent
from csa_runtime.bench.times import Times

COLOURS = {OURS: "#0b6e99", EAGER: "#c2703d", PEER: "#7a5195", COPY: "#8c8c8c", TWIN: "#3a7d44"}
KEPT, MISSED, NONE = "#0b6e99", "#d1495b", "#666666"
STYLES: dict[str, dict[str, Any]] = {
    COPY: {"linewidth": 6, "alpha": 0.45, "marker": "", "solid_capstyle": "round"},
    TWIN: {"linestyle": "--", "marker": ""},
}
RAGGED = {"linestyle": "--", "marker": "s", "markerfacecolor": "white"}
INK, FAINT = "#222222", "#dddddd"
DOTS = 160  # per inch
SEGMENTS_LIMIT = 1.03  # of one segment's time per byte
RANGE = 0.9, 1.3  # of the axis; what lies beyond is written at its edge


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
    times: Times, title: str, size: tuple[float, float], rows: int, columns: int, *, sharex: Any
) -> tuple[Any, Any]:
    """A figure of `size` in inches and its axes, in a grid; below, what was measured on."""
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    machine = times.record.machine
    figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    bundle = machine.get("bundle", "").rpartition(" ")[2]
    figure.supxlabel(
        f"{machine.get('gpu', '')}, torch {machine.get('torch', '')}, bundle {bundle}, one call "
        "inside a CUDA graph",
        x=0.01, ha="left", fontsize=8, color="#666666",
    )  # fmt: skip
    axes = figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=True)
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)
        each.spines[["left", "bottom"]].set_color("#999999")
        each.tick_params(labelsize=9, colors=INK, length=0)
        each.grid(True, color=FAINT, linewidth=0.6)
        each.set_axisbelow(True)
    return figure, axes


def shares(times: Times) -> Any:
    """A line a shape, a column a direction: a dot for the call, a stroke for the twin."""
    packs = times.record.packs_of("graph")
    found = {
        (pack, call, system): 100 * part
        for pack in packs
        for call in CALLS
        for system in (OURS, TWIN)
        if (part := times.share("graph", pack, call, system))
    }
    packs = [pack for pack in packs if any((pack, call, OURS) in found for call in CALLS)]
    if not packs:
        return None
    title, size = "Time per call, % of the limit for its bytes", (9.6, 1.7 + 0.27 * len(packs))
    figure, (row,) = canvas(times, title, size, 1, len(CALLS), sharex=True)
    for axis, call in zip(row, CALLS, strict=True):
        axis.axvline(100, color=INK, linewidth=1.2, zorder=1)
        for place, pack in enumerate(packs):
            twin, ours = (found.get((pack, call, system)) for system in (TWIN, OURS))
            if twin is not None:
                axis.plot(twin, place, "|", color=COLOURS[TWIN], markersize=11, markeredgewidth=2)
            colour = NONE if ours is None else KEPT if ours <= 100 else MISSED
            if ours is not None:
                axis.plot([100, ours], [place, place], color=colour, linewidth=1.6, alpha=0.5)
                axis.plot(ours, place, "o", color=colour, markersize=7)
            said = "-" if ours is None else percent(ours / 100).rstrip("%")
            axis.text(
                1.08, place, said, color=colour, ha="right", va="center", fontsize=8.5,
                transform=axis.get_yaxis_transform(),
            )  # fmt: skip
        axis.set_title(call, fontsize=10, color=INK)
        axis.grid(False, axis="y")
        axis.set_xlabel("% of the limit", fontsize=9, color=INK)
    row[0].set_yticks(range(len(packs)), packs)
    row[0].set_ylim(len(packs) - 0.4, -0.6)
    row[0].annotate(
        "ratio, coff, head_dim, pack", (0, 1), (-5, 6), xycoords="axes fraction", ha="right",
        textcoords="offset points", fontsize=9, color=INK,
    )  # fmt: skip
    names = [("o", "within the limit", KEPT), ("o", "over it", MISSED)]
    if any(system == TWIN for _, _, system in found):
        names.append(("|", "twin: the same traffic, nothing computed", COLOURS[TWIN]))
    if any(key.section == "graph" for key in times.slow):
        names.append(("$-$", "no valid copy to set it beside", NONE))
    legend(figure, [Line2D([], [], color=c, marker=m, ls="", label=n) for m, n, c in names])
    return figure


def legend(figure: Any, handles: list[Any]) -> None:
    """Under the title, where `canvas` leaves a line free."""
    figure.legend(
        handles=handles, frameon=False, fontsize=9, ncols=len(handles), loc="upper left",
        bbox_to_anchor=(0.012, 1 - 0.34 / figure.get_figheight()), borderpad=0, borderaxespad=0,
        handletextpad=0.4, columnspacing=1.4,
    )  # fmt: skip


def panels(times: Times, title: str, section: str) -> tuple[Any, list[tuple[Any, str, str]]]:
    """A column a window, a row a direction: a figure, and each panel with its window and call."""
    names = times.record.packs_of(section)
    windows = list(dict.fromkeys(times.record.packs[name].window for name in names))
    if not windows:
        return None, []
    size = 3.6 * len(windows) + 0.8, 6.4
    figure, axes = canvas(times, title, size, len(CALLS), len(windows), sharex="col")
    grid = [
        (axes[row, column], window, call)
        for row, call in enumerate(CALLS)
        for column, window in enumerate(windows)
    ]
    for axis, window, call in grid:
        axis.set_title(f"{call}: {named(window)}", fontsize=9.5, loc="left", color=INK)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_locator(LogLocator(base=4 if section == "tokens" else 8))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    for axis in axes[-1]:
        axis.set_xlabel(section, fontsize=9, color=INK)
    return figure, grid


def by_tokens(times: Times) -> Any:
    """A line a system, both scales logarithmic; wide and grey is a copy of the same bytes."""
    figure, grid = panels(times, "Time per call by tokens, one segment", "tokens")
    for axis, window, call in grid:
        for system in (*times.yardsticks("tokens"), OURS, *times.others):
            points = [
                (times.record.packs[pack].tokens, us)
                for pack in times.record.packs_of("tokens")
                if times.record.packs[pack].window == window
                and (us := times.valid("tokens", pack, system, call)) is not None
            ]
            line(axis, points, system, COLOURS[system], **STYLES.get(system, {}))
            for tokens, us in (points[:1] + points[-1:]) if system == OURS else ():
                axis.annotate(
                    f"{us:.3g}", (tokens, us), (0, 6), textcoords="offset points", ha="center",
                    fontsize=8, color=COLOURS[OURS],
                )  # fmt: skip
        axis.set_yscale("log")
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda us, _: f"{us:g}"))
    if grid:
        for axis, _, _ in grid:
            if axis.get_subplotspec().is_first_col():
                axis.set_ylabel("microseconds", fontsize=9, color=INK)
        grid[0][0].set_ylim(top=grid[0][0].get_ylim()[1] * 1.5)  # room for numbers
        legend(figure, grid[0][0].get_legend_handles_labels()[0])
    return figure


def by_segments(times: Times) -> Any:
    """Time per byte moved, 1 where it is as in one segment; a line a system and kind of lengths."""
    title = "Time per byte by segments, equal or ragged, over one segment's"
    figure, grid = panels(times, title, "segments")
    low, high = RANGE
    for axis, window, call in grid:
        axis.axhline(SEGMENTS_LIMIT, color=MISSED, lw=1.4, label=f"limit, {SEGMENTS_LIMIT}")
        beyond: dict[int, int] = {}  # how many stand at the edge there
        for system in (OURS, *times.others):
            for ragged in (False, True):
                points = list(_relative(times, window, system, call, ragged))
                name = f"{system}, {'ragged' if ragged else 'equal'}"
                line(axis, points, name, COLOURS[system], **(RAGGED if ragged else {}))
                for count, over in points:
                    if low <= over <= high:
                        continue
                    beyond[count] = beyond.get(count, 0) + 1
                    sign = ("\u25bc\u25bd" if over < low else "\u25b2\u25b3")[ragged]
                    axis.annotate(
                        f"{over:.2f} {sign}", (count, min(max(over, low), high)),
                        (4, (11 if over < low else -11) * beyond[count]), ha="right", va="center",
                        textcoords="offset points", fontsize=8, color=COLOURS[system],
                        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
                    )  # fmt: skip
    if grid:
        for axis, _, _ in grid:
            axis.set_ylim(low, high)
            if axis.get_subplotspec().is_first_col():
                axis.set_ylabel("times one segment's", fontsize=9, color=INK)
        legend(figure, grid[0][0].get_legend_handles_labels()[0])
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


def named(window: str) -> str:
    """`ratio 4, coff 2, d 512`."""
    ratio, coff, head_dim = window.split(", ")
    return f"ratio {ratio}, coff {coff}, d {head_dim}"


def line(axis: Any, points: list[tuple[int, float]], name: str, colour: str, **style: Any) -> None:
    """Points and what joins them; nothing where there are none."""
    if points:
        style = {"linewidth": 1.6, "marker": "o", "markersize": 4} | style
        axis.plot(*zip(*sorted(points), strict=True), color=colour, label=name, **style)
