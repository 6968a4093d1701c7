# SPDX-License-Identifier: Apache-2.0
"""The command csa-runtime and what stands behind it, on a machine without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import csa_runtime
from csa_runtime import _check, _demo, _native, _trial, diagnostics
from csa_runtime.__main__ import main
from csa_runtime.errors import BundleError, DriverError

NO_DRIVER = DriverError("cuInit: long story", "CUDA_ERROR_NO_DEVICE", 100, "cuInit")
WHY = "CUDA_ERROR_NO_DEVICE (100) from cuInit"


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has."""

    def refuse() -> None:
        raise NO_DRIVER

    monkeypatch.setattr(_native, "driver_info", refuse)


def test_info_lists_every_variant_and_says_what_never_ran(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row a variant, one column an architecture, and why there is no driver."""
    monkeypatch.setattr(diagnostics, "_evidence", lambda: ({}, []))
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"none: {WHY}\n" in text
    assert text.splitlines()[-1].startswith("compiled only: ") and "; -: not built" in text
    for variant in _native.bundle_info()["variants"]:
        row = next(line for line in text.splitlines() if line.startswith(variant["name"] + " "))
        assert row.split()[0] == variant["name"]
        images = [i for i in _native.bundle_info()["images"] if i["variant"] == variant["name"]]
        assert row.count("compiled only") == len(images) >= 1
    for arch in (80, 90, 100, 120):
        assert f"sm_{arch}" in text


def test_info_as_json_is_the_same_data(capsys: pytest.CaptureFixture[str]) -> None:
    """For programs."""
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == [] and found["driver_error"] == str(NO_DRIVER)
    assert found["bundle"]["sha256"] == _native.bundle_info()["sha256"]
    assert {image["arch"] for image in found["images"]} == {80, 90, 100, 120}


def test_info_names_the_gpus_that_ran_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the image's digest, from the packaged evidence."""
    image = _native.bundle_info()["images"][0]
    attestation = {
        "gpu": "NVIDIA H200", "driver": "580", "suite": {"passed": 3},
        "images": [{"sha256": image["sha256"]}],
    }  # fmt: skip
    monkeypatch.setattr(
        diagnostics, "_evidence", lambda: ({"toolchain": {"dsl": "1"}}, [attestation])
    )
    found = csa_runtime.info()
    assert found["images"][0]["status"] == "ran on NVIDIA H200"
    assert found["images"][0]["ran_on"] == [{"gpu": "NVIDIA H200", "driver": "580", "passed": 3}]
    assert found["images"][1]["status"] == "compiled only"
    assert found["toolchain"] == {"dsl": "1"}
    assert "devices" not in found


def test_demo_without_a_gpu_says_so_and_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """The fp32 reference against fp64: nothing is compared with itself."""
    assert main(["demo"]) == 0
    text = capsys.readouterr().out
    assert f"no GPU ({WHY}): CPU reference only" in text and "no kernel ran" in text
    assert "differ" not in text and text.count("max error against fp64") == 4
    assert text.endswith("demo passed\n")


def test_demo_without_a_gpu_fails_on_a_wrong_reference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One element beyond one rounding."""
    on_cpu = _trial.on_cpu

    def spoiled(problem: Any, *, exact: bool = False) -> dict[str, Any]:
        results = on_cpu(problem, exact=exact)
        if not exact:
            results["grad_kv"][3, 3] += np.float32(0.1)
        return results

    monkeypatch.setattr(_trial, "on_cpu", spoiled)
    monkeypatch.setattr(_demo, "SEGMENTS", [9, 3])
    assert main(["demo"]) == 1
    assert capsys.readouterr().out.endswith("demo FAILED\n")


def test_check_without_a_gpu_checks_the_bundle(capsys: pytest.CaptureFixture[str]) -> None:
    """And says that no variant ran."""
    assert main(["check"]) == 0
    text = capsys.readouterr().out
    assert "digest of its tables agrees" in text and "no variant ran" in text
    assert text.endswith("the only thing checked\n")


def test_failures_are_told_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 1 and no traceback."""

    def damaged() -> None:
        raise BundleError("digest of image 3 differs")

    monkeypatch.setattr(_native, "bundle_info", damaged)
    for command in ("info", "check"):
        assert main([command]) == 1
        assert "digest of image 3 differs" in capsys.readouterr().err


class Pretend:
    """A GPU played by the CPU reference; spoils one result if told to."""

    def __init__(self, spoil: str | None = None) -> None:
        """Nothing launched yet."""
        self.spoil = spoil
        self.forced: list[str] = []

    def run(self, problem: Any, **options: Any) -> dict[str, Any]:
        """In place of `_trial.on_gpu`."""
        self.forced += [options[name] for name in options["directions"]]
        names = ["out"] if options["directions"] == ("forward",) else list(_trial.RESULTS[1:])
        results = {name: _trial.on_cpu(problem)[name] for name in names}
        if self.spoil in results:
            results[self.spoil] = results[self.spoil] + np.float32(0.5)
        return results


@pytest.mark.parametrize("spoil", [None, "out", "grad_score", "grad_ape"])
def test_check_forces_every_variant_and_fails_on_wrong_results(
    spoil: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, on the device's own images."""
    device = {"name": "Pretend", "compute_capability": 90, "arch": 90, "ordinal": 0}
    pretend = Pretend(spoil)
    monkeypatch.setattr(_native, "driver_info", lambda: {"version": 13000, "devices": [device]})
    monkeypatch.setattr(_native, "load", lambda *_: None)
    monkeypatch.setattr(_trial, "on_gpu", pretend.run)
    monkeypatch.setattr(_check, "SEGMENTS", [0, 9, 1, 12])
    monkeypatch.setattr(_check, "_head_dims", lambda _: (16,))  # the reference is slow
    assert main(["check"]) == (0 if spoil is None else 1)
    text = capsys.readouterr().out
    assert ("FAILED" in text) is (spoil is not None)
    images = {image["variant"] for image in _native.bundle_info()["images"] if image["arch"] == 90}
    expected = {name for name in images if not name.startswith("csa_finish")}
    assert set(pretend.forced) == expected


def test_comparison_refuses_nan_and_unwritten_results() -> None:
    """A poisoned buffer that stays so is a failure."""
    problem = _trial.make([9, 12], ratio=4, coff=1, head_dim=3, padding=1, seed=0)
    reference = _trial.on_cpu(problem)
    assert all(found.passed for found in _trial.compare(reference, problem))
    poisoned = {name: np.full_like(values, np.nan) for name, values in reference.items()}
    for long in (False, True):
        assert not any(found.passed for found in _trial.compare(poisoned, problem, long=long))


def test_long_windows_may_differ_by_a_step_in_few_elements() -> None:
    """But not by a large one, and not in many."""
    problem = _trial.make([400, 300], ratio=128, coff=2, head_dim=256, padding=1, seed=0)
    out = _trial.on_cpu(problem)["out"]

    def passes(elements: int, steps: int) -> bool:
        changed = _trial.bits_of(out)
        changed.flat[:elements] += np.uint16(steps)
        results = {"out": _trial.values_of(changed)}
        return next(_trial.compare(results, problem, long=True)).passed

    assert passes(0, 1) and passes(4, 1)
    assert not passes(5, 1) and not passes(1, 3)


def test_bf16_bits_round_to_nearest_even() -> None:
    """As ml_dtypes does, NaN and overflow included."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, 4096, dtype=np.uint32).view(np.float32)
    values[:4] = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38, np.inf]
    with np.errstate(all="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(_trial.values_of(_trial.bits_of(values)), expected)


def test_a_closed_pipe_ends_the_command_quietly() -> None:
    """As `csa-runtime info | head -1` closes it."""
    code = "import sys, csa_runtime.__main__ as m; sys.exit(m.main(['info']))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, cwd="/", check=False,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    """And needs no driver."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"csa-runtime {csa_runtime.__version__}\n"


def test_missing_numpy_is_explained(tmp_path: Path) -> None:
    """Demo needs it; the message says which extra brings it."""
    (tmp_path / "numpy.py").write_text("raise ImportError('not here')\n")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    }
    done = subprocess.run(
        [sys.executable, "-m", "csa_runtime", "demo"],
        capture_output=True, text=True, env=environment, cwd="/", check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "pip install numpy ml_dtypes" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_explain_needs_no_device_when_told_its_kind(operation: str) -> None:
    """Variant, grid, workspace and image for a device that is not here."""
    options = {"ratio": 4, "coff": 2, "total_tokens": 8192, "total_comp": 2048}
    found = csa_runtime.explain(operation, head_dim=128, **options, compute_capability=90)
    assert found["arch"] == 90 and found["variant"].startswith(f"csa_{operation}_r4_c2_bf16")
    images = {image["sha256"] for image in _native.bundle_info()["images"]}
    assert found["image"] in images
    pair = csa_runtime.explain(operation, head_dim=128, **options, compute_capability=(9, 0))
    assert pair == found
    odd = csa_runtime.explain(
        operation, head_dim=128, **options, compute_capability=90, alignment=2
    )
    assert odd["variant"] == f"csa_{operation}_r4_c2_bf16_v1"


def test_explain_and_workspace_refuse_what_nothing_serves() -> None:
    """As a call would."""
    options = {"ratio": 4, "coff": 2, "head_dim": 128, "total_tokens": 64, "total_comp": 16}
    bad: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"operation": "sideways"}, ValueError),
        ({"dtype": "int8"}, ValueError),
        ({"ratio": 3}, ValueError),
        ({"variant": "csa_forward_r2_c1_bf16_v1"}, ValueError),
        ({"compute_capability": 70}, csa_runtime.UnsupportedArch),
        ({"compute_capability": "9.0"}, ValueError),
        ({"compute_capability": 9.0}, ValueError),
        ({"compute_capability": 9}, ValueError),
        ({"compute_capability": (9, 0, 0)}, ValueError),
        ({"compute_capability": (9, 10)}, ValueError),
    ]
    for changes, error in bad:
        with pytest.raises(error):
            csa_runtime.explain(**{"compute_capability": 90} | options | changes)
    with pytest.raises(ValueError, match="dtype"):
        csa_runtime.backward_workspace_bytes(64, 16, 128, ratio=4, coff=2, dtype="bf16")


def test_workspace_does_not_grow_with_tokens() -> None:
    """And stays within 32 MiB up to W = 1024."""
    sizes = {
        csa_runtime.backward_workspace_bytes(tokens, tokens // 4, 512, ratio=4, coff=2)
        for tokens in (2**20, 2**24, 2**30)
    }
    assert len(sizes) == 1 and 0 < sizes.pop() <= 32 << 20


def test_load_names_what_is_wrong_with_the_device() -> None:
    """Before the driver is asked."""
    with pytest.raises(ValueError, match="device is -1"):
        csa_runtime.load(-1)
    assert _demo.gpu() == (None, WHY)
