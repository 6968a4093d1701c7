# SPDX-License-Identifier: Apache-2.0
"""The native module's own calls on torch tensors: launches, results and refusals of Python's.

On the fake driver, with tensors that say they are on a GPU.
"""

import pytest
import torch

from csa_runtime import torch as adapter
from support import fake
from support.packs import Pack, random_pack

pytestmark = pytest.mark.L0

SET_UP = """
import torch
from csa_runtime import _operators, ops
from support.torch_on_gpu import on_gpu, set_up
set_up()
T, ROWS, D, RATIO, COFF = 64, 16, 128, 4, 2
def host(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)
def bf16(*shape, **options):
    return on_gpu(host(*shape), **options)
def half(rows, columns, which):
    return on_gpu(host(rows, 2 * columns)[:, which * columns:][:, :columns])
def prefix(*values, dtype=torch.int32, **options):
    return on_gpu(torch.tensor(values, dtype=dtype), **options)
def call():
    return dict(
        kv=bf16(T, COFF * D), score=bf16(T, COFF * D), ape=on_gpu(torch.zeros(RATIO, COFF * D)),
        cu_seqlens=prefix(0, T), cu_seqlens_comp=prefix(0, ROWS), ratio=RATIO, coff=COFF)
def both(operation, native, arguments):
    "What Python says, what the native module says, and whether it was the one that spoke."
    spoke, own = [], getattr(ops, native)
    outcomes = []
    for function in (lambda *_: None, lambda *a: spoke.append(own(*a)) or spoke[-1]):
        setattr(ops, native, function)
        before = sum(_native.launch_counts().values())
        failed = attempt(operation, **arguments)
        outcomes.append([failed, sum(_native.launch_counts().values()) - before])
    setattr(ops, native, own)
    return [*outcomes, any(s is not None for s in spoke)]
"""
# The first call tells the module about torch.
KNOWN = SET_UP + "csa_runtime.compressor_forward(**call(), total_comp=ROWS)\n"

# Changes to a usual forward into `out`, and whether the native module serves the call itself.
FORWARD = {
    "usual": ("", True),
    "total_comp": ("total_comp=ROWS", True),
    "no ape": ("ape=None", True),
    "a parameter": ("kv=torch.nn.Parameter(bf16(T, COFF * D), requires_grad=False)", True),
    "a stream": ("stream=1", True),
    "halves of rows": ("kv=half(T, 256, 0), score=half(T, 256, 1), out=half(ROWS, D, 0)", True),
    "a broadcast row": ("kv=on_gpu(host(1, COFF * D).expand(T, COFF * D))", True),
    "one segment more": ("cu_seqlens=prefix(0, 8, T), cu_seqlens_comp=prefix(0, 2, ROWS)", True),
    "coff 1": ("coff=1, kv=bf16(T, D), score=bf16(T, D), ape=on_gpu(torch.zeros(RATIO, D))", True),
    "nothing asked for": ("out=bf16(0, D)", True),
    "ratio 3": ("ratio=3, ape=on_gpu(torch.zeros(3, COFF * D))", False),
    "overlap": ("kv=on_gpu(SHARED[:, :256]), out=on_gpu(SHARED[:ROWS, :D])", False),
    "a bool": ("ratio=True", False),
    "a float": ("ratio=4.0", False),
    "coff 3": ("coff=3", False),
    "rows": ("total_comp=ROWS - 1", False),
    "negative rows": ("total_comp=-1", False),
    "no tokens": ("kv=bf16(2, COFF * D), score=bf16(2, COFF * D)", False),
    "kv of one dimension": ("kv=bf16(T)", False),
    "odd width": ("kv=bf16(T, 255)", False),
    "kv of int32": ("kv=on_gpu(torch.zeros(2, 2, dtype=torch.int32))", False),
    "fp32": ("kv=on_gpu(torch.zeros(T, COFF * D))", False),
    "columns apart": ("kv=on_gpu(host(T, 512)[:, ::2])", False),
    "a short score": ("score=bf16(T - 1, COFF * D)", False),
    "an ape of bf16": ("ape=bf16(RATIO, COFF * D)", False),
    "a strided ape": ("ape=on_gpu(torch.zeros(RATIO, 512)[:, :256])", False),
    "int64": ("cu_seqlens=prefix(0, T, dtype=torch.int64)", False),
    "prefixes of two lengths": ("cu_seqlens=prefix(0, 8, T)", False),
    "an empty prefix": ("cu_seqlens=prefix(), cu_seqlens_comp=prefix()", False),
    "a strided prefix": ("cu_seqlens=on_gpu(torch.zeros(4, dtype=torch.int32)[::2])", False),
    "another device": ("score=bf16(T, COFF * D, device=1)", False),
    "the CPU": ("score=torch.zeros(T, COFF * D, dtype=torch.bfloat16)", False),
    "a negative": ("score=torch._neg_view(bf16(T, COFF * D))", False),
    "no array": ("kv=7", False),
    "out of another width": ("out=bf16(ROWS, D - 1)", False),
    "out that records": ("out=bf16(ROWS, D).requires_grad_()", False),
    "no stream": ("stream='0'", False),
    "a negative stream": ("stream=-1", False),
}  # fmt: skip


