# SPDX-License-Identifier: Apache-2.0
"""What the drop-in makes the driver do, on the recording fake one; its arrays are on no GPU."""

from typing import Any

import pytest

from support import fake

pytestmark = pytest.mark.L0

# Arrays at addresses that nothing reads, of a library that can allocate more of them.
SET_UP = """
from csa_runtime import CSACompressorBackward, CSACompressorForward, libraries
from csa_runtime.compat import csa_compressor_backward_wrapper, csa_compressor_forward_wrapper
T, ROWS, D, RATIO, COFF = 44, 9, 128, 4, 2

class OnGpu:  # that of array_calls would import torch in every process
    def __init__(self, shape, typestr, data):
        self.shape = shape
        self.__cuda_array_interface__ = dict(shape=shape, typestr=typestr, data=data, version=3)

class Allocator(libraries.Library):
    taken = 0
    def empty(self, like, shape, dtype, stream):
        Allocator.taken += 1
        kinds = {None: "<V2", "float32": "<f4", "uint8": "|u1"}
        return OnGpu(shape, kinds[dtype], data=((50 + Allocator.taken) << 32, False))

libraries._KNOWN["__main__"] = Allocator()

def at(place, shape, kind="<V2"):
    return OnGpu(shape, kind, data=(place << 32, False))

def arrays(ratio=RATIO, coff=COFF, d=D, tokens=T, rows=ROWS):
    wide = (tokens, coff * d)
    inputs = [at(1, wide), at(2, wide), at(3, (ratio, coff * d), "<f4"),
              at(4, (4,), "<i4"), at(5, (4,), "<i4")]
    grads = [at(7, wide), at(8, wide), at(9, (ratio, coff * d), "<f4")]
    return inputs, at(6, (rows, d)), grads

def made(kind, inputs, out, ratio=RATIO, coff=COFF, **options):
    return kind(*inputs, out, ratio=ratio, coff=coff, **options)
"""
LOADS = ("cuLibraryLoadData", "cuFuncLoad", "cuLibraryGetKernel")


def kernels(run: fake.Run) -> list[str]:
    """Names of the kernels launched."""
    return [str(launch["name"]) for launch in run.launches]


def test_compile_loads_and_execute_only_launches() -> None:
    """All kernels of the device's architecture; nothing is loaded later."""
    run = fake.run(
        SET_UP
        + """
inputs, out, grads = arrays()
forward = made(CSACompressorForward, inputs, out)
backward = made(CSACompressorBackward, inputs, out)
assert forward.check_support()
for operation in forward, backward:
    operation.compile()
before = len(_native.launch_counts())
forward.execute(*inputs, out)
backward.execute(*inputs, out, *grads)
emit([before, len(_native.launch_counts())])
"""
    )
    names = [call["call"] for call in run.calls]
    first = names.index("cuLaunchKernelEx")
    assert run.output == [0, 3] and len(run.launches) == 3
    assert "cuLibraryLoadData" in names[:first]
    assert not [name for name in names[first:] if name in LOADS]


@pytest.mark.parametrize("ratio", [2, 4, 128])
@pytest.mark.parametrize("coff", [1, 2])
def test_the_window_chooses_the_kernels(ratio: int, coff: int) -> None:
    """By `ratio`, in wrappers and classes alike."""
    run = fake.run(
        SET_UP
        + f"""
inputs, out, grads = arrays({ratio}, {coff}, tokens=1200)
window = dict(ratio={ratio}, coff={coff})
csa_compressor_forward_wrapper(*inputs, **window, total_comp=ROWS)
csa_compressor_backward_wrapper(*inputs, out, **window)
for kind, rest in (CSACompressorForward, [out]), (CSACompressorBackward, [out, *grads]):
    operation = made(kind, inputs, out, **window)
    operation.compile()
    operation.execute(*inputs, *rest)
"""
    )
    names = kernels(run)
    assert names[:3] == names[3:]
    for name, operation in zip(names, ("forward", "backward"), strict=False):
        assert f"csa_{operation}_r{ratio}_c{coff}_" in name
    assert "finish" in names[2]


@pytest.mark.parametrize("deterministic", [False, True])
def test_grad_ape_is_added_to_by_the_class_unless_deterministic(deterministic: bool) -> None:
    """The wrapper's is new and overwritten; only the finishing kernel's arguments tell."""
    run = fake.run(
        SET_UP
        + f"""
inputs, out, grads = arrays()
operation = made(CSACompressorBackward, inputs, out, deterministic={deterministic})
operation.compile()
operation.execute(*inputs, out, *grads, None, at(10, (operation.scratch_workspace_bytes(),), "|u1"))
flags = 0 if {deterministic} else 1
common = dict(device=0, ratio=RATIO, coff=COFF, dtype=1, tokens=T, segments=3, rows=ROWS,
    head_dim=D, kv=1 << 32, score=2 << 32, ape=3 << 32, cu_seqlens=4 << 32, cu_seqlens_comp=5 << 32,
    kv_stride=COFF * D, score_stride=COFF * D, grad_out=6 << 32, grad_out_stride=D,
    grad_kv=7 << 32, grad_score=8 << 32, grad_ape=9 << 32, grad_kv_stride=COFF * D,
    grad_score_stride=COFF * D, workspace=10 << 32,
    workspace_bytes=operation.scratch_workspace_bytes())
_native.launch_backward(**common, flags=flags)
_native.launch_backward(**common, flags=1 - flags)
"""
    )
    ours, same, other = (run.launches[i : i + 2] for i in (0, 2, 4))
    strip = lambda launches: [{k: v for k, v in one.items() if k != "n"} for one in launches]  # noqa: E731
    assert strip(ours) == strip(same) != strip(other)


