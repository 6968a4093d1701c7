# SPDX-License-Identifier: Apache-2.0
"""The drop-in's classes on the CPU: samples, states, buffers, refusals."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from csa_runtime import CSACompressorBackward, CSACompressorForward, backward_workspace_bytes
from support.array_calls import SENTINEL, backward, forward, results
from support.packs import Pack, random_pack

pytestmark = pytest.mark.L0

WINDOWS = [(2, 1), (2, 2), (4, 1), (4, 2), (128, 1), (128, 2)]
CLASSES: list[Any] = [CSACompressorForward, CSACompressorBackward]


def make(ratio: int = 4, coff: int = 2, **options: Any) -> Pack:
    """Tails, an empty segment, one shorter than a block, padding, tokens outside segments."""
    segments = [quarters * ratio // 4 for quarters in (9, 0, 3, 11)]
    sizes = {"padding": 2, "first": 1, "after": 3, "head_dim": 6} | options
    return random_pack(segments, ratio=ratio, coff=coff, **sizes)


def samples(pack: Pack, device: str = "meta") -> tuple[Any, ...]:
    """Of all six arrays; out and grad_out look alike."""
    return tuple(None if one is None else one.to(device) for one in (*pack.inputs, pack.grad_out))


def ready(kind: Any, pack: Pack, **options: Any) -> Any:
    """Made from the pack's own arrays, checked and compiled."""
    made = kind(*samples(pack, "cpu"), **pack.options, **options)
    assert made.check_support() is True
    made.compile()
    return made


@pytest.mark.parametrize(("ratio", "coff"), WINDOWS)
def test_forward_writes_all_of_out(ratio: int, coff: int) -> None:
    """Into memory that holds NaN."""
    pack = make(ratio, coff)
    out = torch.full_like(pack.grad_out, torch.nan)
    assert ready(CSACompressorForward, pack).execute(*pack.inputs, out) is None
    assert torch.equal(out, forward(pack))


@pytest.mark.parametrize(("ratio", "coff"), WINDOWS)
def test_backward_writes_uninitialised_gradients_and_adds_to_grad_ape(
    ratio: int, coff: int
) -> None:
    """Every position of the two; the finished sum once to the third, which the caller zeroes."""
    pack = make(ratio, coff)
    wanted = backward(pack)
    made = ready(CSACompressorBackward, pack)
    grad_kv, grad_score = (torch.full_like(pack.kv, torch.nan) for _ in range(2))
    grad_ape = torch.zeros_like(wanted[2])
    for times in (1, 2):
        made.execute(*pack.inputs, pack.grad_out, grad_kv, grad_score, grad_ape)
        assert torch.equal(grad_kv, wanted[0]) and torch.equal(grad_score, wanted[1])
        assert torch.equal(grad_ape, wanted[2] * times)


def test_deterministic_backward_overwrites_grad_ape() -> None:
    """So it needs no zeroing between replays."""
    pack = make()
    made = ready(CSACompressorBackward, pack, deterministic=True)
    grads = results(pack)[1:]
    for _ in range(2):
        made.execute(*pack.inputs, pack.grad_out, *grads)
        assert all(map(torch.equal, grads, backward(pack)))


@pytest.mark.parametrize("warn_only", [False, True])
@pytest.mark.filterwarnings("error")
def test_deterministic_mode_is_no_obstacle(warn_only: bool) -> None:
    """Neither raises nor warns."""
    pack = make()
    made = ready(CSACompressorBackward, pack)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        made.execute(*pack.inputs, pack.grad_out, *results(pack)[1:])
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_rows_write_zeros(deterministic: bool) -> None:
    """To grad_ape nothing is added, unless it is overwritten."""
    pack = random_pack([3, 2], ratio=4, coff=2, head_dim=6)
    assert pack.total_comp == 0
    made = ready(CSACompressorBackward, pack, deterministic=deterministic)
    grads = results(pack)[1:]
    made.execute(*pack.inputs, pack.grad_out, *grads)
    assert not grads[0].any() and not grads[1].any()
    assert (grads[2] == (0 if deterministic else SENTINEL)).all()
    out = torch.empty(0, 6, dtype=torch.bfloat16)
    ready(CSACompressorForward, pack).execute(*pack.inputs, out)


@pytest.mark.parametrize("kind", CLASSES)
def test_execute_before_compile_is_a_value_error(kind: Any) -> None:
    """check_support alone is not enough, nothing is written."""
    pack = make()
    out, *grads = results(pack)
    arrays = (out,) if kind is CSACompressorForward else (pack.grad_out, *grads)
    made = kind(*samples(pack, "cpu"), **pack.options)
    for step in (made.check_support, made.compile):
        with pytest.raises(ValueError, match=r"compile\(\)"):
            made.execute(*pack.inputs, *arrays)
        assert all((one == SENTINEL).all() for one in (out, *grads))
        step()
    made.execute(*pack.inputs, *arrays)


def test_compile_checks_by_itself_and_again_does_nothing() -> None:
    """As often as one likes."""
    pack = make()
    made = CSACompressorForward(*samples(pack, "cpu"), **pack.options)
    for _ in range(2):
        made.compile()
    made.execute(*pack.inputs, torch.empty_like(pack.grad_out))
    with pytest.raises(ValueError, match="coff is 3"):
        CSACompressorForward(*samples(pack, "cpu"), ratio=4, coff=3).compile()


