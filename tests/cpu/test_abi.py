# SPDX-License-Identifier: Apache-2.0
"""The C ABI as a C caller sees it: the struct's size promise, codes, messages, exported names."""

import ast
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import csa_runtime
from csa_runtime import _native
from support import fake

pytestmark = pytest.mark.L0

# Where the compiled files are; a development install leaves the Python files in the source tree.
PACKAGE = Path(_native.__file__).parent
HEADER = PACKAGE / "include" / "csa_runtime.h"
STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
PUBLIC = {
    "csa_forward", "csa_backward", "csa_backward_workspace_bytes", "csa_load", "csa_last_error",
    "csa_abi_version",
}  # fmt: skip
SCRIPT = f"""
library = ctypes.CDLL({str(PACKAGE / "libcsa_runtime.so")!r})
library.csa_last_error.restype = ctypes.c_char_p
NAMES = [("size", 4, "I")] + [(n, 4, "i") for n in ("device", "ratio", "coff", "dtype", "flags")]
NAMES += [(n, 8, "q") for n in ("tokens segments rows head_dim kv score ape cu_seqlens "
    "cu_seqlens_comp out grad_out grad_kv grad_score grad_ape workspace workspace_bytes kv_stride "
    "score_stride out_stride grad_out_stride grad_kv_stride grad_score_stride").split()]
import struct
def pack(call, size, tail=b""):
    values = {{"size": size, **call}}
    kinds = "<" + "".join(kind for _, _, kind in NAMES)
    data = struct.pack(kinds, *(values.get(name, 0) for name, _, _ in NAMES))
    return ctypes.create_string_buffer(data + tail, len(data) + len(tail))
def call(buffer):
    code = library.csa_forward(buffer, None)
    return [code, library.csa_last_error().decode() if code else ""]
"""


def test_the_size_field_keeps_its_promise() -> None:
    run = fake.run(f"""{SCRIPT}
emit([call(pack(forward(), 200)), call(pack(forward(), 0)), call(pack(forward(), 199)),
      call(pack(forward(), 208, bytes(8))), call(pack(forward(), 208, bytes(7) + b"x")),
      call(None), call(pack(forward(), 4096, bytes(3896))), call(pack(forward(), 4097)),
      call(pack(forward(), 2**32 - 1))])
""")
    exact, zero, short, longer, unknown, null, longest, *absurd = run.output
    assert exact[0] == longer[0] == longest[0] == 0 and len(run.launches) == 3
    assert zero[0] == short[0] == unknown[0] == null[0] == 1
    assert "set size" in zero[1] and "199" in short[1] and "args is NULL" in null[1]
    for code, text in absurd:
        assert code == 1 and "above 4096" in text
    assert "byte 207 is set" in unknown[1] and "knows 200 bytes" in unknown[1]


def test_last_error_belongs_to_the_thread() -> None:
    run = fake.run(f"""{SCRIPT}
seen = [library.csa_last_error().decode()]
call(pack(forward(ratio=3), 200))
thread = threading.Thread(target=lambda: seen.append(library.csa_last_error().decode()))
thread.start(); thread.join()
seen.append(library.csa_last_error().decode())
emit(seen)
""")
    before, other, own = run.output
    assert before == other == "" and "ratio 3" in own


def test_workspace_bytes_and_load_from_c() -> None:
    run = fake.run(f"""{SCRIPT}
result = ctypes.c_int64()
args = pack(backward(), 200)
codes = [library.csa_backward_workspace_bytes(args, ctypes.byref(result)),
         library.csa_load(-2, None), library.csa_load(0, None),
         library.csa_backward_workspace_bytes(args, None)]
emit([codes, result.value, _native.backward_workspace_bytes(64, 16, 128, 4, 2, 1)])
""")
    codes, value, same = run.output
    assert codes == [0, 1, 0, 1] and value == same > 0


def test_a_c_program_compiles_links_and_launches(tmp_path: Path) -> None:
    source = tmp_path / "use.c"
    source.write_text(
        """
#include <stdio.h>
#include <string.h>
#include "csa_runtime.h"
int main(void) {
  csa_args args;
  memset(&args, 0, sizeof(args));
  args.size = sizeof(args);
  args.ratio = 4, args.coff = 1, args.dtype = CSA_DTYPE_BF16;
  args.tokens = 4, args.segments = 1, args.rows = 1, args.head_dim = 128;
  args.kv = (void *)0x10000, args.score = (void *)0x20000, args.out = (void *)0x30000;
  args.cu_seqlens = (void *)0x40000, args.cu_seqlens_comp = (void *)0x50000;
  args.kv_stride = args.score_stride = args.out_stride = 128;
  int code = csa_forward(&args, NULL);
  printf("%d %d %d %s\\n", code, csa_abi_version(), CSA_ABI_VERSION, csa_last_error());
  return code;
}
"""
    )
    compiler = shutil.which(os.environ.get("CC", "cc"))
    assert compiler is not None
    for standard in ("-std=c99", "-std=c11"):
        subprocess.run(
            [
                compiler,
                standard,
                *STRICT,
                f"-I{HEADER.parent}",
                str(source),
                f"-L{PACKAGE}",
                "-lcsa_runtime",
                f"-Wl,-rpath,{PACKAGE}",
                "-o",
                str(tmp_path / "use"),
            ],
            check=True,
        )
    log = tmp_path / "log"
    done = subprocess.run(
        [str(tmp_path / "use")],
        env={"LD_LIBRARY_PATH": str(fake.library()), "FAKE_CUDA_LOG": str(log)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["0", "1", "1"] and done.returncode == 0, done.stdout
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    assert [c["grid"] for c in calls if c["call"] == "cuLaunchKernelEx"] == [[1, 1, 1]]


def test_only_the_promised_names_are_exported() -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("binutils' nm is not installed")
    text = subprocess.run(
        [nm, "-D", "--defined-only", str(PACKAGE / "libcsa_runtime.so")],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    names = {line.split()[-1] for line in text.splitlines()}
    assert {name for name in names if not name.startswith("csa_private_")} == PUBLIC
    declared = set(re.findall(r"CSA_API [\w ]+?\*?(csa_\w+)\(", HEADER.read_text()))
    assert declared == PUBLIC


def test_the_module_is_built_for_the_stable_abi_and_links_no_driver() -> None:
    files = [path.name for path in PACKAGE.glob("*.so")]
    assert sorted(files) == ["_native.abi3.so", "libcsa_runtime.so"]
    for name in files:
        data = (PACKAGE / name).read_bytes()
        assert b"libpython" not in data and b"libcudart" not in data
    assert b"libcuda.so.1\0" in (PACKAGE / "libcsa_runtime.so").read_bytes()


def test_the_stub_names_what_the_module_has() -> None:
    stub = ast.parse(Path(csa_runtime.__file__).with_name("_native.pyi").read_text())
    functions = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert set(functions) == {name for name in dir(_native) if not name.startswith("_")}
    declaration = HEADER.read_text().split("typedef struct csa_args {")[1].split("} csa_args;")[0]
    fields = re.findall(r"(\w+)(?=[,;])", re.sub(r"/\*.*?\*/", "", declaration, flags=re.DOTALL))
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    keywords = [ast.unparse(node.target) for node in classes["Launch"].body]
    assert keywords == [*fields[1:], "stream", "variant"]
    for name in ("launch_forward", "launch_backward"):
        assert ast.unparse(functions[name].args.kwarg.annotation) == "Unpack[Launch]"
