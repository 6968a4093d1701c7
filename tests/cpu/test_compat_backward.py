# SPDX-License-Identifier: Apache-2.0
"""The class backward on torch tensors: what the native module serves, launches and leaves.

On the fake driver, with tensors that say they are on a GPU.
"""

import pytest

from support import fake

pytestmark = pytest.mark.L0

# `left` has a 1 for each call that the native module left to Python.
SET_UP = """
import torch
from csa_runtime import CSACompressorBackward, compat_classes, ops
from support.torch_on_gpu import on_gpu, set_up
set_up()
T, ROWS, D, RATIO, COFF = 64, 16, 128, 4, 2
NAMES = ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp", "grad_out", "grad_kv",
         "grad_score", "grad_ape")
left = []
native = ops.torch_backward
def counted(*arguments):
    made = native(*arguments)
    if made is None:
        left.append(1)
    return made
ops.torch_backward = counted
def host(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)
def bf16(*shape):
    return on_gpu(host(*shape))
def half(which):
    return on_gpu(host(T, 4 * D)[:, 2 * which * D:][:, :2 * D])
def prefix(*values):
    return on_gpu(torch.tensor(values, dtype=torch.int32))
def tensors(**changed):
    wide, ape = lambda: bf16(T, COFF * D), lambda: on_gpu(torch.zeros(RATIO, COFF * D))
    usual = dict(kv=wide, score=wide, ape=ape, cu_seqlens=lambda: prefix(0, T),
        cu_seqlens_comp=lambda: prefix(0, ROWS), grad_out=lambda: bf16(ROWS, D), grad_kv=wide,
        grad_score=wide, grad_ape=ape)
    return {name: changed[name] if name in changed else usual[name]() for name in NAMES}
def made(**options):
    sample = tensors()
    operation = CSACompressorBackward(*list(sample.values())[:6], ratio=RATIO, coff=COFF, **options)
    operation.compile()
    return operation
def spaced(bytes):  # aligned to 16
    whole = host(bytes + 16, dtype=torch.uint8)
    return on_gpu(whole[-whole.data_ptr() % 16:][:bytes])
def call(**changed):
    options = dict((name, changed.pop(name)) for name in ("workspace", "current_stream")
                   if name in changed)
    return tensors(**changed) | options
"""
# The first call tells the module about torch.
KNOWN = (
    SET_UP
    + """
operation = made()
operation.execute(**tensors())
left.clear()
"""
)

# Calls that the native module serves.
USUAL = {
    "usual": "",
    "a workspace": "workspace=spaced(operation.scratch_workspace_bytes())",
    "halves of rows": "kv=half(0), score=half(1), grad_kv=half(1), grad_score=half(0)",
    "one incoming row": "grad_out=on_gpu(host(1, D).expand(ROWS, D))",
    "a parameter": "ape=torch.nn.Parameter(on_gpu(torch.zeros(RATIO, COFF * D)))",
    "inputs that record": "kv=bf16(T, COFF * D).requires_grad_()",
    "the current stream": "current_stream=2",
    "no ape, no grad_ape": "ape=None, grad_ape=None",
    "one tensor twice": "kv=SHARED, score=SHARED",
    "another stream, all given": "current_stream=1, workspace=spaced(1 << 20)",
}


@pytest.mark.parametrize("deterministic", [False, True])
def test_usual_calls_are_the_same_from_c_and_from_python(deterministic: bool) -> None:
    """One layout after another, from one object."""
    changes = "".join(f"    lambda: dict({change}),\n" for change in USUAL.values())
    run = fake.run(
        KNOWN
        + f"""
SHARED = bf16(T, COFF * D)
operation.deterministic = {deterministic}
compat_classes.on_stream = lambda call, arrays, stream: call(stream)
for change in (\n{changes}):
    given = call(**change())
    operation.execute(**given)
    assert not left, change
    ops.torch_backward = lambda *_: None
    operation.execute(**given)
    ops.torch_backward = counted
"""
    )
    launches = run.launches[2:]
    assert len(launches) == 4 * len(USUAL)
    for i, (name, given) in enumerate(USUAL.items()):
        native, python = launches[4 * i : 4 * i + 2], launches[4 * i + 2 : 4 * i + 4]
        for one, two in zip(native, python, strict=True):
            own_space = {} if "workspace" in given else {"parameters": two["parameters"]}
            assert one | own_space == two, name


