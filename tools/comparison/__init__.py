# SPDX-License-Identifier: Apache-2.0
"""This library beside the system that it replaces: results, refusals, times of the same calls."""
