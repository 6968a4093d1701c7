# SPDX-License-Identifier: Apache-2.0
"""tools/tune without a GPU: the shapes it tries, the bundle that holds them, rows of winners."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from csa_runtime.bench import clock
from csa_runtime.bench.packs import Pack
from support import expected
from support.tools import load

pytestmark = pytest.mark.L0

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = expected.manifest()
LAUNCHED = """
import json, sys, csa_runtime
plans = []
for name in json.loads(sys.argv[1]):
    _, operation, ratio, coff = name.split("_")[:4]
    plan = csa_runtime.explain(
        operation, ratio=int(ratio[1:]), coff=int(coff[1:]), head_dim=512, total_tokens=1 << 20,
        total_comp=(1 << 20) // int(ratio[1:]), compute_capability=90, variant=name)
    plans.append([plan["variant"], plan["lanes_log2"], plan["groups"] * plan["column_tiles"]])
chosen = csa_runtime.explain("backward", ratio=4, coff=2, head_dim=512, total_tokens=1 << 20,
                             total_comp=1 << 18, compute_capability=90)
print(json.dumps([plans, chosen["variant"]]))
"""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tool as a module."""
    return load("tune", monkeypatch)


def test_shapes_are_of_what_is_built_and_scheduled(tool: Any) -> None:
    kinds = {v["name"]: v["kind"] for v in MANIFEST["variants"]}
    for arch in (80, 90, 100, 120):
        shapes = list(tool.candidates.shapes(MANIFEST, arch, 100))
        assert len(set(shapes)) == len(shapes) == len({shape.name for shape in shapes})
        served = {s["variant"] for s in MANIFEST["schedules"] if s["arch"] == arch}
        assert {s.variant for s in shapes} == {n for n in served if "finish" not in n}
        for shape in shapes:
            assert (shape.ctas == 0) == ("forward" in shape.variant)
            if shape.ctas == 0 and kinds[shape.variant] in ("short", "early"):
                assert all(shape._replace(lanes_log2=n) in shapes for n in (5, 6, 7))
            assert 5 <= shape.lanes_log2 <= 7


def test_every_scheduled_shape_is_among_them_whatever_the_gpu(tool: Any) -> None:
    """Under a name of its own, which is how the scheduled shape is timed beside them."""
    for arch, multiprocessors in ((90, 132), (90, 100), (80, 60)):
        shapes = set(tool.candidates.shapes(MANIFEST, arch, multiprocessors))
        for row in MANIFEST["schedules"]:
            if row["arch"] == arch and row["operation"] != "finish":
                assert (row["variant"], row["lanes_log2"], row["ctas"]) in shapes


BUFFERED = {"v2_t256_a8", "v2_t256_a8_p128", "v4_t256_a8"}


@pytest.mark.parametrize(
    ("head_dim", "absent"),
    [
        (8, {"v4_n4", "v4_n8", "v2_early", "v4_early"} | BUFFERED),
        (16, {"v4_n8", "v2_early", "v4_early"} | BUFFERED),
        (32, {"v2_early", "v4_early"} | BUFFERED),
        (64, {"v4_early", "v4_t256_a8"}),
        (68, {"v4_t256_a8"}),
        (128, set()),
    ],
)
def test_a_pack_gets_what_the_launcher_would_choose(
    tool: Any, head_dim: int, absent: set[str]
) -> None:
    """Of its window, and none that is too wide for the head."""
    pack, shapes = Pack(4, 2, head_dim, (64,)), list(tool.candidates.shapes(MANIFEST, 90, 132))
    forward = {"v4_n4", "v4_n8", "v2_early", "v4_early"}
    for call, kinds in (("forward", forward), ("backward", BUFFERED)):
        start = f"csa_{call}_r4_c2_bf16_"
        window = {s.variant for s in shapes if s.variant.startswith(start)}
        missing = {start + kind for kind in absent & kinds}
        served = {s.variant for s in tool.candidates.serving(MANIFEST, shapes, pack, call)}
        assert served == window - missing


@pytest.mark.L1
def test_the_bundle_launches_each_shape_when_forced_and_none_by_itself(
    tool: Any, tmp_path: Path
) -> None:
    shapes = list(tool.candidates.shapes(MANIFEST, 90, 132))
    made = tool.candidates.with_shapes(MANIFEST, 90, shapes)
    path = tmp_path / "bundle.bin"
    tool.candidates.write_bundle(made, ROOT / "cubins", shapes, path)
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHED, json.dumps([shape.name for shape in shapes])],
        env=os.environ | {"CSA_RUNTIME_BUNDLE": str(path)},
        capture_output=True, text=True, check=False, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plans, chosen = json.loads(done.stdout)
    assert chosen in {v["name"] for v in MANIFEST["variants"]}
    for shape, (variant, lanes, blocks) in zip(shapes, plans, strict=True):
        assert (variant, lanes) == (shape.name, shape.lanes_log2)
        assert shape.ctas - 32 < blocks <= shape.ctas


