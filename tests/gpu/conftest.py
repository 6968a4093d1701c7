# SPDX-License-Identifier: Apache-2.0
"""GPU tests are written in torch: without it there is nothing to collect, and pytest says so."""

import importlib.util

HAVE_TORCH = importlib.util.find_spec("torch") is not None
collect_ignore_glob = [] if HAVE_TORCH else ["test_*.py"]


def pytest_report_header() -> list[str]:
    """Says why nothing of this folder was collected."""
    return [] if HAVE_TORCH else ["tests/gpu: not collected, torch is not installed"]
