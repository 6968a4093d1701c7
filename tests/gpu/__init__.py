# SPDX-License-Identifier: Apache-2.0
"""Tests that run the kernels on a GPU, against Reference R computed by torch on the same GPU."""
