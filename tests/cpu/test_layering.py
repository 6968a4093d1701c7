# SPDX-License-Identifier: Apache-2.0
"""Who may import whom, and the limits on files: the rules of the tree, checked on its text."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 300

# A framework's adapter is the only file that imports it; compat serves PyTorch users, and the bench
# measures with torch. Paths below csa_runtime/.
FRAMEWORKS = {"torch", "jax", "jaxlib", "cupy", "tensorflow"}
MAY_IMPORT = {
    "torch.py": {"torch"},
    "_operators.py": {"torch"},
    "jax.py": {"jax", "jaxlib"},
    "compat.py": {"torch"},
    "bench/clock.py": {"torch"},
    "bench/eager.py": {"torch"},
    "bench/ours.py": {"torch"},
    "bench/peer.py": {"torch"},
    "bench/plots.py": {"matplotlib"},
    "bench/problem.py": {"torch"},
    "bench/run.py": {"torch"},
    "bench/twin.py": {"torch", "cupy"},
}
OPTIONAL = {"numpy", "ml_dtypes"}
# Type checkers read a stub, never Python; they know this module.
STUB = {"typing_extensions"}
# NumPy code, which says so where NumPy is missing; nothing but the trial imports it up front.
REFERENCE = "reference.py"
TRIAL = "_trial.py"


def python_files(*folders: str) -> list[Path]:
    """Python sources and stubs below these folders, and the scripts in tools/ without a suffix."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and (path.suffix in {".py", ".pyi"} or is_script(path)):
                found.append(path)
    return found


def is_script(path: Path) -> bool:
    """Whether a file without a suffix starts a Python interpreter."""
    return not path.suffix and path.read_bytes()[:64].startswith(b"#!/usr/bin/env python3\n")


def c_files() -> list[Path]:
    """C sources and headers, the tests' too."""
    return [
        path
        for folder in ("csa_runtime", "tests", "tools", "examples")
        for path in sorted((ROOT / folder).rglob("*.[ch]"))
    ]


def ids(paths: list[Path]) -> list[str]:
    """Readable names of test cases."""
    return [path.relative_to(ROOT).as_posix() for path in paths]


def is_type_checking(test: ast.expr) -> bool:
    """Whether an `if` tests typing.TYPE_CHECKING."""
    return ast.unparse(test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether merely importing the file imports it) of every import at run time."""
    yield from _imports(ast.parse(path.read_text()).body, True)


def _imports(nodes: list[ast.stmt] | list[ast.AST], top: bool) -> Iterator[tuple[str, bool]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module, top
            yield from ((f"{module}.{alias.name}", top) for alias in node.names)
        elif isinstance(node, ast.If) and is_type_checking(node.test):
            yield from _imports(node.orelse, top)
            continue
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {
            "import_module",
            "__import__",
        }:
            if node.args and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value), top
        inner = top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports(list(ast.iter_child_nodes(node)), inner)


def roots(path: Path) -> set[str]:
    """First components of everything that a file imports, anywhere in it."""
    return {module.split(".")[0] for module, _ in imports(path)} - {""}


def may_import(path: Path) -> set[str]:
    """Distributions that this file of the runtime exists to serve."""
    return MAY_IMPORT.get(path.relative_to(ROOT / "csa_runtime").as_posix(), set())


RUNTIME = python_files("csa_runtime")
AOT = python_files("aot")
OTHERS = python_files("tools", "tests", "examples")
SOURCES = RUNTIME + AOT + OTHERS
C_SOURCES = c_files()


def test_there_is_something_to_check() -> None:
    assert RUNTIME and AOT and OTHERS and C_SOURCES


@pytest.mark.parametrize("path", RUNTIME, ids=ids(RUNTIME))
def test_the_runtime_imports_no_compiler_no_cuda_and_no_build_time_code(path: Path) -> None:
    assert not roots(path) & {"cutlass", "cuda", "aot", "tools", "tests"}


@pytest.mark.parametrize("path", RUNTIME, ids=ids(RUNTIME))
def test_a_framework_is_imported_by_its_adapter_alone(path: Path) -> None:
    assert not roots(path) & (FRAMEWORKS - may_import(path))


@pytest.mark.parametrize("path", RUNTIME, ids=ids(RUNTIME))
def test_the_runtime_needs_no_other_distribution_to_be_imported(path: Path) -> None:
    needed = {module.split(".")[0] for module, top in imports(path) if top} - {""}
    own = {"csa_runtime"} | may_import(path)
    own |= {"numpy"} if path.name == REFERENCE else STUB if path.suffix == ".pyi" else set()
    assert needed - own <= set(sys.stdlib_module_names)
    lazy = (".reference", "._trial")
    early = [module for module, top in imports(path) if top and module.endswith(lazy)]
    assert not early or path.name == TRIAL


@pytest.mark.parametrize("path", RUNTIME, ids=ids(RUNTIME))
def test_only_optional_distributions_are_imported_later(path: Path) -> None:
    own = {"csa_runtime"} | may_import(path) | OPTIONAL
    own |= STUB if path.suffix == ".pyi" else set()
    assert roots(path) - own <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", AOT, ids=ids(AOT))
def test_build_time_code_knows_neither_the_runtime_nor_the_driver(path: Path) -> None:
    assert roots(path) - {"aot", "cutlass"} <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("path", OTHERS, ids=ids(OTHERS))
def test_only_build_time_code_imports_the_compiler(path: Path) -> None:
    assert "cutlass" not in roots(path)


def test_the_packer_imports_the_standard_library_alone() -> None:
    assert roots(ROOT / "aot" / "bundle.py") <= set(sys.stdlib_module_names)


def test_reading_the_tables_and_the_manifest_imports_no_compiler() -> None:
    code = "import sys, aot.manifest, aot.compare; sys.exit('cutlass' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("path", C_SOURCES, ids=ids(C_SOURCES))
def test_c_includes_no_cuda_header(path: Path) -> None:
    includes = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)
    own = {header.name for header in C_SOURCES if header.suffix == ".h"}
    foreign = [name for name in includes if Path(name).name not in own]
    assert not [name for name in foreign if "cuda" in name.lower() or name.startswith("nv")]


def test_cmake_neither_finds_nor_links_cuda() -> None:
    text = re.sub(r"#.*", "", (ROOT / "CMakeLists.txt").read_text())
    commands = re.findall(r"(\w+)\s*\(([^)]*)\)", text)
    linking = {"target_link_libraries", "link_libraries", "find_package", "find_library"}
    for command, arguments in commands:
        if command.lower() in linking | {"enable_language", "project"}:
            assert "cuda" not in arguments.lower(), f"{command}({arguments})"
    assert not re.search(r"-lcuda|libcuda\.so", text)


@pytest.mark.parametrize("path", SOURCES + C_SOURCES, ids=ids(SOURCES + C_SOURCES))
def test_a_file_fits_in_a_head(path: Path) -> None:
    assert len(path.read_text().splitlines()) < MAX_LINES


@pytest.mark.parametrize("path", SOURCES + C_SOURCES, ids=ids(SOURCES + C_SOURCES))
def test_a_file_names_its_licence_first(path: Path) -> None:
    lines = path.read_text().splitlines()
    script = bool(lines) and lines[0].startswith("#!")
    assert "SPDX-License-Identifier: Apache-2.0" in " ".join(lines[script : script + 1])
