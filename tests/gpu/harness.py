# SPDX-License-Identifier: Apache-2.0
"""One problem on the GPU, launched through the pointer API by variant, and its comparisons."""

from dataclasses import dataclass
from typing import Any

import torch

from csa_runtime import backward_workspace_bytes, launch_backward, launch_forward
from gpu import names, oracle, tally
from gpu.buffers import DEVICE, Guarded, placed
from gpu.problems import Packing, Values, named_packing, values

BF16 = 2  # bytes


@dataclass(frozen=True)
class Placement:
    """Where tensors lie: elements between rows, bytes off a 256-byte boundary, halves fused."""

    name: str
    pad: int = 0
    offset: int = 0
    fused: bool = False


PLAIN = Placement("plain")


@dataclass(frozen=True)
class Problem:
    """Prefixes, values and options of one call, on the GPU."""

    packing: Packing
    given: Values
    ratio: int
    coff: int
    cu_seqlens: torch.Tensor
    cu_seqlens_comp: torch.Tensor

    @property
    def head_dim(self) -> int:
        """Columns of `out`."""
        return self.given.kv.shape[1] // self.coff

    @property
    def width(self) -> int:
        """Columns of `kv`."""
        return self.given.kv.shape[1]

    def pointers(self) -> dict[str, Any]:
        """Keyword arguments of both launch functions, outputs left out."""
        given = self.given
        return {
            "device": DEVICE.index or 0,
            "ratio": self.ratio,
            "coff": self.coff,
            "dtype": 1,
            "tokens": self.packing.tokens,
            "segments": self.cu_seqlens.numel() - 1,
            "rows": self.packing.rows,
            "head_dim": self.head_dim,
            "kv": given.kv.data_ptr(),
            "score": given.score.data_ptr(),
            "ape": None if given.ape is None else given.ape.data_ptr(),
            "cu_seqlens": self.cu_seqlens.data_ptr(),
            "cu_seqlens_comp": self.cu_seqlens_comp.data_ptr(),
            "kv_stride": given.kv.stride(0),
            "score_stride": given.score.stride(0),
        }


def prefix(entries: tuple[int, ...]) -> torch.Tensor:
    """An int32 prefix on the GPU between guard bytes, which read as -1."""
    row = torch.tensor([entries], dtype=torch.int32, device=DEVICE)
    return placed(row)[0]


