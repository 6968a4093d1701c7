# SPDX-License-Identifier: Apache-2.0
"""What the measuring tools make of their arguments and of what they measured, without a GPU."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.tools import load

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"


@pytest.mark.L0
@pytest.mark.parametrize(
    "given", [("--launches", "50"), ("--launches", "499"), ("--batch", "0"), ("--batch", "-1")]
)
def test_host_cost_refuses_what_makes_no_batch(tmp_path: Path, given: tuple[str, ...]) -> None:
    """Before the C side reads the median of none."""
    command = [sys.executable, str(TOOLS / "host_cost"), *given]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "no batch at all" in done.stderr


@pytest.mark.L0
def test_host_costs_rounds_become_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of times and limits each: a round in which the machine was slow moves neither."""
    tool = load("host_cost", monkeypatch)
    rounds = [
        [tool.Row("launch", ns, None), tool.Row("call", 2 * ns, ns + 400)] for ns in (3, 90, 5)
    ]
    assert tool.of_rounds(rounds) == [("launch", 5, None), ("call", 10, 405)]


@pytest.mark.L0
@pytest.mark.parametrize(
    "tool", ["attest", "capture_storm", "counters", "gate", "host_cost", "peer", "traffic", "tune"]
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, tool: str
) -> None:
    option = "--log" if tool == "attest" else "--json"
    for path, why in ((tmp_path / "none" / "x.json", "no folder"), (tmp_path, "is a folder")):
        command = [sys.executable, str(TOOLS / tool), option, str(path)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 2 and why in done.stderr


@pytest.mark.L0
def test_rows_of_times_have_the_headings_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table drops what lies beyond them: why a system has no time."""
    monkeypatch.syspath_prepend(TOOLS)
    from comparison import times

    record = {
        "pack": "4, 2, 128, 1x64", "path": "classes", "operation": "forward",
        "times": {"csa_runtime": {"host": 1.0, "alone": 2.0}},
        "peer": {"error": "RuntimeError: no"}, "csa_runtime": {},
    }  # fmt: skip
    failed = "| 4, 2, 128, 1x64 | class, forward | - / 1.0 | - / 2.0 | RuntimeError: no |"
    assert times.host_line(record) == failed
    assert times.host_line(record | {"peer": {}}) == failed.replace("RuntimeError: no", "")


@pytest.mark.L0
def test_the_readme_says_what_the_evidence_does() -> None:
    """How many images a GPU has run, and how many tests passed there."""
    said = re.search(
        r"all (\d+) ran the GPU suite on an H200: ([\d,]+) tests passed, (\d+) need a second GPU",
        (ROOT / "README.md").read_text(),
    )
    assert said, "README.md has no such line"
    evidence = json.loads((ROOT / "cubins" / "attested" / "nvidia-h200.json").read_text())
    counts = len(evidence["images"]), evidence["suite"]["passed"], evidence["suite"]["skipped"]
    assert tuple(int(number.replace(",", "")) for number in said.groups()) == counts
    images = json.loads((ROOT / "cubins" / "manifest.json").read_text())["images"]
    assert counts[0] == sum(image["arch"] == 90 for image in images)
