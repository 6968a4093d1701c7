# SPDX-License-Identifier: Apache-2.0
"""Which variants heads get that leave a kernel's lanes idle; and tools/tune, which must agree."""

from typing import Any

import pytest

from csa_runtime.bench.packs import Pack
from support.plans import BY_NAME, CALLS, TABLE, agree
from support.problems import forward
from support.tools import load

pytestmark = pytest.mark.L0


def chosen(operation: str, call: dict[str, Any], variant: str | None = None) -> dict[str, Any]:
    """The variant that the launcher takes on compute capability 9.0, as the rules say."""
    return BY_NAME[agree(operation, call, variant=variant)["variant"]]


@pytest.mark.parametrize("operation", CALLS)
@pytest.mark.parametrize("rows", [3, 2000, 9000, 1 << 23])
def test_a_variant_too_wide_for_a_head_serves_it_only_by_name(operation: str, rows: int) -> None:
    """Buffered, early, and of several rows a thread; large packs have one row instead."""
    wide = [v for v in TABLE["variants"] if v["kind"] in ("buffered", "early") or v["rows"] > 1]
    for variant in (v for v in wide if v["operation"] == operation):
        ratio, coff = variant["ratio"], variant["coff"]
        for head_dim in (8, 16, 24, 32, 40, 56, 64, 72, 120, 128, 8_388_480):
            call = CALLS[operation](ratio, coff, head_dim, ratio * rows, rows)
            taken = chosen(operation, call)
            columns, each = taken["columns"], taken["rows"]
            if taken["kind"] == "early":
                assert head_dim > 16 * columns
            elif taken["kind"] in ("buffered", "long"):
                assert columns == 1 or head_dim >= 32 * columns
            else:
                assert each == 1 or head_dim >= each * columns
            assert columns == 4 or operation == "backward" or rows < 1 << 23
            assert chosen(operation, call, variant["name"]) == variant


@pytest.mark.parametrize(
    ("head_dim", "rows", "name"),
    [
        (32, 2048, "v2"),
        (34, 2048, "v2_early"),
        (48, 2048, "v2_early"),
        (64, 8192, "v2"),
        (64, 12288, "v4"),
        (66, 8192, "v2"),
        (68, 8192, "v4_early"),
        (96, 8192, "v4_early"),
        (128, 8192, "v4_early"),
    ],
)
def test_rows_are_loaded_early_where_a_warp_has_one(head_dim: int, rows: int, name: str) -> None:
    """In one segment, at ratio 4 with coff 2: 2.2 to 36 MB."""
    call = forward(4, 2, head_dim, 4 * rows, rows)
    assert chosen("forward", call)["name"] == f"csa_forward_r4_c2_bf16_{name}"


@pytest.mark.parametrize("head_dim", [8, 16, 32, 34, 48, 64, 66, 68, 96, 128])
@pytest.mark.parametrize("call", CALLS)
def test_tune_tries_what_the_launcher_would_choose(
    call: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is chosen at any size that `tools/tune` does not try for that head."""
    candidates = load("tune", monkeypatch).candidates
    shapes = list(candidates.shapes(TABLE, 90, 132))
    pack = Pack(4, 2, head_dim, (64,))
    tried = {shape.variant for shape in candidates.serving(TABLE, shapes, pack, call)}
    for rows in (1 << power for power in range(24)):
        problem = CALLS[call](4, 2, head_dim, 4 * rows, rows)
        assert chosen(call, problem)["name"] in tried
