# SPDX-License-Identifier: Apache-2.0
"""tools/traffic without a GPU: the profiler's table read, summed per call, and judged."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.profiled import printed, stand_in
from support.tools import TOOLS, load

pytestmark = pytest.mark.L0


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tool as a module."""
    return load("traffic", monkeypatch)


def calls_of(tool: Any, text: str) -> list[Any]:
    """The calls that the profiler printed."""
    calls: list[Any] = tool.profiler.per_call(tool.profiler.parse(text))
    return calls


def counted(tool: Any, read: int, stored: int, written: int, **others: str) -> dict[str, str]:
    """Counters of a kernel, bytes given."""
    names = tool.counts
    return {
        names.READ: f"{read:,}",
        names.WRITTEN: str(written),
        names.STORED[1]: f"{2 * stored / 32:.1f}",  # where the halves of the cache pass it on
        names.STORED[0]: f"{stored / 32:.1f}",
        names.USED.format("ld"): others.get("ld", "98.5"),
        names.USED.format("st"): "100",
        names.SECTORS.format("ld"): "n/a",
    }


def expected(tool: Any, call: str) -> Any:
    """Of a gigabyte read and as much written, with a cache of 50 MB."""
    return tool.counts.Expected("p", call, 10**9 - 10**7, 10**9 - 10**6, 10**7, 10**6, 50_000_000)


def test_kernels_become_calls_and_calls_are_judged(tool: Any) -> None:
    text = printed(
        [
            ("csa_forward_r4_c2_bf16_v4_0", counted(tool, 10**9, 10**9, 960_000_000)),
            ("csa_backward_r4_c2_bf16_v4_0", counted(tool, 990_000_000, 999 * 10**6, 950 * 10**6)),
            ("csa_finish_f32_e32_0", counted(tool, 10**7, 10**6, 0)),
        ]
    )
    calls = calls_of(tool, text)
    assert [len(kernels) for kernels in calls] == [1, 2]
    rows = [
        tool.counts.judge(expected(tool, call), kernels)
        for call, kernels in zip(("forward", "backward"), calls, strict=True)
    ]
    assert [row["wrong"] for row in rows] == [[], []]
    assert rows[1]["dram_read"] == rows[1]["stored"] == 10**9 and rows[0]["loaded"] is None
    last = tool.counts.markdown(rows).splitlines()[-1]
    assert last == (
        "| p | backward | 1000.0 | 1.0000 | 1000.0 | 1.0000 | 0.9500 "
        "| 98.5, (-), 100.0 | -, - | - |"
    )


@pytest.mark.parametrize(
    ("read", "stored", "written", "ld", "words"),
    [
        (1_011_000_000, 10**9, 10**9, "98", "+1.1% bytes read from memory"),
        (980_000_000, 10**9, 10**9, "98", "-2.0% bytes read from memory"),
        (10**9, 1_020_000_000, 10**9, "98", "+2.0% bytes written to the cache"),
        (10**9, 10**9, 1_030_000_000, "98", "+3.0% bytes written to memory"),
        (10**9, 10**9, 900_000_000, "98", "-10.0% bytes written to memory"),
        (10**9, 10**9, 10**9, "50", "ld: 50.0% of a sector used"),
    ],
)
def test_what_is_beyond_its_tolerance_is_named(
    tool: Any, read: int, stored: int, written: int, ld: str, words: str
) -> None:
    kernels = [("csa_forward_x", counted(tool, read, stored, written, ld=ld))]
    calls = calls_of(tool, printed(kernels))
    assert tool.counts.judge(expected(tool, "forward"), calls[0])["wrong"] == [words]


@pytest.mark.parametrize(("written", "wrong"), [(3_200_000, False), (9_000_000, True)])
def test_what_the_cache_held_before_may_reach_memory_beside_a_small_output(
    tool: Any, written: int, wrong: bool
) -> None:
    small = tool.counts.Expected("p", "forward", 537_000_000, 2_000_000, 0, 0, 50_000_000)
    kernels = [("csa_forward_x", counted(tool, 537_000_000, 2_000_000, written))]
    calls = calls_of(tool, printed(kernels))
    assert bool(tool.counts.judge(small, calls[0])["wrong"]) == wrong


