# SPDX-License-Identifier: Apache-2.0
"""tools/counters without a GPU: the profiler's report asked for, read and tabulated."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.profiled import printed, stand_in
from support.tools import TOOLS, load

pytestmark = pytest.mark.L0

STATES = {
    "barrier": "0.14", "branch_resolving": "0.01", "dispatch_stall": "0.02", "drain": "0.00",
    "gmma": "0", "imc_miss": "0.01", "lg_throttle": "0.04", "long_scoreboard": "0.50",
    "math_pipe_throttle": "0.10", "membar": "0", "mio_throttle": "0.20", "misc": "0",
    "no_instruction": "0.06", "not_selected": "0.54", "selected": "1.00",
    "short_scoreboard": "0.46", "sleeping": "0", "tex_throttle": "0", "wait": "0.42",
}  # fmt: skip
BACKWARD = {
    "gpu__time_duration.sum": "85,024",
    "gpc__cycles_elapsed.avg.per_second": "1,487,000,000.51",
    "gpc__cycles_elapsed.max": "126,470",
    "sm__cycles_active.avg": "118,000.33",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "60.86",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "75.76",
    "sm__inst_issued.avg.pct_of_peak_sustained_elapsed": "52.43",
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_elapsed": "31.20",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed": "41.50",
    "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed": "22.00",
    "sm__inst_executed_pipe_tex.sum": "99,999",
    "smsp__issue_active.avg.per_cycle_active": "0.56",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "56.40",
    "smsp__issue_inst0.avg.pct_of_peak_sustained_active": "43.60",
    "sm__warps_active.avg.per_cycle_active": "7.98",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "12.47",
    "launch__waves_per_multiprocessor": "0.97",
    "launch__registers_per_thread": "178",
    "launch__cluster_scheduling_policy": "PolicySpread",
    **{f"smsp__average_warps_issue_stalled_{state}_per_issue_active.ratio": value
       for state, value in STATES.items()},
    "smsp__average_warps_issue_stalled_wait_not_issued_per_issue_active.ratio": "0.30",
}  # fmt: skip
NAMES = (
    "csa_forward_r128_c1_bf16_v4_t256_a8_0",
    "csa_backward_r128_c1_bf16_v2_t256_a8_ape_0",
    "csa_finish_f32_e32_0",
)
PACK = "128, 1, 512, 1x65536"
LINE = (
    f"| {PACK} | backward_r128_c1_bf16_v2_t256_a8_ape_0 | 85.02 | 1.49 | 93 | 56 | 44 | 61 | 76 |"
    " xu 42 | 8.0 (12) | 0.97 | 178 |"
    " issues 29, not selected 15, long scoreboard 14, short scoreboard 13 |"
)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tool as a module."""
    return load("counters", monkeypatch)


def rows_of(tool: Any, text: str, pack: str = PACK) -> list[dict[str, Any]]:
    """Records of a forward and a backward of one pack."""
    calls = tool.profiler.per_call(tool.profiler.parse(text))
    rows: list[dict[str, Any]] = tool.counters.records(
        [(pack, "forward"), (pack, "backward")], calls
    )
    return rows


def test_each_launch_has_its_line(tool: Any) -> None:
    rows = rows_of(tool, printed([(name, BACKWARD) for name in NAMES]))
    assert [(row["call"], row["kernel"]) for row in rows] == [
        ("forward", NAMES[0]), ("backward", NAMES[1]), ("backward", NAMES[2]),
    ]  # fmt: skip
    lines = tool.counters.table(rows).splitlines()
    assert len(lines) == 5 and lines[3] == LINE
    assert {line.count("|") for line in lines} == {len(tool.counters.HEADINGS) + 1}
    assert tool.counters.missing(rows) == []


def test_the_shares_of_a_warps_time_are_all_of_it(tool: Any) -> None:
    row = rows_of(tool, printed([(NAMES[0], BACKWARD)]))[0]
    assert sum(row["warp"].values()) == pytest.approx(100.0)
    assert set(row["warp"]) == set(STATES)
    assert row["warp"]["selected"] == pytest.approx(100 / 3.5)


@pytest.mark.parametrize(
    ("name", "instead", "value"),
    [
        ("gpc__cycles_elapsed.avg.per_second", "sm__cycles_elapsed.avg.per_second",
         "1,487,000,000"),
        ("gpc__cycles_elapsed.max", "sm__cycles_elapsed.max", "126,470"),
        ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
         "dram__throughput.avg.pct_of_peak_sustained_elapsed", "60.86"),
        ("sm__warps_active.avg.per_cycle_active", "smsp__warps_active.avg.per_cycle_active",
         "1.995"),
        ("smsp__issue_active.avg.pct_of_peak_sustained_active",
         "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active", "41.5"),
    ],
)  # fmt: skip
def test_other_counters_say_the_same(tool: Any, name: str, instead: str, value: str) -> None:
    """Other versions of the profiler, whose sections hold others."""
    counted = {key: cell for key, cell in BACKWARD.items() if key != name} | {instead: value}
    row = rows_of(tool, printed([(NAMES[1], counted)]))[0]
    assert "| " + " | ".join(tool.counters.cells(row)) + " |" == LINE


