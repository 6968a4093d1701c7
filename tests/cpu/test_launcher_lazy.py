# SPDX-License-Identifier: Apache-2.0
"""No launch loads: a kernel is finished, beside captures, in every context it is launched in."""

import pytest

from support import fake

pytestmark = pytest.mark.L0

# Two contexts of one device beside its primary one; the second captures in the strictest mode.
SET_UP = """
fake.cuInit(0)
a, b = fake.fake_context(0), fake.fake_context(0)
fake.cuCtxSetCurrent(a)
on_a, on_b = fake.fake_stream(a), fake.fake_stream(b)
"""
FIRST_USES = ["csa_runtime.load(0)", "csa_runtime.launch_backward(**backward(), stream=on_a)"]


@pytest.mark.parametrize("version", ["12030", "12080", "13000"])
@pytest.mark.parametrize("first", FIRST_USES)
def test_a_capture_in_another_context_may_be_its_first_use(first: str, version: str) -> None:
    run = fake.run(
        f"""{SET_UP}
{first}
fake.fake_capture(on_b, 0)
error = attempt(csa_runtime.launch_backward, **backward(), stream=on_b)
again = attempt(csa_runtime.launch_backward, **backward(), stream=on_b)
emit([error, again, fake.fake_invalidated(on_b), fake.fake_mode()])
""",
        FAKE_CUDA_VERSION=version,
    )
    assert run.output == [None, None, 0, 0]
    assert not any(launch["lazy"] for launch in run.launches)
    finished = [call["mode"] for call in run.named("cuKernelGetFunction")]
    assert set(finished) == {2}, "always under the relaxed exchange"
    assert len([c for c in run.named("cuKernelGetFunction") if c["current"] == 1]) == 2


@pytest.mark.parametrize("first", FIRST_USES)
def test_an_old_driver_refuses_the_first_use_of_another_context_in_a_capture(first: str) -> None:
    run = fake.run(
        f"""{SET_UP}
{first}
fake.fake_capture(on_b, 0)
error = attempt(csa_runtime.launch_backward, **backward(), stream=on_b)
spoilt = fake.fake_invalidated(on_b)
fake.fake_capture(on_b, -1)
fake.cuCtxSetCurrent(b)
csa_runtime.load(0)
fake.fake_capture(on_b, 0)
emit([error, spoilt, attempt(csa_runtime.launch_backward, **backward(), stream=on_b)])
""",
        FAKE_CUDA_VERSION="12020",
    )
    error, spoilt, after = run.output
    assert error["type"] == "DriverError" and "call load() before the capture" in error["text"]
    assert spoilt == 0 and after is None


def test_load_serves_the_primary_and_the_current_context() -> None:
    run = fake.run(f"""{SET_UP}
csa_runtime.load(0)
before = len(open(os.environ["FAKE_CUDA_LOG"]).readlines())
csa_runtime.launch_backward(**backward(), stream=on_a)
fake.cuCtxSetCurrent(None)
csa_runtime.launch_backward(**backward())
emit(before)
""")
    after = {call["call"] for call in run.calls[run.output :]}
    assert not after & {"cuLibraryLoadData", "cuKernelGetFunction", "cuFuncLoad"}
    assert [launch["lazy"] for launch in run.launches] == [0] * 4
    assert len(run.named("cuLibraryLoadData")) * 2 == len(run.named("cuFuncLoad"))


def test_a_handle_used_again_is_another_context() -> None:
    run = fake.run(f"""{SET_UP}
csa_runtime.launch_forward(**forward(), stream=on_b)
fake.fake_destroy(b)
again = fake.fake_context(0)
on_again = fake.fake_stream(again)
fake.fake_capture(on_again, 0)
error = attempt(csa_runtime.launch_forward, **forward(), stream=on_again)
emit([again == b, error, fake.fake_invalidated(on_again)])
""")
    assert run.output == [True, None, 0]
    assert [launch["lazy"] for launch in run.launches] == [0, 0]


def test_more_contexts_than_are_remembered_never_load_lazily_nor_push_out_the_primary_one() -> None:
    run = fake.run("""
csa_runtime.load(0)
streams = [fake.fake_stream(fake.fake_context(0)) for _ in range(20)]
for stream in streams + streams:
    csa_runtime.launch_forward(**forward(), stream=stream)
before = len(open(os.environ["FAKE_CUDA_LOG"]).readlines())
csa_runtime.launch_forward(**forward())
emit(before)
""")
    assert not any(launch["lazy"] for launch in run.launches) and len(run.launches) == 41
    after = {call["call"] for call in run.calls[run.output :]}
    assert not after & {"cuKernelGetFunction", "cuFuncLoad"}
