# SPDX-License-Identifier: Apache-2.0
"""The drop-in's wrappers on the CPU: names, results, arguments, refusals."""

import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import csa_runtime
from csa_runtime import compat
from support.array_calls import backward, forward
from support.packs import Pack, random_pack

pytestmark = pytest.mark.L0

NAMES = (
    "CSACompressorBackward",
    "CSACompressorForward",
    "csa_compressor_backward_wrapper",
    "csa_compressor_forward_wrapper",
)
WINDOWS = [(2, 1), (2, 2), (4, 1), (4, 2), (128, 1), (128, 2)]
_INPUTS = ["kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp"]
_SAMPLES = [f"sample_{name}" for name in [*_INPUTS, "out"]]
# Names in order, with their defaults, as callers of the system replaced pass them.
SIGNATURES: dict[str, list[str]] = {
    "csa_compressor_forward_wrapper": [
        *_INPUTS, "ratio=4", "head_dim=None", "coff=2", "total_comp=None", "stream=None",
    ],
    "csa_compressor_backward_wrapper": [
        *_INPUTS, "grad_out", "ratio=4", "head_dim=None", "coff=2", "stream=None",
        "deterministic=False",
    ],
    "CSACompressorForward": [*_SAMPLES, "ratio=4", "coff=2"],
    "CSACompressorBackward": [*_SAMPLES, "ratio=4", "coff=2", "deterministic=False"],
    "CSACompressorForward.execute": ["self", *_INPUTS, "out", "current_stream=None"],
    "CSACompressorBackward.execute": [
        "self", *_INPUTS, "grad_out", "grad_kv", "grad_score", "grad_ape", "current_stream=None",
        "workspace=None",
    ],
}  # fmt: skip


def make(ratio: int = 4, coff: int = 2, **options: Any) -> Pack:
    """Tails, an empty segment, one shorter than a block, padding, tokens outside segments."""
    segments = [quarters * ratio // 4 for quarters in (9, 0, 3, 11)]
    sizes = {"padding": 2, "first": 1, "after": 3} | options
    return random_pack(segments, ratio=ratio, coff=coff, head_dim=6, **sizes)


def wrapped(pack: Pack, **options: Any) -> compat.Results:
    """The forward wrapper."""
    given = pack.options | {"total_comp": pack.total_comp} | options
    return compat.csa_compressor_forward_wrapper(*pack.inputs, **given)


def gradients(pack: Pack, **options: Any) -> compat.Results:
    """The backward wrapper."""
    return compat.csa_compressor_backward_wrapper(
        *pack.inputs, pack.grad_out, **pack.options | options
    )


def named(path: str) -> Callable[..., Any]:
    """A function of the namespace, or a method of a class of it."""
    found: Any = csa_runtime.CSA
    for part in path.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("path", SIGNATURES)
def test_arguments_are_those_of_the_system_replaced(path: str) -> None:
    """Positions, names and defaults."""
    found = [
        name if parameter.default is parameter.empty else f"{name}={parameter.default}"
        for name, parameter in inspect.signature(named(path)).parameters.items()
    ]
    assert found == SIGNATURES[path]


def test_names_are_in_the_namespace_and_the_package() -> None:
    """The same objects, listed."""
    for name in NAMES:
        assert getattr(csa_runtime.CSA, name) is getattr(csa_runtime, name)
        assert name in csa_runtime.__all__
    assert csa_runtime.compat is compat


def test_importing_the_package_does_not_import_them() -> None:
    """And importing them brings in no framework."""
    code = (
        "import sys; before = set(sys.modules); import csa_runtime;"
        "assert 'csa_runtime.compat' not in sys.modules; from csa_runtime import CSA;"
        "print(sorted({'torch', 'numpy', 'megatron'} & set(sys.modules)))"
    )
    path = [entry for entry in sys.path if entry]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {code}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("ratio", "coff"), WINDOWS)