def found(tool: Any, elements: int, times: dict[str, float], scheduled: str) -> Any:
    """Of one pack, backward."""
    shapes = {name: tool.candidates.Shape(f"csa_x_bf16_{name}", 5, 264) for name in times}
    each = {shapes[name]: us for name, us in times.items()}
    return tool.candidates.Found(
        f"p{elements}", "backward", 4, 2, elements, each, shapes[scheduled], len(each)
    )


def test_winners_become_rows_up_to_the_next_winner(tool: Any) -> None:
    small = found(tool, 100, {"v1": 1.0, "v2": 2.0}, "v2")
    middle = found(tool, 400, {"v1": 2.0, "v2": 3.0}, "v2")
    large = found(tool, 1600, {"v1": 9.0, "v2": 7.0}, "v1")
    same = found(tool, 6400, {"v1": 9.97, "v2": 10.0}, "v2")
    assert [f.winner.variant[-2:] for f in (small, middle, large, same)] == ["v1", "v1", "v2", "v2"]
    assert tool.candidates.rows([same, large, small, middle]) == [
        ("csa_x_bf16_v1", 800, 5, 264, 0, "2.0 us, v2 3.0, at 400 elements: p400"),
        ("csa_x_bf16_v2", -1, 5, 264, 0, "10.0 us, v1 10.0, at 6,400 elements: p6400"),
    ]
    text = tool.candidates.markdown([small])
    assert "| p100 | backward | csa_x_bf16_v2_l5_b264 2.00 | csa_x_bf16_v1_l5_b264 1.00 |" in text
    assert "50.0%" in text and "('csa_x_bf16_v1', -1, 5, 264, 0, " in text


def test_finalists_are_timed_again(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best, the best of each variant and the one scheduled; what cannot serve is left out."""
    shape = tool.candidates.Shape
    shapes = [shape(name, 5, n) for name in ("a", "b", "none") for n in range(1, 7)]

    def run(name: str) -> str:
        if name.startswith("none"):
            raise ValueError("needs more shared memory")
        return name

    rough = {s.name: s.ctas + 10.0 * (s.variant == "b") for s in shapes}
    exact = {name: us - 0.5 for name, us in rough.items()}
    monkeypatch.setattr(clock, "quick_time", lambda name: rough[name])
    monkeypatch.setattr(clock, "graph_time", lambda name: exact[name])
    times, tried = tool.times(shapes, shape("b", 5, 6), run)
    assert tried == 12 and times == {
        **{shape("a", 5, n): n - 0.5 for n in range(1, 5)},
        shape("b", 5, 1): 10.5,
        shape("b", 5, 6): 15.5,
    }


def test_what_is_scheduled_is_found_by_its_row(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table = [s for s in MANIFEST["schedules"] if s["arch"] == 90]
    monkeypatch.setattr("csa_runtime.explain", lambda *_, **__: {
        "variant": "csa_backward_r4_c2_bf16_v4"})  # fmt: skip
    shape = tool.scheduled(Pack(4, 2, 512, (131072,)), "backward", table)
    assert shape == ("csa_backward_r4_c2_bf16_v4", 5, 264)


def test_a_rows_limits_are_of_elements_and_of_rows_per_segment(tool: Any) -> None:
    pack = Pack(4, 2, 128, (15, 16, 24))  # 13 rows
    kept = [
        (size, each)
        for size in (-1, 13 * 128 - 1, 13 * 128)
        for each in (-1, 0, 4, 5)
        if tool.serves({"max_elements": size, "max_rows_per_segment": each}, pack)
    ]
    assert kept == [(-1, -1), (-1, 5), (13 * 128, -1), (13 * 128, 5)]
