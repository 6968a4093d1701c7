# SPDX-License-Identifier: Apache-2.0
"""How many threads a warp has."""

LOG2_WARP = 5
WARP = 1 << LOG2_WARP
