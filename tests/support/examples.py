# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/: compiled as docs/raw_pointers.md says, and run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from csa_runtime import _native

PACKAGE = Path(_native.__file__).parent
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STRICT = ("-O2", "-Wall", "-Wextra", "-Werror")
NATIVE = {"c_forward.c": ("CC", "cc", "-std=c11"), "cpp_forward.cpp": ("CXX", "c++", "-std=c++17")}


def compiler(source: str) -> str | None:
    """Path of the compiler for a source; None where there is none."""
    variable, usual, _ = NATIVE[source]
    return shutil.which(os.environ.get(variable, usual))


def build(source: str, folder: Path) -> list[str]:
    """Compiles a C or C++ example into the folder; the command that runs it."""
    found = compiler(source)
    assert found is not None, f"no compiler for {source}: install one, or set {NATIVE[source][0]}"
    program = folder / Path(source).stem
    subprocess.run(
        [
            found, NATIVE[source][2], *STRICT, str(EXAMPLES / source),
            f"-I{PACKAGE / 'include'}", f"-L{PACKAGE}", "-lcsa_runtime", "-ldl",
            f"-Wl,-rpath,{PACKAGE}", "-o", str(program),
        ],
        check=True,
    )  # fmt: skip
    return [str(program)]


def run(command: list[str], folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs one in the folder, from which Python does not find the source tree's csa_runtime."""
    import csa_runtime

    # A development install is found by a hook that a child has too, an ordinary one by its place.
    path = os.pathsep.join(
        filter(None, [str(Path(csa_runtime.__path__[0]).parent), os.environ.get("PYTHONPATH")])
    )
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def python(script: str) -> list[str]:
    """The command that runs a Python example."""
    return [sys.executable, str(EXAMPLES / script)]
