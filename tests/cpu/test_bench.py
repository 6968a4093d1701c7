# SPDX-License-Identifier: Apache-2.0
"""The command csa-runtime bench without a GPU: a stored run shown, drawn and compared."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from csa_runtime import _native
from csa_runtime.__main__ import main
from csa_runtime.bench import tables
from csa_runtime.bench.options import SECTIONS
from csa_runtime.bench.packs import CALLS, TOKENS, Pack
from csa_runtime.bench.record import COPY, EAGER, OURS, PEER, Record, Row, read
from csa_runtime.bench.times import Times
from csa_runtime.errors import DriverError
from support.stored_run import STORED

pytestmark = pytest.mark.L0

ROOT = Path(__file__).resolve().parents[2]
NO_DRIVER = DriverError("cuInit: long story", "CUDA_ERROR_NO_DEVICE", 100, "cuInit")


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has."""

    def refuse() -> None:
        raise NO_DRIVER

    monkeypatch.setattr(_native, "driver_info", refuse)


@pytest.fixture
def stored() -> Record:
    """The stored run."""
    return read(STORED)


def row_of(text: str, pack: str, table: int = 0) -> list[str]:
    """Cells of a pack's row in the `table`-th table that has it."""
    rows = [line for line in text.splitlines() if line.startswith(f"| {pack} |")]
    return [cell.strip() for cell in rows[table].strip("|").split("|")]


def test_a_stored_run_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "found.md"
    assert main(["bench", "--from", str(STORED), "--markdown", str(file)]) == 0
    text = capsys.readouterr().out
    assert text == file.read_text()
    assert text.startswith("NVIDIA H200: capability 9.0, driver CUDA 13.0, torch 2.11.0+cu130")
    assert "Not measured" not in text
    pack = "4, 2, 512, 3x8192"
    assert row_of(text, pack) == [
        pack, "106.9 / 207.6", "27.36 / 50.71", "25.25 (0.92)", "92%", "62.52 (1.23)", "115%", "-",
    ]  # fmt: skip
    assert row_of(text, pack, 1)[2:] == [
        "26.51 / 50.23", "25.33 (0.96)", "96%", "60.58 (1.21)", "113%", "58.64 + 1.94",
    ]  # fmt: skip
    assert row_of(text, "4, 2, 512, 32768x8")[2:] == [
        "273.05* / 520.91", "232.09 (-)", "1.152", "526.12 (1.01)", "1.041",
    ]  # fmt: skip
    slow = "128, 2, 512, 1x131072"
    assert row_of(text, slow)[2:] == [
        "126.87 / 389.16*", "127.68 (1.01)", "102%", "291.79 (-)", "-", "-",
    ]  # fmt: skip
    assert text.count("Marked *: a copy ") == 2  # in a graph and of segments, none in kernels
    assert "Marked *: a copy " in tables.short(read(STORED))


def test_other_systems_stand_beside_ours_and_failures_at_the_end(stored: Record) -> None:
    pack = Pack(4, 2, 512, (8192,) * 3)
    for section in ("graph", "kernels", "wall", "cold", "tokens"):
        for system, us in ((COPY, 50.0), (OURS, 80.0), (EAGER, 1600.0)):
            stored.rows = [r for r in stored.rows if r.key != (section, pack.name, system, "both")]
            stored.add(pack, Row(section, pack.name, system, "both", us))
    host = Pack(4, 2, 128, (64,))
    stored.add(host, Row("host", host.name, OURS, "launch_forward", 4.25))
    stored.add(host, Row("alone", host.name, OURS, "launch_forward", 14.5))
    stored.add(pack, Row("graph", pack.name, PEER, "all", None, error="RuntimeError: too old"))
    stored.seconds["graph"] = 12.5
    text = tables.render(stored)
    assert row_of(text, pack.name)[-1] == "80.00"
    assert row_of(text, pack.name, 1) == [pack.name, "-", "-", "1600 (20.0)"]
    assert row_of(text, host.name) == [host.name, OURS, "launch_forward", "4.25", "14.50"]
    assert "\n12.5 s\n" in text
    assert text.endswith(f"- graph, {pack.name}, peer, all: RuntimeError: too old")
    assert all(f"## {section.capitalize()}" in text for section in SECTIONS)


def test_a_failed_call_of_this_library_is_a_failure(stored: Record, tmp_path: Path) -> None:
    pack, file = Pack(4, 2, 512, (8192,)), tmp_path / "run.json"
    for system, status in ((PEER, 0), (OURS, 1)):
        stored.add(pack, Row("wall", pack.name, system, "both", None, error="RuntimeError: no"))
        stored.write(file)
        assert main(["bench", "--from", str(file)]) == status


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "graph", "--systems", "csa_runtime"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(
        "csa-runtime bench: no GPU (CUDA_ERROR_NO_DEVICE (100) from cuInit)"
    )
    assert "--from FILE" in shown.err and shown.err.count("\n") == 1


