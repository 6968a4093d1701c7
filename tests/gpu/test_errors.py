# SPDX-License-Identifier: Apache-2.0
"""Malformed arguments on the device: a ValueError, nothing launched and nothing written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import csa_runtime
from csa_runtime import _native
from gpu.buffers import POISON
from support.packs import Pack, random_pack

pytestmark = [pytest.mark.gpu, pytest.mark.L0]

BF16 = torch.bfloat16
Arguments = dict[str, Any]


def pack() -> Pack:
    """A sound problem."""
    return random_pack([40, 21], ratio=4, coff=2, head_dim=16, device="cuda")


def poisoned(like: torch.Tensor) -> torch.Tensor:
    """A result whose every byte is the poison."""
    raw = torch.full((like.numel() * like.element_size(),), POISON, dtype=torch.uint8).cuda()
    return raw.view(like.dtype).view(like.shape)


def arguments(p: Pack) -> Arguments:
    """Keyword arguments of both directions with poisoned results."""
    names = ("kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp", "grad_out", "ratio", "coff")
    found = {name: getattr(p, name) for name in names}
    found["out"] = poisoned(p.grad_out)
    found["grads"] = (poisoned(p.kv), poisoned(p.kv), poisoned(p.ape))
    return found


def change(**values: Callable[[Arguments], Any]) -> Callable[[Arguments], None]:
    """Replaces arguments by functions of the sound ones."""

    def apply(found: Arguments) -> None:
        found.update({name: make(found) for name, make in values.items()})

    return apply


BOTH = {
    "kv_of_three_dimensions": change(kv=lambda a: a["kv"][None]),
    "kv_of_odd_width": change(kv=lambda a: a["kv"][:, :31], score=lambda a: a["score"][:, :31]),
    "kv_of_fp64": change(kv=lambda a: a["kv"].double()),
    "score_of_another_dtype": change(score=lambda a: a["score"].float()),
    "score_of_fewer_tokens": change(score=lambda a: a["score"][:-1]),
    "score_of_another_width": change(score=lambda a: a["score"][:, :16]),
    "columns_apart": change(kv=lambda a: a["kv"].t().contiguous().t()),
    "ape_of_bf16": change(ape=lambda a: a["ape"].to(BF16)),
    "ape_of_another_ratio": change(ape=lambda a: a["ape"][:2]),
    "ape_with_rows_apart": change(ape=lambda a: torch.cat([a["ape"]] * 2, dim=1)[:, :32]),
    "prefix_of_int64": change(cu_seqlens=lambda a: a["cu_seqlens"].long()),
    "prefix_of_two_dimensions": change(cu_seqlens=lambda a: a["cu_seqlens"][None]),
    "prefix_with_gaps": change(cu_seqlens=lambda a: a["cu_seqlens"].repeat_interleave(2)[::2]),
    "prefixes_of_different_lengths": change(cu_seqlens=lambda a: a["cu_seqlens"][:-1]),
    "empty_prefixes": change(
        cu_seqlens=lambda a: a["cu_seqlens"][:0], cu_seqlens_comp=lambda a: a["cu_seqlens"][:0]
    ),
    "kv_on_the_host": change(kv=lambda a: a["kv"].cpu()),
    "ape_on_the_host": change(ape=lambda a: a["ape"].cpu()),
    "prefix_on_the_host": change(cu_seqlens_comp=lambda a: a["cu_seqlens_comp"].cpu()),
    "fewer_tokens_than_ratio": change(
        kv=lambda a: a["kv"][:3],
        score=lambda a: a["score"][:3],
        grads=lambda a: tuple(poisoned(t) for t in (a["kv"][:3], a["kv"][:3], a["ape"])),
    ),
    "ratio_of_zero": change(ratio=lambda a: 0),
    "ratio_without_a_kernel": change(
        ratio=lambda a: 3,
        ape=lambda a: a["ape"][:3],
        grads=lambda a: (*a["grads"][:2], poisoned(a["ape"][:3])),
    ),
    "coff_of_three": change(coff=lambda a: 3),
}

FORWARD = {
    "out_of_another_width": change(out=lambda a: poisoned(a["kv"][: len(a["out"])])),
    "out_of_fp32": change(out=lambda a: poisoned(a["out"].float())),
    "out_on_the_host": change(out=lambda a: a["out"].cpu()),
    "out_with_rows_on_top_of_each_other": change(out=lambda a: a["out"][:1].expand(a["out"].shape)),
    "out_within_kv": change(out=lambda a: a["kv"][: len(a["out"]), :16]),
    "out_within_score": change(out=lambda a: a["score"].view(-1, 16)[5 : 5 + len(a["out"])]),
}

BACKWARD = {
    "grad_out_of_another_width": change(grad_out=lambda a: a["kv"][:15]),
    "grad_out_of_fp32": change(grad_out=lambda a: a["grad_out"].float()),
    "grad_out_on_the_host": change(grad_out=lambda a: a["grad_out"].cpu()),
    "a_pair_of_gradients": change(grads=lambda a: a["grads"][:2]),
    "grad_kv_missing": change(grads=lambda a: (None, *a["grads"][1:])),
    "grad_kv_is_grad_score": change(grads=lambda a: (a["grads"][0], a["grads"][0], a["grads"][2])),
    "grad_kv_within_kv": change(grads=lambda a: (a["kv"], *a["grads"][1:])),
    "grad_kv_of_fp32": change(grads=lambda a: (poisoned(a["kv"].float()), *a["grads"][1:])),
    "grad_ape_of_bf16": change(grads=lambda a: (*a["grads"][:2], poisoned(a["ape"].to(BF16)))),
    "grad_ape_without_ape": change(ape=lambda a: None),
    "workspace_too_small": change(workspace=lambda a: torch.empty(16, device="cuda")),
    "workspace_off_by_four_bytes": change(
        workspace=lambda a: torch.empty(2**20, device="cuda")[1:]
    ),
    "workspace_on_the_host": change(workspace=lambda a: torch.empty(2**20)),
    "workspace_within_kv": change(workspace=lambda a: a["kv"].flatten()),
}


def refused(direction: str, spoil: Callable[[Arguments], None]) -> None:
    """The call raises ValueError, counts no launch and leaves the results poisoned."""
    p = pack()
    found = arguments(p)
    results = [found["out"], *found["grads"]]
    spoil(found)
    read = [t.clone() for t in p.inputs]
    counts = _native.launch_counts()
    out, grads = found.pop("out"), found.pop("grads")
    with pytest.raises(ValueError, match=r"\w"):
        if direction == "forward":
            found.pop("grad_out")
            csa_runtime.compressor_forward(**found, out=out)
        else:
            csa_runtime.compressor_backward(**found, grads=grads)
    torch.cuda.synchronize()
    assert _native.launch_counts() == counts
    for result in results:
        assert bool((result.view(torch.uint8) == POISON).all())
    for before, now in zip(read, p.inputs, strict=True):
        assert torch.equal(before, now)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", BOTH)
def test_malformed_inputs_are_refused(name: str, direction: str) -> None:
    refused(direction, BOTH[name])


@pytest.mark.parametrize("name", FORWARD)
def test_malformed_output_is_refused(name: str) -> None:
    refused("forward", FORWARD[name])


@pytest.mark.parametrize("name", BACKWARD)
def test_malformed_gradients_and_workspace_are_refused(name: str) -> None:
    refused("backward", BACKWARD[name])


LAUNCH = {
    "kv_off_by_one_byte": lambda a: a.update(kv=a["kv"] + 1),
    "ape_off_by_two_bytes": lambda a: a.update(ape=a["ape"] + 2),
    "prefix_off_by_two_bytes": lambda a: a.update(cu_seqlens=a["cu_seqlens"] + 2),
    "negative_stride": lambda a: a.update(kv_stride=-32),
    "out_stride_below_its_width": lambda a: a.update(out_stride=15),
    "no_kv": lambda a: a.update(kv=None),
    "no_out": lambda a: a.update(out=None),
    "no_prefixes": lambda a: a.update(cu_seqlens=None),
    "out_within_kv": lambda a: a.update(out=a["kv"] + 64),
    "no_head_dim": lambda a: a.update(head_dim=0),
    "head_dim_beyond_the_limit": lambda a: a.update(head_dim=8388481),
    "tokens_beyond_the_limit": lambda a: a.update(tokens=2**31),
    "rows_beyond_the_limit": lambda a: a.update(rows=2**31),
    "negative_rows": lambda a: a.update(rows=-1),
    "unknown_dtype": lambda a: a.update(dtype=9),
    "no_such_device": lambda a: a.update(device=4096),
}


@pytest.mark.parametrize("name", LAUNCH)
def test_malformed_numbers_are_refused_by_the_pointer_api(name: str) -> None:
    p = pack()
    out = poisoned(p.grad_out)
    numbers: Arguments = {
        "device": 0, "ratio": 4, "coff": 2, "dtype": 1, "tokens": 61, "segments": 2,
        "rows": len(out), "head_dim": 16, "kv": p.kv.data_ptr(), "score": p.score.data_ptr(),
        "ape": p.ape.data_ptr(), "cu_seqlens": p.cu_seqlens.data_ptr(),
        "cu_seqlens_comp": p.cu_seqlens_comp.data_ptr(), "out": out.data_ptr(),
        "kv_stride": 32, "score_stride": 32, "out_stride": 16,
    }  # fmt: skip
    LAUNCH[name](numbers)
    with pytest.raises(ValueError, match=r"\w"):
        csa_runtime.launch_forward(**numbers)
    torch.cuda.synchronize()
    assert bool((out.view(torch.uint8) == POISON).all())
