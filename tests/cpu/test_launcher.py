# SPDX-License-Identifier: Apache-2.0
"""What the launcher tells the driver, call by call, on the recording fake driver."""

import itertools
from typing import Any

import pytest

from support import expected, fake
from support.problems import backward, forward

pytestmark = pytest.mark.L0

CALLS = {"forward": forward, "backward": backward}
SHAPES = [  # ratio, coff, head_dim, tokens, rows
    (4, 2, 128, 64, 16),
    (2, 1, 1, 5, 2),
    (4, 1, 6, 1000, 250),
    (2, 2, 511, 777, 0),
    (4, 2, 512, 2**31 - 1, 2**29),
    (4, 1, 8_388_480, 8, 2),
]
# Launches by hand through cuda-python what the manifest's rules say, with values, not a buffer.
INDEPENDENT = """
from cuda.bindings import driver
from support import expected
def check(result):
    assert result[0] == 0, result
    return result[1] if len(result) == 2 else result[1:]
check(driver.cuInit(0))
check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(0))))
TYPES = {8: ctypes.c_int64, 4: ctypes.c_int32}
def launch(want, stream):
    path = expected.ROOT / "cubins" / f"sm_{want.arch}" / f"{want.variant}.cubin"
    library = check(driver.cuLibraryLoadData(path.read_bytes(), [], [], 0, [], [], 0))
    kernel = check(driver.cuLibraryGetKernel(library, want.symbol.encode()))
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = want.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = want.block
    config.sharedMemBytes, config.hStream = want.shared, stream
    values = tuple(value for value, _ in want.values)
    types = tuple(TYPES[size] for _, size in want.values)
    check(driver.cuLaunchKernelEx(config, driver.CUfunction(int(kernel)), (values, types), 0))
"""
TOLD = ("name", "arch", "grid", "block", "shared", "stream", "attributes", "parameters")


def told(run: fake.Run) -> list[list[Any]]:
    """What each launch told the driver."""
    return [[launch[key] for key in TOLD] for launch in run.launches]


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_launches_equal_those_of_cuda_python(capability: int) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")
    problems = [
        (operation, CALLS[operation](*shape) | replaced)
        for operation, shape in itertools.product(CALLS, SHAPES)
        for replaced in ({}, {"kv": (1 << 46) + 2, "ape": None, "grad_ape": None}, {"flags": 1})
    ]
    ours = fake.run(
        f"for operation, call in {problems!r}:\n"
        "    getattr(csa_runtime, 'launch_' + operation)(**call, stream=2)\n",
        FAKE_CUDA_DEVICES=str(capability),
    )
    theirs = fake.run(
        f"{INDEPENDENT}\nfor operation, call in {problems!r}:\n"
        f"    for want in expected.launches(operation, call, {capability}):\n"
        "        launch(want, 2)\n",
        FAKE_CUDA_DEVICES=str(capability),
    )
    assert told(ours) == told(theirs)
    assert len(ours.launches) > len(problems)


def test_launches_context_free_kernels_with_no_attributes() -> None:
    run = fake.run("csa_runtime.launch_backward(**backward())")
    assert [(c["context_free"], c["attributes"], c["lazy"]) for c in run.launches] == [
        (1, 0, 0)
    ] * 2


def test_a_variant_loads_once_relaxed_preserved_and_aligned() -> None:
    run = fake.run("for _ in range(3): csa_runtime.launch_backward(**backward())")
    loads = run.named("cuLibraryLoadData")
    assert len(loads) == 2 and len(run.launches) == 6
    for load in loads:
        assert (load["mode"], load["jit"], load["aligned"]) == (2, 0, 1)
        assert (load["options"], load["option"], load["value"]) == (1, 1, 1)
    assert not run.named("cuKernelSetAttribute"), "no kernel needs more than 48 KiB"


def test_once_loaded_a_call_on_a_current_context_only_asks_and_launches() -> None:
    run = fake.run("""
fake.cuInit(0)
context = fake.fake_context(0)
fake.cuCtxSetCurrent(context)
stream = fake.fake_stream(context)
for handle in (0, stream):
    csa_runtime.launch_forward(**forward(), stream=handle)
    csa_runtime.launch_forward(**forward(), stream=handle)
""")
    names = [call["call"] for call in run.calls]
    launches = [i for i, name in enumerate(names) if name == "cuLaunchKernelEx"]
    assert names[launches[0] + 1 : launches[1] + 1] == ["cuCtxGetId", "cuLaunchKernelEx"]
    own = ["cuStreamGetCtx", "cuCtxGetCurrent", "cuCtxGetId", "cuLaunchKernelEx"]
    assert names[launches[2] + 1 : launches[3] + 1] == own


@pytest.mark.parametrize("operation", CALLS)
def test_explain_of_a_device_is_what_a_launch_there_does(operation: str) -> None:
    run = fake.run(
        f"""
plan = _native.explain("{operation}", device=1, **{operation}())
csa_runtime.launch_{operation}(**{operation}(), device=1)
emit([[x["variant"], x["grid"], x["block"], x["shared"], x["parameters"].hex()]
      for x in plan["launches"]])
""",
        FAKE_CUDA_DEVICES="90,86",
    )
    keys = ("grid", "block", "shared", "parameters")
    launched = [[x["name"].removesuffix("_0"), *(x[key] for key in keys)] for x in run.launches]
    assert run.output == launched and {x["arch"] for x in run.launches} == {80}


def test_no_rows_forward_touches_no_kernel() -> None:
    run = fake.run("csa_runtime.launch_forward(**forward(rows=0))")
    assert not run.launches and not run.named("cuLibraryLoadData")


