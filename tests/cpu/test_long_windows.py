# SPDX-License-Identifier: Apache-2.0
"""Plans and launches of windows that a block's warps share, on a bundle made for the test.

The committed images of ratio 4, coff 2 stand in for the kernels: a plan reads their records only.
"""

import ast
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from support import expected, fake
from support.bundles import with_manifest
from support.plans import CALLS, TABLE, assert_launches
from support.problems import address, backward, forward

pytestmark = pytest.mark.L0

SHARED = 150 << 10  # with its static bytes too much for any device but those of 9.0 and 10.x
UNSCHEDULED = "csa_forward_r2_c1_bf16_v1"
WIDE = 65535 * 32  # columns that would take more blocks than a grid has along its height


def change(table: dict[str, Any]) -> None:
    """Wide variants of ratio 4, coff 2 become long ones; a few lose their schedules."""
    dropped = {v["name"] for v in table["variants"] if v["rows"] > 1 or v["kind"] == "buffered"}
    dropped.add(UNSCHEDULED)
    long = set()
    for variant in table["variants"]:
        if (variant["ratio"], variant["coff"]) == (4, 2) and variant["columns"] > 1:
            variant.update(kind="long", alignment=8, rows=1)
            if variant["operation"] == "backward" and variant["columns"] == 2:
                variant["dynamic_shared"] = SHARED
            long.add(variant["name"])
    for row in table["schedules"]:
        if row["variant"] in long:
            row["lanes_log2"] = 5
    table["schedules"] = [r for r in table["schedules"] if r["variant"] not in dropped]


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """(path of the bundle, its manifest)."""
    table = expected.manifest()
    change(table)
    return str(with_manifest(tmp_path_factory.mktemp("long"), change)), table


def explained(path: str, problems: list[Any]) -> list[Any]:
    """The launcher's account of each (operation, call, capability, variant), or its error."""
    listed = Path(path).with_name("problems.json")
    listed.write_text(json.dumps(problems))  # too long for a command line
    script = f"""
results = []
for operation, call, capability, variant in json.load(open({str(listed)!r})):
    try:
        results.append(_native.explain(
            operation, compute_capability=capability, variant=variant, **call))
    except ValueError as error:
        results.append(str(error))
emit(repr(results))
"""
    return ast.literal_eval(fake.run(script, driver=False, CSA_RUNTIME_BUNDLE=path).output)


@pytest.mark.parametrize("operation", CALLS)
def test_plans_of_long_windows_follow_the_rules(
    operation: str, long: tuple[str, dict[str, Any]]
) -> None:
    path, table = long
    problems = []
    for head_dim, rows, capability, offset in itertools.product(
        (1, 8, 64, 128, 132, 512, 2 * WIDE, 2 * WIDE + 8, 4 * WIDE),
        (0, 1, 3, 1000, 1 << 20),
        (80, 86, 90, 103, 120),
        (0, 8, 16),
    ):
        call = CALLS[operation](4, 2, head_dim, max(4 * rows, 1 << 16), rows)
        call["kv"] += offset
        problems.append((operation, call, capability, None))
    seen = set()
    for (_, call, capability, _), plan in zip(problems, explained(path, problems), strict=True):
        assert_launches(plan, expected.launches(operation, call, capability, table))
        seen.add(plan["variant"].split("_v")[1][0])  # columns
    assert seen == {"1", "2", "4"}


def test_a_long_windows_block_takes_one_row_at_a_time(long: tuple[str, dict[str, Any]]) -> None:
    calls: list[Any] = [
        ("forward", forward(head_dim=64, rows=100, tokens=400), 90, None),
        ("backward", backward(head_dim=64, rows=100, tokens=400), 90, None),
    ]
    ahead, back = explained(long[0], calls)
    assert ahead["grid"] == (1, 100, 1) and ahead["lanes_log2"] == 5
    assert back["groups"] == 100 and back["fill_ctas"] == 4 and back["lanes_log2"] == 5
    assert back["workspace_bytes"] == 100 * 4 * 128 * 4