def compare(run: fake.Run, cases: dict[str, tuple[str, bool]], parameters: bool = True) -> None:
    """Whether both ways of each case ended alike, and launched the same."""
    launches = run.launches[1:]
    assert launches
    for (name, (_, native)), (python, module, spoke) in zip(cases.items(), run.output, strict=True):
        assert python == module, name
        assert spoke == native, name
        count = python[1]
        for one, two in zip(launches[:count], launches[count : 2 * count], strict=True):
            other = {} if parameters else {"parameters": two["parameters"]}
            assert one | other == two, name
        launches = launches[2 * count :]
    assert not launches


def test_forwards_are_the_same_call_or_the_same_refusal() -> None:
    changes = "".join(f"    dict({change}),\n" for change, _ in FORWARD.values())
    run = fake.run(
        f"""{KNOWN}
SHARED = host(T, 512)
outcomes = []
for change in (\n{changes}):
    arguments = call() | dict(out=bf16(ROWS, D)) | change
    outcomes.append(both(csa_runtime.compressor_forward, "torch_forward", arguments))
emit(outcomes)
"""
    )
    compare(run, FORWARD)


# Changes to a usual backward, whose results are new.
BACKWARD = {
    "usual": ("", True),
    "no ape": ("ape=None", True),
    "a broadcast gradient": ("grad_out=on_gpu(host(1, D).expand(ROWS, D))", True),
    "no rows": ("grad_out=bf16(0, D)", True),
    "given gradients": ("grads=GIVEN", True),
    "none of ape": ("grads=(*GIVEN[:2], None)", True),
    "none of an absent ape": ("grads=(*GIVEN[:2], None), ape=None, accumulate=True", True),
    "added": ("grads=GIVEN, accumulate=True", True),
    "a workspace": ("workspace=SPACE", True),
    "no stream but a workspace": ("workspace=SPACE, grads=GIVEN, stream=1", True),
    "the current stream": ("stream=2", True),
    "a workspace that nothing needs": ("workspace=SPACE, ape=None", True),
    "accumulate alone": ("accumulate=True", False),
    "accumulate into nothing": ("grads=(*GIVEN[:2], None), accumulate=True", False),
    "a list": ("grads=[*GIVEN]", False),
    "a pair": ("grads=GIVEN[:2]", False),
    "a gradient of an absent ape": ("grads=GIVEN, ape=None", False),
    "a short grad_kv": ("grads=(bf16(T - 1, COFF * D), *GIVEN[1:])", False),
    "an empty workspace": ("workspace=on_gpu(torch.zeros(0, dtype=torch.uint8))", False),
    "a flat gradient": ("grad_out=bf16(ROWS * D)", False),
    "a gradient of fp32": ("grad_out=on_gpu(torch.zeros(ROWS, D))", False),
    "a negative": ("grad_out=torch._neg_view(bf16(ROWS, D))", False),
    "no tokens": ("kv=bf16(2, COFF * D), score=bf16(2, COFF * D)", False),
    "ratio 3": ("ratio=3, ape=on_gpu(torch.zeros(3, COFF * D))", False),
    "coff 0": ("coff=0", False),
}  # fmt: skip


def test_backwards_are_the_same_call_or_the_same_refusal() -> None:
    changes = "".join(f"    dict({change}),\n" for change, _ in BACKWARD.values())
    run = fake.run(
        f"""{KNOWN}
GIVEN = (bf16(T, COFF * D), bf16(T, COFF * D), on_gpu(torch.zeros(RATIO, COFF * D)))
SPACE = torch.zeros(1 << 20, dtype=torch.uint8)
SPACE = on_gpu(SPACE[-SPACE.data_ptr() % 16:])
outcomes = []
for change in (\n{changes}):
    arguments = call() | dict(grad_out=bf16(ROWS, D)) | change
    outcomes.append(both(csa_runtime.compressor_backward, "torch_backward", arguments))
emit(outcomes)
"""
    )
    compare(run, BACKWARD, parameters=False)  # with the addresses of new memory