# Other calls, and what is said of them; None: served.
OTHERS = {
    "kv of fewer tokens": ("kv=bf16(T - 1, COFF * D), score=bf16(T - 1, COFF * D)", "kv has shape"),
    "a short score": ("score=bf16(T - 1, COFF * D)", "score is"),
    "a narrow grad_out": ("grad_out=bf16(ROWS, D - 1)", "grad_out has shape"),
    "columns apart": ("score=on_gpu(host(T, 4 * D)[:, ::2])", "score has strides"),
    "fp32": ("grad_kv=on_gpu(torch.zeros(T, COFF * D))", "grad_kv is float32"),
    "int64": ("cu_seqlens=on_gpu(torch.tensor([0, T]))", "cu_seqlens is int64"),
    "a negative": ("kv=torch._neg_view(bf16(T, COFF * D))", "kv is a view"),
    "another device": ("grad_kv=on_gpu(host(T, COFF * D), 1)", "grad_kv is on cuda:1"),
    "the CPU": ("grad_score=host(T, COFF * D)", "grad_score is on the CPU"),
    "no array": ("score=7", "score is a builtins.int"),
    "None": ("grad_kv=None", "grads lacks"),
    "no grad_ape": ("grad_ape=None", "grad_ape is None"),
    "a result that records": ("grad_kv=bf16(T, COFF * D).requires_grad_()", "grad_kv requires"),
    "overlap": ("kv=SHARED, grad_kv=SHARED", "overlap"),
    "a short workspace": ("workspace=spaced(32)", "workspace is"),
    "a workspace of another dtype": ("workspace=on_gpu(torch.zeros(1 << 20))", "workspace is"),
    "a workspace off by 8": ("workspace=on_gpu(SPACE[8:])", "workspace is"),
    "a workspace apart": ("workspace=on_gpu(SPACE[::2])", "workspace is"),
    "no stream": ("current_stream='0'", "stream is a"),
}  # fmt: skip


def test_others_are_refused_as_python_does() -> None:
    """With the native module and without."""
    changes = "".join(f"    dict({change}),\n" for change, _ in OTHERS.values())
    run = fake.run(
        KNOWN
        + f"""
SHARED = bf16(T, COFF * D)
SPACE = torch.zeros(1 << 20, dtype=torch.uint8)
SPACE = SPACE[-SPACE.data_ptr() % 16:]
outcomes = []
for change in (\n{changes}):
    given = call(**change)
    ops.torch_backward = counted
    outcomes.append([attempt(operation.execute, **given)])
    ops.torch_backward = lambda *_: None
    outcomes[-1].append(attempt(operation.execute, **given))
emit(outcomes)
"""
    )
    for (name, (_, said)), (native, python) in zip(OTHERS.items(), run.output, strict=True):
        assert native == python, name
        assert native["type"] == "ValueError" and said in native["text"], (name, native)


def test_a_result_that_records_may_be_written_under_no_grad_alone() -> None:
    run = fake.run(
        KNOWN
        + """
given = tensors(grad_kv=bf16(T, COFF * D).requires_grad_())
with torch.no_grad():
    failed = [attempt(operation.execute, **given)]
emit([*failed, attempt(operation.execute, **given)])
"""
    )
    served, failed = run.output
    assert served is None and "requires a gradient" in failed["text"]


def test_a_first_call_under_a_mode_costs_later_ones_nothing() -> None:
    """Nothing is learnt from it but what torch's tensors are."""
    for mode in (
        "torch.func.vmap(lambda x: (operation.execute(**given), x)[1])(torch.zeros(2))",
        "with torch.utils._python_dispatch.TorchDispatchMode(): operation.execute(**given)",
    ):
        run = fake.run(
            SET_UP
            + f"""
operation = made()
given = call(workspace=spaced(operation.scratch_workspace_bytes()))
{mode}
left.clear()
operation.execute(**given)
operation.execute(**tensors())
emit(left)
"""
        )
        assert run.output == [] and len(run.launches) == 6


def test_memory_for_a_graph_is_left_to_the_array_operation() -> None:
    """A call with a workspace takes none, and is launched into the capture at once."""
    run = fake.run(
        KNOWN
        + """
given = tensors()
space = spaced(operation.scratch_workspace_bytes())
stream = fake.fake_stream(fake.fake_context(0))
torch._C._cuda_getCurrentRawStream.stream = stream
torch.cuda.is_current_stream_capturing = lambda: True
torch.cuda.memory_snapshot = list
fake.fake_capture(stream, 2)
counts = []
operation.execute(**given, workspace=space)
counts.append(len(left))
failed = attempt(operation.execute, **given)
counts.append(len(left))
emit([counts, failed, fake.fake_invalidated(stream)])
"""
    )
    counts, failed, spoilt = run.output
    assert counts == [0, 1] and "under a capture" in failed["text"] and not spoilt


def test_another_stream_takes_the_long_way() -> None:
    """Its memory is for others to take."""
    run = fake.run(
        KNOWN
        + """
streams, own = [], compat_classes.on_stream
compat_classes.on_stream = lambda call, arrays, stream: streams.append(stream)
operation.execute(**tensors(), current_stream=0x77)
compat_classes.on_stream = lambda call, arrays, stream: call(stream)
taken = []
ops._take_workspace = lambda call, kv, rows: taken.append(call.stream)
attempt(operation.execute, **tensors(), current_stream=1)
emit([streams, left, taken])
"""
    )
    assert run.output == [[0x77], [1], [1]] and len(run.launches) == 2


def test_options_are_read_at_each_call() -> None:
    """Both may be set anew."""
    run = fake.run(
        KNOWN
        + """
given = tensors()
operation.execute(**given)
operation.deterministic = True
operation.execute(**given)
operation.ratio = 2
two = dict(ape=on_gpu(torch.zeros(2, COFF * D)), grad_ape=on_gpu(torch.zeros(2, COFF * D)))
operation.execute(**tensors(**two))
emit([left, attempt(operation.execute, **tensors())])
"""
    )
    left, failed = run.output
    assert left == [1] and "(2, 256) is allowed" in failed["text"]
    finish = [launch["parameters"] for launch in run.launches[1::2]]
    assert len(finish) == 4 and len(finish[1]) == len(finish[2]) and finish[1] != finish[2]
