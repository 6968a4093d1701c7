# SPDX-License-Identifier: Apache-2.0
"""Threads that race for a first call, threads that wait for one, and forked children."""

import pytest

from support import fake

pytestmark = pytest.mark.L0


def test_threads_racing_for_the_first_call_load_once() -> None:
    run = fake.run(
        """
barrier = threading.Barrier(16)
def work():
    barrier.wait()
    csa_runtime.launch_forward(**forward())
threads = [threading.Thread(target=work) for _ in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
emit([*_native.launch_counts().values()])
""",
        FAKE_CUDA_SLOW_LOAD="20000",
    )
    assert run.output == [16] and len(run.launches) == 16
    for name in ("cuInit", "cuLibraryLoadData", "cuLibraryGetKernel"):
        assert len(run.named(name)) == 1
    assert len({launch["thread"] for launch in run.launches}) == 16


def test_the_interpreter_runs_while_a_kernel_loads() -> None:
    run = fake.run(
        """
import time
thread = threading.Thread(target=lambda: csa_runtime.launch_forward(**forward()))
started = time.perf_counter()
thread.start()
ticks = 0
while thread.is_alive():
    time.sleep(0.001)
    ticks += 1
emit([ticks, time.perf_counter() - started])
""",
        FAKE_CUDA_SLOW_LOAD="300000",
    )
    ticks, seconds = run.output
    assert seconds > 0.3 and ticks > 20


@pytest.mark.parametrize("started", [False, True])
def test_a_forked_child_gets_a_driver_error_only_if_the_driver_had_started(started: bool) -> None:
    run = fake.run(f"""
csa_runtime.info()
if {started}: csa_runtime.launch_forward(**forward())
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    calls = [attempt(csa_runtime.launch_forward, **forward()), attempt(csa_runtime.load, 0),
             attempt(csa_runtime.info)]
    os.write(writer, json.dumps(calls).encode())
    os._exit(0)
os.waitpid(child, 0)
emit(json.loads(os.read(reader, 65536)))
""")
    launch, load, info = run.output
    assert info is None
    if started:
        assert launch["type"] == load["type"] == "DriverError"
        assert launch["code"] == 3 and launch["call"] == "fork" and "spawn" in launch["text"]
        assert len(run.launches) == 1
    else:
        assert launch is None and load is None


@pytest.mark.parametrize(("name", "starts"), [("cuInit", False), ("cuDeviceGetCount", True)])
def test_a_driver_counts_as_started_once_cuinit_succeeded(name: str, starts: bool) -> None:
    run = fake.run(
        """
first = attempt(csa_runtime.launch_forward, **forward())
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    call = attempt(csa_runtime.launch_forward, **forward())
    os.write(writer, json.dumps(call).encode())
    os._exit(0)
os.waitpid(child, 0)
emit([first, json.loads(os.read(reader, 65536)), attempt(csa_runtime.launch_forward, **forward())])
""",
        FAKE_CUDA_FAIL=f"{name}:1:999",
    )
    first, child, again = run.output
    assert first["call"] == name and again is None
    assert (child["call"] == "fork") if starts else (child is None)