def test_results_are_those_of_the_array_operations(ratio: int, coff: int) -> None:
    """Both families of windows, by `ratio` alone; coff 1 on tensors of half the width."""
    pack = make(ratio, coff)
    assert torch.equal(wrapped(pack)["out"], forward(pack))
    for ours, wanted in zip(gradients(pack), backward(pack), strict=True):
        assert torch.equal(ours, wanted)


def test_results_unpack_in_order_and_index_by_name() -> None:
    """And by place; names are keys, so they make a dict too."""
    pack = make()
    (out,) = result = wrapped(pack)
    assert result["out"] is out and result[0] is out and len(result) == 1
    grads = gradients(pack)
    grad_kv, grad_score, grad_ape = grads
    assert grads["grad_kv"] is grad_kv and grads["grad_score"] is grad_score
    assert grads["grad_ape"] is grads[-1] is grad_ape
    assert dict(grads) == dict(grads.items()) and tuple(grads.values()) == tuple(grads)
    assert [*grads.keys()] == ["grad_kv", "grad_score", "grad_ape"]
    assert "grad_ape" in grads and "out" not in grads and grad_kv in grads
    with pytest.raises(KeyError, match="grad_kv, grad_score, grad_ape"):
        grads["out"]


def test_results_survive_pickling_and_printing() -> None:
    """A worker process may return them."""
    result = wrapped(make())
    copy = pickle.loads(pickle.dumps(result))
    assert torch.equal(copy["out"], result["out"]) and repr(copy).startswith("Results(out=tensor")


def test_defaults_are_the_production_windows() -> None:
    """Ratio 4, coff 2, head_dim from kv's width, rows read back."""
    pack = make(padding=0)
    bare = compat.csa_compressor_forward_wrapper(*pack.inputs)["out"]
    assert torch.equal(bare, forward(pack, total_comp=None))
    grads = compat.csa_compressor_backward_wrapper(*pack.inputs, pack.grad_out)
    assert all(map(torch.equal, grads, backward(pack)))


def test_a_capacity_gives_padding_rows() -> None:
    """As many rows as asked for; what their gradient holds does not matter."""
    pack = make(padding=5)
    out = wrapped(pack)["out"]
    assert out.shape == (pack.total_comp, 6)
    assert (out[-5:] == out[-1]).all()
    poisoned = pack.grad_out.clone()
    poisoned[-5:] = torch.nan
    again = compat.csa_compressor_backward_wrapper(*pack.inputs, poisoned, **pack.options)
    assert all(map(torch.equal, again, gradients(pack)))


def test_head_dim_is_checked_against_the_width() -> None:
    """Both directions, before anything is computed."""
    pack = make()
    assert wrapped(pack, head_dim=6)["out"].shape[1] == 6
    gradients(pack, head_dim=6)
    for call in (wrapped, gradients):
        for wrong in (5, 12, 0, "6"):
            with pytest.raises(ValueError, match="head_dim"):
                call(pack, head_dim=wrong)


@pytest.mark.parametrize("tokens", [0, 3, 9])
def test_no_rows_give_empty_output_and_zero_gradients(tokens: int) -> None:
    """Fewer tokens than a block too, and no tokens at all; grad_ape is fresh zeros."""
    pack = random_pack([tokens], ratio=4, coff=2, head_dim=6)
    cu_seqlens_comp = torch.zeros_like(pack.cu_seqlens_comp)
    inputs = (pack.kv, pack.score, pack.ape, pack.cu_seqlens, cu_seqlens_comp)
    result = compat.csa_compressor_forward_wrapper(*inputs, total_comp=0)
    assert result["out"].shape == (0, 6) and result["out"].dtype == torch.bfloat16
    grads = compat.csa_compressor_backward_wrapper(*inputs, result["out"])
    for grad, like in zip(grads, (pack.kv, pack.score, pack.ape), strict=True):
        assert like is not None and grad.shape == like.shape and grad.dtype == like.dtype
        assert not grad.any()


def test_an_absent_ape_has_no_gradient() -> None:
    """Zeros in the forward, None in the backward."""
    pack = make(ape=False)
    assert torch.equal(wrapped(pack)["out"], forward(pack))
    assert gradients(pack)["grad_ape"] is None


