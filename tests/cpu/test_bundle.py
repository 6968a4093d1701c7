# SPDX-License-Identifier: Apache-2.0
"""The committed bundle, its packed form read back by an independent parser, and damage to it."""

import hashlib
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aot import bundle
from aot.compare import compare

ROOT = Path(__file__).resolve().parents[2]
CUBINS = ROOT / "cubins"
OPERATIONS = ["", "forward", "backward", "finish"]
DTYPES = ["f32", "bf16"]
KINDS = ["finish", "short", "long", "buffered", "early"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the committed bundle that a test may damage."""
    return Path(shutil.copytree(CUBINS, tmp_path / "cubins"))


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    """The committed manifest."""
    return json.loads((CUBINS / "manifest.json").read_text())


def edit(tree: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply `change` to a tree's manifest, which stays canonical."""
    manifest = json.loads((tree / "manifest.json").read_text())
    change(manifest)
    (tree / "manifest.json").write_text(bundle.dumps(manifest))


def text(field: bytes) -> str:
    """A NUL-padded name."""
    name, _, padding = field.partition(b"\0")
    assert not any(padding)
    return name.decode()


def unpack(data: bytes) -> dict[str, Any]:
    """bundle.bin by fixed offsets, sharing nothing with the packer."""
    assert data[:8] == b"CSABNDL\0"
    schema, header_bytes = struct.unpack_from("<II", data, 8)
    (total,) = struct.unpack_from("<Q", data, 16)
    variants, schedules, images, zero = struct.unpack_from("<4I", data, 24)
    at_variants, at_schedules, at_images = struct.unpack_from("<3Q", data, 40)
    assert (schema, header_bytes, total, zero) == (3, 128, len(data), 0)
    assert (at_variants, at_schedules) == (128, 128 + 128 * variants)
    assert at_images == at_schedules + 64 * schedules
    assert not any(data[96:128])
    table: dict[str, Any] = {"variants": [], "schedules": [], "images": []}
    for i in range(variants):
        record = data[at_variants + 128 * i :][:128]
        numbers = struct.unpack_from("<7iI2i", record, 64)
        ids = list(record[104:128])
        assert ids[numbers[7] :] == [0xFF] * (24 - numbers[7])
        name, (rows,) = text(record[:60]), struct.unpack_from("<i", record, 60)
        table["variants"].append((name, rows, *numbers[:7], *numbers[8:], ids[: numbers[7]]))
    for i in range(schedules):
        record = data[at_schedules + 64 * i :][:64]
        table["schedules"].append(struct.unpack_from("<10iq", record))
        assert not any(record[48:])
    for i in range(images):
        record = data[at_images + 192 * i :][:192]
        numbers = struct.unpack_from("<4i2I2Q", record)
        table["images"].append((*numbers, record[40:72], text(record[72:168])))
        assert not any(record[168:])
    first = min(image[6] for image in table["images"])
    assert 0 <= first - (at_images + 192 * images) < 64
    assert hashlib.sha256(data[128:first]).digest() == data[64:96]
    return table


def test_packed_bundle_holds_exactly_the_committed_tree(manifest: dict[str, Any]) -> None:
    data = bundle.pack(CUBINS)
    table = unpack(data)
    ids = {name: p["id"] for name, p in manifest["parameters"].items()}
    names = [v["name"] for v in manifest["variants"]]
    for v, (name, rows, operation, ratio, coff, dtype, *rest) in zip(
        manifest["variants"], table["variants"], strict=True
    ):
        assert (name, rows) == (v["name"], v["rows"])
        assert (OPERATIONS[operation], ratio, coff) == (v["operation"], v["ratio"], v["coff"])
        assert DTYPES[dtype] == v["dtype"]
        params = [ids[p] for p in v["params"]]
        assert rest[:3] == [v["columns"], v["threads"], v["dynamic_shared"]]
        assert (KINDS[rest[3]], *rest[4:]) == (v["kind"], v["alignment"], params)
    for s, row in zip(manifest["schedules"], table["schedules"], strict=True):
        arch, operation, ratio, coff, dtype, variant, lanes, ctas, fill, each, elements = row
        assert (arch, OPERATIONS[operation], ratio) == (s["arch"], s["operation"], s["ratio"])
        assert (coff, DTYPES[dtype], names[variant]) == (s["coff"], s["dtype"], s["variant"])
        assert (lanes, ctas, fill) == (s["lanes_log2"], s["ctas"], s["fill_ctas"])
        assert (elements, each) == (s["max_elements"], s["max_rows_per_segment"])
    end = 0
    for i, row in zip(manifest["images"], table["images"], strict=True):
        variant, arch, registers, shared, flags, zero, offset, size, digest, symbol = row
        assert (names[variant], arch, symbol) == (i["variant"], i["arch"], i["symbol"])
        assert (registers, shared) == (i["registers"], i["static_shared"])
        assert (flags, zero, offset % 64) == (0, 0, 0)
        assert offset >= end
        assert not any(data[end:offset]) or end == 0
        end = offset + size
        assert data[offset:end] == (CUBINS / i["file"]).read_bytes()
        assert hashlib.sha256(data[offset:end]).digest() == digest == bytes.fromhex(i["sha256"])
    assert 0 <= len(data) - end < 64


def test_packing_is_deterministic_and_needs_only_the_script(tree: Path, tmp_path: Path) -> None:
    script = shutil.copy(ROOT / "aot" / "bundle.py", tmp_path / "alone.py")
    out = tmp_path / "out.bin"
    command = [sys.executable, "-I", "-S", script, "pack", str(tree), str(out)]
    subprocess.run(command, check=True, cwd=tmp_path)
    assert out.read_bytes() == bundle.pack(CUBINS) == bundle.pack(CUBINS)


def test_manifest_text_is_canonical(manifest: dict[str, Any]) -> None:
    text = (CUBINS / "manifest.json").read_text()
    assert text == json.dumps(manifest, sort_keys=True, indent=1) + "\n"


def test_another_text_of_the_same_manifest_is_refused(tree: Path) -> None:
    path = tree / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    with pytest.raises(bundle.BundleError, match="not canonical"):
        bundle.pack(tree)


def test_flipped_bit_in_an_image_is_refused(tree: Path, manifest: dict[str, Any]) -> None:
    path = tree / manifest["images"][0]["file"]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(bundle.BundleError, match="sha256 differs"):
        bundle.pack(tree)


def test_cut_missing_and_unlisted_images_are_all_named(
    tree: Path, manifest: dict[str, Any]
) -> None:
    cut, missing = (tree / image["file"] for image in manifest["images"][:2])
    cut.write_bytes(cut.read_bytes()[:-1])
    missing.unlink()
    (tree / "sm_90" / "stray.cubin").write_bytes(b"")
    with pytest.raises(bundle.BundleError) as caught:
        bundle.pack(tree)
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    for name in (cut.name, missing.name, "stray.cubin"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m: m.update(schema=2), "schema"),
        (lambda m: m.pop("variants"), "malformed"),
        (lambda m: m["variants"].append(m["variants"][0]), "share a name"),
        (lambda m: m["variants"][0]["params"].append("color"), "unknown ones"),
        (lambda m: m["variants"][0]["params"].extend(["kv"] * 24), "too many parameters"),
        (lambda m: m["variants"][0].update(kind="wide"), "unknown kind 'wide'"),
        (lambda m: m["variants"][2].update(alignment=2), "aligned to 2 elements, reads 4"),
        (lambda m: m["variants"][0].pop("alignment"), "malformed"),
        (lambda m: m["parameters"]["kv"].update(id=1), "distinct"),
        (lambda m: m["schedules"][0].update(ratio=3), "not of its family"),
        (lambda m: m["schedules"][0].update(variant="none"), "not of its family"),
        (lambda m: m["schedules"][0].update(arch=70), "no image"),
        (lambda m: m["images"].append(m["images"][0]), "two images"),
        (lambda m: m["images"][0].update(file="../x"), "not where"),
        (lambda m: m["images"][0].update(frame=8), "frame 8"),
        (lambda m: m["images"][0].update(block=[1, 1, 1]), "block"),
        (lambda m: m["images"][0]["parameters"].pop(), "parameter layout"),
        (lambda m: m["images"][0].update(symbol="s" * 96), "does not fit"),
        (lambda m: m["variants"][0].update(dynamic_shared=2**31), "format requires|argument"),
    ],
)
def test_inconsistent_manifest_is_refused(
    tree: Path, change: Callable[[dict[str, Any]], object], complaint: str
) -> None:
    edit(tree, change)
    with pytest.raises(bundle.BundleError, match=complaint):
        bundle.pack(tree)


def test_command_fails_readably_and_writes_nothing(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "manifest.json").unlink()
    assert bundle.main(["pack", str(tree), str(tmp_path / "out.bin")]) == 1
    assert "manifest.json" in capsys.readouterr().err
    assert not (tmp_path / "out.bin").exists()


def test_comparison_is_empty_for_equal_and_names_what_differs(manifest: dict[str, Any]) -> None:
    other = json.loads(json.dumps(manifest))
    assert compare(manifest, other) == []
    other["images"][0]["registers"] += 1
    other["schedules"].pop()
    other["variants"].append({**other["variants"][0], "name": "new"})
    changed, added = compare(manifest, other)[0], compare(manifest, other)[-1]
    image = manifest["images"][0]
    assert changed.startswith(f"~ images / sm_{image['arch']} {image['variant']} / registers: ")
    assert added == "+ variants / new"
    assert sum(line.startswith("- schedules / ") for line in compare(manifest, other)) == 1


def test_comparison_sees_order(manifest: dict[str, Any]) -> None:
    other = json.loads(json.dumps(manifest))
    other["images"].reverse()
    assert compare(manifest, other) == ["~ the order of the variants, schedules or images"]
