# SPDX-License-Identifier: Apache-2.0
"""The committed bundle: reads and writes `cubins/`, checks it, packs it into bundle.bin.

Standard library only and no sibling imports: building a wheel runs this file as a script, where no
compiler is installed, so everything it needs to know is in `cubins/manifest.json`.
"""

import argparse
import hashlib
import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMA = 3
MAGIC = b"CSABNDL\0"
MANIFEST = "manifest.json"
IMAGE_ALIGNMENT = 64
MAX_PARAMETERS = 24
NO_PARAMETER = 0xFF

OPERATIONS = {"forward": 1, "backward": 2, "finish": 3}
DTYPES = {"f32": 0, "bf16": 1}
KINDS = {"finish": 0, "short": 1, "long": 2, "buffered": 3, "early": 4}

# bundle.bin, little endian, offsets from the start of the file. The C parser holds the same
# records as structs with the same sizes.
# magic, schema, header bytes, total bytes, variants, schedules, images, 0,
# offsets of the three tables, sha256 of bytes [128, first image)
HEADER = struct.Struct("<8sIIQIIIIQQQ32s32x")
# name, rows, operation, ratio, coff, dtype, columns, threads, dynamic shared, parameter count,
# kind, alignment, parameter ids
VARIANT = struct.Struct("<60siiiiiiiiIii24s")
# arch, operation, ratio, coff, dtype, variant index, lanes_log2, ctas, fill_ctas,
# max_rows_per_segment, max_elements
SCHEDULE = struct.Struct("<iiiiiiiiiiq16x")
# variant index, arch, registers, static shared, flags, 0, offset, size, sha256, symbol
IMAGE = struct.Struct("<iiiiIIQQ32s96s24x")
assert (HEADER.size, VARIANT.size, SCHEDULE.size, IMAGE.size) == (128, 128, 64, 192)

Manifest = dict[str, Any]


class BundleError(Exception):
    """`cubins/` and its manifest do not agree, or a bundle.bin is damaged."""


def dumps(manifest: Manifest) -> str:
    """The manifest's one canonical text."""
    return json.dumps(manifest, sort_keys=True, indent=1) + "\n"


