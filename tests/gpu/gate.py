# SPDX-License-Identifier: Apache-2.0
"""Runs one case of the numerics gate and says what of the contract it breaks."""

from dataclasses import dataclass, field
from typing import Any

import torch

from csa_runtime import _native
from gpu import harness, oracle, tolerance
from gpu.buffers import DEVICE
from gpu.gate_cases import OVERFLOW, SCALE, Case, build
from gpu.harness import Problem
from gpu.tolerance import Deviation

TENSORS = ("out", "grad_kv", "grad_score", "grad_ape")
UNIT_SCALE = ("unit", "padding")
BITS = {2: torch.int16, 4: torch.int32}
# Beyond the contract, for long windows at unit scale: differing elements pooled over the cases, and
# distance from R: one rounding step of a bf16 in [1/2, 1) and [1/4, 1/2), as 3.91e-3 and 1.95e-3.
# R's own rounding can put one of the few larger elements a step off; then fp64 decides.
POOLED = {"out": 3.0e-4, "grad_kv": 4.5e-5, "grad_score": 1.2e-4}
LARGEST = {"out": 2.0**-8, "grad_kv": 2.0**-8, "grad_score": 2.0**-9, "grad_ape": 2.0e-6}
POOLED_SHORT = {"out": 2.0e-4, "grad_kv": 0.0, "grad_score": 0.0}


