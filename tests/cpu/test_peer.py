# SPDX-License-Identifier: Apache-2.0
"""tools/peer on the CPU, against a stand-in for the system compared with."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

# This library under the other's name, with four faults.
STAND_IN = """
from types import SimpleNamespace
import torch
from csa_runtime import compat

def forward(kv, *rest, **options):
    if kv is None:
        raise AttributeError("shape")
    if isinstance(kv, str):
        raise RuntimeError("no string")
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
    assert verdicts.pop(("kv None", "forward wrapper")) == "known (16)"
    assert verdicts.pop(("kv a string", "forward wrapper")) == "NEW"
    assert verdicts.pop(("ape and grad_ape None", "forward samples")) == "known (4)"
    assert verdicts.pop(("ape None", "forward samples")) == "known (4)"
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


# Answers of the two on a GPU: the case, the call, what each did, and what that is called.
ANSWERED = [
    ("kv None", "forward wrapper", "AttributeError", "ValueError: kv is a NoneType", "known (16)"),
    ("kv None", "forward wrapper", "AttributeError", "ValueError: score is", "NEW"),
    ("kv None", "forward wrapper", "AttributeError", "served", "NEW"),
    ("kv None", "forward wrapper", "RuntimeError", "ValueError: kv is a NoneType", "NEW"),
    ("kv None", "forward wrapper", "served", "ValueError: kv is a NoneType", "NEW"),
    ("ape None", "backward wrapper", "TypeError", "served", "known (4)"),
    ("ape None", "backward execute", "AttributeError", "ValueError: ape is None", "known (16)"),
    ("out one row for all", "forward samples", "ValueError", "served", "NEW"),
    ("out wants a gradient", "forward execute", "served", "ValueError: out", "known (19)"),
    ("ratio 4.5", "forward samples", "served", "ValueError: ratio is 4.5", "known (17)"),
    ("ratio 4.5", "forward samples", "served", "TypeError: ratio is 4.5", "NEW"),
    ("total_comp -1", "forward wrapper", "RuntimeError", "ValueError: total_comp", "known (17)"),
    ("stream 2", "backward execute", "ValueError", "served", "known (6)"),
    ("workspace None", "backward execute", "ValueError", "served", "known (14)"),
    ("grad_kv is kv", "backward execute", "served", "ValueError: grad_kv (0x1)", "known (18)"),
    ("scratch_workspace_bytes at once", "sequence", "RuntimeError", "served", "known (15)"),
    ("forward from meta samples", "sequence", "AttributeError", "ValueError: kv", "NEW"),
]


@pytest.fixture(scope="module")
def errors() -> Iterator[Any]:
    """The tool's module."""
    sys.path.insert(0, str(ROOT / "tools"))
    from comparison import errors

    yield errors
    sys.path.remove(str(ROOT / "tools"))


@pytest.mark.L0
@pytest.mark.parametrize(("case", "call", "peer", "ours", "wanted"), ANSWERED)
def test_a_difference_is_known_for_its_own_answer_alone(
    errors: Any, case: str, call: str, peer: str, ours: str, wanted: str
) -> None:
    """By the argument that the refusal names, too."""
    answers = []
    for text in (peer, ours):
        kind = text.partition(":")[0]
        answers.append(errors.Answer(kind, "", text, (kind, "Exception")))
    asked = errors.SEQUENCES[case] if call == "sequence" else errors.CASES[case]
    assert errors.verdict(asked, case.split()[0], *answers) == wanted


def test_known_differences_are_in_the_page() -> None:
    """By number."""
    page = (ROOT / "docs" / "seed_coverage.md").read_text().partition("## Differences")[2]
    numbers = {int(number) for number in re.findall(r"^(\d+)\. ", page, re.MULTILINE)}
    for file, pattern in (
        ("bad_arguments.py", r"^WIDE, .* = (.*)$"),
        ("bad_arguments.py", r"^NUMBERS, .* = (.*)$"),
        ("sequences.py", r"^DETERMINISTIC_MODE, .* = (.*)$"),
        ("errors.py", r"^ACCIDENTS, NO_ARRAY = .*\), (.*)$"),
    ):
        text = (ROOT / "tools" / "comparison" / file).read_text()
        given = re.search(pattern, text, re.MULTILINE)
        assert given and {int(n) for n in given[1].split(", ")} <= numbers
