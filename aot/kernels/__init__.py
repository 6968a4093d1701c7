# SPDX-License-Identifier: Apache-2.0
"""Device code in CuTe-DSL, one operation a file."""
