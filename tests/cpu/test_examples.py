# SPDX-License-Identifier: Apache-2.0
"""The examples compile without a warning; they run on the fake driver, or say what they lack."""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import examples, fake

pytestmark = pytest.mark.L1

NATIVE = tuple(examples.NATIVE)
PYTHON = ("raw_pointers.py", "graph_capture.py")
PAGE = examples.EXAMPLES.parent / "docs" / "raw_pointers.md"
ARRAYS = PAGE.with_name("arrays.md")


def built(source: str, folder: Path) -> list[str]:
    """The command; skips a C++ example where no C++ compiler is installed."""
    if source.endswith(".cpp") and examples.compiler(source) is None:
        pytest.skip("no C++ compiler is installed")
    return examples.build(source, folder)


def on_the_fake_driver(command: list[str], folder: Path) -> tuple[str, list[dict[str, object]]]:
    """What it printed and the driver calls it made."""
    log = folder / "calls"
    done = examples.run(
        command,
        folder,
        LD_LIBRARY_PATH=str(fake.library("example_driver.c")),
        FAKE_CUDA_LOG=str(log),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, [json.loads(line) for line in log.read_text().splitlines()]


def named(calls: list[dict[str, object]], name: str) -> list[dict[str, object]]:
    """Those of one function."""
    return [call for call in calls if call["call"] == name]


def test_c_runs_forward_and_backward_on_its_own_stream(tmp_path: Path) -> None:
    text, calls = on_the_fake_driver(built("c_forward.c", tmp_path), tmp_path)
    names = [line.split()[0] for line in text.splitlines()]
    assert names == ["out", "grad_kv", "grad_score", "grad_ape"]
    launches = named(calls, "cuLaunchKernelEx")
    kernels = [str(launch["name"]).split("_")[1] for launch in launches]
    assert kernels == ["forward", "backward", "finish"]
    assert {launch["stream"] for launch in launches} == {1000}
    assert all(call["result"] == 0 for call in calls)


def test_cpp_runs_a_long_forward_and_frees_its_memory(tmp_path: Path) -> None:
    text, calls = on_the_fake_driver(built("cpp_forward.cpp", tmp_path), tmp_path)
    assert text.startswith("mean of out ")
    (launch,) = named(calls, "cuLaunchKernelEx")
    assert str(launch["name"]).startswith("csa_forward_r128_c1_bf16")
    assert len(named(calls, "cuMemAlloc")) == len(named(calls, "cuMemFree")) == 5


@pytest.mark.parametrize("source", NATIVE)
def test_without_a_driver_a_program_says_so(source: str, tmp_path: Path) -> None:
    command = built(source, tmp_path)
    (tmp_path / "libcuda.so.1").touch()  # the loader stops here
    done = examples.run(command, tmp_path, LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 1
    assert "needs an NVIDIA GPU's driver" in done.stderr and "libcuda.so.1" in done.stderr


@pytest.mark.parametrize("source", NATIVE)
def test_an_error_of_the_library_reaches_the_user(source: str, tmp_path: Path) -> None:
    command = built(source, tmp_path)
    done = examples.run(
        command,
        tmp_path,
        LD_LIBRARY_PATH=str(fake.library("example_driver.c")),
        FAKE_CUDA_DEVICES="75",
    )
    assert done.returncode == 1
    assert "csa_forward: " in done.stderr and "7.5" in done.stderr


@pytest.mark.parametrize("script", PYTHON)
def test_without_a_gpu_a_script_says_so(script: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = examples.run(examples.python(script), tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert f"{script}: this example needs an NVIDIA GPU" in done.stderr


def test_the_page_of_raw_pointers_builds_and_runs_them(tmp_path: Path) -> None:
    for source in NATIVE:
        if examples.compiler(source) is None or shutil.which(examples.NATIVE[source][1]) is None:
            pytest.skip("the page's cc and c++ are not installed")
        shutil.copy(examples.EXAMPLES / source, tmp_path)
    (commands,) = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [line for line in commands.splitlines() if not line.startswith("python ")]
    assert len(lines) == 4
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    done = examples.run(
        ["bash", "-euc", "\n".join(lines)],
        tmp_path,
        PATH=f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        LD_LIBRARY_PATH=str(fake.library("example_driver.c")),
    )
    assert done.returncode == 0, done.stderr
    assert "grad_ape" in done.stdout and "mean of out" in done.stdout


def test_the_page_of_raw_pointers_names_every_field() -> None:
    header = (examples.PACKAGE / "include" / "csa_runtime.h").read_text()
    declared = header.split("typedef struct csa_args {")[1].split("} csa_args;")[0]
    fields = re.findall(r"(\w+)(?=[,;])", re.sub(r"/\*.*?\*/", "", declared, flags=re.DOTALL))
    text = PAGE.read_text()
    missing = [f for f in fields if not f.endswith("_stride") and f"`{f}`" not in text]
    assert len(fields) > 20 and not missing


def test_the_page_of_arrays_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", ARRAYS.read_text(), re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    shapes = {name: found[name].shape for name in ("out", "grad_kv", "grad_score", "grad_ape")}
    assert shapes == {
        "out": (9, 64), "grad_kv": (40, 128), "grad_score": (40, 128), "grad_ape": (4, 128)
    }  # fmt: skip
    assert all(np.isfinite(found[name].astype(np.float32)).all() for name in shapes)
