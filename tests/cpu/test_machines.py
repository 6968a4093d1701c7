# SPDX-License-Identifier: Apache-2.0
"""The rule that fits launch shapes to architectures that nobody could measure."""

import pytest

from aot.machines import MACHINES, MEASURED, blocks, elements
from aot.schedules import SCHEDULES
from aot.variants import ARCHITECTURES, BY_NAME

pytestmark = pytest.mark.L0

ROWS = {arch: [s for s in SCHEDULES if s.architecture == arch] for arch in ARCHITECTURES}


def test_each_architecture_has_its_gpu_and_only_the_measured_one_evidence() -> None:
    assert set(MACHINES) == set(ARCHITECTURES)
    for arch, rows in ROWS.items():
        assert {row.evidence == "unmeasured" for row in rows} == {arch != MEASURED}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_blocks_fill_whole_waves_and_one_alone_where_nobody_measured(arch: int) -> None:
    machine = MACHINES[arch]
    for row in ROWS[arch]:
        each, left = divmod(row.ctas, machine.multiprocessors)
        assert left == 0 and row.fill_ctas % machine.multiprocessors == 0
        assert (row.ctas > 0) == (row.variant.operation == "backward")
        holds = machine.shared // (row.variant.dynamic_shared + 1024)
        assert arch == MEASURED or each <= max(holds, 1) or not row.variant.dynamic_shared


def test_what_was_found_is_kept_where_it_was_found_and_fitted_elsewhere() -> None:
    narrow = BY_NAME["csa_backward_r128_c1_bf16_v1_t256_a8_ape"]  # 56,320 bytes of shared memory
    assert [blocks(arch, narrow, 264) for arch in ARCHITECTURES] == [216, 264, 296, 170]
    assert [blocks(arch, narrow, 132) for arch in ARCHITECTURES] == [108, 132, 148, 170]
    assert [blocks(arch, narrow, 0) for arch in ARCHITECTURES] == [0] * 4
    assert [elements(arch, 1_320) for arch in ARCHITECTURES] == [1_080, 1_320, 1_480, 1_700]
    assert [elements(arch, -1) for arch in ARCHITECTURES] == [-1] * 4


def test_a_pack_leaves_each_cache_at_its_own_size() -> None:
    """Where windows are loaded past the first-level cache: from there on, in 10**6 bytes moved."""
    found = {}
    for arch, rows in ROWS.items():
        family = [row for row in rows if row.variant.name.startswith("csa_forward_r4_c2_")]
        once = next(i for i, row in enumerate(family) if row.variant.once)
        found[arch] = round(family[once - 1].max_elements * (4 * 4 * 2 + 2) / 1e6)
    assert found == {arch: MACHINES[arch].cache for arch in ARCHITECTURES}