def test_blocks_for_zeros_grow_with_what_is_zero_up_to_a_limit(
    long: tuple[str, dict[str, Any]],
) -> None:
    """A thread a token; more for segments' last blocks, or for tokens without a row."""
    rows = (r for r in long[1]["schedules"] if (r["operation"], r["arch"]) == ("finish", 90))
    most = next(rows)["fill_ctas"]
    cases = [  # rows, segments, tokens: blocks
        ((1 << 15, 1, 1 << 17), (1 << 17) // 512),
        ((100, 60, 400), 4 * 60),
        ((100, 200, 400), 4 * 100),
        ((100, 1 << 12, 400), 4 * (1 << 12) // 32),
        ((1 << 16, 1 << 20, 1 << 18), 8 * most),
        ((0, 7, 400), 13),
        ((0, 1 << 12, 400), 13),
        (((1 << 15) - 1, 50, 1 << 17), most),
        ((1 << 10, 50, 1 << 17), ((1 << 17) - (1 << 12)) * 128 // 4096),
        ((1 << 10, 50, 1 << 27), 8 * most),
    ]
    calls: list[Any] = [
        ("backward", backward(head_dim=64, rows=r, segments=s, tokens=t), 90, None)
        for (r, s, t), _ in cases
    ]
    got = [plan["fill_ctas"] for plan in explained(long[0], calls)]
    assert got == [blocks for _, blocks in cases]


def test_the_launcher_and_the_kernel_part_last_blocks_alike() -> None:
    """Fewer blocks than a last block has parts would write none; 32 sharers no mask could name."""
    here = (expected.ROOT / "csa_runtime/native/layout.c").read_text()
    there = (expected.ROOT / "aot/kernels/zeros.py").read_text()
    parts = re.search(r"LAST_BLOCK_PARTS = (\d+)", here)
    log2_parts = re.search(r"LOG2_PARTS = (\d+)", there)
    assert parts and log2_parts and int(parts[1]) == 1 << int(log2_parts[1])
    finish = [image for image in TABLE["images"] if image["variant"].startswith("csa_finish")]
    assert finish and max(image["block"][0] for image in finish) <= 16 * 32


def test_shared_memory_that_a_device_lacks_passes_the_row_over(
    long: tuple[str, dict[str, Any]],
) -> None:
    name = "csa_backward_r4_c2_bf16_v2"
    call = backward(head_dim=64)
    plans = explained(long[0], [("backward", call, c, None) for c in (90, 100, 80, 86, 120)])
    assert [plan["variant"] == name for plan in plans] == [True, True, False, False, False]
    (error,) = explained(long[0], [("backward", call, 86, name)])
    assert "bytes of shared memory; a block of this device has 101376" in error


@pytest.mark.parametrize(
    ("call", "variant", "message"),
    [
        (forward(kv=address("kv") + 8), "csa_forward_r4_c2_bf16_v2", "multiples of 8 elements"),
        (forward(head_dim=132), "csa_forward_r4_c2_bf16_v4", "multiples of 8 elements"),
        (forward(2, 1), UNSCHEDULED, "not scheduled for sm_90"),
    ],
)
def test_forced_variant_that_cannot_serve_says_why(
    call: dict[str, Any], variant: str, message: str, long: tuple[str, dict[str, Any]]
) -> None:
    (error,) = explained(long[0], [("forward", call, 90, variant)])
    assert message in error


def test_what_no_row_serves_is_refused(long: tuple[str, dict[str, Any]]) -> None:
    (error,) = explained(long[0], [("forward", forward(2, 1, head_dim=7), 90, None)])
    assert "no forward variant of ratio 2, coff 1 on sm_90 serves head_dim 7" in error
    assert "multiples of 2 elements, and bases aligned alike (ape: to 8 bytes)" in error


def test_workspace_bound_counts_long_rows(long: tuple[str, dict[str, Any]]) -> None:
    path, table = long
    sizes = (8, 128, 512, 4 * WIDE)
    script = f"""
emit([_native.backward_workspace_bytes(1 << 20, 5, d, 4, 2, 1) for d in {sizes}])
"""
    run = fake.run(script, driver=False, CSA_RUNTIME_BUNDLE=path)
    assert run.output == [expected.workspace_bound(table, 4, 2, d) for d in sizes]


def test_dynamic_shared_memory_is_allowed_once_and_asked_for_at_each_launch(
    long: tuple[str, dict[str, Any]],
) -> None:
    run = fake.run(
        "for _ in range(2): csa_runtime.launch_backward(**backward(head_dim=64, grad_ape=None))",
        CSA_RUNTIME_BUNDLE=long[0],
    )
    (allowed,) = run.named("cuKernelSetAttribute")
    assert allowed["value"] == SHARED
    assert [launch["shared"] for launch in run.launches] == [SHARED, 0] * 2


def test_load_passes_over_a_kernel_whose_shared_memory_the_device_lacks(
    long: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    run = fake.run(
        "csa_runtime.load(0); csa_runtime.launch_backward(**backward())",
        CSA_RUNTIME_BUNDLE=long[0],
        FAKE_CUDA_DEVICES="120",
    )
    assert run.launches[0]["name"] == "csa_backward_r4_c2_bf16_v1_0"
