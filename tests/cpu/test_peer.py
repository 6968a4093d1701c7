# SPDX-License-Identifier: Apache-2.0
"""tools/peer on the CPU, against a stand-in for the system compared with."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

# This library under the other's name, with three faults.
STAND_IN = """
from types import SimpleNamespace
import torch
from csa_runtime import compat

def forward(kv, *rest, **options):
    if kv is None:
        raise AttributeError("shape")
    return compat.csa_compressor_forward_wrapper(kv, *rest, **options)

def backward(*inputs, **options):
    grads = compat.csa_compressor_backward_wrapper(*inputs, **options)
    if options.get("ratio") == 4 and grads["grad_kv"].numel():
        grads["grad_kv"].view(-1)[0] += 1.0
    return grads

class Forward(compat.CSACompressorForward):
    def check_support(self):
        if not self._samples.ape:
            raise RuntimeError("no ape")
        return super().check_support()

CSA = SimpleNamespace(**vars(compat.CSA) | {
    "CSACompressorForward": Forward,
    "csa_compressor_forward_wrapper": forward,
    "csa_compressor_backward_wrapper": backward,
})
"""


def run(folder: Path, *arguments: str, path: str) -> subprocess.CompletedProcess[str]:
    """The tool in a process of its own."""
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "peer"), "--device", "cpu", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])},
        cwd=folder,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the tool writes of the stand-in."""
    folder = tmp_path_factory.mktemp("peer")
    (folder / "cudnn.py").write_text(STAND_IN)
    done = run(folder, "--results", "--errors", "--json", "found.json", path=str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    record: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return record | {"text": done.stdout}


@pytest.mark.L1
def test_a_gradient_that_differs_is_found(found: dict[str, Any]) -> None:
    """Where it was planted, and nothing else."""
    for record in found["results"]:
        planted = record["window"][0] == 4 and record["path"] == "wrappers"
        assert bool(record["broken"]) == planted, record
        off = [name for name, t in record["tensors"].items() if t["differing"]]
        assert off == (["grad_kv"] if planted else [])
    assert "the peer is off eager in 1, csa_runtime is not" in found["text"]


@pytest.mark.L1
def test_other_answers_are_found_and_the_known_ones_named(found: dict[str, Any]) -> None:
    verdicts = {(r["case"], r["call"]): r["verdict"] for r in found["errors"]}
    assert verdicts.pop(("kv None", "forward wrapper")) == "NEW"
    assert verdicts.pop(("ape and grad_ape None", "forward samples")) == "known (4)"
    assert verdicts.pop(("ape None", "forward samples")) == "NEW"
    assert set(verdicts.values()) == {"same"} and len(verdicts) > 500
    answers = {(r["case"], r["call"]): r["csa_runtime"]["kind"] for r in found["errors"]}
    assert answers["kv float32", "forward wrapper"] == "ValueError"
    assert answers["ratio left out", "forward wrapper"] == "served"
    assert answers["forward execute at once", "sequence"] == "ValueError"


@pytest.mark.L1
def test_what_cannot_be_imported_is_said(tmp_path: Path) -> None:
    (tmp_path / "cudnn.py").write_text("raise ImportError('no such thing')")
    done = run(tmp_path, path=str(tmp_path))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "no such thing" in done.stderr and "pip install nvidia-cudnn-frontend" in done.stderr


def test_known_differences_are_in_the_page() -> None:
    """By number."""
    page = (ROOT / "docs" / "seed_coverage.md").read_text().partition("## Differences")[2]
    numbers = {int(number) for number in re.findall(r"^(\d+)\. ", page, re.MULTILINE)}
    for file, pattern in (
        ("bad_arguments.py", r"^WIDE, STRIDED, OTHER_WINDOWS, OTHER_ARRAYS, STREAMS = (.*)$"),
        ("sequences.py", r"^DETERMINISTIC_MODE = (.*)$"),
    ):
        text = (ROOT / "tools" / "comparison" / file).read_text()
        given = re.search(pattern, text, re.MULTILINE)
        assert given and {int(n) for n in given[1].split(", ")} <= numbers
