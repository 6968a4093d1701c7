# SPDX-License-Identifier: Apache-2.0
"""The traffic twin of csa-runtime bench, and the copy: what they move, and how one is chosen."""

import shutil
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from csa_runtime.bench import sections, tables, twin
from csa_runtime.bench.packs import CALLS, PACKS, Pack
from csa_runtime.bench.problem import Problem, copy_sizes
from csa_runtime.bench.record import COPY, OURS, TWIN, Record, Row
from csa_runtime.bench.twin import SHAPES, Shape, Twin, Words, words

pytestmark = pytest.mark.L0

SMALL = Pack(4, 2, 8, (9, 3, 16))

# A GPU of one thread at a time, which is all that the twin needs. It is given, in words, the three
# lengths, span and tiles, then threads and blocks; words of inputs hold their index and a stream.
HOST = """
#include <cstdio>
#include <cstdlib>
#include <vector>
#define __device__
#define __global__
#define __launch_bounds__(threads)
struct uint4 { unsigned x, y, z, w; };
struct { int x; } blockIdx, blockDim, gridDim, threadIdx;
#include "twin.cu"

static std::vector<uint4> stream(int length, unsigned id) {
  std::vector<uint4> made;
  for (int i = 0; i < length; ++i) made.push_back({unsigned(i) * 2654435761u, id, unsigned(i), 0});
  made.push_back({7, 7, 7, 7});
  return made;
}

int main(int, char** given) {
  int n[7];
  for (int i = 0; i < 7; ++i) n[i] = atoi(given[i + 1]);
  auto kv = stream(n[0], 1), score = stream(n[0], 2), narrow = stream(n[1], 4);
  auto grad_kv = stream(n[2], 8), grad_score = stream(n[2], 16);
  const auto before = narrow;
  blockDim.x = n[5], gridDim.x = n[6];
  for (blockIdx.x = 0; blockIdx.x < n[6]; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < n[5]; ++threadIdx.x)
      twin(kv.data(), score.data(), narrow.data(), grad_kv.data(), grad_score.data(),
           n[0], n[1], n[2], n[3], n[4]);
  uint4 left = {};
  bool whole = narrow[n[1]].x == 7 && grad_kv[n[2]].x == 7 && grad_score[n[2]].x == 7;
  if (BACKWARD) {
    for (auto* all : {&kv, &score, &narrow, &grad_kv, &grad_score})
      for (size_t i = 0; i + 1 < all->size(); ++i) fold(left, (*all)[i]);
    whole = whole && !(left.x | left.y | left.z | left.w);
    for (int i = 0; i < n[2]; ++i) whole = whole && grad_score[i].y == (i < n[0] ? 2 : 0);
  } else {
    for (int i = 0; i < n[1]; ++i) whole = whole && narrow[i].y != before[i].y;
  }
  puts(whole ? "whole" : "not whole");
}
"""


@pytest.mark.parametrize("pack", [*PACKS, SMALL], ids=lambda pack: pack.name)
@pytest.mark.parametrize("call", CALLS)
def test_the_twin_moves_what_the_call_moves(pack: Pack, call: str) -> None:
    lengths = words(pack, call)
    moved = 16 * (2 * lengths.inputs + lengths.narrows + 2 * lengths.grads)
    assert pack.bytes(call) - 5 * 16 < moved <= pack.bytes(call)
    for shape in SHAPES:
        tiles, span = lengths.tiling(shape)
        tile = shape.unroll * shape.threads
        assert tiles * tile >= max(lengths.inputs, lengths.grads) > (tiles - 1) * tile
        assert tiles * span >= lengths.narrows and span % 8 == 0