def test_import_and_bundle_info_start_no_driver() -> None:
    run = fake.run("_native.bundle_info(); csa_runtime.info(); _native.launch_counts()")
    assert run.calls == []


def test_symbols_are_asked_for_with_the_version_of_their_signature() -> None:
    run = fake.run("_native.driver_info()")
    asked = {c["name"]: (c["version"], c["flags"]) for c in run.named("cuGetProcAddress")}
    assert asked["cuStreamGetCtx"] == (9020, 0), "12050 takes another argument"
    assert asked["cuCtxGetDevice"][0] < 13000 and asked["cuCtxPushCurrent"][0] >= 4000
    newest = {name: version for name, (version, _) in asked.items() if version > 12000}
    assert newest == {"cuFuncLoad": 12040}


def test_driver_info_lists_the_devices() -> None:
    info = fake.run("emit(_native.driver_info())", FAKE_CUDA_DEVICES="89,87,103").output
    assert info["version"] == 12080
    got = [(d["compute_capability"], d["shared_limit"], d["arch"]) for d in info["devices"]]
    assert got == [(89, 99 << 10, 80), (87, 163 << 10, None), (103, 227 << 10, 100)]


def test_launch_counts_count_successful_launches() -> None:
    run = fake.run(
        """
csa_runtime.launch_forward(**forward())
attempt(csa_runtime.launch_forward, **forward())
csa_runtime.launch_forward(**forward())
emit([[*key, count] for key, count in _native.launch_counts().items()])
""",
        FAKE_CUDA_FAIL="cuLaunchKernelEx:2:999",
    )
    variant = expected.launches("forward", forward(), 90)[0].variant
    assert run.output == [[variant, 90, 2]]


@pytest.mark.parametrize("version", ["12000", "12030", "12080", "13000"])
def test_load_finishes_every_kernel_so_that_no_launch_loads(version: str) -> None:
    run = fake.run(
        """
csa_runtime.load(0)
for ratio in (2, 4):
    for coff in (1, 2):
        for columns in (1, 2, 4):
            for operation, call in (("forward", forward), ("backward", backward)):
                name = f"csa_{operation}_r{ratio}_c{coff}_bf16_v{columns}"
                getattr(csa_runtime, "launch_" + operation)(**call(ratio, coff), variant=name)
""",
        FAKE_CUDA_VERSION=version,
    )
    names = [call["call"] for call in run.calls]
    images = [i for i in expected.manifest()["images"] if i["arch"] == 90]
    assert names.count("cuLibraryLoadData") == names.count("cuKernelGetFunction") == len(images)
    assert names.count("cuFuncLoad") == (0 if version < "12040" else len(images))
    loading = {"cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction", "cuFuncLoad"}
    after = names[names.index("cuLaunchKernelEx") :]
    assert not loading & set(after) and len(run.launches) == 12 + 12 * 2
    if version >= "12040":
        assert not any(launch["lazy"] for launch in run.launches)


@pytest.mark.parametrize("version", ["12030", "13000"])
@pytest.mark.parametrize("capture", [0, 1, 2])
def test_the_first_call_may_be_inside_a_capture(version: str, capture: int) -> None:
    run = fake.run(
        f"""
fake.cuInit(0)
context = fake.fake_context(0)
fake.cuCtxSetCurrent(context)
stream, other = fake.fake_stream(context), fake.fake_stream(context)
thread = threading.Thread(target=fake.fake_capture, args=(other, 0))
thread.start(); thread.join()
fake.fake_capture(stream, {capture})
csa_runtime.launch_backward(**backward(), stream=stream)
csa_runtime.load(0)
emit([fake.fake_invalidated(stream), fake.fake_invalidated(other), fake.fake_mode()])
""",
        FAKE_CUDA_VERSION=version,
    )
    assert run.output == [0, 0, 0] and len(run.launches) == 2


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_the_threads_own_capture_mode_is_kept(mode: int) -> None:
    run = fake.run(f"""
fake.cuInit(0)
value = ctypes.c_int({mode})
fake.cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
csa_runtime.launch_forward(**forward())
emit(fake.fake_mode())
""")
    assert run.output == mode


def test_an_old_driver_refuses_to_load_into_a_capture_and_names_load() -> None:
    run = fake.run(
        """
fake.cuInit(0)
context = fake.fake_context(0)
fake.cuCtxSetCurrent(context)
stream = fake.fake_stream(context)
fake.fake_capture(stream, 0)
first = attempt(csa_runtime.launch_backward, **backward(), stream=stream)
legacy = attempt(csa_runtime.launch_backward, **backward(), stream=0)
spoilt = fake.fake_invalidated(stream)
fake.fake_capture(stream, -1)
csa_runtime.load()
fake.fake_capture(stream, 0)
emit([first, legacy, spoilt, attempt(csa_runtime.launch_backward, **backward(), stream=stream)])
""",
        FAKE_CUDA_VERSION="12020",
    )
    first, legacy, spoilt, second = run.output
    assert first["type"] == legacy["type"] == "DriverError"
    assert first["code"] == 900 and "call load() before the capture" in first["text"]
    assert spoilt == 0 and second is None and len(run.launches) == 2


def test_arguments_of_the_manifest_are_those_of_the_kernels() -> None:
    table = expected.manifest()
    sizes = {name: entry["bytes"] for name, entry in table["parameters"].items()}
    kernels = {v["name"]: [sizes[name] for name in v["params"]] for v in table["variants"]}
    for image in table["images"]:
        assert [size for _, size in image["parameters"]] == kernels[image["variant"]], image["file"]
