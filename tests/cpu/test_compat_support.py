# SPDX-License-Identifier: Apache-2.0
"""What `check_support` of the drop-in's classes refuses, on samples of the CPU and of no device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from csa_runtime import CSACompressorBackward, CSACompressorForward
from support.packs import Pack, random_pack

pytestmark = pytest.mark.L0

CLASSES: list[Any] = [CSACompressorForward, CSACompressorBackward]


def make() -> Pack:
    """Ragged, with padding."""
    return random_pack([9, 0, 3, 11], ratio=4, coff=2, head_dim=6, padding=2)


def samples(pack: Pack, device: str = "meta") -> tuple[Any, ...]:
    """Of all six arrays; out and grad_out look alike."""
    return tuple(one.to(device) for one in (*pack.inputs, pack.grad_out))


BAD_SAMPLES: dict[str, dict[int, Callable[[torch.Tensor], Any]]] = {
    "kv of three dimensions": {0: lambda t: t[:, None]},
    "a width of another coff": {0: lambda t: t[:, 1:], 1: lambda t: t[:, 1:]},
    "kv of fp32": {0: lambda t: t.float()},
    "kv, score and out of fp16": {i: lambda t: t.half() for i in (0, 1, 5)},
    "score of another shape": {1: lambda t: t[1:]},
    "columns that are strided": {1: lambda t: t.repeat(1, 2)[:, ::2]},
    "ape of bf16": {2: lambda t: t.bfloat16()},
    "ape of another ratio": {2: lambda t: t[1:]},
    "int64 prefixes": {3: lambda t: t.long(), 4: lambda t: t.long()},
    "prefixes of two lengths": {4: lambda t: t[1:]},
    "prefixes of two dimensions": {3: lambda t: t[None], 4: lambda t: t[None]},
    "out of another width": {5: lambda t: t[:, 1:]},
    "out of one dimension": {5: lambda t: t[0]},
    "out of fp32": {5: lambda t: t.float()},
    "rows of too few tokens": {0: lambda t: t[:3], 1: lambda t: t[:3]},
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("bad", BAD_SAMPLES)
def test_malformed_samples_are_value_errors(bad: str, kind: Any, device: str) -> None:
    """Of meta tensors too, and before any driver is asked."""
    pack = make()
    arrays = list(samples(pack, device))
    for index, change in BAD_SAMPLES[bad].items():
        arrays[index] = change(arrays[index])
    made = kind(*arrays, **pack.options)
    for step in (made.check_support, made.compile):
        with pytest.raises(ValueError, match=r"allowed|must be contiguous|needs at least|serves"):
            step()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_of_out_may_not_overlap_in_its_sample(device: str) -> None:
    """Those of grad_out may: one row for all is what a sum's gradient is."""
    *inputs, out = samples(make(), device)
    for rows in (out[:1].expand(out.shape), out.as_strided(out.shape, (out.shape[1] - 1, 1))):
        if device == "cpu":  # meta tensors are taken for a GPU's, which may not be there
            assert CSACompressorBackward(*inputs, rows).check_support()
        with pytest.raises(ValueError, match="out has row stride"):
            CSACompressorForward(*inputs, rows).check_support()


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"coff": 0}, "coff"),
        ({"coff": 3}, "coff"),
        ({"ratio": 0}, "ratio"),
        ({"ratio": 3}, "ratio 3"),
        ({"ratio": 256}, "ratio 256"),
        ({"ratio": "4"}, "ratio"),
    ],
)
def test_windows_without_an_image_are_value_errors(
    kind: Any, changes: dict[str, Any], said: str
) -> None:
    """On the CPU as on any GPU, though the reference could pool them."""
    pack = make()
    arrays = list(samples(pack, "cpu"))
    if isinstance(changes.get("ratio"), int):
        arrays[2] = torch.zeros(changes["ratio"], pack.kv.shape[1])
        arrays[0] = arrays[1] = torch.zeros(600, pack.kv.shape[1], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=said):
        kind(*arrays, **pack.options | changes).check_support()


@pytest.mark.parametrize("kind", CLASSES)
def test_sizes_at_their_limits(kind: Any) -> None:
    """head_dim up to 8,388,480; more elements than 2**31 are no limit here."""

    def check(tokens: int, rows: int, head_dim: int) -> bool:
        wide = torch.empty(tokens, head_dim, dtype=torch.bfloat16, device="meta")
        ape = torch.empty(4, head_dim, device="meta")
        prefix = torch.zeros(2, dtype=torch.int32)
        out = torch.empty(rows, head_dim, dtype=torch.bfloat16, device="meta")
        made: bool = kind(wide, wide, ape, prefix, prefix, out, ratio=4, coff=1).check_support()
        return made

    assert check(4, 1, 8388480) and check(4, 1, 1)
    assert check(1 << 26, 1 << 24, 128)
    with pytest.raises(ValueError, match="8388480"):
        check(4, 1, 8388481)


def test_a_sample_that_is_no_array_is_a_value_error() -> None:
    """At once."""
    pack = make()
    with pytest.raises(ValueError, match="kv is a"):
        CSACompressorForward([1], *samples(pack)[1:], **pack.options)


def test_samples_on_two_kinds_of_device_are_a_value_error() -> None:
    """A meta sample is on none."""
    pack = make()

    class OnGpu:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": tuple(pack.score.shape), "typestr": "<V2", "data": (256, False), "version": 3,
        }  # fmt: skip

    arrays = list(samples(pack, "cpu"))
    arrays[1] = OnGpu()
    with pytest.raises(ValueError, match="device"):
        CSACompressorForward(*arrays, **pack.options).check_support()