# Sectors: nine tenths of the gigabyte that is read; less than a hundredth of all bytes moved.
MOST, FEW = "28125000", "624999"


@pytest.mark.parametrize(
    ("ld", "copies", "used", "wrong"),
    [
        (FEW, MOST, "95", []),
        (FEW, MOST, "94.9", ["ldgsts: 94.9% of a sector used"]),
        ("625000", MOST, "95", ["ld: 12.5% of a sector used"]),
        ("n/a", MOST, "95", ["ld: 12.5% of a sector used"]),
        (FEW, "28124999", "95", ["ld: 12.5% of a sector used"]),
        (FEW, MOST, "n/a", ["ld: 12.5% of a sector used"]),
        (FEW, "n/a", "95", ["ld: 12.5% of a sector used"]),
        (FEW, "0", "0", ["ld: 12.5% of a sector used"]),
        (FEW, "7", "10", ["ld: 12.5% of a sector used", "ldgsts: 10.0% of a sector used"]),
    ],
)
def test_few_scattered_loads_are_not_judged_where_copies_bring_the_windows(
    tool: Any, ld: str, copies: str, used: str, wrong: list[str]
) -> None:
    names = tool.counts
    counters = counted(tool, 10**9, 10**9, 10**9, ld="12.5") | {
        names.ASKED.format("ld"): ld,
        names.ASKED.format("ldgsts"): copies,
        names.USED.format("ldgsts"): used,
    }
    (kernels,) = calls_of(tool, printed([("csa_backward_x", counters)]))
    found = tool.counts.judge(expected(tool, "backward"), kernels)
    assert found["wrong"] == wrong and found["used_ld"] == 12.5
    assert ("ld" in found["unjudged"]) == ("ld: 12.5% of a sector used" not in wrong)
    assert ("(12.5)" in tool.counts.markdown([found])) == ("ld" in found["unjudged"])


def test_stores_are_judged_however_few(tool: Any) -> None:
    names = tool.counts
    counters = counted(tool, 10**9, 10**9, 10**9) | {
        names.USED.format("st"): "50", names.ASKED.format("st"): "9",
    }  # fmt: skip
    (kernels,) = calls_of(tool, printed([("csa_forward_x", counters)]))
    found = tool.counts.judge(expected(tool, "forward"), kernels)
    assert found["wrong"] == ["st: 50.0% of a sector used"]


def test_all_that_is_judged_is_asked_for(tool: Any) -> None:
    names = tool.counts
    for op in names.FULL:
        assert {names.USED.format(op), names.ASKED.format(op)} <= set(names.METRICS)


def test_missing_counters_are_wrong_only_where_bytes_are_missing(tool: Any) -> None:
    text = printed([("csa_forward_x", {tool.counts.READ: "1000000000"})])
    found = tool.counts.judge(expected(tool, "forward"), calls_of(tool, text)[0])
    assert found["wrong"] == ["bytes written to the cache were not counted"]
    with pytest.raises(ValueError, match="no table"):
        tool.profiler.parse("==ERROR== ERR_NVGPUCTRPERM\n")


PROFILER = """
asked = given[given.index("--metrics") + 1].split(",")
if "lts__t_sectors_op_read.sum" in asked:
    sys.exit("==ERROR== Failed to find metric lts__t_sectors_op_read.sum")
pathlib.Path(given[-1]).write_text({plan!r})
print({text!r})
"""


@pytest.mark.parametrize(("read", "status"), [(10**9, 0), (2 * 10**9, 1)])
def test_the_command_runs_the_profiler_and_asks_again_without_what_it_does_not_know(
    tool: Any, tmp_path: Path, read: int, status: int
) -> None:
    plan = json.dumps([expected(tool, "forward")._asdict()])
    text = printed([("csa_forward_x", counted(tool, read, 10**9, 10**9))])
    fake = stand_in(tmp_path, PROFILER.format(plan=plan, text=text))
    found = tmp_path / "found.json"
    command = [sys.executable, str(TOOLS / "traffic"), "--ncu", str(fake), "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert "not counted here: lts__t_sectors_op_read.sum" in done.stderr
    assert done.stdout.count("\n") == 3 and json.loads(found.read_text())[0]["dram_read"] == read


def test_without_a_profiler_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOLS / "traffic"), "--ncu", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "traffic: no profiler" in done.stderr
