# SPDX-License-Identifier: Apache-2.0
"""The table of coverage names tests that exist, and every one of the drop-in's."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs" / "seed_coverage.md").read_text()
NAMED = sorted(set(re.findall(r"`((?:cpu|gpu)/test_\w+)::(test_\w+)`", PAGE)))


def functions(file: str) -> set[str]:
    """Names of the functions in a test file."""
    tree = ast.parse((TESTS / f"{file}.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_named_tests_exist(file: str) -> None:
    wanted = {name for other, name in NAMED if other == file}
    assert wanted and not wanted - functions(file)


def test_every_row_names_a_test_or_a_tool() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]
    headings = [row for row in rows if row.startswith("| the page")]
    assert len(headings) == 6
    for row in rows:
        assert row in headings or re.search(r"`(cpu|gpu)/test_\w+::|pytest -m", row), row
