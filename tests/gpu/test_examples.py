# SPDX-License-Identifier: Apache-2.0
"""The examples run on the GPU, and the C one's sums are those of the same inputs through torch."""

from pathlib import Path

import pytest
import torch

import csa_runtime
from support import examples

pytestmark = [pytest.mark.gpu, pytest.mark.L1]


def printed(command: list[str], folder: Path) -> str:
    """What it said; it must succeed."""
    done = examples.run(command, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def eighths(rows: int, columns: int, step: int) -> torch.Tensor:
    """c_forward.c's values."""
    values = (torch.arange(rows * columns) * step % 33 - 16).float() / 8
    return values.reshape(rows, columns).bfloat16().cuda()


def test_the_c_program_computes_what_torch_tensors_give(tmp_path: Path) -> None:
    if examples.compiler("c_forward.c") is None:
        pytest.skip("no C compiler is installed")
    text = printed(examples.build("c_forward.c", tmp_path), tmp_path)
    ape = torch.zeros(4, 256)
    ape[0, :2] = torch.tensor([0.5, -0.5])
    prefixes = ((0, 40, 47, 64), (0, 10, 11, 14))
    inputs = (
        eighths(64, 256, 7),
        eighths(64, 256, 5),
        ape.cuda(),
        *(torch.tensor(prefix, dtype=torch.int32, device="cuda") for prefix in prefixes),
    )
    window = {"ratio": 4, "coff": 2}
    wanted = {"out": csa_runtime.compressor_forward(*inputs, **window)}
    grads = csa_runtime.compressor_backward(*inputs, eighths(14, 128, 3), **window)
    wanted |= dict(zip(("grad_kv", "grad_score", "grad_ape"), grads, strict=True))
    found = {name: float(number) for name, number in (line.split() for line in text.splitlines())}
    assert found == {
        name: pytest.approx(float(tensor.double().sum()), abs=1e-5)
        for name, tensor in wanted.items()
    }


def test_the_cpp_program_gives_the_mean(tmp_path: Path) -> None:
    if examples.compiler("cpp_forward.cpp") is None:
        pytest.skip("no C++ compiler is installed")
    assert printed(examples.build("cpp_forward.cpp", tmp_path), tmp_path) == "mean of out 1\n"


@pytest.mark.parametrize("script", ["raw_pointers.py", "graph_capture.py"])
def test_a_script_checks_itself(script: str, tmp_path: Path) -> None:
    assert "equal" in printed(examples.python(script), tmp_path)