def test_row_strided_views_are_taken_as_they_are() -> None:
    """Two halves of one buffer, an odd row stride, a base that is aligned to the element only."""
    pack = make()
    tokens, width = pack.kv.shape
    buffer = torch.zeros(tokens * 31 + 1, dtype=torch.bfloat16)[1:].view(tokens, 31)
    kv, score = buffer[:, :width], buffer[:, width + 3 : 2 * width + 3]
    kv.copy_(pack.kv)
    score.copy_(pack.score)
    inputs = (kv, score, *pack.inputs[2:])
    out = compat.csa_compressor_forward_wrapper(*inputs, total_comp=pack.total_comp)["out"]
    assert torch.equal(out, forward(pack))
    grads = compat.csa_compressor_backward_wrapper(*inputs, pack.grad_out)
    assert all(map(torch.equal, grads, backward(pack)))


@pytest.mark.parametrize("warn_only", [False, True])
@pytest.mark.filterwarnings("error")
def test_deterministic_mode_is_no_obstacle(warn_only: bool) -> None:
    """The backward neither raises nor warns, and gives the same bits."""
    pack = make()
    wanted = gradients(pack)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        for deterministic in (False, True):
            found = gradients(pack, deterministic=deterministic)
            assert all(map(torch.equal, found, wanted))
    finally:
        torch.use_deterministic_algorithms(False)


BAD: dict[str, Callable[[Pack], dict[str, Any]]] = {
    "kv of three dimensions": lambda p: {"kv": p.kv[:, None]},
    "kv of another dtype": lambda p: {"kv": p.kv.float()},
    "columns that are strided": lambda p: {"kv": p.kv.repeat(1, 2)[:, ::2]},
    "score of another shape": lambda p: {"score": p.score[1:]},
    "ape of another shape": lambda p: {"ape": p.ape[1:] if p.ape is not None else 0},
    "ape of bf16": lambda p: {"ape": p.ape.bfloat16() if p.ape is not None else 0},
    "int64 prefixes": lambda p: {"cu_seqlens": p.cu_seqlens.long()},
    "prefixes of two lengths": lambda p: {"cu_seqlens_comp": p.cu_seqlens_comp[1:]},
    "prefixes of two dimensions": lambda p: {"cu_seqlens": p.cu_seqlens[None]},
    "coff 3": lambda _: {"coff": 3},
    "ratio 0": lambda _: {"ratio": 0},
    "ratio of another ape": lambda _: {"ratio": 2},
    "a stream that is none": lambda _: {"stream": "0"},
    "no array": lambda _: {"kv": None},
}


@pytest.mark.parametrize("bad", BAD)
def test_malformed_arguments_are_value_errors(bad: str) -> None:
    """In both directions."""
    pack = make()
    arguments = dict(zip(_INPUTS, pack.inputs, strict=True)) | pack.options | BAD[bad](pack)
    with pytest.raises(ValueError, match=r"allowed|must be contiguous"):
        compat.csa_compressor_forward_wrapper(**arguments, total_comp=pack.total_comp)
    with pytest.raises(ValueError, match=r"allowed|must be contiguous"):
        compat.csa_compressor_backward_wrapper(**arguments, grad_out=pack.grad_out)


def test_rows_need_tokens() -> None:
    """A capacity over fewer tokens than a block is refused, the number is checked."""
    pack = random_pack([3], ratio=4, coff=2, head_dim=6)
    for wrong in (1, -1, 1.0):
        with pytest.raises(ValueError, match=r"rows|total_comp"):
            compat.csa_compressor_forward_wrapper(*pack.inputs, total_comp=wrong)  # type: ignore[arg-type]


def test_variables_of_the_system_replaced_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no launch cache to turn off."""
    monkeypatch.setenv("CUDNNFE_CSA_COMPRESSOR_FAST_LAUNCH", "0")
    pack = make()
    assert torch.equal(wrapped(pack)["out"], forward(pack))
