# SPDX-License-Identifier: Apache-2.0
"""The shared hand-computed cases, and the same stretched to windows of 128 tokens."""

import copy
import json
from pathlib import Path
from typing import Any

LONG = 128
PATH = Path(__file__).parents[1] / "cases" / "compressor_cases.json"
CASES: list[dict[str, Any]] = json.loads(PATH.read_text())["cases"]


def stretch(case: dict[str, Any], ratio: int = LONG) -> dict[str, Any]:
    """Every token and APE row repeated `ratio // case["ratio"]` times.

    A window's weights divide by that number, a power of two, and its sums stay: `out` stays, the
    gradients divide.
    """
    times = ratio // case["ratio"]
    assert times * case["ratio"] == ratio and times & (times - 1) == 0
    longer = copy.deepcopy(case)
    longer["name"] = f"{case['name']}_stretched"
    longer["ratio"] = ratio
    longer["cu_seqlens"] = [token * times for token in case["cu_seqlens"]]
    for name in ("kv", "score", "ape"):
        longer[name] = [row for row in case[name] for _ in range(times)]
    for name in ("grad_kv", "grad_score", "grad_ape"):
        if name in case:
            longer[name] = [
                [x / times if isinstance(x, int | float) else x for x in row]
                for row in case[name]
                for _ in range(times)
            ]
    return longer


STRETCHED = [stretch(case) for case in CASES if case["ratio"] < LONG]
