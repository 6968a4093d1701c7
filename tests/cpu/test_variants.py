# SPDX-License-Identifier: Apache-2.0
"""What a row of the table of variants may say."""

import dataclasses
from typing import Any

import pytest

from aot.variants import BY_NAME

pytestmark = pytest.mark.L0


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        ("csa_forward_r4_c2_bf16_v4_n8", {"together": 3}, "8 rows, 3 together"),
        ("csa_forward_r128_c1_bf16_v2_once_t256_ahead", {"early": True}, "but ahead"),
        ("csa_forward_r4_c2_bf16_v4", {"ahead": True}, "but ahead"),
        ("csa_forward_r4_c2_bf16_v4", {"prefetch_size": 128}, "copies no 16"),
    ],
)
def test_fields_without_effect_are_refused(name: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        dataclasses.replace(BY_NAME[name], **fields)
