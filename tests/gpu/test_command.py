# SPDX-License-Identifier: Apache-2.0
"""The command csa-runtime on a GPU."""

import json

import pytest
import torch

from csa_runtime import _native
from csa_runtime.__main__ import main

pytestmark = [pytest.mark.gpu, pytest.mark.L1]


def test_demo_runs_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    text = capsys.readouterr().out
    assert f"ran on {torch.cuda.get_device_name(0)}" in text
    assert text.endswith("demo passed\n")


def test_check_runs_every_variant(capsys: pytest.CaptureFixture[str]) -> None:
    before = _native.launch_counts()
    assert main(["check"]) == 0
    arch = _native.driver_info()["devices"][0]["arch"]
    after = _native.launch_counts()
    for image in _native.bundle_info()["images"]:
        if image["arch"] != arch:
            continue
        key = (image["variant"], arch)
        assert after.get(key, 0) > before.get(key, 0)
    assert capsys.readouterr().out.endswith("check passed\n")


def test_info_names_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"][0]["name"] == torch.cuda.get_device_name(0)
    assert found["devices"][0]["arch"] in found["architectures"]
