# SPDX-License-Identifier: Apache-2.0
"""What csa-runtime bench measures with, as far as a CPU can run it."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from csa_runtime import compat
from csa_runtime.bench import clock, packs, sections
from csa_runtime.bench.eager import Eager
from csa_runtime.bench.options import SECTIONS
from csa_runtime.bench.ours import Ours
from csa_runtime.bench.packs import Pack, parse
from csa_runtime.bench.peer import Imported, Operations, Peer
from csa_runtime.bench.problem import Problem
from support.eager import eager
from support.packs import Pack as Tensors

pytestmark = pytest.mark.L0

ROOT = Path(__file__).resolve().parents[2]
SMALL = Pack(4, 2, 8, (9, 3, 16))
NAMES = SimpleNamespace(
    Forward=compat.CSACompressorForward,
    Backward=compat.CSACompressorBackward,
    forward=compat.csa_compressor_forward_wrapper,
    backward=compat.csa_compressor_backward_wrapper,
)


def consumed(pack: Pack) -> tuple[int, int]:
    """Elements of kv and of `out`, counted window by window."""
    ratio, coff, d, lengths = pack
    used: set[tuple[int, int]] = set()
    rows = start = 0
    for length in lengths:
        for block in range(length // ratio):
            rows += 1
            for half in range(coff):
                first = start + (block - (half == 0 and coff == 2)) * ratio
                used |= {(t, half) for t in range(first, first + ratio) if first >= start}
        start += length
    return len(used) * d, rows * d


@pytest.mark.parametrize("coff", [1, 2])
@pytest.mark.parametrize("lengths", [(8,), (9, 3, 16), (4,) * 5, (3,)])
def test_bytes_are_what_windows_consume(coff: int, lengths: tuple[int, ...]) -> None:
    pack = Pack(4, coff, 8, lengths)
    used, out = consumed(pack)
    assert pack.bytes("forward") == 2 * (2 * used + out)
    assert pack.bytes("backward") == 2 * (2 * used + out + 2 * sum(lengths) * coff * 8)


def test_names_of_packs_tell_them_apart() -> None:
    for several in (packs.PACKS, packs.TOKENS, tuple(packs.segments()), packs.HOST):
        names = [pack.name for pack in several]
        assert len(set(names)) == len(names)
        assert all(pack.tokens == sum(pack.lengths) for pack in several)
    assert parse("4, 2, 512, 3x8192") == Pack(4, 2, 512, (8192,) * 3)
    assert parse("4,2,512,3x8192").name == "4, 2, 512, 3x8192"
    counts = {pack.segments for pack in packs.segments()}
    assert {1, 32768} <= counts and len(packs.TWELVE) == 12
    assert packs.ragged(1000, 7) == packs.ragged(1000, 7) and sum(packs.ragged(1000, 7)) == 1000


@pytest.mark.parametrize("pack", [SMALL, Pack(4, 1, 8, (9, 3, 16)), Pack(128, 2, 4, (300, 128))])
def test_eager_is_the_reference(pack: Pack) -> None:
    problem = Problem(pack, "cpu")
    tensors = Tensors(*problem.inputs, problem.grad_out, pack.ratio, pack.coff, pack.rows)
    expected = eager(tensors)
    calls = Eager().calls(problem)
    assert torch.equal(calls["forward"](), expected.out)
    for name in ("backward", "backward", "both"):
        for got, want in zip(calls[name](), expected[1:], strict=True):
            assert torch.equal(got, want)
    assert set(Eager().host_calls(problem)) == {"eager, no gradient", "eager and autograd.grad"}


def test_a_system_with_the_drop_in_names_writes_into_the_problem() -> None:
    """Here this library's own, on the CPU."""
    problem = Problem(SMALL, "cpu")
    calls = Peer(NAMES).calls(problem)
    problem.grad_ape.fill_(7.0)
    calls["both"]()
    expected = eager(Tensors(*problem.inputs, problem.grad_out, 4, 2, SMALL.rows))
    assert torch.allclose(problem.out.float(), expected.out.float(), atol=1e-2)
    assert torch.equal(problem.grad_kv, expected.grad_kv)
    assert torch.allclose(problem.grad_ape, expected.grad_ape, atol=1e-5)
    made = Operations(NAMES, problem)
    assert set(made.compile_seconds) == {"forward", "backward", "deterministic"}
    for call in (*made.classes.values(), *made.wrappers.values(), *made.kernels.values()):
        call()
    assert len(Peer(NAMES).host_calls(problem)) == 4