@pytest.mark.parametrize("stream", ["int", "protocol", "torch", "cuda.bindings", "None"])
def test_launches_land_on_the_stream_given(stream: str) -> None:
    """Whatever library it is of; wrapper and class, both kernels of a backward."""
    made = {
        "int": "handle",
        "protocol": "type('S', (), {'__cuda_stream__': lambda self: (0, handle)})()",
        "torch": "type('S', (), {'cuda_stream': handle})()",
        "cuda.bindings": "driver.CUstream(handle)",
        "None": "None",
    }
    run = fake.run(
        SET_UP
        + f"""
from cuda.bindings import driver
forward_fields = forward
fake.cuInit(0)
handle = fake.fake_stream(fake.fake_context(0))
stream = {made[stream]}
inputs, out, grads = arrays()
csa_compressor_forward_wrapper(*inputs, total_comp=ROWS, stream=stream)
csa_compressor_backward_wrapper(*inputs, out, stream=stream)
forward = made(CSACompressorForward, inputs, out)
forward.compile()
forward.execute(*inputs, out, current_stream=stream)
backward = made(CSACompressorBackward, inputs, out)
backward.compile()
backward.execute(*inputs, out, *grads, stream)
csa_runtime.launch_forward(**forward_fields(), stream=handle if stream else 0)
"""
    )
    *ours, last = (launch["stream"] for launch in run.launches)
    assert len(ours) == 6 and {*ours} == {last} and (last == 0) is (stream == "None")


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 103, 120])
def test_every_capability_with_images_is_supported(capability: int) -> None:
    """From 8.0 up, meta samples asking the current device."""
    run = fake.run(
        SET_UP
        + """
inputs, out, grads = arrays()
emit([made(kind, inputs, out).check_support()
      for kind in (CSACompressorForward, CSACompressorBackward)])
""",
        FAKE_CUDA_DEVICES=str(capability),
    )
    assert run.output == [True, True] and not run.launches


REFUSED = """
inputs, out, grads = arrays()
operation = made(CSACompressorForward, inputs, out)
emit([attempt(operation.check_support), attempt(operation.compile),
      attempt(operation.execute, *inputs, out),
      attempt(csa_compressor_forward_wrapper, *inputs, total_comp=ROWS)])
"""


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"FAKE_CUDA_DEVICES": "70"}, "UnsupportedArch"),
        ({"FAKE_CUDA_DEVICES": "none"}, "DriverError"),
        ({"driver": False}, "DriverError"),
    ],
)
def test_a_device_that_cannot_is_a_runtime_error(options: dict[str, Any], error: str) -> None:
    """In check_support, compile and the wrappers; execute was never compiled."""
    output = fake.run(SET_UP + REFUSED, **options).output
    assert [one["type"] for one in output] == [error, error, "ValueError", error]


def test_meta_samples_without_a_gpu_are_a_runtime_error() -> None:
    """They stand for a GPU's tensors; malformed ones are found first."""
    script = """
import torch
from csa_runtime import CSACompressorForward
kv = torch.empty(44, 256, dtype=torch.bfloat16, device="meta")
prefix = torch.empty(4, dtype=torch.int32, device="meta")
ape, out = torch.empty(4, 256, device="meta"), torch.empty(9, 128, device="meta")
for sample in out, out.bfloat16():
    operation = CSACompressorForward(kv, kv, ape, prefix, prefix, sample)
    results.append(attempt(operation.check_support))
emit(results)
"""
    output = fake.run("results = []" + script, driver=False).output
    assert [one["type"] for one in output] == ["ValueError", "DriverError"]
    output = fake.run("results = []" + script).output
    assert output[1] is None


def test_no_rows_launch_no_forward_and_zeros_backward() -> None:
    """One kernel writes the zeros and one leaves grad_ape as it was."""
    run = fake.run(
        SET_UP
        + """
inputs, out, grads = arrays(rows=0)
csa_compressor_forward_wrapper(*inputs, total_comp=0)
csa_compressor_backward_wrapper(*inputs, out)
"""
    )
    assert kernels(run) and all("forward" not in name for name in kernels(run))


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_the_first_call_may_be_inside_a_capture(mode: int) -> None:
    """Compile too: neither has to come before it, nothing spoils it."""
    run = fake.run(
        SET_UP
        + f"""
fake.cuInit(0)
stream = fake.fake_stream(fake.fake_context(0))
fake.fake_capture(stream, {mode})
inputs, out, grads = arrays()
csa_compressor_forward_wrapper(*inputs, total_comp=ROWS, stream=stream)
csa_compressor_backward_wrapper(*inputs, out, stream=stream)
backward = made(CSACompressorBackward, inputs, out)
backward.compile()
backward.execute(*inputs, out, *grads, stream)
emit(fake.fake_invalidated(stream))
"""
    )
    assert run.output == 0 and len(run.launches) == 5
