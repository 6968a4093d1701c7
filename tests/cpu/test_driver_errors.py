# SPDX-License-Identifier: Apache-2.0
"""No driver, too old a driver, no device, no image, too little shared memory: the right error."""

from pathlib import Path
from typing import Any

import pytest

from support import fake
from support.bundles import with_manifest

pytestmark = pytest.mark.L0

LAUNCH = "emit(attempt(csa_runtime.launch_forward, **forward()))"


def test_without_a_driver_the_error_says_so() -> None:
    error = fake.run(LAUNCH, driver=False).output
    assert error["type"] == "DriverError" and error["call"] == "dlopen"
    assert "no CUDA driver" in error["text"] and "libcuda.so.1" in error["text"]


@pytest.mark.parametrize("driver", [False, True])
def test_explain_says_how_to_ask_without_a_gpu(driver: bool) -> None:
    ask = "dict(ratio=4, coff=2, head_dim=128, total_tokens=64, total_comp=16)"
    script = f"emit(attempt(csa_runtime.explain, **{ask}))"
    error = fake.run(script, driver, FAKE_CUDA_DEVICES="none").output
    assert (error["type"], error["call"]) == ("DriverError", "cuInit" if driver else "dlopen")
    assert "explain() asks no driver when given compute_capability=" in error["text"]


@pytest.mark.parametrize(("version", "said"), [("11080", "11.8"), ("11020", "11.2")])
def test_a_driver_before_cuda_12_is_too_old(version: str, said: str) -> None:
    run = fake.run(LAUNCH, FAKE_CUDA_VERSION=version)
    assert run.output["type"] == "DriverError" and run.output["call"] == "cuDriverGetVersion"
    assert f"supports CUDA {said}" in run.output["text"] and "R525" in run.output["text"]
    assert not run.named("cuInit")


@pytest.mark.parametrize(
    ("capability", "oldest", "release"),
    [(90, 12000, ""), (100, 12080, "R570"), (120, 12080, "R570")],
)
def test_each_generation_needs_its_driver(capability: int, oldest: int, release: str) -> None:
    devices = {"FAKE_CUDA_DEVICES": str(capability)}
    assert fake.run(LAUNCH, FAKE_CUDA_VERSION=str(oldest), **devices).output is None
    if release:
        error = fake.run(LAUNCH, FAKE_CUDA_VERSION=str(oldest - 20), **devices).output
        assert error["type"] == "DriverError" and release in error["text"]


def test_without_a_device_the_drivers_error_is_raised() -> None:
    error = fake.run(LAUNCH, FAKE_CUDA_DEVICES="none").output
    assert (error["name"], error["code"], error["call"]) == ("CUDA_ERROR_NO_DEVICE", 100, "cuInit")


@pytest.mark.parametrize("symbol", ["cuLibraryLoadData", "cuStreamGetCtx", "cuLaunchKernelEx"])
def test_a_missing_symbol_is_named(symbol: str) -> None:
    error = fake.run(LAUNCH, FAKE_CUDA_MISSING=symbol).output
    assert error["type"] == "DriverError" and f"has no {symbol}" in error["text"]


def test_func_load_may_be_missing() -> None:
    assert fake.run(LAUNCH, FAKE_CUDA_MISSING="cuFuncLoad").output is None


@pytest.mark.parametrize("capability", ["75", "87", "110"])
def test_a_device_without_images_is_unsupported(capability: str) -> None:
    run = fake.run(
        "emit([attempt(csa_runtime.launch_forward, **forward()), attempt(csa_runtime.load)])",
        FAKE_CUDA_DEVICES=capability,
    )
    for error in run.output:
        assert error["type"] == "UnsupportedArch"
        assert f"device 0 has compute capability {int(capability) / 10}" in error["text"]
        assert "sm_80, sm_90, sm_100, sm_120" in error["text"]
        assert ("tools/build_cubins" in error["text"]) == (int(capability) >= 80)
    assert not run.named("cuLibraryLoadData", "cuDevicePrimaryCtxRetain")


def test_an_unsupported_device_beside_a_good_one_does_no_harm() -> None:
    run = fake.run(
        "emit([attempt(csa_runtime.launch_forward, **forward(), device=d) for d in (0, 1)])",
        FAKE_CUDA_DEVICES="75,90",
    )
    assert run.output[0]["type"] == "UnsupportedArch" and run.output[1] is None