def problem(
    packing: Packing,
    ratio: int,
    coff: int,
    head_dim: int,
    *,
    distribution: str = "gate",
    seed: int = 1,
    ape: bool = True,
    placement: Placement = PLAIN,
) -> Problem:
    """Random inputs placed among NaN, as `placement` says."""
    found = values(distribution, packing, ratio, coff, head_dim, seed)
    pad, offset = placement.pad, placement.offset
    if placement.fused:
        both = Guarded(packing.tokens, (found.kv.shape[1],) * 2, torch.bfloat16, pad, offset)
        for view, value in zip(both.views, (found.kv, found.score), strict=True):
            view.copy_(value)
        kv, score = both.views
    else:
        kv, score = placed(found.kv, pad, offset), placed(found.score, pad, offset)
    given = Values(
        kv,
        score,
        placed(found.ape, 0, offset // 4 * 4) if ape else None,
        placed(found.grad_out, pad, offset),
    )
    return Problem(
        packing, given, ratio, coff, prefix(packing.cu_seqlens), prefix(packing.cu_seqlens_comp)
    )


def narrowed_problem(name: str, ratio: int, coff: int, head_dim: int) -> Problem:
    """Of the pack of that name; the one of many segments with an eighth of a wide `head_dim`."""
    if name == "many_short" and head_dim > 576:
        head_dim //= 8
    return problem(named_packing(name, ratio), ratio, coff, head_dim, seed=head_dim)


def stream() -> int:
    """The handle of torch's current stream."""
    return torch.cuda.current_stream(DEVICE).cuda_stream


def forward_arguments(p: Problem, out: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments of a forward into `out`, stream and variant left out."""
    return p.pointers() | {"out": out.data_ptr(), "out_stride": out.stride(0)}


def forward(
    p: Problem, out: torch.Tensor, variant: str | None = None, on: int | None = None
) -> None:
    """Launches forward into `out`."""
    chosen = stream() if on is None else on
    launch_forward(**forward_arguments(p, out), stream=chosen, variant=variant)


def workspace(p: Problem, offset: int = 0) -> torch.Tensor:
    """Poisoned workspace of exactly the bytes the library asks for, `offset` into its block."""
    size = backward_workspace_bytes(
        p.packing.tokens, p.packing.rows, p.head_dim, ratio=p.ratio, coff=p.coff
    )
    return torch.full((offset + size,), 0xFF, dtype=torch.uint8, device=DEVICE)[offset:]


def backward_arguments(
    p: Problem,
    grad_kv: torch.Tensor,
    grad_score: torch.Tensor,
    grad_ape: torch.Tensor | None,
    scratch: torch.Tensor | None,
) -> dict[str, Any]:
    """Keyword arguments of a backward into the given gradients, stream and variant left out."""
    return p.pointers() | {
        "grad_out": p.given.grad_out.data_ptr(),
        "grad_out_stride": p.given.grad_out.stride(0),
        "grad_kv": grad_kv.data_ptr(),
        "grad_kv_stride": grad_kv.stride(0),
        "grad_score": grad_score.data_ptr(),
        "grad_score_stride": grad_score.stride(0),
        "grad_ape": None if grad_ape is None else grad_ape.data_ptr(),
        "workspace": None if scratch is None else scratch.data_ptr(),
        "workspace_bytes": 0 if scratch is None else scratch.numel(),
    }


def backward(
    p: Problem,
    grad_kv: torch.Tensor,
    grad_score: torch.Tensor,
    grad_ape: torch.Tensor | None,
    variant: str | None = None,
    *,
    accumulate: bool = False,
    scratch: torch.Tensor | None = None,
    on: int | None = None,
) -> None:
    """Launches backward into the given gradients."""
    if scratch is None and grad_ape is not None:
        scratch = workspace(p)
    launch_backward(
        **backward_arguments(p, grad_kv, grad_score, grad_ape, scratch),
        flags=int(accumulate),
        stream=stream() if on is None else on,
        variant=variant,
    )


variants = names.family


def serves(variant: str, p: Problem, *outputs: torch.Tensor, grad_out: bool = False) -> bool:
    """Whether alignment and head_dim let the variant serve the call."""
    unit = names.alignment(variant)
    sixteen_bit = [p.given.kv, p.given.score, *outputs]
    if grad_out:
        sixteen_bit.append(p.given.grad_out)
    ape = p.given.ape
    return (
        p.head_dim % unit == 0
        and all(t.data_ptr() % (unit * BF16) == 0 for t in sixteen_bit)
        and all(t.stride(0) % unit == 0 for t in sixteen_bit if t.shape[0] > 1)
        and (ape is None or ape.data_ptr() % min(16, 4 * unit) == 0)
    )


def same(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Where two tensors are equal as numbers or both NaN."""
    return (x == y) | (x.isnan() & y.isnan())


def assert_equal(kind: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal everywhere, as numbers or both NaN."""
    assert found.shape == wanted.shape
    agree = same(found, wanted)
    tally.count("bitwise", found.numel())
    tally.count(f"bitwise {kind}", found.numel())
    if not bool(agree.all()):
        wrong = (~agree).nonzero()
        first = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{kind}: {len(wrong)} of {found.numel()} elements differ, first at {first}: "
            f"{found[first].item()!r}, R has {wanted[first].item()!r}"
        )


# R rounds in its own order, so a few elements in 100,000 differ by chance. Of fewer elements than
# this a share says nothing; small packs are counted together.
COUNTABLE = 100_000


def assert_output(
    p: Problem, found: torch.Tensor, wanted: oracle.Output, *, gate: bool = False
) -> None:
    """`out` within the contract's bound of R; on the gate's distribution almost everywhere R."""
    exact = wanted.out
    tally.count("out within its bound", found.numel())
    finite = exact.isfinite()
    off = (found.double() - exact.double()).abs()
    within = torch.where(finite, off <= wanted.bound, same(found, exact))
    if not bool(within.all()):
        wrong = (~within).nonzero()
        first = tuple(wrong[0].tolist())
        raise AssertionError(
            f"out: {len(wrong)} of {found.numel()} elements out of bound, first at {first}: "
            f"{found[first].item()!r}, R has {exact[first].item()!r} +- {wanted.bound[first]:.3g}"
        )
    if gate and found.numel():
        # Rows of padding all pool the same tokens: one of them counts.
        different = ~same(found, exact)[: p.packing.computed + 1]
        differ, counted = int(different.sum()), different.numel()
        tally.count("out on the gate's distribution", counted)
        tally.count("out differing from R there", differ)
        if counted >= COUNTABLE:
            assert differ <= 2e-4 * counted, f"out differs from R at {differ} elements"
        far = float((found.double() - wanted.out64).abs().max())
        near = float((exact.double() - wanted.out64).abs().max())
        assert far <= near * (1 + 1e-6) + 1e-4, f"out is {far} from fp64, R {near}"


def assert_grad_ape(
    found: torch.Tensor, wanted: oracle.Gradients, rows: int, *, gate: bool = False
) -> None:
    """Sums of R's own addends: to fp32 summation error, and to 1e-3 on the gate's distribution."""
    tally.count("grad_ape", found.numel())
    assert bool(found.isfinite()[wanted.grad_ape_scale < 1e38].all()), "grad_ape is not finite"
    off = (found.double() - wanted.grad_ape_sum).abs()
    bound = wanted.grad_ape_scale * (rows + 8) * 2.0**-24 + rows * 2.0**-149
    sound = wanted.grad_ape_scale < 1e38
    assert bool((off <= bound)[sound].all()), "grad_ape is not the sum of R's addends"
    if gate and found.numel():
        worst = float(off.max())
        tally.worst("grad_ape max_abs against fp64", worst)
        assert worst <= 1e-3
        assert float((found - wanted.grad_ape).abs().max()) <= 1e-3
