# SPDX-License-Identifier: Apache-2.0
"""Whatever the device prefixes hold, nothing outside the tensors is read or written."""

import os
import random
import re
import shutil
from collections.abc import Iterator
from subprocess import Popen

import pytest
import torch

from gpu import harness, problems
from gpu.buffers import Guarded
from gpu.harness import Problem
from gpu.problems import Packing
from gpu.processes import SCRIPTS, finish, start
from gpu.scripts.hostile import FILLING, HOSTILE, TOKENS, blocks, times

pytestmark = [pytest.mark.gpu]

ROWS = 9
BF16 = torch.bfloat16


def hostile(name: str, ratio: int, coff: int, head_dim: int, filling: int = 0) -> Problem:
    """Sound values under malformed prefixes. filling: if not 0, rows whose blocks are all tokens.

    A kernel may then load a block from where such rows have it before it sees the prefixes.
    """
    cu, comp = HOSTILE[name]
    tokens, rows = (filling * ratio, filling) if filling else (TOKENS * blocks(ratio), ROWS)
    return harness.problem(
        Packing(name, tokens, rows, times(cu, blocks(ratio)), comp), ratio, coff, head_dim
    )


def run(p: Problem) -> None:
    """Every variant of both directions between guard bytes."""
    torch.cuda.synchronize()
    out = Guarded(p.packing.rows, (p.head_dim,), BF16)
    grads = [Guarded(p.packing.tokens, (p.width,), BF16) for _ in range(2)]
    planes = Guarded(p.ratio, (p.width,), torch.float32)
    for variant in harness.variants("forward", p.ratio, p.coff):
        if harness.serves(variant, p, out.view):
            harness.forward(p, out.view, variant)
    for variant in harness.variants("backward", p.ratio, p.coff):
        if harness.serves(variant, p, *(g.view for g in grads), grad_out=True):
            harness.backward(p, *(g.view for g in grads), planes.view, variant)
    torch.cuda.synchronize()
    assert all(g.outside_untouched() for g in (out, *grads, planes))


@pytest.mark.L0
@pytest.mark.parametrize(("ratio", "coff"), [*problems.CONFIGS, *problems.LONG_CONFIGS])
@pytest.mark.parametrize("name", HOSTILE)
def test_malformed_prefixes_neither_fault_nor_leave_the_tensors(
    name: str, ratio: int, coff: int
) -> None:
    for head_dim in (1, 6, 128):
        run(hostile(name, ratio, coff, head_dim))
    run(hostile(name, ratio, coff, 128, filling=FILLING))


@pytest.mark.L0
@pytest.mark.parametrize(("ratio", "coff"), [*problems.CONFIGS, *problems.LONG_CONFIGS])
def test_no_prefixes_make_a_block_of_fewer_tokens(ratio: int, coff: int) -> None:
    """Without rows there may be fewer tokens than a block has, which no prefix can name."""
    swinging = (2**31 - 1, -(2**31)) * 3
    for cu, comp in (*HOSTILE.values(), (swinging, swinging), (swinging, (*swinging[1:], 0))):
        packing = Packing("no block", ratio - 1, 0, cu, comp)
        run(harness.problem(packing, ratio, coff, 128))


@pytest.mark.L0
@pytest.mark.parametrize("ratio", [4, 128])
def test_garbage_prefixes_neither_fault_nor_leave_the_tensors(ratio: int) -> None:
    dice = random.Random(5)
    for _ in range(200 if ratio == 4 else 50):
        p = hostile("negative", ratio, 2, 8)
        for which in (p.cu_seqlens, p.cu_seqlens_comp):
            kind = dice.choice([2**31 - 1, 4 * p.packing.tokens, p.packing.tokens])
            garbage = [dice.randrange(-kind - 1, kind) for _ in range(which.numel())]
            which.copy_(torch.tensor(garbage, dtype=torch.int32))
        run(p)


TOOLS = ("memcheck", "racecheck", "initcheck")


@pytest.fixture(scope="module")
def sanitized() -> Iterator[dict[str, Popen[str]]]:
    """The script under every tool at once; empty where the sanitizer is not installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    sanitizer = shutil.which("compute-sanitizer", path=path)
    started = {}
    for tool in TOOLS if sanitizer is not None else ():
        options = ["--tool", tool, "--error-exitcode", "17", "--target-processes", "all"]
        if tool == "memcheck":
            options += ["--report-api-errors", "no"]
        started[tool] = start(SCRIPTS / "hostile.py", tool, before=[sanitizer, *options])
    yield started
    for process in started.values():
        if process.poll() is None:
            process.kill()


@pytest.mark.L1
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_finds_nothing(tool: str, sanitized: dict[str, Popen[str]]) -> None:
    if tool not in sanitized:
        pytest.skip("compute-sanitizer is not installed")
    try:
        log = finish(sanitized[tool], seconds=200)
    except AssertionError as error:
        if "Device not supported" in str(error):
            pytest.skip("compute-sanitizer does not support this device")
        raise
    assert re.search(r"SUMMARY: 0 (errors|hazards)", log), log
    assert "ran " in log, log
