# SPDX-License-Identifier: Apache-2.0
"""What the launcher must launch, worked out in Python from cubins/manifest.json alone."""

import json
import struct
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


def fits(operation: str, call: dict[str, Any], columns: int) -> bool:
    """Whether alignment lets a variant of that many columns serve the call."""
    if call["head_dim"] % columns or (call["ape"] and call["ape"] % min(16, 4 * columns)):
        return False
    for name in ALIGNED[operation]:
        rows = call["rows"] if name in PER_ROW else call["tokens"]
        if (call[name] or 0) % (2 * columns) or (rows > 1 and call[f"{name}_stride"] % columns):
            return False
    return True


def choose(
    table: dict[str, Any], operation: str, call: dict[str, Any], arch: int, limit: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first fitting schedule row and its variant."""
    variants = {variant["name"]: variant for variant in table["variants"]}
    static = {i["variant"]: i["static_shared"] for i in table["images"] if i["arch"] == arch}
    wanted = (arch, operation, call["ratio"], call["coff"], "bf16")
    for row in table["schedules"]:
        if tuple(row[k] for k in ("arch", "operation", "ratio", "coff", "dtype")) != wanted:
            continue
        variant = variants[row["variant"]]
        if 0 <= row["max_elements"] < call["rows"] * call["head_dim"]:
            continue
        if static[row["variant"]] + variant["dynamic_shared"] > limit:
            continue
        if fits(operation, call, variant["columns"]):
            return row, variant
    raise LookupError(f"no schedule for {call}")


def launches(
    operation: str, call: dict[str, Any], capability: int, table: dict[str, Any] | None = None
) -> list[Launch]:
    """The launches of one call on a device of that compute capability."""
    table = table or manifest()
    arch = architecture(table, capability)
    row, variant = choose(table, operation, call, arch, SHARED[capability] << 10)
    threads, rows = variant["threads"], call["rows"]
    wide = up(call["head_dim"], variant["columns"])
    log2 = min(row["lanes_log2"], (wide - 1).bit_length())
    while up(wide, 1 << log2) > 65535 and 1 << log2 < threads:
        log2 += 1
    tiles, blocks = up(wide, 1 << log2), up(rows, threads >> log2)
    groups = min(max(up(row["ctas"], tiles), 1), blocks)
    fill = min(row["fill_ctas"], up(call["tokens"], threads))
    plane = call["ratio"] * call["coff"] * call["head_dim"]
    wants = bool(call.get("grad_ape"))
    values = call | {
        "workspace": call["workspace"] if wants else 0,
        "lanes_log2": log2, "column_tiles": tiles, "groups": groups, "fill_ctas": fill,
        "plane_elements": plane, "accumulate": call.get("flags", 0) & 1,
    } if operation == "backward" else call | {"lanes_log2": log2}  # fmt: skip
    grid = (blocks, tiles) if operation == "forward" else (groups * tiles + fill, 1)
    result = [_launch(table, variant, arch, grid, values)] if grid[0] else []
    if operation == "backward" and wants:
        reduce = next(v for v in table["variants"] if v["operation"] == "reduce")
        result.append(_launch(table, reduce, arch, (up(plane, 32), 1), values))
    return result


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
    block = (variant["threads"], 1, 1)
    return Launch(
        image["symbol"], variant["name"], arch, (*grid, 1), block, variant["dynamic_shared"], packed
    )