@pytest.mark.parametrize("cell", ["n/a", "", "nan", "(!) nan", "inf"])
def test_what_was_not_counted_is_an_empty_cell(tool: Any, cell: str) -> None:
    rows = rows_of(tool, printed([(NAMES[0], dict.fromkeys(BACKWARD, cell))]))
    assert set(tool.counters.cells(rows[0])[2:]) == {"-", "- (-)"}
    assert {"us", "issued", "active", "pipe", "warp"} <= set(tool.counters.missing(rows))


def test_counters_without_a_value_leave_the_others(tool: Any) -> None:
    without = BACKWARD | {"smsp__issue_inst0.avg.pct_of_peak_sustained_active": "n/a"}
    rows = rows_of(tool, printed([(NAMES[1], without), (NAMES[2], BACKWARD)]))
    assert "| 56 | - | 61 |" in tool.counters.table(rows) and tool.counters.missing(rows) == []


def test_calls_before_the_counted_one_are_not_counted(
    tool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward and a backward of each pack are, with the variant that was asked for."""
    torch = pytest.importorskip("torch")
    from csa_runtime.bench import ours, problem

    seen: list[str] = []

    class Profiler:
        def cudaProfilerStart(self) -> None:
            seen.append("start")

        def cudaProfilerStop(self) -> None:
            seen.append("stop")

    class Ours:
        def __init__(self, variant: str | None) -> None:
            self.variant = variant

        def calls(self, pack: Any) -> dict[str, Any]:
            names = tool.profiler.CALLS
            return {n: lambda n=n: seen.append(f"{pack.tokens} {n} {self.variant}") for n in names}

    monkeypatch.setattr(torch.cuda, "cudart", Profiler)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(ours, "Ours", Ours)
    monkeypatch.setattr(problem, "Problem", lambda pack: pack)
    packs = [tool.parse(pack.name) for pack in tool.TWELVE[:2]]
    assert packs == list(tool.TWELVE[:2])
    tool.profiler.launch(packs, 2, "v")
    assert seen == [
        word
        for tokens in (8192, 24576)
        for call in ("forward", "backward")
        for each in (f"{tokens} {call} v",)
        for word in (each, each, "start", each, "stop")
    ]


PROFILER = """
pathlib.Path({asked!r}).write_text(json.dumps(given))
print({text!r})
sys.exit({status})
"""


def command(fake: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """The tool over a stand-in for the profiler."""
    line = [sys.executable, str(TOOLS / "counters"), "--ncu", str(fake), *options]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_the_command_asks_for_all_packs_at_once_and_keeps_what_was_printed(tmp_path: Path) -> None:
    asked, raw, found = (tmp_path / name for name in ("asked", "raw.csv", "found.json"))
    text = printed([(name, BACKWARD) for name in NAMES])
    fake = stand_in(tmp_path, PROFILER.format(asked=str(asked), text=text, status=0))
    done = command(
        fake, "--pack", "128,1,512,1x65536", "--raw", str(raw), "--json", str(found),
        "--variant", NAMES[1],
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr
    assert done.stdout.splitlines()[3] == LINE
    assert json.loads(found.read_text())[1]["registers"] == 178
    given = json.loads(asked.read_text())
    assert given[given.index("--cache-control") + 1] == "none" and "--metrics" not in given
    assert given[given.index("--launch") :] == ["--launch", "--pack", PACK, "--variant", NAMES[1]]
    assert text in raw.read_text()
    again = command(tmp_path / "none", "--pack", "128,1,512,1x65536", "--from", str(raw))
    assert (again.returncode, again.stdout) == (0, done.stdout)


def test_twelve_packs_are_the_default_and_missing_calls_are_said(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    text = printed([(name, BACKWARD) for name in NAMES]) + "==ERROR== no memory\n"
    fake = stand_in(tmp_path, PROFILER.format(asked=str(asked), text=text, status=9))
    done = command(fake, "--cold")
    given = json.loads(asked.read_text())
    assert given.count("--pack") == 12
    assert given[given.index("--cache-control") + 1] == "all"
    assert done.returncode == 1 and done.stdout.count("\n") == 5
    assert "ended with 9: 24 calls were to be made, the profiler saw 2" in done.stderr
    assert "==ERROR== no memory" in done.stderr


def test_a_profiler_that_printed_no_table_is_quoted_and_kept(tmp_path: Path) -> None:
    raw, words = tmp_path / "raw.csv", "==ERROR== ERR_NVGPUCTRPERM"
    body = PROFILER.format(asked=str(tmp_path / "asked"), text=words, status=1)
    done = command(stand_in(tmp_path, body), "--raw", str(raw))
    assert done.returncode == 1 and "ended with 1: the profiler printed no table" in done.stderr
    assert words in done.stderr and words in raw.read_text()


def test_without_a_profiler_it_says_so(tmp_path: Path) -> None:
    done = command(tmp_path / "none")
    assert done.returncode == 1 and "counters: no profiler" in done.stderr
