# SPDX-License-Identifier: Apache-2.0
"""A damaged bundle.bin of any kind is a BundleError that says what is wrong."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import fake
from support.bundles import committed, first_image, flip, header, with_header, with_record, word
from support.expected import manifest

pytestmark = pytest.mark.L0

NAMES = [variant["name"] for variant in manifest()["variants"]]
REDUCE = next(i for i, v in enumerate(manifest()["variants"]) if v["operation"] == "finish")
LONG = next(i for i, v in enumerate(manifest()["variants"]) if v["kind"] == "long")
WIDE = next(i for i, v in enumerate(manifest()["variants"]) if v["columns"] == 4)
KINDS = {v["name"]: (v["operation"], v["kind"]) for v in manifest()["variants"]}
BACKWARD = [*KINDS.values()].index(("backward", "short"))
SHORT_BACKWARD = next(
    i for i, s in enumerate(manifest()["schedules"]) if KINDS[s["variant"]] == ("backward", "short")
)
FINISHED = next(i for i, s in enumerate(manifest()["schedules"]) if s["operation"] == "finish")
SCHEDULED = NAMES.index(manifest()["schedules"][0]["variant"])  # of the first row


def quad(value: int) -> bytes:
    """A little-endian uint64."""
    return struct.pack("<Q", value)


MISPLACED = "a table is not where the counts put it"
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
        "has schema 2; this library reads schema 3",
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
    "table beyond the file": (lambda b: with_header(b, off_images=2**63), MISPLACED),
    "table within the header": (lambda b: with_header(b, off_variants=8), MISPLACED),
    "table off its alignment": (lambda b: with_header(b, off_variants=129), MISPLACED),
    "a variant fewer": (
        lambda b: with_header(b, variants=header(b)["variants"] - 1),
        MISPLACED,
    ),
    "a schedule fewer": (
        lambda b: with_header(b, schedules=header(b)["schedules"] - 1),
        MISPLACED,
    ),
    "an image fewer": (
        lambda b: with_header(b, images=header(b)["images"] - 1),
        "tables: sha256 differs",
    ),
    "a spare byte": (lambda b: with_header(b, zero=1), "a spare byte is set"),
    "image over the tables": (
        lambda b: with_record(b, "images", 0, 24, quad(128)),
        "image 0: it lies over a table",
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
    "a symbol with a line break": (
        lambda b: with_record(b, "images", 1, 73, b"\n"),
        "symbol is no string of printable ASCII",
    ),
    "a name beyond ASCII": (
        lambda b: with_record(b, "variants", 0, 2, b"\xff"),
        "name is no string of printable ASCII",
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
    "unknown parameter": (lambda b: with_record(b, "variants", 0, 104, b"\x1d"), "does not know"),
    "unknown kind": (lambda b: with_record(b, "variants", 0, 96, word(5)), "bad kind"),
    "an early backward": (
        lambda b: with_record(b, "variants", BACKWARD, 96, word(4)),
        "bad kind",
    ),
    "a window of no kind": (lambda b: with_record(b, "variants", 0, 96, word(0)), "bad kind"),
    "a reduction with a window": (
        lambda b: with_record(b, "variants", REDUCE, 68, word(4)),
        "bad window",
    ),
    "a reduction of a kind": (
        lambda b: with_record(b, "variants", REDUCE, 96, word(1)),
        "bad kind",
    ),
    "a reduction of 16 elements a block": (
        lambda b: with_record(b, "variants", REDUCE, 80, word(16)),
        "bad column count",
    ),
    "alignment of 3": (lambda b: with_record(b, "variants", 0, 100, word(3)), "bad alignment"),
    "alignment of 256": (lambda b: with_record(b, "variants", 0, 100, word(256)), "bad alignment"),
    "alignment below the columns": (
        lambda b: with_record(b, "variants", WIDE, 100, word(1)),
        "bad alignment",
    ),
    "rows that are no power of two": (
        lambda b: with_record(b, "variants", 0, 60, word(3)),
        "bad row count",
    ),
    "more rows than a warp has lanes": (
        lambda b: with_record(b, "variants", 0, 60, word(64)),
        "bad row count",
    ),
    "a long window's threads with several rows": (
        lambda b: with_record(b, "variants", LONG, 60, word(2)),
        "bad row count",
    ),
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
    "a long window on half a warp": (
        lambda b: with_record(
            with_record(b, "schedules", 0, 24, word(4)), "variants", SCHEDULED, 96, word(2)
        ),
        "schedule 0: bad lanes_log2",
    ),
    "a backward whose block has one row of lanes": (
        lambda b: with_record(b, "schedules", SHORT_BACKWARD, 24, word(8)),
        f"schedule {SHORT_BACKWARD}: bad lanes_log2",
    ),
    "forward with CTAs": (
        lambda b: with_record(b, "schedules", 0, 28, word(1)),
        "only backward has CTAs",
    ),
    "a finish that writes no zeros": (
        lambda b: with_record(b, "schedules", FINISHED, 32, word(0)),
        f"schedule {FINISHED}: only finish fills",
    ),
    "negative CTAs": (lambda b: with_record(b, "schedules", 0, 28, word(-1)), "bad CTA count"),
    "fewer rows per segment than any": (
        lambda b: with_record(b, "schedules", 0, 36, word(-2)),
        "schedule 0: bad max_rows_per_segment",
    ),
    "a reduction of few rows per segment": (
        lambda b: with_record(b, "schedules", FINISHED, 36, word(4)),
        "bad max_rows_per_segment",
    ),
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


def test_no_single_bit_of_the_header_goes_unnoticed(tmp_path: Path) -> None:
    path, data = tmp_path / "b.bin", committed()
    path.write_bytes(data)
    run = fake.run(f"""
path, accepted = {str(path)!r}, []
with open(path, "r+b") as file:
    header = file.read(128)
    for bit in range(8 * 128):
        changed = bytearray(header)
        changed[bit // 8] ^= 1 << bit % 8
        file.seek(0); file.write(changed); file.flush()
        error = attempt(csa_runtime.load, 0, bundle=path)
        if error is None or error["type"] != "BundleError":
            accepted.append([bit, error])
            break
emit(accepted)
""")
    assert run.output == []