@pytest.mark.L1
@pytest.mark.parametrize(("call", "unroll"), list(product(CALLS, (1, 2, 4))))
def test_every_word_is_read_and_written_once(call: str, unroll: int, tmp_path: Path) -> None:
    """Its source, run on the CPU."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    defines = f"#define UNROLL {unroll}\n#define BACKWARD {int(call == 'backward')}\n"
    (tmp_path / "twin.cu").write_text(defines + twin.SOURCE)
    (tmp_path / "host.cc").write_text(HOST)
    build = [compiler, "-O1", "-fpermissive", "-w", "-o", "host", "host.cc"]
    subprocess.run(build, check=True, cwd=tmp_path)
    backward = call == "backward"
    for inputs, narrows, grads, blocks in (
        (4096, 512, 4096, 3), (4090, 300, 4096, 2), (1001, 501, 1003, 99), (40, 1, 9000, 4),
    ):  # fmt: skip
        lengths = Words(inputs, narrows, grads if backward else 0)
        shape = Shape(unroll, 64, 0)
        numbers = [*lengths, *reversed(lengths.tiling(shape)), shape.threads, blocks]
        run = [str(tmp_path / "host"), *map(str, numbers)]
        done = subprocess.run(run, capture_output=True, text=True, check=True)
        assert done.stdout == "whole\n", numbers


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A GPU of 10 multiprocessors, and the launches on it; the fastest shape is (2, 512, 4)."""
    launched: list[tuple[Any, ...]] = []

    def compiler(source: str) -> Callable[..., None]:
        return lambda *given: launched.append((source.partition("static")[0], *given))

    def quick(run: Callable[[], Any]) -> float:
        run()
        source, blocks, threads, _ = launched[-1]
        return abs(blocks - 40) + abs(threads - 512) + ("UNROLL 2" not in source)

    properties = SimpleNamespace(multi_processor_count=10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    monkeypatch.setattr(twin, "COMPILERS", (compiler,))
    monkeypatch.setattr(twin, "quick_time", quick)
    return launched


def test_the_fastest_shape_is_chosen_once(gpu: list[tuple[Any, ...]]) -> None:
    pack = Pack(4, 2, 64, (8192,))
    problems = [Problem(pack, "cpu") for _ in range(2)]
    made = Twin()
    for call in CALLS:
        gpu.clear()
        run, shape = made.best(problems, call)
        assert shape == Shape(2, 512, 4) and len(gpu) == len(SHAPES)
        assert made.best(problems, call)[1] == shape and len(gpu) == len(SHAPES)
        for _ in range(3):
            run()
        source, blocks, threads, given = gpu[-1]
        assert (blocks, threads) == (40, 512) and f"BACKWARD {int(call == 'backward')}" in source
        lengths = words(pack, call)
        assert given[5:] == (*lengths, *reversed(lengths.tiling(shape)))
        narrow = "grad_out" if call == "backward" else "out"
        for place, name in enumerate(("kv", "score", narrow, "grad_kv", "grad_score")):
            used = {id(each[3][place]) for each in gpu[-2:]}
            assert used == {id(getattr(problem, name)) for problem in problems}


def test_without_a_compiler_it_says_why(
    gpu: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(source: str) -> Any:
        raise ImportError("not here")

    monkeypatch.setattr(twin, "COMPILERS", (missing, missing))
    with pytest.raises(RuntimeError, match="no compiler: ImportError: not here; ImportError"):
        Twin()


def test_the_twin_stands_beside_the_copy(
    gpu: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the rows, and then in the tables."""
    monkeypatch.setattr(sections, "Problem", lambda pack: Problem(pack, "cpu"))
    monkeypatch.setattr(sections, "copy_of", lambda half: lambda: None)
    monkeypatch.setattr(sections, "in_graph", lambda run, moved: 2.0)
    scope = sections.Scope({}, (SMALL,), 0, Twin())
    rows = [row for _, row in sections.graph(scope)]
    assert [(row.system, row.call) for row in rows] == list(product((COPY, TWIN), CALLS))
    assert rows[2].us == 2.0 and rows[2].note.startswith("unroll ")
    record = Record()
    for row in (*rows, Row("graph", SMALL.name, OURS, "forward", 3.0)):
        record.add(SMALL, row)
    text = tables.render(record)
    assert "| copy us | twin us | fwd us (x copy, x twin) |" in text
    assert "| 2.00 / 2.00 | 2.00 / 2.00 | 3.00 (1.50, 1.50) |" in text


def test_a_copy_is_rounded_up_by_less_than_a_hundredth() -> None:
    for half in [*range(1, 3000), *(pack.bytes(call) // 2 for pack in PACKS for call in CALLS)]:
        first, last = min(copy_sizes(2 * half)), max(copy_sizes(2 * half))
        assert first == half and last <= 1.01 * half and last - half < 1 << 16
    assert copy_sizes(2 * 10_000_000) == (10_000_000, 153 << 16)
    assert copy_sizes(2 << 20) == (1 << 20,)


def test_the_faster_copy_counts_byte_by_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, rounded = copy_sizes(SMALL.bytes("forward") + 2_000_001)
    monkeypatch.setattr(sections, "copy_sizes", lambda moved: (exact, rounded))
    monkeypatch.setattr(sections, "copy_of", lambda half: lambda: half)
    moved = SMALL.bytes("forward")

    def row(times: dict[int, float]) -> Row:
        tick = lambda run, moved: times[run()]  # noqa: E731
        return sections.copy_row("graph", SMALL, "forward", tick, 1)

    fast = row({exact: 9.0, rounded: 6.0})
    assert fast.us == pytest.approx(6.0 * moved / (2 * rounded)) and str(rounded) in fast.note
    assert row({exact: 5.9, rounded: 6.0}).us == pytest.approx(5.9 * moved / (2 * exact))
    assert row({rounded: 6.0}).us == pytest.approx(6.0 * moved / (2 * rounded))
    assert row({}).us is None and "KeyError" in row({}).error