def test_new_results_have_their_shapes_and_are_what_is_written() -> None:
    run = fake.run(
        f"""{KNOWN}
given = call()
out = csa_runtime.compressor_forward(**given, total_comp=ROWS)
grads = csa_runtime.compressor_backward(**given, grad_out=out)
unwanted = _operators.backward(*list(given.values())[:5], out, RATIO, COFF, False)
emit([[[*t.shape], str(t.dtype), str(t.device), t.data_ptr()] for t in (out, *grads, *unwanted)])
"""
    )
    out, *grads = run.output
    assert [made[:3] for made in run.output] == [
        [[16, 128], "torch.bfloat16", "cuda:0"],
        [[64, 256], "torch.bfloat16", "cuda:0"],
        [[64, 256], "torch.bfloat16", "cuda:0"],
        [[4, 256], "torch.float32", "cuda:0"],
        [[64, 256], "torch.bfloat16", "cuda:0"],
        [[64, 256], "torch.bfloat16", "cuda:0"],
        [[0], "torch.float32", "cuda:0"],
    ]
    forward, main, finish, *_ = run.launches[1:]
    for launch, addresses in ((forward, [out[3]]), (main, [g[3] for g in grads[:2]])):
        for address in addresses:
            assert address.to_bytes(8, "little").hex() in launch["parameters"]
    assert grads[2][3].to_bytes(8, "little").hex() in finish["parameters"]


def test_a_capture_leaves_the_workspace_to_python() -> None:
    """It would have to live as long as the graph."""
    run = fake.run(
        f"""{KNOWN}
csa_runtime.load()
given = call() | dict(grad_out=bf16(ROWS, D))
stream = fake.fake_stream(fake.fake_context(0))
torch._C._cuda_getCurrentRawStream.stream = stream
torch.cuda.is_current_stream_capturing = lambda: True
torch.cuda.memory_snapshot = list
fake.fake_capture(stream, 2)
captured = both(csa_runtime.compressor_backward, "torch_backward", given)
fake.fake_capture(stream, -1)
emit([captured, both(csa_runtime.compressor_backward, "torch_backward", given | dict(ape=None))])
"""
    )
    (python, module, spoke), without = run.output
    assert python == module and "under a capture" in python[0]["text"] and not spoke
    assert without == [[None, 2], [None, 2], True]


def test_checked_calls_stay_with_python() -> None:
    """Their prefixes are read back, which the native module never does."""
    run = fake.run(
        f"""{SET_UP}
from csa_runtime.libraries import Torch
Torch.values = lambda self, array, stream: held.pop(0)
held = [[0, T], [0, ROWS], [0, T + 1], [0, ROWS], [0, T + 2], [0, ROWS], [0, T + 3], [0, ROWS]]
out = csa_runtime.compressor_forward(**call(), total_comp=ROWS)
backward = csa_runtime.compressor_backward
emit([attempt(csa_runtime.compressor_forward, **call(), total_comp=ROWS),
      attempt(backward, **call(), grad_out=out),
      attempt(_operators.backward, *list(call().values())[:5], out, RATIO, COFF, True)])
""",
        CSA_RUNTIME_CHECK="1",
    )
    for more, failed in enumerate(run.output, start=1):
        assert f"cu_seqlens[1] is {64 + more}" in failed["text"]


def gradients(pack: Pack) -> tuple[torch.Tensor, ...]:
    """The output and the gradients of a pack by autograd."""
    inputs = [t.clone().requires_grad_() for t in (pack.kv, pack.score, pack.ape)]
    out = adapter.compressor(
        *inputs, pack.cu_seqlens, pack.cu_seqlens_comp, **pack.options, total_comp=pack.total_comp
    )
    return out, *torch.autograd.grad(out, inputs, pack.grad_out)


def test_the_direct_derivative_is_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What spares apply's search for wrappers, here on the CPU."""
    pack = random_pack([9, 30], ratio=4, coff=2, head_dim=8)
    wanted = gradients(pack)
    monkeypatch.setattr(adapter, "torch_usual", lambda *_: True)
    found = gradients(pack)
    for one, two in zip(found, wanted, strict=True):
        assert torch.equal(one, two)
