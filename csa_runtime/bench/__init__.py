# SPDX-License-Identifier: Apache-2.0
"""`csa-runtime bench`: how long calls take on this GPU, beside a copy and beside other systems.

`packs` says what is measured, `clock` how, `ours`, `eager` and `peer` on what, `twin` what no
computing costs, `sections` puts them together into a `record`, and `tables`, `plots` and `baseline`
read one. Only those that measure import torch, and only `plots` imports matplotlib.
"""
