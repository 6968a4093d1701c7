# SPDX-License-Identifier: Apache-2.0
"""The plan: which variant, grid and parameters serve a problem. Pure, so no driver is involved."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from csa_runtime import UnsupportedArch, _native
from support import expected
from support.plans import BY_NAME, CALLS, TABLE, agree, explain
from support.problems import address, backward, forward

pytestmark = pytest.mark.L0

WINDOWS = sorted({(v["ratio"], v["coff"]) for v in TABLE["variants"] if v["ratio"]})


@pytest.mark.parametrize("operation", CALLS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("head_dim", [1, 2, 3, 4, 6, 8, 16, 32, 64, 127, 128, 129, 512, 8_388_480])
def test_plan_follows_the_schedules(operation: str, window: tuple[int, int], head_dim: int) -> None:
    ratio, coff = window
    for rows, tokens in itertools.product(
        (0, 1, 2, 7, 8, 9, 1 << 20, 2**31 - 1), (ratio, 2 * ratio + 257, 2**31 - 1)
    ):
        call = CALLS[operation](ratio, coff, head_dim, tokens, rows)
        plan = agree(operation, call)
        assert plan["grid"][0] < 2**31 and max(plan["grid"][1:]) <= 65535


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize("window", WINDOWS)
def test_the_readmes_widest_heads_are_served(window: tuple[int, int], capability: int) -> None:
    """By both directions, odd or even; the next one is refused."""
    widest = 8_388_480
    assert f"1 to {widest:,}," in (Path(__file__).parents[2] / "README.md").read_text()
    ratio, coff = window
    for operation, head_dim in itertools.product(CALLS, (widest - 1, widest)):
        explain(operation, CALLS[operation](ratio, coff, head_dim, ratio, 1), capability)
    for operation in CALLS:
        with pytest.raises(ValueError, match=str(widest)):
            explain(operation, CALLS[operation](ratio, coff, widest + 1, ratio, 1), capability)
    if ratio == 128:
        with pytest.raises(ValueError, match="shared memory a block; pass a smaller one"):
            explain("forward", forward(ratio, coff, 64, ratio, 1), capability, shared_limit=16)


@pytest.mark.parametrize("operation", CALLS)
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 103, 120, 121])
def test_every_capability_gets_the_images_of_its_major(operation: str, capability: int) -> None:
    plan = agree(operation, CALLS[operation](), capability)
    assert plan["arch"] == capability // 10 * 10
    digests = {i["sha256"] for i in TABLE["images"] if i["arch"] == plan["arch"]}
    assert plan["image"] in digests


@pytest.mark.parametrize("operation", CALLS)
@pytest.mark.parametrize("window", WINDOWS)
def test_alignment_of_any_tensor_narrows_the_variant(
    operation: str, window: tuple[int, int]
) -> None:
    ratio, coff = window
    call = CALLS[operation](ratio, coff, tokens=4 * ratio, rows=4)
    names = [*expected.ALIGNED[operation], "ape"]
    for name, offset in itertools.product(names, (2, 4, 8, 16)):
        if name == "ape" and offset == 2:
            continue
        agree(operation, call | {name: address(name) + offset})
    for name, extra in itertools.product(expected.ALIGNED[operation], (1, 2, 3, 4, 8)):
        stride = f"{name}_stride"
        agree(operation, call | {stride: call[stride] + extra})
    odd = explain(operation, call | {"kv": address("kv") + 2})
    assert BY_NAME[odd["variant"]]["alignment"] == 1


def test_stride_of_a_single_row_does_not_narrow_the_variant() -> None:
    usual = agree("forward", forward(tokens=4, rows=1))["variant"]
    assert not usual.endswith("_v1")
    assert agree("forward", forward(tokens=4, rows=1, out_stride=129))["variant"] == usual
    assert agree("forward", forward(tokens=8, rows=2, out_stride=129))["variant"].endswith("_v1")


@pytest.mark.parametrize("operation", CALLS)
def test_a_schedule_serves_up_to_its_largest_problem(operation: str) -> None:
    head_dim = 128
    for row in TABLE["schedules"]:
        if row["operation"] != operation or row["max_elements"] < 0:
            continue
        most = row["max_elements"] // head_dim
        for rows in (most - 1, most, most + 1):
            tokens = min(row["ratio"] * rows, 2**31 - 1)
            call = CALLS[operation](row["ratio"], row["coff"], head_dim, tokens, rows)
            agree(operation, call, row["arch"])


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_a_row_for_short_segments_serves_up_to_its_rows_per_segment(arch: int) -> None:
    rows_of_arch = [row for row in TABLE["schedules"] if row["arch"] == arch]
    limited = [row for row in rows_of_arch if row["max_rows_per_segment"] >= 0]
    assert limited
    for i, row in enumerate(limited):
        operation, ratio, each = row["operation"], row["ratio"], row["max_rows_per_segment"]
        same = ("operation", "ratio", "coff")
        before = [r for r in limited[:i] if all(r[key] == row[key] for key in same)]
        less = (r["max_rows_per_segment"] for r in before)
        shorter = max((n for n in less if n < each), default=0)
        # Of 128 columns each: too many for the rows before, too few for the last.
        large = row["max_elements"] // 128 if row["max_elements"] >= 0 else 1 << 17
        for segments in (0, 1, large // each - 1, large // each, large // each + 1, 2**31 - 1):
            for rows in {0, 1, min(each * segments, large), large, 2**31 - 1}:
                tokens = min(ratio * max(rows, 1), 2**31 - 1)
                call = CALLS[operation](ratio, row["coff"], 128, tokens, rows, segments=segments)
                agree(operation, call, arch)
                if rows == large:
                    served = shorter * segments < rows <= each * segments
                    limit = expected.SHARED[arch] << 10
                    chosen, _ = expected.choose(TABLE, operation, call, arch, limit)
                    assert (chosen == row) == served
                forced = agree(operation, call, arch, row["variant"])
                assert forced["variant"] == row["variant"]


def test_what_finishes_goes_by_the_planes_elements() -> None:
    chosen = set()
    for row in TABLE["schedules"]:
        if row["operation"] == "finish" and row["max_elements"] >= 0:
            most = row["max_elements"] // 8
            for head_dim in (most - 1, most, most + 1):
                plan = agree("backward", backward(4, 2, head_dim), row["arch"])
                chosen.add(plan["launches"][1]["variant"])
    assert chosen == {v["name"] for v in TABLE["variants"] if v["operation"] == "finish"}


def test_blocks_that_write_zeros_go_by_the_tokens_up_to_a_limit() -> None:
    few = agree("backward", backward(rows=1, tokens=4))
    assert few["fill_ctas"] == 1
    many = agree("backward", backward(rows=1, tokens=1 << 24))
    finish = many["launches"][1]["variant"]
    row = next(r for r in TABLE["schedules"] if r["variant"] == finish and r["arch"] == 90)
    assert many["fill_ctas"] == row["fill_ctas"]


def test_every_image_is_scheduled() -> None:
    images = {(image["variant"], image["arch"]) for image in TABLE["images"]}
    assert images == {(row["variant"], row["arch"]) for row in TABLE["schedules"]}


def test_every_image_fits_the_best_device_of_its_architecture() -> None:
    for image in TABLE["images"]:
        shared = image["static_shared"] + BY_NAME[image["variant"]]["dynamic_shared"]
        assert shared <= expected.SHARED[image["arch"]] << 10, image["file"]


def test_no_rows_launch_nothing_forward_and_only_zeros_backward() -> None:
    assert agree("forward", forward(rows=0))["launches"] == []
    plan = agree("backward", backward(rows=0))
    assert plan["groups"] == 0 and plan["workspace_bytes"] == 0
    assert plan["grid"] == (0, 1, 1) and plan["fill_ctas"] > 0
    assert [x["variant"] for x in plan["launches"]] == ["csa_finish_f32_e32"]
    assert agree("backward", backward(rows=0, tokens=0, grad_ape=None))["launches"] == []


def test_without_grad_ape_no_workspace_reaches_the_kernel() -> None:
    plan = agree("backward", backward(grad_ape=None))
    assert plan["workspace_bytes"] == 0
    assert plan["launches"][1]["grid"] == (plan["fill_ctas"], 1, 1)


def test_accumulate_reaches_the_finish_alone() -> None:
    plain, adding = (agree("backward", backward(flags=flags))["launches"] for flags in (0, 1))
    assert plain[0] == adding[0]
    flags = [launches[1]["parameters"][76:80] for launches in (plain, adding)]
    assert flags == [b"\0\0\0\0", b"\1\0\0\0"]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("head_dim", [1, 2, 96, 128, 512, 4096, 8_388_480])
def test_workspace_bound_is_the_most_planes_of_any_schedule(
    window: tuple[int, int], head_dim: int
) -> None:
    ratio, coff = window
    bounds = {
        _native.backward_workspace_bytes(tokens, rows, head_dim, ratio, coff, 1)
        for tokens, rows in itertools.product((ratio, 1 << 20, 2**31 - 1), (0, 1, 2**31 - 1))
    }
    assert bounds == {expected.workspace_bound(TABLE, ratio, coff, head_dim)}


@pytest.mark.parametrize("window", WINDOWS)
def test_workspace_bound_covers_every_plan(window: tuple[int, int]) -> None:
    ratio, coff = window
    for head_dim in (1, 2, 8, 96, 128, 129, 256, 512, 1024, 4096):
        bound = _native.backward_workspace_bytes(ratio, 0, head_dim, ratio, coff, 1)
        assert coff * head_dim > 1024 or bound <= 32 << 20
        for rows, capability, offset in itertools.product(
            (1, 100, 1 << 20), (80, 86, 90, 100, 120), (0, 2, 4, 8)
        ):
            call = backward(ratio, coff, head_dim, 1 << 20, rows)
            call["kv"] += offset
            assert explain("backward", call, capability)["workspace_bytes"] <= bound


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_forced_variant_runs_as_its_schedule_for_the_size_says(arch: int) -> None:
    named = [r for r in TABLE["schedules"] if r["arch"] == arch and r["operation"] in CALLS]
    for row, rows in itertools.product(named, (1, 1 << 13, 1 << 20)):
        operation, ratio = row["operation"], row["ratio"]
        call = CALLS[operation](ratio, row["coff"], 512, min(rows * ratio, 1 << 24), rows)
        assert agree(operation, call, arch, row["variant"])["variant"] == row["variant"]


@pytest.mark.parametrize("operation", CALLS)
def test_forcing_what_would_be_chosen_changes_nothing(operation: str) -> None:
    for (ratio, coff), rows in itertools.product(WINDOWS, (1, 500, 1 << 13, 1 << 18)):
        for segments in (1, rows // 4):
            call = CALLS[operation](ratio, coff, 256, ratio * rows, rows, segments=segments)
            plan = explain(operation, call)
            assert explain(operation, call, variant=plan["variant"]) == plan


def test_a_forced_variant_is_launched_as_its_row_for_the_size_says() -> None:
    """Not as its first one: other lanes forward, other blocks backward."""
    name = "csa_forward_r4_c2_bf16_v4_n4"
    calls = [forward(head_dim=512, rows=rows) for rows in (1 << 10, 1 << 16)]
    assert [agree("forward", call, variant=name)["lanes_log2"] for call in calls] == [6, 7]
    name = "csa_backward_r4_c2_bf16_v2_t256_a8"
    calls = [backward(head_dim=64, rows=rows) for rows in (1 << 12, 1 << 14)]
    assert [agree("backward", call, variant=name)["groups"] for call in calls] == [128, 256]


@pytest.mark.parametrize(
    ("call", "variant", "message"),
    [
        (forward(), "no_such", r"no forward variant .*csa_runtime\.info\(\) lists them"),
        (forward(), "csa_forward_r2_c2_bf16_v4", "no forward variant of ratio 4, coff 2"),
        (forward(), "csa_finish_f32_e32", "no forward variant"),
        (forward(head_dim=6), "csa_forward_r4_c2_bf16_v4", "multiples of 4 elements"),
        (forward(kv=2), "csa_forward_r4_c2_bf16_v2", "multiples of 2 elements"),
    ],
)
def test_forced_variant_that_cannot_serve_is_refused(
    call: dict[str, Any], variant: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        explain("forward", call, variant=variant)


@pytest.mark.parametrize("capability", [50, 75, 87, 110, 130])
def test_capability_without_images_says_what_there_is_and_what_helps(capability: int) -> None:
    with pytest.raises(UnsupportedArch) as failure:
        explain("forward", forward(), capability)
    text = str(failure.value)
    assert f"{capability // 10}.{capability % 10}" in text
    assert "sm_80, sm_90, sm_100, sm_120" in text
    if capability < 80:
        assert "before compute capability 8.0" in text and "build_cubins" not in text
    else:
        assert "ARCHITECTURES in aot/variants.py, run tools/build_cubins" in text


def test_explain_refuses_an_unknown_operation() -> None:
    with pytest.raises(ValueError, match="operation is 'sideways'"):
        _native.explain("sideways", compute_capability=90, **forward())
