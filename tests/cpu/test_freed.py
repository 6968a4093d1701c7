# SPDX-License-Identifier: Apache-2.0
"""Arrays with elements and without memory: no call takes them, nor for arrays that are absent."""

from types import SimpleNamespace

import pytest
import torch

import csa_runtime
from csa_runtime.arrays import describe
from csa_runtime.torch import compressor
from support import fake
from support.array_calls import SENTINEL, Exporter, OnGpu, backward, forward, results
from support.packs import Pack, random_pack

pytestmark = pytest.mark.L0

INPUTS = ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp")
RESULTS = ("grad_kv", "grad_score", "grad_ape")


def freed(like: torch.Tensor, first: int = 0) -> torch.Tensor:
    """As large, `first` rows after the start of a storage that is gone."""
    view = torch.cat([like.new_zeros(first, *like.shape[1:]), like])[first:]
    view.untyped_storage().resize_(0)
    return view


ROWS = torch.zeros(4, 6)
KINDS = {
    "torch": freed(ROWS),
    "a view": freed(ROWS, first=1),
    "a parameter": torch.nn.Parameter(freed(ROWS, first=3)),
    "DLPack": Exporter(freed(ROWS)),
    "old DLPack": Exporter(freed(ROWS), versioned=False),
    "address 0": OnGpu((4, 6), "<f4", data=(0, False)),
    "address None": OnGpu((4, 6), "<f4", data=(None, False)),
    "NumPy's": SimpleNamespace(
        __array_interface__={"shape": (4, 6), "typestr": "<f4", "data": (0, False)}
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_of_array_is_described(kind: str) -> None:
    with pytest.raises(ValueError, match=r"ape has shape \(4, 6\) and no memory .* is allowed"):
        describe("ape", KINDS[kind])


def test_no_elements_need_no_memory() -> None:
    """Of any kind."""
    none = ROWS[:0]
    for array in (freed(none), freed(none, first=2), Exporter(freed(none)), OnGpu((0, 6), "<f4")):
        assert 0 in describe("ape", array).shape


@pytest.fixture
def pack() -> Pack:
    """For the CPU."""
    return random_pack([9, 0, 30, 4], ratio=4, coff=2, head_dim=6, padding=2, first=1)


@pytest.mark.parametrize("first", [0, 1], ids=["whole", "view"])
def test_calls_on_the_cpu_name_the_argument(pack: Pack, first: int) -> None:
    """Whichever it is; nothing is written."""
    out, *grads = results(pack)
    refused = "{} has shape .* and no memory"
    for name in INPUTS:
        changed = {name: freed(getattr(pack, name), first)}
        with pytest.raises(ValueError, match=refused.format(name)):
            forward(pack, out=out, **changed)
        with pytest.raises(ValueError, match=refused.format(name)):
            backward(pack, grads=tuple(grads), **changed)
        given = {each: getattr(pack, each) for each in INPUTS} | changed
        with pytest.raises(ValueError, match=refused.format(name)):
            compressor(**given, **pack.options, total_comp=pack.total_comp)
    with pytest.raises(ValueError, match=refused.format("out")):
        forward(pack, out=freed(out, first))
    with pytest.raises(ValueError, match=refused.format("grad_out")):
        backward(pack, grads=tuple(grads), grad_out=freed(pack.grad_out, first))
    for i, name in enumerate(RESULTS):
        without = [*grads[:i], freed(grads[i], first), *grads[i + 1 :]]
        with pytest.raises(ValueError, match=refused.format(name)):
            backward(pack, grads=tuple(without))
    with pytest.raises(ValueError, match=refused.format("workspace")):
        backward(pack, workspace=freed(torch.zeros(1 << 20, dtype=torch.uint8), first))
    assert all((one == SENTINEL).all() for one in (out, *grads))


def test_prefixes_that_are_read_back_too(pack: Pack) -> None:
    given = freed(pack.cu_seqlens), pack.cu_seqlens_comp
    with pytest.raises(ValueError, match=r"cu_seqlens has shape .* and no memory"):
        csa_runtime.check_prefixes(*given, pack.kv.shape[0], ratio=4)


@pytest.mark.parametrize("known", [False, True], ids=["first call", "later call"])
def test_calls_on_a_gpu_name_the_argument(known: bool) -> None:
    """From Python and, once it knows torch, from C; nothing is launched."""
    run = fake.run(
        f"""
import torch
from csa_runtime import CSACompressorBackward
from csa_runtime.torch import compressor
from support.torch_on_gpu import on_gpu, set_up
set_up()
T, ROWS, W = 64, 16, 256
INPUTS, RESULTS = {INPUTS!r}, {RESULTS!r}
def array(rows, columns, dtype, first=None):
    made = torch.zeros((first or 0) + rows, *columns, dtype=dtype)[first or 0:]
    if first is not None:
        made.untyped_storage().resize_(0)
    return on_gpu(made)
KINDS = dict(
    kv=(T, (W,), torch.bfloat16), score=(T, (W,), torch.bfloat16), ape=(4, (W,), torch.float32),
    cu_seqlens=(2, (), torch.int32), cu_seqlens_comp=(2, (), torch.int32),
    out=(ROWS, (W // 2,), torch.bfloat16), grad_out=(ROWS, (W // 2,), torch.bfloat16),
    grad_kv=(T, (W,), torch.bfloat16), grad_score=(T, (W,), torch.bfloat16),
    grad_ape=(4, (W,), torch.float32), workspace=(1 << 20, (), torch.uint8))
def run(call, names, bad, first):
    given = {{name: array(*KINDS[name], first if name == bad else None) for name in names}}
    return attempt(call, **given)
def forward(**given):
    csa_runtime.compressor_forward(**given, ratio=4, coff=2)
def plain(**given):
    compressor(**given, ratio=4, coff=2, total_comp=ROWS)
def backward(grad_kv, grad_score, grad_ape, **given):
    csa_runtime.compressor_backward(**given, ratio=4, coff=2, grads=(grad_kv, grad_score, grad_ape))
def execute(workspace, **given):
    good = [array(*KINDS[name]) for name in (*INPUTS, "grad_out")]
    operation = CSACompressorBackward(*good, ratio=4, coff=2)
    operation.compile()
    operation.execute(**given, workspace=workspace)
if {known}:
    run(forward, (*INPUTS, "out"), None, None)
wrong = []
for call, names in (
    (forward, (*INPUTS, "out")), (plain, INPUTS),
    (backward, (*INPUTS, "grad_out", *RESULTS, "workspace")),
    (execute, (*INPUTS, "grad_out", *RESULTS, "workspace")),
):
    for bad in names:
        for first in (0, 16):
            said = run(call, names, bad, first)
            if said is None or not said["text"].startswith(bad + " has shape") or (
                "no memory" not in said["text"] or said["type"] != "ValueError"):
                wrong.append([call.__name__, bad, first, said])
emit(wrong)
"""
    )
    assert run.output == [] and len(run.launches) == known
