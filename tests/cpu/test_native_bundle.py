# SPDX-License-Identifier: Apache-2.0
"""The launcher's parser: the packed bundle reads back; damage of any kind is a BundleError."""

import ast
import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from csa_runtime import _native
from support import fake
from support.bundles import committed, first_image, header, with_header, with_record
from support.expected import manifest
from support.problems import forward

pytestmark = pytest.mark.L0


def test_the_embedded_bundle_is_the_committed_one() -> None:
    info, table = _native.bundle_info(), manifest()
    assert info["source"] == "embedded" and info["schema"] == 1
    assert bytes.fromhex(info["sha256"]) == header(committed())["sha256"]
    keys = ("name", "operation", "ratio", "coff", "dtype", "columns", "threads", "dynamic_shared")
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


def word(value: int) -> bytes:
    """A little-endian int32."""
    return struct.pack("<i", value)


def quad(value: int) -> bytes:
    """A little-endian uint64."""
    return struct.pack("<Q", value)


def flip(data: bytes, at: int) -> bytes:
    """One bit changed."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda b: b"", "not a regular file with contents"),
    "shorter than a header": (lambda b: b[:127], "shorter than a header"),
    "truncated": (lambda b: b[:-1], "bytes, not the"),
    "longer": (lambda b: b + b"\0", "bytes, not the"),
    "cut after the header": (
        lambda b: with_header(b[:128], total_bytes=128),
        "a table lies outside",
    ),
    "cut after the tables": (
        lambda b: with_header(b[: first_image(b)], total_bytes=first_image(b)),
        "damaged",
    ),
    "another magic": (lambda b: b"X" + b[1:], "no bundle.bin"),
    "another schema": (
        lambda b: with_header(b, schema=2),
        "has schema 2; this library reads schema 1",
    ),
    "another header size": (lambda b: with_header(b, header_bytes=64), "bad header size"),
    "a bit of the tables": (lambda b: flip(b, 200), "tables: sha256 differs"),
    "the last bit of the tables": (lambda b: flip(b, first_image(b) - 1), "tables: sha256 differs"),
    "a bit of the digest": (
        lambda b: with_header(b, sha256=flip(header(b)["sha256"], 0)),
        "tables: sha256 differs",
    ),
    "too many variants": (lambda b: with_header(b, variants=2**32 - 1), "a table lies outside"),
    "too many images": (lambda b: with_header(b, images=2**16), "a table lies outside"),
    "table beyond the file": (lambda b: with_header(b, off_images=2**63), "a table lies outside"),
    "table within the header": (lambda b: with_header(b, off_variants=8), "a table lies outside"),
    "table off its alignment": (lambda b: with_header(b, off_variants=129), "a table lies outside"),
    "image over the tables": (
        lambda b: with_record(b, "images", 0, 24, quad(128)),
        "an image lies over a table",
    ),
    "image beyond the file": (lambda b: with_record(b, "images", 1, 24, quad(2**40)), "bad offset"),
    "image that wraps": (lambda b: with_record(b, "images", 1, 32, quad(2**64 - 64)), "bad size"),
    "image of no bytes": (lambda b: with_record(b, "images", 1, 32, quad(0)), "bad size"),
    "image of no variant": (lambda b: with_record(b, "images", 1, 0, word(999)), "no such variant"),
    "image of variant -1": (lambda b: with_record(b, "images", 1, 0, word(-1)), "no such variant"),
    "unending symbol": (
        lambda b: with_record(b, "images", 1, 72, b"x" * 96),
        "symbol is no string",
    ),
    "unending name": (lambda b: with_record(b, "variants", 0, 0, b"x" * 64), "name is no string"),
    "unknown operation": (
        lambda b: with_record(b, "variants", 0, 64, word(4)),
        "unknown operation",
    ),
    "no ratio": (lambda b: with_record(b, "variants", 0, 68, word(0)), "bad window"),
    "unknown dtype": (lambda b: with_record(b, "variants", 0, 76, word(9)), "unknown dtype"),
    "three columns": (lambda b: with_record(b, "variants", 0, 80, word(3)), "bad column count"),
    "block of 96": (lambda b: with_record(b, "variants", 0, 84, word(96)), "bad block size"),
    "negative shared": (lambda b: with_record(b, "variants", 0, 88, word(-1)), "bad shared size"),
    "many parameters": (
        lambda b: with_record(b, "variants", 0, 92, word(33)),
        "too many parameters",
    ),
    "unknown parameter": (lambda b: with_record(b, "variants", 0, 96, b"\x1b"), "does not know"),
    "schedule of no variant": (
        lambda b: with_record(b, "schedules", 0, 20, word(99)),
        "schedule 0: no such variant",
    ),
    "schedule of another family": (
        lambda b: with_record(b, "schedules", 0, 8, word(4)),
        "another family",
    ),
    "more lanes than threads": (
        lambda b: with_record(b, "schedules", 0, 24, word(8)),
        "bad lanes_log2",
    ),
    "negative CTAs": (lambda b: with_record(b, "schedules", 0, 28, word(-1)), "bad CTA count"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Each damaged file's error: one process, which forks a child for each file."""
    folder, data = tmp_path_factory.mktemp("damaged"), committed()
    paths = {}
    for number, (name, (change, _)) in enumerate(DAMAGE.items()):
        paths[name] = str(folder / f"{number}.bin")
        Path(paths[name]).write_bytes(change(data))
    script = f"""
results = {{}}
for name, path in {paths!r}.items():
    reader, writer = os.pipe()
    if os.fork() == 0:
        error = attempt(csa_runtime.load, 0, bundle=path)
        os.write(writer, json.dumps([error, attempt(csa_runtime.load, 0, bundle=path)]).encode())
        os._exit(0)
    os.wait()
    results[name] = json.loads(os.read(reader, 65536))
emit(results)
"""
    return fake.run(script).output


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_bundle_is_refused(name: str, outcomes: dict[str, Any]) -> None:
    error, again = outcomes[name]
    assert error is not None, "accepted"
    assert error["type"] == "BundleError" and DAMAGE[name][1] in error["text"], error["text"]
    assert again == error, "no half-open bundle is left behind"


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
        data = with_record(data, "variants", index, 92, word(4) + ids)
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


def test_the_environment_is_read_once() -> None:
    run = fake.run("""
os.environ["CSA_RUNTIME_BUNDLE"] = "/nowhere"
first = attempt(_native.bundle_info)
del os.environ["CSA_RUNTIME_BUNDLE"]
emit([first, attempt(_native.bundle_info)])
""")
    assert run.output[0]["type"] == "BundleError" and run.output[1] == run.output[0]
