# SPDX-License-Identifier: Apache-2.0
"""The C side of `tools/host_cost`: builds host_cost.c and measures with it."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from installed import ROOT, manifest_in_use

POINTERS = (
    "kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp",
    "out", "grad_out", "grad_kv", "grad_score", "grad_ape", "workspace",
)  # fmt: skip
STRIDES = tuple(f"{name}_stride" for name in ("kv", "score", "out", "grad_out", "grad_kv"))
THREE = ctypes.c_uint32 * 3
Plan = dict[str, Any]


class Args(ctypes.Structure):
    """`csa_args` of csa_runtime.h."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        *((name, ctypes.c_int32) for name in ("device", "ratio", "coff", "dtype", "flags")),
        *((name, ctypes.c_int64) for name in ("tokens", "segments", "rows", "head_dim")),
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("workspace_bytes", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in (*STRIDES, "grad_score_stride")),
    )


class Launch(ctypes.Structure):
    """`launch` of host_cost.c."""

    _fields_ = (
        ("cubin", ctypes.c_char_p),
        ("symbol", ctypes.c_char_p),
        ("grid", THREE),
        ("block", THREE),
        ("shared", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("offsets", ctypes.c_void_p),
        ("parameters", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
    )


class Native:
    """Times per call in nanoseconds, medians over batches that are synchronised in between."""

    def __init__(self, folder: Path, stream: int, batches: int, size: int) -> None:
        """Compile into `folder`, and open the driver."""
        compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
        target, source = folder / "host_cost.so", Path(__file__).with_name("host_cost.c")
        options = ["-O2", "-std=c11", "-Wall", "-Wextra", "-shared", "-fPIC"]
        subprocess.run([compiler, *options, "-o", target, source, "-ldl"], check=True)
        self.library = ctypes.CDLL(str(target))
        self.how = ctypes.c_void_p(stream), batches, size
        self.images = manifest_in_use()["images"]
        if self.library.host_cost_open() != 0:
            sys.exit("host_cost: libcuda.so.1 cannot be opened, or is older than CUDA 12.0")

    def launches(self, plan: Plan, packed: bool = True) -> float:
        """The launches of a plan of `explain`, by cuLaunchKernelEx alone.

        Packed: with one buffer of parameters each, as the launcher does it; else pointers.
        """
        keep: list[Any] = []
        made = (Launch * len(plan["launches"]))()
        for slot, launch in zip(made, plan["launches"], strict=True):
            image = next(
                i
                for i in self.images
                if i["variant"] == launch["variant"] and i["arch"] == plan["arch"]
            )
            starts = [offset for offset, _ in image["parameters"]]
            buffer = ctypes.create_string_buffer(launch["parameters"], len(launch["parameters"]))
            offsets = (ctypes.c_uint32 * len(starts))(*starts)
            keep += [buffer, offsets]
            slot.cubin = str(ROOT / "cubins" / image["file"]).encode()
            slot.symbol = image["symbol"].encode()
            slot.grid, slot.block = THREE(*launch["grid"]), THREE(*launch["block"])
            slot.shared, slot.count = launch["shared"], len(starts)
            slot.offsets = None if packed else ctypes.addressof(offsets)
            slot.parameters, slot.bytes = ctypes.addressof(buffer), len(launch["parameters"])
        return self._measure("cuLaunchKernelEx", "launches", made, len(made))

    def context(self) -> float:
        """The driver calls that find a stream's context."""
        return self._measure("the driver", "context")

    def call(self, function: str, fields: dict[str, int]) -> float:
        """`csa_forward` or `csa_backward`."""
        from csa_runtime import _native

        csa = ctypes.CDLL(str(Path(_native.__file__).with_name("libcsa_runtime.so")))
        args = Args(size=ctypes.sizeof(Args), **fields)
        return self._measure(function, "csa", getattr(csa, function), ctypes.byref(args))

    def _measure(self, what: str, function: str, *arguments: Any) -> float:
        result = ctypes.c_double()
        call = getattr(self.library, f"host_cost_{function}")
        status = call(*arguments, *self.how, ctypes.byref(result))
        if status != 0:
            sys.exit(f"host_cost: {what} returned {status}")
        return result.value