def read_manifest(cubins: Path) -> Manifest:
    """The manifest of a `cubins/` directory.

    Raises:
        BundleError: missing, not canonical text, or of another schema.
    """
    path = cubins / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
        manifest = json.loads(text)
    except (OSError, ValueError) as error:
        raise BundleError(f"{path}: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise BundleError(f"{path}: not a manifest of schema {SCHEMA}")
    if text != dumps(manifest):
        raise BundleError(f"{path}: not canonical; edited by hand? run tools/build_cubins")
    return manifest


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` in one step: no reader and no crash ever sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def image_file(variant: str, arch: int) -> str:
    """Where an image lies, relative to `cubins/`."""
    return f"sm_{arch}/{variant}.cubin"


def natural_layout(widths: list[int]) -> list[list[int]]:
    """[offset, size] in bytes of parameters of these widths, each aligned to its own width."""
    layout, end = [], 0
    for width in widths:
        offset = -(-end // width) * width
        layout.append([offset, width])
        end = offset + width
    return layout


def unlisted(cubins: Path, manifest: Manifest) -> list[Path]:
    """Files below cubins/sm_* that no image record names."""
    listed = {cubins / image["file"] for image in manifest["images"]}
    return sorted(p for p in cubins.glob("sm_*/*") if p not in listed)


def _table_problems(manifest: Manifest) -> Iterator[str]:
    """Every way in which the manifest's tables contradict themselves."""
    parameters = manifest["parameters"]
    variants = {variant["name"]: variant for variant in manifest["variants"]}
    if len(variants) != len(manifest["variants"]):
        yield "two variants share a name"
    ids = [parameter["id"] for parameter in parameters.values()]
    if len(set(ids)) != len(ids) or any(not 0 <= i < NO_PARAMETER for i in ids):
        yield "parameter ids are not distinct bytes"
    for name, variant in variants.items():
        if len(variant["params"]) > MAX_PARAMETERS or set(variant["params"]) - set(parameters):
            yield f"{name}: too many parameters, or unknown ones"
        if variant["kind"] not in KINDS:
            yield f"{name}: unknown kind {variant['kind']!r}"
        if variant["operation"] != "finish" and variant["alignment"] % variant["columns"]:
            yield f"{name}: aligned to {variant['alignment']} elements, reads {variant['columns']}"
    images = {(image["variant"], image["arch"]) for image in manifest["images"]}
    if len(images) != len(manifest["images"]):
        yield "two images share a variant and an architecture"
    for row, schedule in enumerate(manifest["schedules"]):
        variant = variants.get(schedule["variant"])
        family = ("operation", "ratio", "coff", "dtype")
        if variant is None or any(variant[key] != schedule[key] for key in family):
            yield f"schedule {row}: names {schedule['variant']}, which is not of its family"
        elif (schedule["variant"], schedule["arch"]) not in images:
            yield f"schedule {row}: no image of {schedule['variant']} for sm_{schedule['arch']}"


def _image_problems(cubins: Path, manifest: Manifest) -> Iterator[str]:
    """Every way in which files, their records and the variants contradict each other."""
    parameters = manifest["parameters"]
    variants = {variant["name"]: variant for variant in manifest["variants"]}
    for image in manifest["images"]:
        where = image["file"]
        variant = variants.get(image["variant"])
        if variant is None:
            yield f"{where}: image of unknown variant {image['variant']}"
            continue
        if where != image_file(image["variant"], image["arch"]):
            yield f"{where}: not where {image['variant']} for sm_{image['arch']} belongs"
        widths = [parameters[name]["bytes"] for name in variant["params"] if name in parameters]
        if image["parameters"] != natural_layout(widths):
            yield f"{where}: parameter layout is not its variant's"
        if image["block"] != [variant["threads"], 1, 1] or image["frame"] != 0:
            yield f"{where}: block {image['block']}, frame {image['frame']} bytes"
        try:
            data = (cubins / where).read_bytes()
        except OSError as error:
            yield f"{where}: {error.strerror}"
            continue
        if len(data) != image["bytes"]:
            yield f"{where}: {len(data)} bytes, the manifest says {image['bytes']}"
        elif hashlib.sha256(data).hexdigest() != image["sha256"]:
            yield f"{where}: sha256 differs from the manifest's"
    for path in unlisted(cubins, manifest):
        yield f"{path.relative_to(cubins)}: not in the manifest"


def verify(cubins: Path) -> Manifest:
    """The manifest, after checking it against itself and against every committed file.

    Raises:
        BundleError: with one line for each problem.
    """
    manifest = read_manifest(cubins)
    try:
        problems = [*_table_problems(manifest), *_image_problems(cubins, manifest)]
    except (KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{cubins / MANIFEST}: malformed record: {error!r}") from error
    if problems:
        raise BundleError(f"{cubins}:\n  " + "\n  ".join(problems))
    return manifest


def _text(value: str, size: int) -> bytes:
    data = value.encode("ascii")
    if len(data) >= size or b"\0" in data:
        raise BundleError(f"{value!r} does not fit {size} bytes with its terminating NUL")
    return data


def _aligned(offset: int) -> int:
    return -(-offset // IMAGE_ALIGNMENT) * IMAGE_ALIGNMENT


def _tables(manifest: Manifest, first_image: int) -> bytes:
    """The three tables, unpadded, with the first image's data at offset `first_image`."""
    ids = {name: parameter["id"] for name, parameter in manifest["parameters"].items()}
    index = {variant["name"]: i for i, variant in enumerate(manifest["variants"])}
    table = bytearray()
    for v in manifest["variants"]:
        params = bytes(ids[name] for name in v["params"])
        table += VARIANT.pack(
            _text(v["name"], 60), v["rows"], OPERATIONS[v["operation"]], v["ratio"], v["coff"],
            DTYPES[v["dtype"]], v["columns"], v["threads"], v["dynamic_shared"],
            len(params), KINDS[v["kind"]], v["alignment"],
            params.ljust(MAX_PARAMETERS, bytes([NO_PARAMETER])),
        )  # fmt: skip
    for s in manifest["schedules"]:
        table += SCHEDULE.pack(
            s["arch"], OPERATIONS[s["operation"]], s["ratio"], s["coff"], DTYPES[s["dtype"]],
            index[s["variant"]], s["lanes_log2"], s["ctas"], s["fill_ctas"],
            s["max_rows_per_segment"], s["max_elements"],
        )  # fmt: skip
    offset = first_image
    for i in manifest["images"]:
        table += IMAGE.pack(
            index[i["variant"]], i["arch"], i["registers"], i["static_shared"], 0, 0,
            offset, i["bytes"], bytes.fromhex(i["sha256"]), _text(i["symbol"], 96),
        )  # fmt: skip
        offset = _aligned(offset + i["bytes"])
    return bytes(table)


def pack(cubins: Path) -> bytes:
    """bundle.bin of a `cubins/` directory whose every file is checked first.

    The same directory gives the same bytes, whatever its path or its files' times.

    Raises:
        BundleError: as `verify`, or a record that does not fit its field.
    """
    manifest = verify(cubins)
    counts = [len(manifest[key]) for key in ("variants", "schedules", "images")]
    off_variants = HEADER.size
    off_schedules = off_variants + counts[0] * VARIANT.size
    off_images = off_schedules + counts[1] * SCHEDULE.size
    first_image = _aligned(off_images + counts[2] * IMAGE.size)
    try:
        tables = _tables(manifest, first_image).ljust(first_image - HEADER.size, b"\0")
    except (KeyError, ValueError, struct.error) as error:
        raise BundleError(f"{cubins / MANIFEST}: {error!r}") from error
    data = bytearray(HEADER.size) + tables
    for image in manifest["images"]:
        data += (cubins / image["file"]).read_bytes()
        data += bytes(_aligned(len(data)) - len(data))
    HEADER.pack_into(
        data, 0, MAGIC, SCHEMA, HEADER.size, len(data), *counts, 0,
        off_variants, off_schedules, off_images, hashlib.sha256(tables).digest(),
    )  # fmt: skip
    return bytes(data)


def main(argv: list[str] | None = None) -> int:
    """Command line: `pack CUBINS OUT`, `verify CUBINS`."""
    parser = argparse.ArgumentParser(prog="bundle.py", description="Work on a cubins directory.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, operands in (("pack", ("cubins", "out")), ("verify", ("cubins",))):
        command = commands.add_parser(name)
        for operand in operands:
            command.add_argument(operand, type=Path)
    args = parser.parse_args(argv)
    try:
        if args.command == "pack":
            write_atomically(args.out, pack(args.cubins))
        else:
            verify(args.cubins)
    except (BundleError, OSError) as error:
        sys.stderr.write(f"bundle.py: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
