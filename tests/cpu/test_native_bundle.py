# SPDX-License-Identifier: Apache-2.0
"""The launcher's parser: the packed bundle reads back; damage of any kind is a BundleError."""

import ast
import hashlib
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from csa_runtime import _native
from support import fake
from support.bundles import committed, first_image, flip, header, with_record, word
from support.expected import manifest
from support.problems import forward

pytestmark = pytest.mark.L0


def test_the_embedded_bundle_is_the_committed_one() -> None:
    info, table = _native.bundle_info(), manifest()
    assert info["source"] == "embedded" and info["schema"] == 3
    assert bytes.fromhex(info["sha256"]) == header(committed())["sha256"]
    keys = (
        "name", "operation", "ratio", "coff", "dtype", "kind", "columns", "alignment", "threads",
        "dynamic_shared",
    )  # fmt: skip
    assert info["variants"] == [{k: v[k] for k in keys} for v in table["variants"]]
    keys = ("variant", "arch", "sha256", "bytes", "registers", "static_shared", "symbol")
    assert info["images"] == [{k: i[k] for k in keys} for i in table["images"]]


def test_sha256_agrees_with_hashlib_at_every_block_boundary(tmp_path: Path) -> None:
    data = bytearray(committed())
    at, start = header(bytes(data))["off_images"], first_image(bytes(data)) + 64
    mine = [n for n, image in enumerate(manifest()["images"]) if image["arch"] == 80]
    assert mine[0] == 0, "it stays as it is, so that the tables end where they did"
    for index, size in zip(mine[1:], range(54, 54 + 4 * len(mine)), strict=False):
        digest = hashlib.sha256(data[start : start + size]).digest()
        struct.pack_into("<QQ32s", data, at + 192 * index + 24, start, size, digest)
    path = tmp_path / "b.bin"
    symbol = manifest()["images"][0]["symbol"].encode().ljust(96, b"\0")
    path.write_bytes(with_record(bytes(data), "images", 0, 72, symbol))
    run = fake.run(
        "emit(attempt(csa_runtime.load))",
        CSA_RUNTIME_BUNDLE=str(path),
        FAKE_CUDA_DEVICES="80",
    )
    assert run.output is None and len(run.named("cuLibraryLoadData")) == len(mine) > 20


def test_a_damaged_image_is_refused_when_it_loads(tmp_path: Path) -> None:
    data = committed()
    path = tmp_path / "b.bin"
    path.write_bytes(flip(data, len(data) - 100 - len(data) % 64))
    images = [i for i in manifest()["images"] if i["arch"] == manifest()["images"][-1]["arch"]]
    run = fake.run(
        "emit([attempt(csa_runtime.info), attempt(csa_runtime.load),"
        " attempt(csa_runtime.launch_forward, **forward())])",
        CSA_RUNTIME_BUNDLE=str(path),
        FAKE_CUDA_DEVICES=str(images[-1]["arch"]),
    )
    info, load, launch = run.output
    assert info is None and launch is None, "the other images still work"
    assert load["type"] == "BundleError" and "sha256 differs" in load["text"]
    assert f"image {images[-1]['variant']} for sm_{images[-1]['arch']}" in load["text"]


def explained(path: Path, capability: int) -> Any:
    """The launcher's account of a forward call under the bundle at `path`."""
    script = f"emit(repr(_native.explain('forward', compute_capability={capability}, **forward())))"
    return ast.literal_eval(fake.run(script, driver=False, CSA_RUNTIME_BUNDLE=str(path)).output)


@pytest.mark.parametrize(("capability", "arch"), [(80, 80), (85, 80), (86, 86), (89, 86), (90, 90)])
def test_the_highest_minor_not_above_the_devices_is_chosen(
    capability: int, arch: int, tmp_path: Path
) -> None:
    data, table = committed(), manifest()
    for name, offset in (("images", 4), ("schedules", 0)):
        for index, record in enumerate(table[name]):
            if record["arch"] == 120:
                data = with_record(data, name, index, offset, word(86))
    path = tmp_path / "b.bin"
    path.write_bytes(data)
    assert explained(path, capability)["arch"] == arch


