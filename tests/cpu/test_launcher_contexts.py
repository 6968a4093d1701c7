# SPDX-License-Identifier: Apache-2.0
"""Which context a call runs in, and that the caller's context and capture mode come back."""

from typing import Any

import pytest

from support import fake

pytestmark = pytest.mark.L0

# Contexts: a and b of device 0 and 1, made by the application; later ones are the primary ones.
SET_UP = """
fake.cuInit(0)
a, b = fake.fake_context(0), fake.fake_context(1)
on_a, on_b = fake.fake_stream(a), fake.fake_stream(b)
"""
TWO = {"FAKE_CUDA_DEVICES": "90,90"}


def contexts(run: fake.Run) -> list[int]:
    """Where each launch ran: 0 is a, 1 is b, others are primary contexts."""
    return [launch["current"] for launch in run.launches]


@pytest.mark.parametrize("current", ["a", "b", "None"])
def test_a_stream_runs_in_its_own_context(current: str) -> None:
    run = fake.run(
        f"""{SET_UP}
fake.cuCtxSetCurrent({current})
before = fake.fake_current(), fake.fake_depth()
csa_runtime.launch_backward(**backward(), stream=on_a, device=0)
csa_runtime.launch_backward(**backward(), stream=on_b, device=1)
emit(before == (fake.fake_current(), fake.fake_depth()))
""",
        **TWO,
    )
    assert run.output is True and contexts(run) == [0, 0, 1, 1]
    assert not run.named("cuDevicePrimaryCtxRetain")


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_special_handles_run_in_the_current_context_of_that_device(handle: int) -> None:
    run = fake.run(
        f"""{SET_UP}
fake.cuCtxSetCurrent(b)
csa_runtime.launch_forward(**forward(), stream={handle}, device=1)
emit(fake.fake_current())
""",
        **TWO,
    )
    assert run.output == 1 and contexts(run) == [1]
    assert not run.named("cuDevicePrimaryCtxRetain", "cuCtxPushCurrent")


@pytest.mark.parametrize("handle", [0, 1, 2])
@pytest.mark.parametrize("current", ["b", "None"])
def test_special_handles_else_run_in_the_primary_context(current: str, handle: int) -> None:
    run = fake.run(
        f"""{SET_UP}
fake.cuCtxSetCurrent({current})
before = fake.fake_current(), fake.fake_depth()
for _ in range(3):
    csa_runtime.launch_forward(**forward(), stream={handle}, device=0)
emit([before == (fake.fake_current(), fake.fake_depth()), fake.fake_primary_references(0)])
""",
        **TWO,
    )
    same, references = run.output
    assert same and contexts(run) == [2, 2, 2]
    assert references == 1, "retained once for good, and given back after each later call"


def test_a_worker_thread_without_a_context_gets_the_primary_one() -> None:
    run = fake.run(
        f"""{SET_UP}
fake.cuCtxSetCurrent(a)
def work():
    csa_runtime.launch_forward(**forward())
    depths.append(fake.fake_depth())
depths = []
thread = threading.Thread(target=work)
thread.start(); thread.join()
emit(depths)
""".replace("fake_context(1)", "fake_context(0)")
    )
    assert run.output == [0] and contexts(run) == [2]


def test_a_stream_of_another_device_is_refused() -> None:
    run = fake.run(
        f"""{SET_UP}
fake.cuCtxSetCurrent(a)
error = attempt(csa_runtime.launch_forward, **forward(), stream=on_b, device=0)
emit([error, fake.fake_current(), fake.fake_depth()])
""",
        **TWO,
    )
    error, current, depth = run.output
    assert error["type"] == "ValueError" and (current, depth) == (0, 1)
    assert "the stream belongs to device 1 and device is 0" in error["text"]
    assert not run.launches and not run.named("cuLibraryLoadData")


def test_two_devices_of_one_major_share_the_image() -> None:
    run = fake.run(
        """
for device in (0, 1, 0, 1):
    csa_runtime.launch_forward(**forward(), device=device)
""",
        FAKE_CUDA_DEVICES="80,89",
    )
    assert len(run.named("cuLibraryLoadData")) == 1
    assert [launch["arch"] for launch in run.launches] == [80] * 4
    assert not any(launch["lazy"] for launch in run.launches)


@pytest.mark.parametrize("mode", ["LAZY", "EAGER"])
def test_devices_of_two_majors_each_run_their_own_images(mode: str) -> None:
    run = fake.run(
        """
errors = [attempt(csa_runtime.launch_forward, **forward(), device=device) for device in (0, 1, 0)]
emit(errors)
""",
        FAKE_CUDA_DEVICES="90,120",
        CUDA_MODULE_LOADING=mode,
    )
    first, second, third = run.output
    assert first is None and third is None
    if mode == "LAZY":
        assert second is None
        assert [launch["arch"] for launch in run.launches] == [90, 120, 90]
    else:  # the driver refuses, and the error says why and what to do
        assert second["type"] == "DriverError" and second["code"] == 209
        assert "CUDA_MODULE_LOADING=EAGER" in second["text"] and "unset it" in second["text"]


