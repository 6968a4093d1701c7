# SPDX-License-Identifier: Apache-2.0
"""What a fresh process pays once, for `tools/host_cost`: the import and the first result."""

import statistics
import subprocess
import sys
import tempfile

RUNS = 9

IMPORT = """
import time
begin = time.perf_counter_ns()
import csa_runtime
print(time.perf_counter_ns() - begin)
"""

# From there on a context exists and the inputs are in its memory.
POINTERS = """
import time
import numpy as np
import csa_runtime
from csa_runtime._device_memory import Memory
host = dict(
    kv=np.zeros((64, 256), np.uint16), score=np.zeros((64, 256), np.uint16),
    ape=np.zeros((4, 256), np.float32), cu_seqlens=np.array([0, 64], np.int32),
    cu_seqlens_comp=np.array([0, 16], np.int32), out=np.zeros((16, 128), np.uint16),
)
with Memory() as memory:
    addresses = {name: memory.upload(values) for name, values in host.items()}
    begin = time.perf_counter_ns()
    csa_runtime.launch_forward(
        device=0, ratio=4, coff=2, dtype=1, tokens=64, segments=1, rows=16, head_dim=128,
        kv_stride=256, score_stride=256, out_stride=128, **addresses,
    )
    memory.download(addresses["out"], host["out"])
    print(time.perf_counter_ns() - begin)
"""

TORCH = """
import time
import torch
import csa_runtime
kv, score = (torch.zeros(64, 256, dtype=torch.bfloat16, device="cuda") for _ in range(2))
ape = torch.zeros(4, 256, device="cuda")
cu, comp = (torch.tensor(p, dtype=torch.int32, device="cuda") for p in ([0, 64], [0, 16]))
torch.cuda.synchronize()
begin = time.perf_counter_ns()
csa_runtime.compressor_forward(kv, score, ape, cu, comp, ratio=4, coff=2, total_comp=16)
torch.cuda.synchronize()
print(time.perf_counter_ns() - begin)
"""


def fresh(script: str) -> float:
    """Nanoseconds that the script prints, the median over processes."""
    elsewhere = tempfile.gettempdir()  # a checkout's folder would hide the installed package
    return statistics.median(
        int(subprocess.check_output([sys.executable, "-c", script], cwd=elsewhere))
        for _ in range(RUNS)
    )