def test_a_gpu_without_images_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = {"name": "Old", "compute_capability": 70, "arch": None, "ordinal": 0}
    monkeypatch.setattr(_native, "driver_info", lambda: {"version": 12000, "devices": [device]})
    assert main(["bench"]) == 1
    assert "no image for Old, compute capability 7.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sideways"], "'sideways' is none of graph, wall"),
        (["--systems", "csa_runtime,other"], "'other' is none of csa_runtime, eager, peer"),
        (["--pack", "4,2,512"], "SEGMENTSxLENGTH is wanted"),
        (["--pack", "4,3,512,1x8192"], "SEGMENTSxLENGTH is wanted"),
        (["--pack", "4,2,512,1x3"], "at least RATIO tokens"),
    ],
)
def test_malformed_options_are_explained(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_options_that_would_be_in_vain_are_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in (
        (["--from", str(STORED), "graph"], "--from measures nothing"),
        (["--json", str(tmp_path)], "cannot be written"),
        (["--markdown", str(tmp_path / "none" / "x.md")], "cannot be written"),
    ):
        assert main(["bench", *arguments]) == 1
        assert words in capsys.readouterr().err


def test_plots_are_drawn(tmp_path: Path, stored: Record) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib, which is not installed")
    from csa_runtime.bench import plots

    assert [path.name for path in plots.draw(stored, tmp_path)] == [
        "share_of_limit.png", "time_by_segments.png",
    ]  # fmt: skip
    for pack in TOKENS:
        for system, factor in ((COPY, 1.0), (OURS, 1.1), (EAGER, 20.0)):
            for call in CALLS:
                us = factor * (2 + pack.bytes(call) / 4.2e6)
                stored.add(pack, Row("tokens", pack.name, system, call, us))
    drawn = plots.draw(stored, tmp_path)
    assert [path.name for path in drawn] == [
        "share_of_limit.png", "time_by_tokens.png", "time_by_segments.png",
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert plots.draw(Record(), tmp_path) == []


def test_a_slow_copy_is_not_drawn(stored: Record) -> None:
    """Neither a share of the limit that it makes, nor itself; what is beyond an axis is written."""
    pytest.importorskip("matplotlib", reason="plots need matplotlib, which is not installed")
    from csa_runtime.bench import plots

    def shares() -> list[list[str]]:
        figure = plots.shares(Times(stored))
        return [[text.get_text() for text in axis.texts] for axis in figure.axes]

    texts = shares()
    assert [each.count("-") for each in texts] == [0, 1] and "72" not in texts[1]
    one, many = TOKENS[-1], Pack(4, 2, 512, (8,) * 32768)
    for factor in (1, 2):
        for pack in TOKENS:
            us = factor ** (pack is one) * pack.bytes("forward") / 4.2e6
            stored.add(pack, Row("tokens", pack.name, COPY, "forward", us))
        lines = [axis.lines for axis in plots.by_tokens(Times(stored)).axes]
        drawn = sum(len(each.get_xdata()) for axis in lines for each in axis)
        assert drawn == len(TOKENS) - factor + 1
    twice = [
        replace(row, us=2 * row.us) if row.us and row.pack == many.name else row
        for row in stored.rows
    ]
    figure = plots.by_segments(Times(replace(stored, rows=twice)))
    written = [text.get_text() for axis in figure.axes for text in axis.texts]
    assert sorted(written) == ["2.08 \u25b2", "2.30 \u25b2", "47.77 \u25b3"]


def test_a_run_is_published_into_the_readme(tmp_path: Path) -> None:
    """Its table between the marks, its plots beside it, and a check that both agree."""
    pytest.importorskip("matplotlib", reason="plots need matplotlib, which is not installed")
    readme, marks = tmp_path / "README.md", "<!-- tools/publish_bench writes from here -->"
    tool = [sys.executable, str(ROOT / "tools" / "publish_bench"), "--root", str(tmp_path)]

    def publish(*arguments: str) -> int:
        return subprocess.run([*tool, *arguments], check=False, capture_output=True).returncode

    (tmp_path / "docs").mkdir()
    readme.write_text("# Title\n")
    assert publish(str(STORED)) == 1 and readme.read_text() == "# Title\n"
    readme.write_text(f"# Title\n{marks}old\n<!-- to here -->\nend\n")
    assert publish(str(STORED)) == 0
    text = readme.read_text()
    assert text.startswith("# Title\n") and text.endswith("<!-- to here -->\nend\n")
    assert "old" not in text and text.count("| 4, 2, 512, 3x8192 |") == 1
    assert "docs/plots/share_of_limit.png" in text and "time_by_tokens" not in text
    assert read(tmp_path / "docs" / "plots" / "bench.json") == read(STORED)
    assert publish("--check") == 0
    readme.write_text(text.replace("25.25", "24.25"))
    assert publish("--check") == 1


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (None, "-"), (0.5, "50%"), (0.994, "99%"), (0.9958, "99.6%"), (0.9998, "99.98%"),
        (1.0, "100.00%"), (1.00017, "100.02%"), (1.004, "100.4%"), (1.006, "101%"), (2.5, "250%"),
    ],
)  # fmt: skip
def test_a_share_of_a_limit_says_on_which_side_it_is(part: float | None, text: str) -> None:
    assert tables.percent(part) == text


def test_the_readme_says_what_the_published_run_does() -> None:
    tool = [sys.executable, str(ROOT / "tools" / "publish_bench"), "--check"]
    done = subprocess.run(tool, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "run tools/publish_bench docs/plots/bench.json"


def run_elsewhere(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that looks into `folders` first."""
    paths = [*map(str, folders), *filter(None, sys.path)]
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, cwd="/", check=False,
    )  # fmt: skip


def test_missing_matplotlib_is_explained(tmp_path: Path) -> None:
    """And which extra brings it."""
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')\n")
    arguments = ["bench", "--from", str(STORED), "--plots", str(tmp_path / "plots")]
    code = f"import sys, csa_runtime.__main__ as m; sys.exit(m.main({arguments!r}))"
    done = run_elsewhere(code, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install '.[bench]'" in done.stderr and "Traceback" not in done.stderr


def test_a_stored_run_is_shown_without_torch_and_matplotlib() -> None:
    arguments = ["bench", "--from", str(STORED)]
    code = (
        f"import sys, csa_runtime.__main__ as m; status = m.main({arguments!r});"
        "sys.exit(status or bool({'torch', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    done = run_elsewhere(code)
    assert done.returncode == 0, done.stderr