def test_load_takes_the_current_contexts_device() -> None:
    script = f"""{SET_UP}
fake.cuCtxSetCurrent(b)
csa_runtime.load()
emit([fake.fake_current(), fake.fake_depth()])
"""
    run = fake.run(script, FAKE_CUDA_DEVICES="90,120")
    assert run.output == [1, 1]
    assert {load["arch"] for load in run.named("cuLibraryLoadData")} == {120}
    run = fake.run("csa_runtime.load(); emit(fake.fake_depth())", FAKE_CUDA_DEVICES="80,120")
    assert run.output == 0
    assert {load["arch"] for load in run.named("cuLibraryLoadData")} == {80}


# Every driver function that a first call makes, with how often it may fail, and whether its failure
# leaves something that only that function could put back.
FAILURES = [
    ("cuInit", 1),
    ("cuDeviceGetCount", 1),
    ("cuDeviceGet", 1),
    ("cuDeviceGetAttribute", 1),
    ("cuDeviceGetAttribute", 3),
    ("cuStreamGetCtx", 1),
    ("cuCtxGetCurrent", 1),
    ("cuCtxPushCurrent", 1),
    ("cuCtxGetId", 1),
    ("cuCtxGetDevice", 1),
    ("cuThreadExchangeStreamCaptureMode", 1),
    ("cuThreadExchangeStreamCaptureMode", 3),
    ("cuLibraryLoadData", 1),
    ("cuLibraryLoadData", 2),
    ("cuLibraryGetKernel", 1),
    ("cuLibraryGetKernel", 2),
    ("cuKernelGetFunction", 1),
    ("cuKernelGetFunction", 2),
    ("cuFuncLoad", 1),
    ("cuFuncLoad", 2),
    ("cuLaunchKernelEx", 1),
    ("cuLaunchKernelEx", 2),
]
CALL_ON_B = f"""{SET_UP}
fake.cuCtxSetCurrent(a)
mode = ctypes.c_int(1)
fake.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
def state():
    return [fake.fake_current(), fake.fake_depth(), fake.fake_mode()]
"""


def shifted(name: str, nth: int) -> str:
    """The set-up itself starts the driver and exchanges the mode, once each."""
    return f"{name}:{nth + (name in ('cuInit', 'cuThreadExchangeStreamCaptureMode'))}:999"


@pytest.mark.parametrize(("name", "nth"), FAILURES)
def test_a_failed_call_is_reported_and_everything_put_back(name: str, nth: int) -> None:
    run = fake.run(
        f"""{CALL_ON_B}
before = state()
error = attempt(csa_runtime.launch_backward, **backward(), stream=on_b, device=1)
after = state()
again = attempt(csa_runtime.launch_backward, **backward(), stream=on_b, device=1)
emit([before, error, after, again, state()])
""",
        FAKE_CUDA_FAIL=shifted(name, nth),
        **TWO,
    )
    before, error, after, again, last = run.output
    assert error is not None, "the failure went unnoticed"
    assert (error["type"], error["code"], error["call"]) == ("DriverError", 999, name)
    assert error["name"] == "CUDA_ERROR_UNKNOWN" and "CUDA_ERROR_UNKNOWN (999)" in error["text"]
    assert before == after == last == [0, 1, 1]
    assert again is None, "a failure is not remembered"
    reached = [launch for launch in run.launches if launch["result"] == 0]
    assert len(reached) == (3 if (name, nth) == ("cuLaunchKernelEx", 2) else 2)


@pytest.mark.parametrize(
    "name", ["cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuCtxGetId", "cuFuncLoad"]
)
def test_a_failure_on_the_way_to_the_primary_context_is_put_back(name: str) -> None:
    run = fake.run(
        f"""{CALL_ON_B}
errors = [attempt(csa_runtime.load, 1), attempt(csa_runtime.load, 1)]
emit([errors, state(), fake.fake_primary_references(1)])
""",
        FAKE_CUDA_FAIL=f"{name}:1:2",
        **TWO,
    )
    (first, second), state, references = run.output
    assert (first["type"], first["name"]) == ("DriverError", "CUDA_ERROR_OUT_OF_MEMORY")
    assert first["call"] == name and second is None
    assert state == [0, 1, 1] and references == 1


@pytest.mark.parametrize(
    ("name", "nth"),
    [("cuThreadExchangeStreamCaptureMode", 2), ("cuCtxPopCurrent", 1)],
)
def test_a_failure_to_put_back_is_reported(name: str, nth: int) -> None:
    run = fake.run(
        f"""{CALL_ON_B}
emit(attempt(csa_runtime.launch_forward, **forward(), stream=on_b, device=1))
""",
        FAKE_CUDA_FAIL=shifted(name, nth),
        **TWO,
    )
    error: Any = run.output
    assert error["type"] == "DriverError" and error["call"] == name
    assert "restoring" in error["text"]


def test_the_second_kernels_failure_says_which_it_was() -> None:
    run = fake.run(
        "emit(attempt(csa_runtime.launch_backward, **backward()))",
        FAKE_CUDA_FAIL="cuLaunchKernelEx:2:1",
    )
    assert "launching csa_finish_f32_e32 (kernel 2 of the call's 2)" in run.output["text"]
    assert run.output["name"] == "CUDA_ERROR_INVALID_VALUE"
