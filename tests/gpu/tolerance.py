# SPDX-License-Identifier: Apache-2.0
"""The contract of long windows: how far from R and from fp64 a result may be."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from gpu import oracle, tally
from gpu.harness import Problem, same

SHARE = 1e-3  # of a tensor's elements may differ from R
MAX_ABS = {"out": 1.6e-2, "grad_kv": 1.6e-2, "grad_score": 1.6e-2, "grad_ape": 1e-3}
PARITY_FACTOR, PARITY_TERM = 1 + 1e-6, 1e-4
# Of fewer elements a share says little: a handful may differ by chance.
COUNTABLE, CHANCE = 20_000, 4


@dataclass(frozen=True)
class Deviation:
    """One tensor against R and fp64.

    elements, differing: counted as numbers, NaN equal to NaN. max_abs: largest distance from R.
    far, near: largest distance from fp64, of the result and of R; None where there is no fp64.
    """

    elements: int
    differing: int
    max_abs: float
    far: float | None = None
    near: float | None = None

    @property
    def share(self) -> float:
        """Differing elements over elements."""
        return self.differing / max(self.elements, 1)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def deviation(
    found: torch.Tensor, wanted: torch.Tensor, exact: torch.Tensor | None = None
) -> Deviation:
    """`found` against R `wanted` and fp64 `exact`. NaN against a number is a distance of NaN."""
    assert found.shape == wanted.shape
    if not found.numel():
        return Deviation(0, 0, 0.0, *((None, None) if exact is None else (0.0, 0.0)))
    equal = same(found, wanted)
    wide, reference = found.double(), wanted.double()
    numbers = [(~equal).sum().double(), torch.where(equal, 0.0, (wide - reference).abs()).amax()]
    if exact is not None:
        numbers += [(wide - exact).abs().amax(), (reference - exact).abs().amax()]
    differing, *distances = torch.stack(numbers).tolist()
    return Deviation(found.numel(), int(differing), *distances)


def too_far(
    name: str, d: Deviation, *, spare: int = 0, gate: bool = True, parity: bool = True
) -> list[str]:
    """What of the contract a tensor breaks; the share and distance hold on the gate's inputs."""
    broken = []
    allowed = max(1, SHARE * d.elements) + spare
    if gate and name != "grad_ape" and not d.differing <= allowed:
        broken.append(f"{name}: {d.differing} of {d.elements} elements differ from R")
    if gate and not d.max_abs <= MAX_ABS[name]:
        broken.append(f"{name}: {d.max_abs:.3g} from R, {MAX_ABS[name]:g} is allowed")
    if parity and d.far is not None and d.near is not None:
        if not d.far <= d.near * PARITY_FACTOR + PARITY_TERM:
            broken.append(f"{name}: {d.far:.6g} from fp64, R is {d.near:.6g} from it")
    return broken


def masks_differ(name: str, found: torch.Tensor, wanted: torch.Tensor) -> list[str]:
    """Where NaN and the two infinities are not R's."""
    broken = []
    for kind, mask in (
        ("NaN", torch.isnan),
        ("+inf", torch.isposinf),
        ("-inf", torch.isneginf),
    ):
        ours, theirs = mask(found), mask(wanted)
        if not torch.equal(ours, theirs):
            extra, missing = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
            broken.append(f"{name}: {extra} {kind} that R has not, {missing} missing")
    return broken


def not_zeroed(p: Problem, grad_kv: torch.Tensor, grad_score: torch.Tensor) -> list[str]:
    """Which gradients are not +0, bit for bit, where no computed real row reads the token."""
    idle = ~oracle.consumed(p.packing, p.ratio, p.coff).to(grad_kv.device)
    broken = []
    for name, grad in (("grad_kv", grad_kv), ("grad_score", grad_score)):
        halves = grad.unflatten(1, (p.coff, p.head_dim)).view(torch.int16)
        stray = int((halves.ne(0).any(dim=2) & idle).sum())
        if stray:
            broken.append(f"{name}: {stray} token positions that no row reads are not +0")
    return broken


def assert_tolerance(
    name: str,
    found: torch.Tensor,
    wanted: torch.Tensor,
    exact: torch.Tensor | None,
    *,
    gate: bool = True,
) -> None:
    """The contract on one tensor, small ones with room for chance."""
    d = deviation(found, wanted, exact)
    tally.count(f"long windows, {name}", d.elements)
    if gate:
        if name != "grad_ape":
            tally.count(f"long windows, {name} differing from R", d.differing)
        tally.worst(f"long windows, {name} max_abs against R", d.max_abs)
    broken = too_far(name, d, spare=CHANCE if d.elements < COUNTABLE else 0, gate=gate)
    assert not broken, broken


def assert_output(
    p: Problem, found: torch.Tensor, wanted: oracle.Output, *, gate: bool = True
) -> None:
    """`out` within the tolerances where R and fp64 are finite; masks are another check.

    Rows of padding all pool the same tokens: of elements that differ, those of one count.
    """
    numbers = wanted.out.isfinite() & wanted.out64.isfinite()

    def of(rows: int) -> list[torch.Tensor]:
        return [x[:rows][numbers[:rows]] for x in (found, wanted.out, wanted.out64)]

    broken = too_far("out", deviation(*of(p.packing.rows)), gate=False)
    assert not broken, broken
    assert_tolerance("out", *of(p.packing.computed + 1), gate=gate)