def test_a_missing_or_older_peer_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(ImportError):
        Imported()
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace())
    with pytest.raises(ImportError, match="no CSA compressor"):
        Imported()


def test_a_variant_is_forced_where_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[dict[str, Any]] = []
    for name in ("launch_forward", "launch_backward"):
        monkeypatch.setattr(f"csa_runtime.{name}", lambda **fields: launched.append(fields))
    stream = SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    problem = Problem(SMALL, "cpu")
    variant = "csa_forward_r4_c2_bf16_v1"
    Ours(variant).calls(problem)["both"]()
    assert [fields["variant"] for fields in launched] == [variant, None]
    assert all(fields["stream"] == 77 and fields["rows"] == SMALL.rows for fields in launched)
    assert launched[0]["out"] == problem.out.data_ptr()
    assert launched[1]["workspace_bytes"] == problem.workspace.numel()
    assert len(Ours().host_calls(problem)) == 6


@pytest.mark.parametrize(("us", "few", "replays"), [(3.0, 50, 7), (900.0, 10, 3), (30000.0, 0, 0)])
def test_a_call_in_a_graph_is_a_difference_of_two(
    us: float, few: int, replays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU played by counting: a replay costs 20 us beside its calls."""
    made = calls = 0
    graphs: list[Any] = []
    filled: list[int] = []  # calls before the cache was filled
    rested: list[float] = []

    def run() -> None:
        nonlocal calls
        calls += 1

    @contextmanager
    def capture(graph: Any, stream: Any) -> Iterator[None]:
        before = calls
        yield
        graph.calls = calls - before

    def by_events(timed: Callable[[], Any]) -> float:
        nonlocal made
        if timed is run:
            return us
        made += 1
        return 20.0 + us * timed()

    def graph() -> Any:
        graphs.append(SimpleNamespace(calls=0))
        graphs[-1].replay = lambda g=graphs[-1]: g.calls
        return graphs[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(clock, "by_events", by_events)
    monkeypatch.setattr(clock, "fill_cache", lambda: filled.append(calls))
    monkeypatch.setattr(clock, "rest", rested.append)
    assert clock.graph_time(run) == pytest.approx(us)
    assert filled == [0]
    assert rested == ([pytest.approx(replays * (40.0 + 3 * few * us))] if few else [])
    assert [each.calls for each in graphs] == ([few, 2 * few] if few else [])
    assert made == 2 * replays


def test_durations_are_summed_per_call_and_lost_records_are_noticed() -> None:
    times = {"once": [2.0] * 99, "thrice": [1.0] * 300, "synchronise": [9.0]}
    assert clock.per_call(times, 100) == pytest.approx({"once": 2.0, "thrice": 3.0})
    once = {"once": [2.0] * 100}
    for count in (40, 60, 90, 150, 260):
        with pytest.raises(RuntimeError, match="100 calls, but the profiler saw"):
            clock.per_call(once | {"other": [1.0] * count}, 100)
    for nothing in ({"synchronise": [9.0]}, {}):
        with pytest.raises(RuntimeError):
            clock.per_call(nothing, 100)


class Refusing:
    """A system that serves nothing."""

    def calls(self, problem: Problem) -> Any:
        """Refuse."""
        raise RuntimeError("too | old")

    host_calls = calls


def test_sections_go_on_where_a_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that only calls."""
    counts: list[int] = []

    def tick(run: Callable[[], Any], moved: int) -> float:
        run()
        counts.append(moved)
        return 1.5

    def broken(run: Callable[[], Any], moved: int) -> float:
        raise RuntimeError("cannot be captured")

    monkeypatch.setattr(sections, "Problem", lambda pack: Problem(pack, "cpu"))
    monkeypatch.setattr(sections, "copy_of", lambda half: lambda: None)
    monkeypatch.setattr(sections, "copy_sizes", lambda moved: (moved // 2,))
    monkeypatch.setattr(sections, "in_graph", tick)
    systems = {"eager": Eager(), "peer": Refusing()}
    scope = sections.Scope(systems, (SMALL,), 0)
    found = [row for _, row in sections.graph(scope)]
    assert [(row.system, row.call, row.us) for row in found] == [
        ("copy", "forward", 1.5), ("copy", "backward", 1.5), ("eager", "forward", 1.5),
        ("eager", "backward", 1.5), ("eager", "both", 1.5), ("peer", "all", None),
    ]  # fmt: skip
    assert found[-1].error == "RuntimeError: too / old"
    assert counts[-1] == SMALL.bytes("forward") + SMALL.bytes("backward")
    cache = SMALL.bytes("forward")
    for size, rows in ((cache, 5), (cache // 4, 0), (cache * sections.MOST_SETS, 0)):
        assert len(list(sections.cold(replace(scope, cache=size)))) == rows
    monkeypatch.setattr(sections, "in_graph", broken)
    errors = {row.error for _, row in sections.graph(replace(scope, systems={}))}
    assert errors == {"RuntimeError: cannot be captured"}
    assert list(sections.SECTIONS) == list(SECTIONS)


def test_of_many_segments_the_median_of_rounds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pack is measured before one is again, and a round that fails is not passed over."""
    few, many = Pack(4, 2, 8, (16,)), Pack(4, 2, 8, (8, 8))
    seen: list[int] = []
    times = {16: [3.0, 1.0, 2.0], 8: [7.0, 5.0, 9.0]}

    class Own:
        def calls(self, problem: Problem) -> dict[str, Any]:
            seen.append(problem.pack.lengths[0])
            if (len(seen) - 1) // 2 == refusing and seen[-1] == 16:
                raise MemoryError
            us = times[seen[-1]][(len(seen) - 1) // 2]
            return dict.fromkeys(("forward", "backward"), lambda: us)

    def tick(run: Callable[[], Any], moved: int) -> float:
        us: float = run()
        if us == failing:
            raise RuntimeError("lost")
        return us

    monkeypatch.setattr(packs, "segments", lambda: iter((few, many)))
    monkeypatch.setattr(sections, "Problem", lambda pack: Problem(pack, "cpu"))
    monkeypatch.setattr(sections, "copy_of", lambda half: lambda: 0.5)
    monkeypatch.setattr(sections, "in_graph", tick)
    scope = sections.Scope({"eager": Eager(), "own": Own()}, (), 0)  # type: ignore[dict-item]
    failing, refusing = 0.0, -1
    found = [(row.system, row.call, row.us) for _, row in sections.segments(scope)]
    assert [us for system, _, us in found if system == "copy"] == [0.5] * 4
    assert [(call, us) for system, call, us in found if system != "copy"] == [
        ("forward", 2.0), ("backward", 2.0), ("forward", 7.0), ("backward", 7.0),
    ]  # fmt: skip
    assert seen == [16, 8] * 3
    seen.clear()
    failing = 9.0  # of the last round of the second pack
    rows = [row for _, row in sections.segments(scope) if row.system == "own"]
    assert [row.us for row in rows] == [2.0, 2.0, None, None]
    assert {row.error for row in rows} == {"", "RuntimeError: lost"}
    seen.clear()
    failing, refusing = 0.0, 1  # the second round of the first pack
    rows = [row for _, row in sections.segments(scope) if row.system == "own"]
    assert [(row.call, row.us) for row in rows] == [
        ("forward", 7.0), ("backward", 7.0), ("all", None),
    ]  # fmt: skip


def test_buffers_take_turns() -> None:
    seen: list[int] = []
    run = sections.in_turn([lambda n=n: seen.append(n) for n in range(3)])
    for _ in range(5):
        run()
    assert seen == [0, 1, 2, 0, 1]


def test_tools_bench_is_the_command() -> None:
    """And refuses what several bundles cannot share."""
    tool = [sys.executable, str(ROOT / "tools" / "bench")]
    done = subprocess.run([*tool, "sideways"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "is none of graph" in done.stderr
    both = [*tool, "--bundle", "a,b", "--json", "x"]
    done = subprocess.run(both, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--json and --bundle exclude each other" in done.stderr