def test_parameters_lie_at_natural_offsets_in_the_bundles_order(tmp_path: Path) -> None:
    data, table = committed(), manifest()
    ids = bytes(table["parameters"][name]["id"] for name in ("tokens", "kv", "rows", "out"))
    for index in range(len(table["variants"])):
        data = with_record(data, "variants", index, 92, word(4))
        data = with_record(data, "variants", index, 104, ids)
    path = tmp_path / "b.bin"
    path.write_bytes(data)
    call = forward()
    want = struct.pack("<ixxxxqixxxxq", call["tokens"], call["kv"], call["rows"], call["out"])
    assert explained(path, 90)["launches"][0]["parameters"] == want


@pytest.mark.parametrize("how", ["environment", "load"])
def test_a_bundle_by_path_is_parsed_by_the_same_code(how: str, tmp_path: Path) -> None:
    path = tmp_path / "b.bin"
    path.write_bytes(committed())
    chosen = f"csa_runtime.load(0, bundle={str(path)!r})" if how == "load" else ""
    run = fake.run(
        f"""{chosen}
os.unlink({str(path)!r}) if {how == "load"} else None
csa_runtime.launch_forward(**forward())
emit(_native.bundle_info())
""",
        **({"CSA_RUNTIME_BUNDLE": str(path)} if how == "environment" else {}),
    )
    assert run.output == _native.bundle_info() | {"source": str(path)}
    assert run.named("cuLibraryLoadData")[0]["aligned"] == 1 and len(run.launches) == 1


def test_a_bundle_chosen_after_first_use_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.bin"
    path.write_bytes(committed())
    run = fake.run(f"""
_native.bundle_info()
emit([attempt(csa_runtime.load, 0, bundle={str(path)!r}), attempt(csa_runtime.load, 0)])
""")
    late, plain = run.output
    assert late["type"] == "BundleError" and "after the first use" in late["text"]
    assert plain is None


def test_the_same_bundle_may_be_named_again(tmp_path: Path) -> None:
    path = tmp_path / "b.bin"
    path.write_bytes(committed())
    run = fake.run(
        f"emit([attempt(csa_runtime.load, d, bundle=p) for d, p in "
        f"((0, {str(path)!r}), (1, {str(path)!r}), (0, 'other'))])",
        FAKE_CUDA_DEVICES="90,90",
    )
    assert run.output[:2] == [None, None] and run.output[2]["type"] == "BundleError"


@pytest.mark.parametrize("path", ["/nowhere/b.bin", "/"])
def test_a_bundle_that_cannot_be_read_is_refused(path: str) -> None:
    run = fake.run(
        "emit(attempt(csa_runtime.launch_forward, **forward()))", CSA_RUNTIME_BUNDLE=path
    )
    assert run.output["type"] == "BundleError" and path in run.output["text"]
    assert run.calls == []


@pytest.mark.parametrize("how", ["environment", "load"])
def test_a_fifo_is_refused_without_waiting_for_a_writer(how: str, tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    run = fake.run(
        f"emit(attempt(csa_runtime.load, 0, bundle={(str(path) if how == 'load' else None)!r}))",
        **({"CSA_RUNTIME_BUNDLE": str(path)} if how == "environment" else {}),
    )
    assert run.output["type"] == "BundleError" and "not a regular file" in run.output["text"]


def test_the_environment_is_read_once() -> None:
    run = fake.run("""
os.environ["CSA_RUNTIME_BUNDLE"] = "/nowhere"
first = attempt(_native.bundle_info)
del os.environ["CSA_RUNTIME_BUNDLE"]
emit([first, attempt(_native.bundle_info)])
""")
    assert run.output[0]["type"] == "BundleError" and run.output[1] == run.output[0]
