# SPDX-License-Identifier: Apache-2.0
"""Calls of the class backward that look like an earlier one: the same launches, no description.

On the fake driver, with tensors that say they are on a GPU.
"""

import copy
import pickle

import pytest

from csa_runtime.compat_repeat import Repeats
from support import fake

pytestmark = pytest.mark.L0

# `described` counts the calls that went to the array operation.
SET_UP = """
import torch
from csa_runtime import CSACompressorBackward, compat_classes, compat_repeat
from support.torch_on_gpu import on_gpu, set_up
set_up()
T, ROWS, D, RATIO, COFF = 64, 16, 128, 4, 2
NAMES = ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp", "grad_out", "grad_kv",
         "grad_score", "grad_ape")
described = []
own = compat_classes.ops.compressor_backward
def counted(*arguments, **options):
    described.append(1)
    return own(*arguments, **options)
compat_classes.ops.compressor_backward = counted
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
"""

# What the first call of an object is given, beside or in place of the usual.
USUAL = {
    "usual": "",
    "a workspace": "workspace=spaced(operation.scratch_workspace_bytes())",
    "halves of rows": "kv=half(0), score=half(1), grad_kv=half(1), grad_score=half(0)",
    "one incoming row": "grad_out=on_gpu(host(1, D).expand(ROWS, D))",
    "a parameter": "ape=torch.nn.Parameter(on_gpu(torch.zeros(RATIO, COFF * D)))",
    "inputs that record": "kv=bf16(T, COFF * D).requires_grad_()",
    "the current stream": "current_stream=2",
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("given", USUAL)
def test_a_call_like_an_earlier_one_launches_the_same(given: str, deterministic: bool) -> None:
    """With new tensors, at their addresses; described is the first alone."""
    run = fake.run(
        SET_UP
        + f"""
operation = made(deterministic={deterministic})
def arguments():
    changed = dict({USUAL[given]})
    options = dict((name, changed.pop(name)) for name in ("workspace", "current_stream")
                   if name in changed)
    return tensors(**changed) | options
operation.execute(**arguments())
new = arguments()
operation.execute(**new)
count = len(described)
operation._repeats = compat_repeat.Repeats(RATIO, COFF)
operation.execute(**new)
emit([count, len(described)])
"""
    )
    assert run.output == [1, 2] and len(run.launches) == 6
    repeated, again = run.launches[2:4], run.launches[4:]
    for one, two in zip(repeated, again, strict=True):
        own_space = {} if "workspace" in given else {"parameters": two["parameters"]}
        assert one | own_space | {"n": 0} == two | {"n": 0}


# Calls after a usual one, and what is said of them; None: served.
OTHERS = {
    "rows apart": ("kv=half(0)", None),
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
    "no ape, no grad_ape": ("ape=None, grad_ape=None", None),
    "a result that records": ("grad_kv=bf16(T, COFF * D).requires_grad_()", "grad_kv requires"),
    "overlap": ("kv=SHARED, grad_kv=SHARED", "overlap"),
    "one tensor twice": ("kv=SHARED, score=SHARED", None),
    "a short workspace": ("workspace=spaced(32)", "workspace is"),
    "a workspace of another dtype": ("workspace=on_gpu(torch.zeros(1 << 20))", "workspace is"),
    "no stream": ("current_stream='0'", "stream is a"),
}  # fmt: skip


def test_others_are_described_and_refused_as_ever() -> None:
    """An object that has served usual calls, with and without a workspace, answers as a new one."""
    changes = "".join(f"    dict({change}),\n" for change, _ in OTHERS.values())
    run = fake.run(
        SET_UP
        + f"""
SHARED = bf16(T, COFF * D)
outcomes = []
for change in (\n{changes}):
    options = dict((name, change.pop(name)) for name in ("workspace", "current_stream")
                   if name in change)
    used, new, given = made(), made(), tensors(**change) | options
    used.execute(**tensors())
    used.execute(**tensors(), workspace=spaced(used.scratch_workspace_bytes()))
    before = len(described)
    outcomes.append([attempt(used.execute, **given), attempt(new.execute, **given)])
    used.execute(**tensors())
emit(outcomes)
"""
    )
    for (name, (_, said)), (used, new) in zip(OTHERS.items(), run.output, strict=True):
        assert used == new, name
        if said is None:
            assert used is None, name
        else:
            assert used["type"] == "ValueError" and said in used["text"], (name, used)


def test_a_result_that_records_is_not_remembered_from_no_grad() -> None:
    """There it may be written."""
    run = fake.run(
        SET_UP
        + """
operation, given = made(), tensors(grad_kv=bf16(T, COFF * D).requires_grad_())
with torch.no_grad():
    operation.execute(**given)
    operation.execute(**given)
emit([len(described), attempt(operation.execute, **given)])
"""
    )
    count, failed = run.output
    assert count == 2 and "requires a gradient" in failed["text"]


def test_memory_for_a_graph_is_left_to_the_array_operation() -> None:
    """A call with a workspace takes none, and is launched into the capture at once."""
    run = fake.run(
        SET_UP
        + """
operation = made()
given = tensors()
space = spaced(operation.scratch_workspace_bytes())
operation.execute(**given)
operation.execute(**given, workspace=space)
stream = fake.fake_stream(fake.fake_context(0))
torch._C._cuda_getCurrentRawStream.stream = stream
torch.cuda.is_current_stream_capturing = lambda: True
torch.cuda.memory_snapshot = list
fake.fake_capture(stream, 2)
counts = [len(described)]
operation.execute(**given, workspace=space)
counts.append(len(described))
failed = attempt(operation.execute, **given)
counts.append(len(described))
emit([counts, failed, fake.fake_invalidated(stream)])
"""
    )
    counts, failed, spoilt = run.output
    assert counts == [2, 2, 3] and "under a capture" in failed["text"] and not spoilt


def test_another_stream_or_device_takes_the_long_way() -> None:
    """Its memory is for others to take."""
    run = fake.run(
        SET_UP
        + """
operation, given = made(), tensors()
operation.execute(**given)
streams = []
compat_classes.on_stream = lambda call, arrays, stream: streams.append(stream)
operation.execute(**given, current_stream=0x77)
torch.cuda.current_device = lambda: 1
operation.execute(**given)
torch.cuda.current_device = lambda: 0
operation.execute(**given)
emit(streams)
"""
    )
    assert run.output == [0x77, None] and len(run.launches) == 4


@pytest.mark.parametrize(
    "guard",
    ["None", "lambda *a, **k: type('G', (), {'check': lambda self, *t: True})()"],
    ids=["missing", "blind"],
)
def test_without_a_guard_worth_it_every_call_is_described(guard: str) -> None:
    """It is torch's own and private: it may go, or come to mean something else."""
    run = fake.run(
        SET_UP
        + f"""
torch._C._dynamo.guards.TensorGuards = {guard}
operation = made()
for _ in range(3):
    operation.execute(**tensors())
emit(len(described))
"""
    )
    assert run.output == 3 and len(run.launches) == 6


def test_deterministic_is_read_at_each_call() -> None:
    """As it was before calls were remembered."""
    run = fake.run(
        SET_UP
        + """
operation, given = made(), tensors()
operation.execute(**given)
operation.execute(**given)
operation.deterministic = True
operation.execute(**given)
emit(len(described))
"""
    )
    finish = [launch["parameters"] for launch in run.launches[1::2]]
    assert run.output == 1 and len(finish) == 3 and len(finish[1]) == len(finish[2])
    assert finish[1] != finish[2]


def test_another_window_takes_the_long_way() -> None:
    """What an object knows of one ratio is not used for another, nor learned from it."""
    run = fake.run(
        SET_UP
        + """
operation = made()
operation.execute(**tensors())
operation.ratio = 2
two = dict(ape=on_gpu(torch.zeros(2, COFF * D)), grad_ape=on_gpu(torch.zeros(2, COFF * D)))
for _ in range(2):
    operation.execute(**tensors(**two))
try:
    operation.execute(**tensors())
except ValueError as error:
    emit([len(described), str(error)])
"""
    )
    assert run.output[0] == 4 and "(2, 256) is allowed" in run.output[1]
    assert len(run.launches) == 6


def test_tensors_are_not_kept_alive() -> None:
    """What they look like is."""
    run = fake.run(
        SET_UP
        + """
import gc, weakref
operation, given = made(), tensors()
operation.execute(**given)
operation.execute(**given)
watched = [weakref.ref(tensor) for tensor in given.values()]
del given
gc.collect()
emit([w() is None for w in watched])
"""
    )
    assert run.output == [True] * 9


def test_objects_can_be_copied() -> None:
    """Into one that knows of no call."""
    for made in (copy.deepcopy(Repeats(4, 2)), pickle.loads(pickle.dumps(Repeats(4, 2)))):
        assert made.window == (4, 2) and not made._known
