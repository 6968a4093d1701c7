# SPDX-License-Identifier: Apache-2.0
"""What the CPU and the GPU tests share."""