def test_samples_are_only_looked_at() -> None:
    """Nothing keeps them alive; a meta tensor beside real ones takes their place."""
    pack = make()
    kv = pack.kv.clone()
    watched = weakref.ref(kv)
    made = CSACompressorForward(kv, *pack.inputs[1:], samples(pack)[5], **pack.options)
    del kv
    gc.collect()
    assert watched() is None
    assert made.check_support()
    made.compile()
    out = torch.empty_like(pack.grad_out)
    made.execute(*pack.inputs, out)
    assert torch.equal(out, forward(pack))


def test_absent_ape_has_no_gradient_and_needs_no_workspace() -> None:
    """Its sample is None too."""
    pack = make(ape=False)
    made = ready(CSACompressorBackward, pack)
    assert made.scratch_workspace_bytes() == 0
    grads = [torch.empty_like(pack.kv), torch.empty_like(pack.kv)]
    made.execute(*pack.inputs, pack.grad_out, *grads, None)
    assert all(map(torch.equal, grads, backward(pack)[:2]))


@pytest.mark.parametrize(("ratio", "coff"), WINDOWS)
def test_workspace_size_is_known_from_meta_samples(ratio: int, coff: int) -> None:
    """Without a driver, before any check; forward needs none."""
    pack = make(ratio, coff, head_dim=128)
    sizes = (pack.kv.shape[0], pack.total_comp, pack.head_dim)
    made = CSACompressorBackward(*samples(pack), **pack.options)
    assert made.scratch_workspace_bytes() == backward_workspace_bytes(*sizes, **pack.options)
    assert CSACompressorForward(*samples(pack), **pack.options).scratch_workspace_bytes() == 0


def test_workspace_is_contiguous_uint8_of_enough_bytes() -> None:
    """Last among the arguments; what it holds does not matter."""
    pack = make()
    made = ready(CSACompressorBackward, pack, deterministic=True)
    size = made.scratch_workspace_bytes()
    grads = results(pack)[1:]
    call: Callable[..., None] = lambda workspace: made.execute(  # noqa: E731
        *pack.inputs, pack.grad_out, *grads, None, workspace
    )
    whole = torch.full((size + 1024,), 0xFF, dtype=torch.uint8)
    base = whole[-whole.data_ptr() % 16 :]
    call(base[:size])
    assert all(map(torch.equal, grads, backward(pack)))
    for wrong in (base[: 2 * size : 2], base[1 : size + 1], base[:size].view(torch.float32)):
        with pytest.raises(ValueError, match="workspace"):
            call(wrong)
    with pytest.raises(ValueError, match="bytes"):
        call(base[:16])


BAD_CALLS: dict[str, dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "fewer tokens": {"kv": lambda t: t[:-1], "score": lambda t: t[:-1]},
    "another width": {"kv": lambda t: t[:, :6], "score": lambda t: t[:, :6]},
    "fewer segments": {"cu_seqlens": lambda t: t[:-1], "cu_seqlens_comp": lambda t: t[:-1]},
    "another number of rows": {"last": lambda t: t[:-1]},
    "another dtype": {name: lambda t: t.float() for name in ("kv", "score", "last")},
    "score unlike kv": {"score": lambda t: t[:-1]},
    "ape of another dtype": {"ape": lambda t: t.double()},
    "strided columns": {"score": lambda t: t.repeat(1, 2)[:, ::2]},
    "int64 row prefixes": {"cu_seqlens_comp": lambda t: t.long()},
}


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("bad", BAD_CALLS)
def test_calls_unlike_their_samples_are_value_errors(bad: str, kind: Any) -> None:
    """Nothing is written."""
    pack = make()
    made = ready(kind, pack)
    out, *grads = results(pack)
    arrays: dict[str, Any] = dict(
        zip(("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp"), pack.inputs, strict=True)
    )
    arrays["last"] = out if kind is CSACompressorForward else pack.grad_out
    for name, change in BAD_CALLS[bad].items():
        arrays[name] = change(arrays[name])
    rest = [] if kind is CSACompressorForward else grads
    with pytest.raises(ValueError, match=r"allowed|must be contiguous"):
        made.execute(*arrays.values(), *rest)
    assert all((one == SENTINEL).all() for one in (out, *grads))


def test_results_are_the_callers_to_give() -> None:
    """None is no place to write to; nothing else is written either."""
    pack = make()
    with pytest.raises(ValueError, match="out is None"):
        ready(CSACompressorForward, pack).execute(*pack.inputs, None)
    grads = results(pack)[1:]
    for deterministic in (False, True):
        made = ready(CSACompressorBackward, pack, deterministic=deterministic)
        with pytest.raises(ValueError, match="grad_ape is None"):
            made.execute(*pack.inputs, pack.grad_out, *grads[:2], None)
        for lacking in ((None, *grads[1:]), (grads[0], None, grads[2])):
            with pytest.raises(ValueError, match="grad_kv or grad_score"):
                made.execute(*pack.inputs, pack.grad_out, *lacking)
    assert all((one == SENTINEL).all() for one in grads)


def test_strided_and_misaligned_arrays_are_executed() -> None:
    """Samples fix shapes, not where arrays lie."""
    pack = make()
    tokens, width = pack.kv.shape
    wide = torch.full((tokens * 31 + 1,), torch.nan, dtype=torch.bfloat16)[1:].view(tokens, 31)
    grads = [wide[:, :width], wide[:, width : 2 * width]]
    sums = torch.zeros(4, width)
    ready(CSACompressorBackward, pack).execute(*pack.inputs, pack.grad_out, *grads, sums)
    assert all(map(torch.equal, (*grads, sums), backward(pack)))
    assert wide[:, 2 * width :].isnan().all()
