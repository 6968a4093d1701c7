# SPDX-License-Identifier: Apache-2.0
"""Checks one corpus problem under every variant of a runner: values, bits, zeros, stray writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from gpu import corpus_values, harness, oracle, tally, tolerance
from gpu.arena import Area, Arena
from gpu.buffers import INTEGER
from gpu.corpus import LONG, Spec
from gpu.harness import Problem
from gpu.problems import Packing, Values

BF16 = torch.bfloat16
LARGE = ("grad_kv", "grad_score")
# Of long windows whose results are not near 1, those whose `out` is held to an elementwise bound.
BOUNDED = ("products", "lowest", "largest")


class Runner(Protocol):
    """What computes: the kernels, or a stand-in."""

    device: torch.device

    def variants(
        self, operation: str, p: Problem, outputs: tuple[torch.Tensor, ...]
    ) -> list[str | None]:
        """Those that serve the call, None for the scheduled one. Others must have refused it."""

    def forward(self, p: Problem, out: torch.Tensor, variant: str | None) -> None:
        """Computes `out`."""

    def backward(
        self,
        p: Problem,
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        variant: str | None,
        accumulate: bool,
        surroundings: int,
    ) -> None:
        """Computes the gradients, with a workspace that holds the pattern of the surroundings."""


@dataclass(frozen=True)
class Oracles:
    """Who says what is right: `oracle.output` and `oracle.gradients`, or stand-ins."""

    output: Callable[[Packing, Values, int, int], oracle.Output] = oracle.output
    gradients: Callable[..., oracle.Gradients] = oracle.gradients


class Shares:
    """Elements of gate problems by (variant, tensor): how many, and how many are not R's."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.elements: Counter[tuple[str, str]] = Counter()
        self.differing: Counter[tuple[str, str]] = Counter()

    def add(
        self, variant: str | None, name: str, found: torch.Tensor, wanted: torch.Tensor
    ) -> None:
        """Counts one tensor."""
        key = (variant or "scheduled", name)
        self.elements[key] += found.numel()
        self.differing[key] += int((~harness.same(found, wanted)).sum())

    def broken(self, ratio: int) -> list[str]:
        """Which variants differ in more than their share, of elements enough to say."""
        least, share = (
            (tolerance.COUNTABLE, tolerance.SHARE) if ratio == LONG else (harness.COUNTABLE, 2e-4)
        )
        return [
            f"{variant}: {self.differing[variant, name]} of {elements} elements of {name} "
            "differ from R on the gate's values"
            for (variant, name), elements in self.elements.items()
            if elements >= least and self.differing[variant, name] > share * elements
        ]


class Placed:
    """A problem in its arena, outputs too."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        """Draws the values and lays everything out."""
        made = corpus_values.make(spec)
        packing, f32, i32 = spec.packing, torch.float32, torch.int32
        tokens, rows, width, d = packing.tokens, packing.rows, spec.width, spec.head_dim
        shapes = {
            "kv": (tokens, width, BF16), "score": (tokens, width, BF16),
            "ape": (spec.ratio, width, f32), "grad_out": (rows, d, BF16),
            "cu_seqlens": (1, packing.segments + 1, i32),
            "cu_seqlens_comp": (1, packing.segments + 1, i32),
            "out": (rows, d, BF16), "grad_kv": (tokens, width, BF16),
            "grad_score": (tokens, width, BF16), "grad_ape": (spec.ratio, width, f32),
        }  # fmt: skip
        contents = {
            "kv": made.kv, "score": made.score, "ape": made.ape, "grad_out": made.grad_out,
            "cu_seqlens": torch.tensor([packing.cu_seqlens], dtype=i32),
            "cu_seqlens_comp": torch.tensor([packing.cu_seqlens_comp], dtype=i32),
        }  # fmt: skip
        areas = {
            name: Area(*shape, spec.places[name].offset, spec.places[name].stride)
            for name, shape in shapes.items()
        }
        self.spec, self.arena = spec, Arena(areas, contents, spec.joined, device)
        view = self.arena.view
        ape = view("ape") if spec.ape else None
        given = Values(view("kv"), view("score"), ape, view("grad_out"))
        prefixes = (view("cu_seqlens")[0], view("cu_seqlens_comp")[0])
        self.problem = Problem(packing, given, spec.ratio, spec.coff, *prefixes)
        self.out = view("out")
        self.grads = (view("grad_kv"), view("grad_score"), view("grad_ape") if spec.ape else None)
        # Several variants are checked against the same places.
        self.written = {
            "forward": self.arena.writable(("out",)),
            "backward": self.arena.writable((*LARGE, *(("grad_ape",) if spec.ape else ()))),
        }

    def run(
        self,
        runner: Runner,
        operation: str,
        variant: str | None,
        surroundings: int,
        before: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Runs once; results in memory of their own.

        before: what grad_ape holds, to be added to.
        """
        self.arena.restore(surroundings)
        if before is not None:
            self.arena.view("grad_ape").copy_(before)
        if operation == "forward":
            runner.forward(self.problem, self.out, variant)
            results = {"out": self.out}
        else:
            accumulate = before is not None
            runner.backward(self.problem, self.grads, variant, accumulate, surroundings)
            results = dict(zip((*LARGE, "grad_ape"), self.grads, strict=True))
        strays = self.arena.strays(surroundings, self.written[operation])
        assert not strays, f"outside the outputs {strays}"
        return {name: found.clone() for name, found in results.items() if found is not None}

    def every(
        self, runner: Runner, operation: str
    ) -> Iterator[tuple[str | None, dict[str, torch.Tensor]]]:
        """Results of each variant, the same bits in both surroundings."""
        outputs = (self.out,) if operation == "forward" else self.grads[:2]
        for variant in runner.variants(operation, self.problem, outputs):
            try:
                found = self.run(runner, operation, variant, 0)
                again = self.run(runner, operation, variant, 1)
                for name, tensor in found.items():
                    _assert_same_bits(name, tensor, again[name])
            except Exception as error:
                raise AssertionError(f"{operation}, {variant or 'scheduled'}: {error}") from error
            yield variant, found


