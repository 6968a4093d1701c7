# SPDX-License-Identifier: Apache-2.0
"""What the launcher must launch, worked out in Python from cubins/manifest.json alone."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
ALIGNED = {
    "forward": ("kv", "score", "out"),
    "backward": ("kv", "score", "grad_out", "grad_kv", "grad_score"),
}
PER_ROW = ("out", "grad_out")
GRID_HEIGHT_MAX = 65535


def manifest() -> dict[str, Any]:
    """The committed manifest."""
    return json.loads((ROOT / "cubins" / "manifest.json").read_text())


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel's symbol and everything the driver is told."""

    symbol: str
    variant: str
    arch: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    values: tuple[tuple[int, int], ...]  # (value, bytes)

    @property
    def parameters(self) -> bytes:
        """The parameter buffer."""
        data = bytearray()
        for value, size in self.values:
            data += bytes(-len(data) % size)
            data += struct.pack("<q" if size == 8 else "<i", value)
        return bytes(data)


def up(a: int, b: int) -> int:
    """Ceiling of a / b."""
    return -(-a // b)


def architecture(table: dict[str, Any], capability: int) -> int:
    """The images' architecture that serves a device."""
    archs = {image["arch"] for image in table["images"]}
    return max(a for a in archs if a // 10 == capability // 10 and a <= capability)


def fits(operation: str, call: dict[str, Any], variant: dict[str, Any]) -> bool:
    """Whether alignment lets a variant serve the call."""
    unit = variant["alignment"]
    if call["head_dim"] % unit or (call["ape"] or 0) % min(16, 4 * unit):
        return False
    for name in ALIGNED[operation]:
        rows = call["rows"] if name in PER_ROW else call["tokens"]
        if (call[name] or 0) % (2 * unit) or (rows > 1 and call[f"{name}_stride"] % unit):
            return False
    return True


def serves_head(variant: dict[str, Any], head_dim: int) -> bool:
    """Whether a variant serves such a head unasked.

    The head must fill its lanes; an early row needs a warp of its own, which it may fill in part.
    """
    columns = variant["columns"]
    if variant["kind"] == "early":
        return head_dim > 16 * columns
    lanes = variant["rows"] if variant["kind"] == "short" else 32
    return columns <= max(head_dim // lanes, 1)


def columns_layout(
    row: dict[str, Any], variant: dict[str, Any], head_dim: int
) -> tuple[int, int, int]:
    """(log2 of lanes along the columns, blocks along the columns, rows that a block holds)."""
    wide, threads = up(head_dim, variant["columns"]), variant["threads"]
    if variant["kind"] == "long":
        return 5, up(wide, 32), 1
    if variant["kind"] == "buffered":
        return 5, up(wide, 32), threads // 32
    rows_log2 = (variant["rows"] - 1).bit_length()
    log2 = max(min(row["lanes_log2"], (wide - 1).bit_length()), rows_log2)
    return log2, up(wide, 1 << log2), (threads >> log2) << rows_log2


def balanced(blocks: int, groups: int) -> int:
    """How many of the groups share the blocks: none that idles in a last round of most."""
    if blocks <= groups:
        return blocks
    rounds = up(blocks, groups)
    return up(blocks, rounds) if 2 * (rounds * groups - blocks) < groups else groups


def scheduled(
    table: dict[str, Any],
    family: tuple[Any, ...],
    arch: int,
    limit: int,
    elements: int,
    rows: int = 0,
    segments: int = 0,
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows of (operation, ratio, coff, dtype) that sizes and shared memory allow, with variants."""
    variants = {variant["name"]: variant for variant in table["variants"]}
    static = {i["variant"]: i["static_shared"] for i in table["images"] if i["arch"] == arch}
    for row in table["schedules"]:
        if tuple(row[k] for k in ("arch", "operation", "ratio", "coff", "dtype")) != (
            arch, *family,
        ):  # fmt: skip
            continue
        variant = variants[row["variant"]]
        if 0 <= row["max_elements"] < elements:
            continue
        each = row["max_rows_per_segment"]
        if each >= 0 and rows > each * segments:
            continue
        if static[row["variant"]] + variant["dynamic_shared"] <= limit:
            yield row, variant


def choose(
    table: dict[str, Any],
    operation: str,
    call: dict[str, Any],
    arch: int,
    limit: int,
    forced: str | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first schedule row that fits a call, and its variant.

    forced: of that variant, whatever the size if no row of it is for the call's.
    """
    family = (operation, call["ratio"], call["coff"], "bf16")
    sizes = call["rows"] * call["head_dim"], call["rows"], call["segments"]
    found = [*scheduled(table, family, arch, limit, *sizes)]
    if forced:
        found += scheduled(table, family, arch, limit, 0)
    for row, variant in found:
        if forced not in (None, row["variant"]):
            continue
        if not serves_head(variant, call["head_dim"]) and not forced:
            continue
        if fits(operation, call, variant):
            return row, variant
    raise LookupError(f"no schedule for {call}")


def launches(
    operation: str,
    call: dict[str, Any],
    capability: int,
    table: dict[str, Any] | None = None,
    forced: str | None = None,
) -> list[Launch]:
    """The launches of one call on a device of that compute capability."""
    table = table or manifest()
    arch, limit = architecture(table, capability), SHARED[capability] << 10
    row, variant = choose(table, operation, call, arch, limit, forced)
    log2, tiles, row_lanes = columns_layout(row, variant, call["head_dim"])
    blocks = up(call["rows"], row_lanes)
    groups = balanced(blocks, max(row["ctas"] // tiles, 1))
    plane = call["ratio"] * call["coff"] * call["head_dim"]
    finish_row, finish = next(scheduled(table, ("finish", 0, 0, "f32"), arch, limit, plane))
    most = finish_row["fill_ctas"]
    fill = min(most, up(call["tokens"], finish["threads"]))
    if variant["kind"] == "long":
        # Tokens without a row: 4096 elements a block, from `most` blocks to one for 32 tokens.
        unpooled = max(call["tokens"] - call["rows"] * call["ratio"], 0)
        each = max(4096 // (call["coff"] * call["head_dim"]), 1)
        tails = min(max(up(unpooled, each), most), up(call["tokens"], 32)) if unpooled else 0
        # Last blocks: four a segment that may have one, or for 32 segments.
        segments = call["segments"] if call["coff"] == 2 and call["rows"] else 0
        last = 4 * max(min(call["rows"], segments), up(segments, 32))
        fill = max(fill, min(8 * most, max(tails, last)))
    wants = bool(call.get("grad_ape"))
    values = call | {
        "workspace": call["workspace"] if wants else 0,
        "lanes_log2": log2, "column_tiles": tiles, "groups": groups, "fill_ctas": fill,
        "plane_elements": plane, "accumulate": call.get("flags", 0) & 1,
    } if operation == "backward" else call | {"lanes_log2": log2}  # fmt: skip
    wide, high = (tiles, blocks) if operation == "forward" else (groups * tiles, 1)
    result = [_launch(table, variant, arch, (wide, high), values)] if wide * high else []
    finishing = fill + (up(plane, finish["columns"]) if wants else 0)
    if operation == "backward" and finishing:
        result.append(_launch(table, finish, arch, (finishing, 1), values))
    return result


def workspace_bound(table: dict[str, Any], ratio: int, coff: int, head_dim: int) -> int:
    """Bytes of the most partial planes that any row of any architecture asks for."""
    variants = {variant["name"]: variant for variant in table["variants"]}
    groups = 0
    for row in table["schedules"]:
        if (row["operation"], row["ratio"], row["coff"]) == ("backward", ratio, coff):
            tiles = columns_layout(row, variants[row["variant"]], head_dim)[1]
            groups = max(groups, row["ctas"] // tiles, 1)
    return up(groups * ratio * coff * head_dim * 4, 256) * 256


def _launch(
    table: dict[str, Any],
    variant: dict[str, Any],
    arch: int,
    grid: tuple[int, int],
    values: dict[str, Any],
) -> Launch:
    image = next(i for i in table["images"] if (i["variant"], i["arch"]) == (variant["name"], arch))
    sizes = table["parameters"]
    packed = tuple((values[name] or 0, sizes[name]["bytes"]) for name in variant["params"])
    wide, high = grid
    deep = max(up(high, GRID_HEIGHT_MAX), 1)
    block = (variant["threads"], 1, 1)
    return Launch(
        image["symbol"], variant["name"], arch, (wide, up(high, deep), deep), block,
        variant["dynamic_shared"], packed,
    )  # fmt: skip