def test_errors_survive_pickling() -> None:
    run = fake.run(
        """
def caught(call, *args, **keywords):
    try:
        call(*args, **keywords)
    except Exception as error:
        return error
results = []
for error in (caught(csa_runtime.launch_forward, **forward(), device=0),
              caught(csa_runtime.launch_forward, **forward(), device=1),
              caught(csa_runtime.load, 1, bundle="/nowhere")):
    copy = pickle.loads(pickle.dumps(error))
    results.append([type(error).__name__, isinstance(error, RuntimeError),
                    type(copy) is type(error), str(copy) == str(error), vars(copy) == vars(error)])
emit(results)
""",
        FAKE_CUDA_DEVICES="90,75",
        FAKE_CUDA_FAIL="cuLaunchKernelEx:1:1",
    )
    kinds = ["DriverError", "UnsupportedArch", "BundleError"]
    assert run.output == [[kind, True, True, True, True] for kind in kinds]


def wide(table: dict[str, Any]) -> None:
    """The widest variants come first and want 120 KiB of dynamic shared memory, the next 64."""
    for variant in table["variants"]:
        wanted = {4: 120 << 10, 2: 64 << 10}.get(variant["columns"])
        variant["dynamic_shared"] = wanted or 0
    alike = {
        v["name"]
        for v in table["variants"]
        if v["rows"] == 1 and not v["name"].endswith(("_once", "_early"))
    }
    rows = [row | {"max_elements": -1} for row in table["schedules"] if row["variant"] in alike]
    table["schedules"] = sorted(rows, key=lambda row: row["variant"], reverse=True)


LIMITS = [(80, 4), (86, 2), (89, 2), (90, 4), (100, 4), (120, 2)]


@pytest.mark.parametrize(("capability", "columns"), LIMITS)
def test_shared_memory_of_the_device_chooses_the_variant(
    capability: int, columns: int, tmp_path: Path
) -> None:
    path = with_manifest(tmp_path, wide)
    run = fake.run(
        """
csa_runtime.launch_forward(**forward())
csa_runtime.launch_forward(**forward())
forced = attempt(csa_runtime.launch_forward, **forward(), variant="csa_forward_r4_c2_bf16_v4")
emit([forced, attempt(csa_runtime.load), [*_native.launch_counts()][0][0]])
""",
        CSA_RUNTIME_BUNDLE=str(path),
        FAKE_CUDA_DEVICES=str(capability),
    )
    forced, load, variant = run.output
    assert variant == f"csa_forward_r4_c2_bf16_v{columns}" and load is None
    assert run.launches[0]["shared"] == {4: 120 << 10, 2: 64 << 10}[columns]
    assert (forced is None) == (columns == 4)
    if forced is not None:
        assert forced["type"] == "ValueError" and "needs 122880 bytes" in forced["text"]
    first = run.named("cuKernelSetAttribute")[0]
    assert (first["attribute"], first["value"]) == (8, run.launches[0]["shared"])
    names = [c["call"] for c in run.calls]
    at = [i for i, name in enumerate(names) if name == "cuLaunchKernelEx"]
    assert "cuKernelSetAttribute" not in names[at[0] : at[1]], "not on every launch"
    again = [c for c in run.named("cuKernelSetAttribute") if c["name"] == first["name"]]
    assert len(again) == 1, "nor by load() once the kernel may be launched"


def test_the_attribute_is_set_for_each_device(tmp_path: Path) -> None:
    run = fake.run(
        "for device in (0, 1, 0, 1): csa_runtime.launch_forward(**forward(), device=device)",
        CSA_RUNTIME_BUNDLE=str(with_manifest(tmp_path, wide)),
        FAKE_CUDA_DEVICES="90,90",
    )
    assert [c["device"] for c in run.named("cuKernelSetAttribute")] == [0, 1]
    assert len(run.named("cuLibraryLoadData")) == 1


def test_an_attribute_that_cannot_be_set_fails_that_variant_not_the_load(tmp_path: Path) -> None:
    run = fake.run(
        """
emit([attempt(csa_runtime.load),
      attempt(csa_runtime.launch_forward, **forward()),
      attempt(csa_runtime.launch_forward, **forward(), variant="csa_forward_r4_c2_bf16_v4")])
""",
        CSA_RUNTIME_BUNDLE=str(with_manifest(tmp_path, wide)),
        FAKE_CUDA_DEVICES="90",
        FAKE_CUDA_REFUSED_SHARED=str(120 << 10),
    )
    load, *launches = run.output
    assert load is None and not run.launches
    for error in launches:
        assert error["type"] == "DriverError" and error["call"] == "cuKernelSetAttribute"
