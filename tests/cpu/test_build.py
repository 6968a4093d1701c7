# SPDX-License-Identifier: Apache-2.0
"""The committed bundle is what the sources build, byte for byte; the build refuses what it must."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aot import compile as aot_compile
from aot import manifest as aot_manifest
from support import fake

ROOT = Path(__file__).resolve().parents[2]
CUBINS = ROOT / "cubins"


def dsl_installed() -> bool:
    """Whether any version of the compiler is there."""
    try:
        importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


pytestmark = pytest.mark.L1
needs_dsl = pytest.mark.skipif(not dsl_installed(), reason="nvidia-cutlass-dsl is not installed")


def build_cubins(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run tools/build_cubins in a process of its own."""
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "build_cubins"), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


@needs_dsl
def test_committed_images_are_what_the_sources_build() -> None:
    run = build_cubins("--check")
    assert run.returncode == 0, run.stdout + run.stderr


@needs_dsl
def test_the_callers_compiler_settings_do_not_reach_the_images() -> None:
    name = "csa_finish_f32_e32"
    run = build_cubins("--check", "--variant", name, CUTE_DSL_LINEINFO="1", CUTE_DSL_ARCH="sm_80")
    assert run.returncode == 0, run.stdout + run.stderr


@needs_dsl
def test_a_partial_build_into_an_empty_tree_is_consistent_and_removes_stale_files(
    tmp_path: Path,
) -> None:
    stale = tmp_path / "sm_70" / "old.cubin"
    stale.parent.mkdir()
    stale.write_bytes(b"stale")
    select = ["--cubins", str(tmp_path), "--arch", "90", "--variant", "csa_finish_f32_e32"]
    run = build_cubins(*select)
    assert run.returncode == 0, run.stdout + run.stderr
    written = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*"))
    assert written == ["manifest.json", "sm_90", "sm_90/csa_finish_f32_e32.cubin"]
    committed = CUBINS / "sm_90" / "csa_finish_f32_e32.cubin"
    assert (tmp_path / "sm_90" / "csa_finish_f32_e32.cubin").read_bytes() == committed.read_bytes()

    (tmp_path / "sm_90" / "csa_finish_f32_e32.cubin").write_bytes(b"damaged")
    run = build_cubins(*select, "--check")
    assert run.returncode == 1
    assert "csa_finish_f32_e32.cubin" in run.stdout


def test_an_unknown_variant_is_an_error() -> None:
    run = build_cubins("--variant", "csa_sideways*")
    assert run.returncode != 0
    assert "csa_sideways*" in run.stderr


def test_source_digest_is_that_of_the_sources_at_hand() -> None:
    manifest = json.loads((CUBINS / "manifest.json").read_text())
    digest = aot_manifest.source_digest()
    assert manifest["source_digest"] == digest
    assert {image["source_digest"] for image in manifest["images"]} == {digest}


@pytest.mark.parametrize(
    ("versions", "complaint"),
    [
        ({}, "not installed"),
        ({"nvidia-cutlass-dsl": "4.8.0"}, r"is 4\.8\.0, not 4\.8\.1"),
        ({"nvidia-cutlass-dsl-libs-cu13": "4.8.1"}, "cu13 is installed"),
    ],
)
def test_another_toolchain_is_refused(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], complaint: str
) -> None:
    pinned = dict.fromkeys(
        ["nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-core", "nvidia-cutlass-dsl-libs-cu12"],
        "4.8.1",
    )
    found = {**pinned, **versions} if versions else {}
    monkeypatch.setattr(aot_compile, "_installed", found.get)
    with pytest.raises(aot_compile.CompileError, match=complaint):
        aot_compile.check_toolchain()


@needs_dsl
@pytest.mark.parametrize("version", ["12000", "13020"])
def test_a_driver_in_sight_does_not_sway_the_images(version: str, tmp_path: Path) -> None:
    """The compiler asks for its version, to choose among one flavour, and never starts it."""
    log = tmp_path / "calls"
    folders = [str(fake.library()), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    run = build_cubins(
        *("--check", "--arch", "90", "--variant", "csa_finish_*"),
        LD_LIBRARY_PATH=os.pathsep.join(folders),
        FAKE_CUDA_LOG=str(log),
        FAKE_CUDA_VERSION=version,
        FAKE_CUDA_DEVICES="120",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert {json.loads(line)["call"] for line in log.read_text().splitlines()} == {
        "cuDriverGetVersion"
    }


def test_register_report_has_one_row_for_each_image_of_an_architecture() -> None:
    images = json.loads((CUBINS / "manifest.json").read_text())["images"]
    command = [sys.executable, str(ROOT / "tools" / "register_report"), "--arch", "90"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    header, *rows = (line.split() for line in run.stdout.splitlines())
    expected = [(i["variant"], str(i["registers"])) for i in images if i["arch"] == 90]
    assert [(row[0], row[header.index("registers")]) for row in rows] == expected
