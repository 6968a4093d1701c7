# SPDX-License-Identifier: Apache-2.0
"""Build-time half: compiles the kernels and writes the bundle. Never imported at run time."""
