# SPDX-License-Identifier: Apache-2.0
"""Bundles made for a test: the committed one with a changed manifest, or changed bytes."""

import copy
import hashlib
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aot import bundle
from support.expected import ROOT, manifest

HEADER = struct.Struct("<8sIIQIIIIQQQ32s32x")
FIELDS = (
    "magic", "schema", "header_bytes", "total_bytes", "variants", "schedules", "images", "zero",
    "off_variants", "off_schedules", "off_images", "sha256",
)  # fmt: skip
RECORD_BYTES = {"variants": 128, "schedules": 64, "images": 192}


def committed() -> bytes:
    """The committed bundle, packed."""
    return bundle.pack(ROOT / "cubins")


def with_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """bundle.bin in `folder` of the committed images under a manifest that `change` edited."""
    table = copy.deepcopy(manifest())
    change(table)
    cubins = folder / "cubins"
    for image in table["images"]:
        target = cubins / image["file"]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / "cubins" / image["file"], target)
    (cubins / "manifest.json").write_text(bundle.dumps(table))
    path = folder / "bundle.bin"
    path.write_bytes(bundle.pack(cubins))
    return path


def header(data: bytes) -> dict[str, Any]:
    """The header's fields."""
    return dict(zip(FIELDS, HEADER.unpack_from(data), strict=True))


def first_image(data: bytes) -> int:
    """Offset of the first image, where the tables end."""
    fields = header(data)
    at = range(fields["off_images"], fields["off_images"] + fields["images"] * 192, 192)
    return min(struct.unpack_from("<Q", data, start + 24)[0] for start in at)


def with_header(data: bytes, **replaced: Any) -> bytes:
    """The same file with header fields replaced."""
    fields = header(data) | replaced
    return HEADER.pack(*fields.values()) + data[HEADER.size :]


def with_record(data: bytes, table: str, index: int, offset: int, value: bytes) -> bytes:
    """The same file with bytes of one record replaced and the tables' digest put right."""
    at = header(data)[f"off_{table}"] + index * RECORD_BYTES[table] + offset
    data = data[:at] + value + data[at + len(value) :]
    return with_header(data, sha256=hashlib.sha256(data[128 : first_image(committed())]).digest())


def word(value: int) -> bytes:
    """A little-endian int32."""
    return struct.pack("<i", value)


def flip(data: bytes, at: int) -> bytes:
    """One bit changed."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
