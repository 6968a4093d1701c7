# SPDX-License-Identifier: Apache-2.0
"""Runs of csa-runtime bench as files: written, read, and compared with one another and limits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from csa_runtime.__main__ import main
from csa_runtime.bench import baseline, limits
from csa_runtime.bench.packs import Pack
from csa_runtime.bench.record import COPY, OURS, PEER, TWIN, Record, Row, read
from csa_runtime.bench.times import Times
from support.stored_run import STORED

pytestmark = pytest.mark.L0


@pytest.fixture
def stored() -> Record:
    """The stored run."""
    return read(STORED)


@pytest.mark.parametrize(
    ("call", "ratio", "megabytes", "copy_us", "allowed_us"),
    [
        ("forward", 4, 570, 134, 134 * 0.97),
        ("forward", 128, 538, 127, 127 * 0.99),
        ("backward", 128, 1075, 254, 254 * 1.04),
        ("forward", 128, 269, 64, 64 * 1.00),
        ("backward", 4, 208, 50, 50 * 1.07),
        ("forward", 4, 107, 26, 26 * 1.00),
        ("backward", 128, 135, 33, 33 * 1.12),
        ("forward", 4, 30, 6, 6 * 1.08),
        ("backward", 4, 69, 17, 17 * 1.20),
        ("forward", 4, 26, 4.5, 4.5 * 1.40),
        ("forward", 4, 8.9, 2.2, 3.2),
        ("backward", 4, 17, 3.3, 6.5),
        ("backward", 4, 29, 7, 7 * 1.70),
        ("forward", 128, 4.2, 1.2, 2.6),
        ("forward", 128, 7.9, 2, 2 * 2.0),
        ("backward", 128, 7.9, 2, None),
    ],
)
def test_limits_are_chosen_by_bytes_and_allow_the_larger_of_two(
    call: str, ratio: int, megabytes: float, copy_us: float, allowed_us: float | None
) -> None:
    share = limits.share(call, ratio, int(megabytes * 1e6), 10.0, copy_us)
    assert share == (None if allowed_us is None else pytest.approx(10.0 / allowed_us))


def test_a_run_survives_writing_and_reading(stored: Record, tmp_path: Path) -> None:
    pack = Pack(4, 2, 128, (64,))
    stored.add(pack, Row("host", pack.name, PEER, "all", None, error='said "no"'))
    stored.write(tmp_path / "run.json")
    assert read(tmp_path / "run.json") == stored


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 0}', '{"schema": 1, "rows": []}'])
def test_what_is_no_run_is_refused_by_name(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    assert main(["bench", "--from", str(file)]) == 1
    assert f"csa-runtime bench: {file} cannot be read: " in capsys.readouterr().err
    assert main(["bench", "--from", str(STORED), "--baseline", str(tmp_path / "none")]) == 1
    assert "none cannot be read: " in capsys.readouterr().err


def scaled(record: Record, factor: float, section: str, call: str) -> Record:
    """A copy of a run in which this library took longer there."""
    rows = [
        replace(row, us=row.us * factor)
        if (row.section, row.system, row.call) == (section, OURS, call) and row.us
        else row
        for row in record.rows
    ]
    return replace(record, rows=rows)


@pytest.mark.parametrize(
    ("factor", "section", "slower"),
    [(1.0, "graph", 0), (1.029, "graph", 0), (1.031, "graph", 12), (0.9, "graph", 0),
     (1.031, "segments", 13)],
)  # fmt: skip
def test_what_is_slower_than_a_baseline_is_listed(
    factor: float,
    section: str,
    slower: int,
    stored: Record,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "now.json"
    scaled(stored, factor, section, "backward").write(file)
    assert main(["bench", "--from", str(file), "--baseline", str(STORED)]) == (slower > 0)
    text = capsys.readouterr().out.partition(" times compared")[2]
    assert f"{slower} slower" in text and f"{12 * (factor == 0.9)} faster" in text
    assert text.count("| backward |") == slower and "| forward |" not in text
    assert slower == 0 or "| 3.1% | +0.0% |" in text


def test_what_is_slower_stands_first_and_the_hosts_times_do_not_count(stored: Record) -> None:
    pack = Pack(4, 2, 128, (64,))
    stored.add(pack, Row("host", pack.name, OURS, "launch_forward", 4.0))
    now = scaled(stored, 2.0, "host", "launch_forward")
    now = scaled(scaled(now, 1.1, "kernels", "forward"), 1.2, "graph", "forward")
    found = baseline.changes(stored, now)
    assert {change.key.section for change in found[:12]} == {"graph"}
    assert {change.key.section for change in found[12:24]} == {"kernels"}
    assert "host" not in {change.key.section for change in found}


def test_a_baseline_of_another_gpu_or_of_nothing_in_common_is_refused(
    stored: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    for other, words in (
        (replace(stored, machine={"gpu": "NVIDIA A100"}), "measured on NVIDIA A100, this run on"),
        (replace(stored, rows=[]), "no time in common"),
    ):
        other.write(file)
        assert main(["bench", "--from", str(STORED), "--baseline", str(file)]) == 1
        assert words in capsys.readouterr().err


def test_a_large_copy_at_less_than_four_fifths_of_the_best_speed_says_nothing() -> None:
    """Of its own section; small ones are slower anyway."""
    large, larger, small = (Pack(4, 2, 512, (n,)) for n in (65536, 131072, 8192))
    record = Record()

    def copy(section: str, pack: Pack, speed: float) -> Row:
        row = Row(section, pack.name, COPY, "forward", pack.bytes("forward") / speed / 1e6)
        record.add(pack, row)
        return row

    copy("tokens", large, 9.0)
    copy("graph", larger, 4.0)
    copy("graph", small, 2.0)
    copy("graph", small, 8.0)
    assert record.slow_copies() == set()
    copy("graph", large, 3.21)
    assert record.slow_copies() == set()
    record.rows.pop()
    slow = copy("graph", large, 3.19)
    assert record.slow_copies() == {slow.key}
    for name, system in (("ours", OURS), ("twin", TWIN)):
        record.add(large, replace(slow, system=system, us=100.0, note=name))
    times = Times(record)
    assert times.share("graph", large.name, "forward") is None
    assert times.share("graph", large.name, "forward", TWIN) is None
    assert times.beside("graph", large.name, OURS, "forward") == "100.00 (-, 1.00)"
    assert [change.copy for change in baseline.changes(record, record)] == [None]


def test_the_stored_run_is_one_row_a_line() -> None:
    """So that a difference of two shows which times changed."""
    text = STORED.read_text()
    rows = json.loads(text)["rows"]
    assert sum(line.startswith('  {"section"') for line in text.splitlines()) == len(rows) > 100
