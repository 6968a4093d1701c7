# SPDX-License-Identifier: Apache-2.0
"""Runs Python in a process of its own on the recording fake driver (tests/fake_driver.c)."""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLAGS = ("-std=gnu11", "-Wall", "-Werror", "-O1", "-fPIC", "-shared", "-pthread")
TESTS = Path(__file__).resolve().parents[1]

# Every script starts with this: what a call raised, as data.
PRELUDE = """
import ctypes, json, os, pickle, sys, threading
import csa_runtime
from csa_runtime import _native
from support.problems import address, backward, forward
def attempt(call, *args, **keywords):
    try:
        call(*args, **keywords)
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error),
                **{k: getattr(error, k) for k in ("name", "code", "call") if hasattr(error, k)}}
def emit(value):
    print(json.dumps(value))
"""

# With the driver, also the functions that make its contexts, streams and captures.
CONTROL = """
fake = ctypes.CDLL("libcuda.so.1")
for name in ("fake_context", "fake_stream"):
    getattr(fake, name).restype = ctypes.c_void_p
for name in ("fake_stream", "fake_destroy", "fake_context_number", "fake_invalidated",
             "cuCtxSetCurrent"):
    getattr(fake, name).argtypes = [ctypes.c_void_p]
fake.fake_capture.argtypes = [ctypes.c_void_p, ctypes.c_int]
"""


@functools.cache
def library(source: str = "fake_driver.c") -> Path:
    """The folder of a fake libcuda.so.1 of this source, built once per test run."""
    folder = Path(tempfile.mkdtemp(prefix="fake_driver"))
    compiler = shutil.which(os.environ.get("CC", "cc"))
    assert compiler is not None, "a C compiler is needed: install gcc or clang, or set CC"
    subprocess.run(
        [compiler, *FLAGS, "-o", str(folder / "libcuda.so.1"), str(TESTS / source)],
        check=True,
    )
    return folder


@dataclass(frozen=True)
class Run:
    """What a script printed through `emit`, and the driver calls it made, in order."""

    output: Any
    calls: list[dict[str, Any]]

    def named(self, *names: str) -> list[dict[str, Any]]:
        """The calls of these functions."""
        return [call for call in self.calls if call["call"] in names]

    @property
    def launches(self) -> list[dict[str, Any]]:
        """The launches."""
        return self.named("cuLaunchKernelEx")


def run(script: str, driver: bool = True, **environment: str) -> Run:
    """Run a script; FAKE_CUDA_* and other variables go by keyword. It must exit with 0."""
    with tempfile.TemporaryDirectory() as folder:
        # The loader stops at this file, so that a real driver of the machine is not found.
        (Path(folder) / "libcuda.so.1").touch()
        log = Path(folder) / "calls"
        variables = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("CSA_", "FAKE_", "CUDA_"))
        }
        variables |= {
            "PYTHONPATH": str(TESTS),
            "LD_LIBRARY_PATH": str(library()) if driver else folder,
            "FAKE_CUDA_LOG": str(log),
            **environment,
        }
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + (CONTROL if driver else "") + script],
            env=variables,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        lines = log.read_text().splitlines() if log.exists() else []
        output = json.loads(done.stdout) if done.stdout.strip() else None
        return Run(output, [json.loads(line) for line in lines])
