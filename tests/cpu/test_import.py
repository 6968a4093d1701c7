# SPDX-License-Identifier: Apache-2.0
"""What importing the package costs and leaves alone; errors that cross processes."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import csa_runtime
from csa_runtime import errors

HEAVY = (
    "numpy",
    "torch",
    "cupy",
    "jax",
    "numba",
    "ml_dtypes",
    "ctypes",
    "typing",
    "json",
    "importlib.metadata",
)


def run(code: str) -> str:
    """Standard output of a fresh interpreter that finds the package where this one does."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        cwd="/",  # -c looks in the working directory first, and that may be the source tree
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_brings_in_no_library() -> None:
    """Nor the slow parts of the standard one."""
    code = (
        "import sys; before = set(sys.modules); import csa_runtime;"
        f"print([m for m in {HEAVY} if m in set(sys.modules) - before])"
    )
    assert run(code) == "[]"


def test_import_and_info_start_no_driver() -> None:
    """A process may fork after them: nothing called libcuda is mapped."""
    code = (
        "import csa_runtime, pathlib; csa_runtime.info();"
        "print('libcuda.so' in pathlib.Path('/proc/self/maps').read_text())"
    )
    assert run(code) == "False"


def test_a_forked_child_can_use_the_cpu_path() -> None:
    """Import, fork, compute."""
    code = """
import os, numpy as np, csa_runtime
csa_runtime.info()
pid = os.fork()
kv = np.ones((4, 3), np.float32)
prefix = np.array([0, 4], np.int32), np.array([0, 1], np.int32)
out = csa_runtime.compressor_forward(kv, kv, None, *prefix, ratio=4, coff=1)
assert (out == 1).all()
if pid == 0:
    os._exit(0)
print(os.waitpid(pid, 0)[1])
"""
    assert run(code) == "0"


def test_import_is_quick() -> None:
    """A few ms; the bound leaves room for a busy machine, the best of three counts."""
    code = "import time; t = time.perf_counter(); import csa_runtime;print(time.perf_counter() - t)"
    assert min(float(run(code)) for _ in range(3)) < 0.1


def test_frameworks_are_imported_on_demand() -> None:
    """`csa_runtime.torch` and `csa_runtime.reference` need no import statement."""
    code = (
        "import sys, csa_runtime; csa_runtime.reference.reference_forward;"
        "print('torch' in sys.modules, csa_runtime.torch.compressor.__name__)"
    )
    assert run(code) == "False compressor"


def test_a_source_folder_without_the_module_says_what_to_do(tmp_path: Path) -> None:
    """It hides an installed package from whoever starts Python beside it."""
    folder = tmp_path / "csa_runtime"
    shutil.copytree(Path(csa_runtime.__file__).parent, folder)
    for module in folder.glob("_native*.so"):
        module.unlink()
    done = subprocess.run(
        [sys.executable, "-ESc", "import csa_runtime"],  # a development install finds both halves
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"ImportError: csa_runtime was imported from {folder}" in done.stderr
    assert "pip install -e ." in done.stderr


def test_launch_functions_are_the_native_ones() -> None:
    """Nothing stands between a caller and the module's own functions."""
    code = (
        "import csa_runtime as c; from csa_runtime import _native as n;"
        "print(c.launch_forward is n.launch_forward, c.launch_backward is n.launch_backward)"
    )
    assert run(code) == "True True"


@pytest.mark.parametrize("kind", [errors.UnsupportedArch, errors.BundleError])
def test_errors_are_runtime_errors_and_picklable(kind: type[RuntimeError]) -> None:
    """A worker process can send them home."""
    copy = pickle.loads(pickle.dumps(kind("what failed")))
    assert type(copy) is kind and isinstance(copy, RuntimeError)
    assert str(copy) == "what failed"


def test_driver_error_keeps_its_parts() -> None:
    """Name, number and call survive pickling."""
    error = errors.DriverError("cuInit failed", "CUDA_ERROR_NO_DEVICE", 100, "cuInit")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, RuntimeError)
    assert (str(copy), copy.name, copy.code, copy.call) == (
        "cuInit failed",
        "CUDA_ERROR_NO_DEVICE",
        100,
        "cuInit",
    )
