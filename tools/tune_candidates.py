# SPDX-License-Identifier: Apache-2.0
"""Launch shapes that `tools/tune` tries, the bundle that holds them, and rows made of the winners.

A shape is a variant with a number of lanes and, backward, of blocks. The launcher takes these from
a schedule's row, and a variant can be forced by name. So each shape becomes a variant of its own
name with one row and the same image: one process can then time all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from installed import bundle

from csa_runtime.bench.packs import Pack

LANES = (5, 6, 7)  # log2; of windows that a thread holds
BLOCKS = (1, 2, 3, 4)  # of a multiprocessor, backward
WARP = 32
SAME = 0.01  # within this part of the best, the scheduled shape stays
ANY = -1


class Shape(NamedTuple):
    """A variant, and how it is launched."""

    variant: str
    lanes_log2: int
    ctas: int

    @property
    def name(self) -> str:
        """Of the variant that stands for it."""
        return f"{self.variant}_l{self.lanes_log2}_b{self.ctas}"


def shapes(manifest: bundle.Manifest, arch: int, multiprocessors: int) -> Iterator[Shape]:
    """What is scheduled for an architecture, then what else a GPU of it could launch."""
    rows = [s for s in manifest["schedules"] if s["arch"] == arch and s["operation"] != "finish"]
    scheduled = dict.fromkeys(Shape(s["variant"], s["lanes_log2"], s["ctas"]) for s in rows)
    yield from scheduled
    lanes_of = {shape.variant: shape.lanes_log2 for shape in scheduled}
    for v in manifest["variants"]:
        if v["name"] not in lanes_of:
            continue
        most = int(math.log2(v["threads"]))
        lanes = [n for n in LANES if n <= most] if v["kind"] in ("short", "early") else []
        blocks = [n * multiprocessors for n in BLOCKS] if v["operation"] == "backward" else [0]
        made = [Shape(v["name"], n, c) for n in lanes or [lanes_of[v["name"]]] for c in blocks]
        yield from (shape for shape in made if shape not in scheduled)


def serving(manifest: bundle.Manifest, shapes: list[Shape], pack: Pack, call: str) -> list[Shape]:
    """Those of a pack's window that the launcher would take by itself.

    It forces variants onto heads that they are too wide for, but never chooses them there: a row
    made of such a winner would serve nothing.
    """
    window = (call, pack.ratio, pack.coff)
    names = {
        v["name"]
        for v in manifest["variants"]
        if (v["operation"], v["ratio"], v["coff"]) == window and _serves_head(v, pack.head_dim)
    }
    return [shape for shape in shapes if shape.variant in names]


def _serves_head(variant: dict[str, Any], head_dim: int) -> bool:
    """As the launcher's `fills_warps`."""
    columns = variant["columns"]
    if variant["kind"] == "early":
        return head_dim > WARP // 2 * columns
    return columns <= max(head_dim // (variant["rows"] if variant["kind"] == "short" else WARP), 1)


def with_shapes(manifest: bundle.Manifest, arch: int, wanted: list[Shape]) -> bundle.Manifest:
    """The manifest of one architecture's images, and of a variant for each shape."""
    variants = {v["name"]: v for v in manifest["variants"]}
    images = {i["variant"]: i for i in manifest["images"] if i["arch"] == arch}
    rows = [s for s in manifest["schedules"] if s["arch"] == arch]
    family = {s["variant"]: s for s in rows}
    made = {name: manifest[name] for name in manifest}
    # Rows of no elements: none of them is ever chosen, only forced.
    made["schedules"] = rows + [
        family[s.variant]
        | {"variant": s.name, "lanes_log2": s.lanes_log2, "ctas": s.ctas, "max_elements": 0}
        for s in wanted
    ]
    made["variants"] = manifest["variants"] + [
        variants[s.variant] | {"name": s.name} for s in wanted
    ]
    made["images"] = list(images.values()) + [
        images[s.variant] | {"variant": s.name, "file": bundle.image_file(s.name, arch)}
        for s in wanted
    ]
    return made


def write_bundle(manifest: bundle.Manifest, cubins: Path, wanted: list[Shape], path: Path) -> None:
    """A bundle.bin of `with_shapes`; `path` lies in an empty folder."""
    tree = path.parent / "cubins"
    sources = {s.name: s.variant for s in wanted}
    for image in manifest["images"]:
        link = tree / image["file"]
        link.parent.mkdir(parents=True, exist_ok=True)
        name = sources.get(image["variant"], image["variant"])
        link.symlink_to((cubins / bundle.image_file(name, image["arch"])).resolve())
    (tree / bundle.MANIFEST).write_text(bundle.dumps(manifest))
    path.write_bytes(bundle.pack(tree))


class Found(NamedTuple):
    """Times of one pack in one direction, us by shape; the shape scheduled is among them.

    tried: shapes that served it, most of which were timed roughly alone.
    """

    pack: str
    operation: str
    ratio: int
    coff: int
    elements: int
    times: dict[Shape, float]
    scheduled: Shape
    tried: int

    @property
    def winner(self) -> Shape:
        """The fastest, or the one scheduled where that is as fast."""
        best = min(self.times, key=lambda shape: self.times[shape])
        near = self.times[self.scheduled] <= (1 + SAME) * self.times[best]
        return self.scheduled if near else best

    @property
    def evidence(self) -> str:
        """What the winner took, and the best of the other variants."""
        others = [s for s in self.times if s.variant != self.winner.variant]
        said = f"{self.times[self.winner]:.1f} us"
        if others:
            other = min(others, key=lambda shape: self.times[shape])
            said += f", {other.variant.partition('_bf16_')[2]} {self.times[other]:.1f}"
        return f"{said}, at {self.elements:,} elements: {self.pack}"


def rows(found: list[Found]) -> list[tuple[Any, ...]]:
    """Rows of aot/schedules.py for each family: up to which size which shape wins.

    Between two packs that different shapes win, the border is their geometric mean. What these
    cannot serve needs the rows that follow them in the file. Of segments a row says nothing: a
    limit of rows per segment is for whoever takes it over to set.
    """
    made: list[tuple[Any, ...]] = []
    families = dict.fromkeys((f.operation, f.ratio, f.coff) for f in found)
    for family in families:
        packs = sorted(
            (f for f in found if (f.operation, f.ratio, f.coff) == family),
            key=lambda f: f.elements,
        )
        for this, after in zip(packs, [*packs[1:], None], strict=True):
            shape = this.winner
            if after is not None and after.winner == shape:
                continue
            if after is not None and after.elements == this.elements:
                continue  # of two packs of a size, the later one's
            border = ANY if after is None else round(math.sqrt(this.elements * after.elements))
            made.append((shape.variant, border, shape.lanes_log2, shape.ctas, 0, this.evidence))
    return made


def markdown(found: list[Found]) -> str:
    """A line a pack and direction, then the rows as Python."""
    lines = [
        "| ratio, coff, d, pack | call | scheduled, us | fastest, us | gain | shapes tried |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for f in found:
        best, now = f.times[f.winner], f.times[f.scheduled]
        lines.append(
            f"| {f.pack} | {f.operation} | {f.scheduled.name} {now:.2f} | {f.winner.name} "
            f"{best:.2f} | {1 - best / now:.1%} | {f.tried} |"
        )
    lines += ["", "```python", *(f"{row!r}," for row in rows(found)), "```"]
    return "\n".join(lines)
