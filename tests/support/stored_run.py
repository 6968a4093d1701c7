# SPDX-License-Identifier: Apache-2.0
"""A run of csa-runtime bench to show and compare where there is no GPU."""

from pathlib import Path

# Of an earlier build on an H200: graphs and kernels of twelve packs, and many segments.
STORED = Path(__file__).with_name("bench_h200.json")