def check(spec: Spec, runner: Runner, oracles: Oracles, shares: Shares) -> None:
    """Everything the contract says of a well-formed problem; raises what is broken."""
    placed = Placed(spec, runner.device)
    p = placed.problem
    wanted = oracles.output(p.packing, p.given, p.ratio, p.coff)
    for variant, found in placed.every(runner, "forward"):
        with_name(variant, _check_output, spec, p, found["out"], wanted)
        if spec.gate:
            distinct = p.packing.computed + 1  # rows of padding all pool the same tokens
            shares.add(variant, "out", found["out"][:distinct], wanted.out[:distinct])

    placed.arena.restore(0)
    near = oracles.gradients(p.packing, p.given, p.ratio, p.coff)
    exact = None
    if p.ratio == LONG and spec.close:
        exact = oracles.gradients(p.packing, p.given, p.ratio, p.coff, torch.float64)
    for variant, found in placed.every(runner, "backward"):
        with_name(variant, _check_gradients, spec, p, found, near, exact)
        if spec.gate:
            for name in LARGE:
                shares.add(variant, name, found[name], getattr(near, name))
        if spec.accumulate and spec.ape:
            with_name(variant, _check_accumulation, placed, runner, variant, found)


def check_hostile(spec: Spec, runner: Runner) -> None:
    """Malformed prefixes give any values, but touch nothing outside the outputs."""
    placed = Placed(spec, runner.device)
    for operation in ("forward", "backward"):
        outputs = (placed.out,) if operation == "forward" else placed.grads[:2]
        for variant in runner.variants(operation, placed.problem, outputs):
            for surroundings in range(2):
                with_name(variant, placed.run, runner, operation, variant, surroundings)


def with_name(variant: str | None, call: Callable[..., object], *arguments: object) -> None:
    """Calls; an assertion that fails there names the variant."""
    try:
        call(*arguments)
    except AssertionError as error:
        raise AssertionError(f"{variant or 'scheduled'}: {error}") from error


def _check_output(spec: Spec, p: Problem, found: torch.Tensor, wanted: oracle.Output) -> None:
    if p.ratio != LONG:
        harness.assert_output(p, found, wanted, gate=spec.gate)
        return
    masks = tolerance.masks_differ("out", found, wanted.out)
    assert not masks, masks
    if spec.close:
        tolerance.assert_output(p, found, wanted, gate=spec.gate)
    elif spec.kind in BOUNDED and not spec.special:
        harness.assert_output(p, found, wanted)


def _check_gradients(
    spec: Spec,
    p: Problem,
    found: dict[str, torch.Tensor],
    near: oracle.Gradients,
    exact: oracle.Gradients | None,
) -> None:
    if p.ratio != LONG:
        for name in LARGE:
            harness.assert_equal(name, found[name], getattr(near, name))
        if "grad_ape" in found:
            harness.assert_grad_ape(found["grad_ape"], near, p.packing.computed, gate=spec.gate)
    else:
        for name in LARGE:
            masks = tolerance.masks_differ(name, found[name], getattr(near, name))
            assert not masks, masks
        for name, tensor in found.items() if exact is not None else ():
            _assert_near(name, tensor, getattr(near, name), getattr(exact, name), gate=spec.gate)
    if "grad_ape" in found:
        certain = near.grad_ape_scale.isnan()
        assert bool(found["grad_ape"].isnan()[certain].all()), "grad_ape lost a NaN"
    if "grad_ape" in found and spec.close:
        # Beyond, partial sums may overflow, and R leaves their order open.
        masks = tolerance.masks_differ("grad_ape", found["grad_ape"], near.grad_ape)
        assert not masks, masks
    stray = tolerance.not_zeroed(p, found["grad_kv"], found["grad_score"])
    assert not stray, stray


def _assert_near(
    name: str, found: torch.Tensor, wanted: torch.Tensor, exact: torch.Tensor, *, gate: bool
) -> None:
    """The tolerances of long windows where R and fp64 are finite; masks are another check."""
    numbers = wanted.isfinite() & exact.isfinite()
    tolerance.assert_tolerance(name, found[numbers], wanted[numbers], exact[numbers], gate=gate)


def _check_accumulation(
    placed: Placed, runner: Runner, variant: str | None, alone: dict[str, torch.Tensor]
) -> None:
    """A call that accumulates adds the finished sum once, and leaves the rest as it is."""
    random = torch.Generator().manual_seed(placed.spec.seed)
    before = torch.randn(alone["grad_ape"].shape, generator=random).to(runner.device)
    found = placed.run(runner, "backward", variant, 0, before)
    harness.assert_equal("grad_ape", found["grad_ape"], before + alone["grad_ape"])
    for name in LARGE:
        _assert_same_bits(name, found[name], alone[name])


def _assert_same_bits(name: str, one: torch.Tensor, two: torch.Tensor) -> None:
    bits = INTEGER[one.dtype.itemsize]
    tally.count("corpus, bits of a repeat", one.numel())
    differ = one.view(bits) != two.view(bits)
    if bool(differ.any()):
        first = tuple(differ.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(differ.sum())} elements differ between two runs in other surroundings "
            f"(unwritten, or read from outside), first at {first}: {one[first].item()!r} and "
            f"{two[first].item()!r}"
        )