@dataclass
class Outcome:
    """What one case gave: deviations by tensor, the calls as explained, what was broken."""

    case: Case
    rows: int = 0
    deviations: dict[str, Deviation] = field(default_factory=dict)
    eager_out: Deviation | None = None
    explained: list[dict[str, Any]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        case = self.case
        return {
            "name": case.name, "kind": case.kind, "ratio": case.ratio, "coff": case.coff,
            "head_dim": case.head_dim, "tokens": case.tokens, "segments": len(case.lengths),
            "rows": self.rows,
            "launched": [x["variant"] for call in self.explained for x in call["launches"]],
            "deviations": {name: d.record() for name, d in self.deviations.items()},
            "out_against_torch_sum": self.eager_out and self.eager_out.record(),
            "broken": self.broken,
            "remarks": self.remarks,
        }  # fmt: skip


def launch(p: Problem, case: Case, offset: int, explained: list[dict[str, Any]]) -> list[Any]:
    """All results, into NaN, with workspace `offset` bytes into its block."""
    bf16 = torch.bfloat16
    out = torch.full((p.packing.rows, p.head_dim), torch.nan, dtype=bf16, device=DEVICE)
    large = [torch.full(p.given.kv.shape, torch.nan, dtype=bf16, device=DEVICE) for _ in range(2)]
    grad_ape = torch.full_like(p.given.ape, torch.nan)
    scratch = harness.workspace(p, offset)
    forward = harness.forward_arguments(p, out)
    backward = harness.backward_arguments(p, *large, grad_ape, scratch)
    explained += [
        _native.explain("forward", **forward, variant=case.forward),
        _native.explain("backward", **backward, variant=case.backward),
    ]
    harness.forward(p, out, case.forward)
    harness.backward(p, *large, grad_ape, case.backward, scratch=scratch)
    return [out, *large, grad_ape]


def run(case: Case, seed: int, twin: Outcome | None = None) -> Outcome:
    """Runs a case twice and compares; `twin` is the unit-scale case of a scaled one."""
    p = build(case, seed)
    outcome = Outcome(case, p.packing.rows)
    found = launch(p, case, 0, outcome.explained)
    again = launch(p, case, 123456 * 16, [])
    for name, one, two in zip(TENSORS, found, again, strict=True):
        bits = BITS[one.itemsize]
        if not torch.equal(one.view(bits), two.view(bits)):
            outcome.broken.append(f"{name}: two runs gave different bits")
    del again
    outcome.broken += tolerance.not_zeroed(p, found[1], found[2])
    output = oracle.output(p.packing, p.given, p.ratio, p.coff)
    near = oracle.gradients(p.packing, p.given, p.ratio, p.coff)
    wanted = [output.out, near.grad_kv, near.grad_score, near.grad_ape]
    if case.kind in OVERFLOW:
        for name, x, r in zip(TENSORS, found, wanted, strict=True):
            outcome.broken += tolerance.masks_differ(name, x, r)
        finite = output.out.isfinite()
        off = (found[0].double() - output.out.double()).abs()
        if not bool((off <= output.bound)[finite].all()):
            outcome.broken.append("out: a finite element is more than its bound from R")
    else:
        far = oracle.gradients(p.packing, p.given, p.ratio, p.coff, torch.float64)
        exact = [output.out64, far.grad_kv, far.grad_score, far.grad_ape]
        for name, x, r, e in zip(TENSORS, found, wanted, exact, strict=True):
            outcome.deviations[name] = tolerance.deviation(x, r, e)
            if case.ratio > 4 and case.kind in UNIT_SCALE:
                _aim(outcome, name, x, r, e)
        outcome.eager_out = tolerance.deviation(found[0], output.summed)
        _judge(outcome, twin)
    if case.ratio <= 4:
        _bitwise(outcome, p, found, output, near)
    return outcome


def _aim(outcome: Outcome, name: str, x: Any, r: Any, exact: Any) -> None:
    """Elements farther from R than LARGEST: a fault, unless it is R that is farther from fp64."""
    far = ~((x.double() - r.double()).abs() <= LARGEST[name])
    if not bool(far.any()):
        return
    ours, theirs = ((t[far].double() - exact[far]).abs() for t in (x, r))
    text = f"{name}: {int(far.sum())} farther from R than {LARGEST[name]:.3g}, the aim"
    if bool((ours <= theirs).all()):
        outcome.remarks.append(
            f"{text}, and nearer to fp64 ({ours.max():.3g}, R {theirs.max():.3g})"
        )
    else:
        outcome.broken.append(text)


def _judge(outcome: Outcome, twin: Outcome | None) -> None:
    """The tolerance contract, and for a scaled case its twin's deviations exactly scaled."""
    scaled = outcome.case.kind == "scaled"
    long = outcome.case.ratio > 4
    for name, d in outcome.deviations.items():
        parity = not (scaled and name == "grad_ape")
        outcome.broken += tolerance.too_far(name, d, gate=long and not scaled, parity=parity)
    if scaled:
        assert twin is not None
        for name, d in outcome.deviations.items():
            unit = twin.deviations[name]
            factor = SCALE if name in ("out", "grad_kv") else SCALE**2
            if d.differing != unit.differing or d.max_abs != factor * unit.max_abs:
                outcome.broken.append(
                    f"{name}: {d.differing} elements differ by {d.max_abs:.9g} at most, the "
                    f"unit-scale twin's {unit.differing} by {unit.max_abs:.9g}"
                )


def _bitwise(
    outcome: Outcome, p: Problem, found: list[Any], output: oracle.Output, near: oracle.Gradients
) -> None:
    """The contract of ratio 2 and 4, as the tests state it."""
    gate = outcome.case.kind not in (*OVERFLOW, "scaled")
    checks = (
        lambda: harness.assert_output(p, found[0], output, gate=gate),
        lambda: harness.assert_equal("grad_kv", found[1], near.grad_kv),
        lambda: harness.assert_equal("grad_score", found[2], near.grad_score),
        lambda: harness.assert_grad_ape(found[3], near, p.packing.computed, gate=gate),
    )
    for check in checks:
        try:
            check()
        except AssertionError as error:
            outcome.broken.append(str(error))


@dataclass(frozen=True)
class Pool:
    """One tensor over a ratio's unit-scale cases."""

    elements: int
    differing: int
    worst: str
    max_abs: float

    @property
    def share(self) -> float:
        """Differing elements over elements."""
        return self.differing / max(self.elements, 1)


def pooled(outcomes: list[Outcome], ratio: int) -> dict[str, Pool]:
    """Deviations over the unit-scale cases of a ratio, by tensor."""
    chosen = [o for o in outcomes if o.case.ratio == ratio and o.case.kind in UNIT_SCALE]
    pools = {}
    for name in TENSORS:
        each = [(o.deviations[name], o.case.name) for o in chosen if name in o.deviations]
        if each:
            worst, where = max(each, key=lambda pair: pair[0].share)
            words = f"{worst.share:.4%}, {worst.differing:,} of {worst.elements:,} ({where})"
            pools[name] = Pool(
                sum(d.elements for d, _ in each), sum(d.differing for d, _ in each),
                words, max(d.max_abs for d, _ in each),
            )  # fmt: skip
    return pools


def beyond(pools: dict[str, Pool], ratio: int) -> list[str]:
    """Which pools have more differing elements than they may."""
    limits = POOLED_SHORT if ratio <= 4 else POOLED
    return [
        f"ratio {ratio}, pooled {name}: {pools[name].share:.4%} of elements differ, "
        f"{limit:.4%} is allowed"
        for name, limit in limits.items()
        if name in pools and not pools[name].share <= limit
    ]
