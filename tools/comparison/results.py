# SPDX-License-Identifier: Apache-2.0
"""Both systems on the same inputs: gradients bit for bit, or within the tolerance of ratio 128."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from comparison.systems import OURS, PEER, System, wait
from csa_runtime.bench.record import said
from gpu.tolerance import MAX_ABS, SHARE
from support.eager import eager
from support.packs import Pack, random_pack

TENSORS = ("out", "grad_kv", "grad_score", "grad_ape")
BITWISE = (2, 4)  # ratios whose grad_kv and grad_score are equal bit for bit
GATE, STEEP, MASKED = "gate", "steep scores", "masked scores"
STEEP_STD = 40.0
# Every (ratio, coff, head_dim) costs the peer three compilations.
WINDOWS = tuple((r, c, d) for r in (2, 4, 128) for c in (1, 2) for d in (128, 512))
ODD_WINDOWS = ((2, 2, 96), (4, 1, 34))


@dataclass(frozen=True)
class Case:
    """A pack of `lengths`, `padding` rows beyond the real ones, `after` tokens behind the last."""

    name: str
    ratio: int
    coff: int
    head_dim: int
    lengths: tuple[int, ...]
    padding: int = 0
    after: int = 0
    kind: str = GATE

    @property
    def window(self) -> tuple[int, int, int]:
        """What costs the peer a compilation."""
        return self.ratio, self.coff, self.head_dim

    @property
    def title(self) -> str:
        """For people."""
        kind = "" if self.kind == GATE else f", {self.kind}"
        return f"{self.ratio}, {self.coff}, {self.head_dim}, {self.name}{kind}"


def packs(ratio: int, coff: int, head_dim: int) -> Iterator[Case]:
    """Every kind of pack for one window, small."""
    r = ratio
    mixed = (5 * r + 1, 0, r - 1, r, 2 * r, 3 * r + r - 1, 0, 0, 7 * r, 1)
    window = ratio, coff, head_dim
    yield Case("one segment", *window, (9 * r,))
    yield Case("ragged", *window, mixed)
    yield Case("ragged, padding rows and tokens", *window, mixed, padding=5, after=2 * r + 3)
    yield Case("shorter than ratio, padding rows", *window, (r - 1,) * 5, padding=3)
    yield Case("no rows", *window, (r - 1,) * 2)
    many = tuple((7 * i * r) // 5 % (4 * r) for i in range(150))
    yield Case("150 segments", *window, many, after=3)


def cases(device: str) -> Iterator[Case]:
    """All of them; on the CPU a few small ones."""
    windows = [*WINDOWS, *ODD_WINDOWS]
    if device == "cpu":
        windows = [(2, 1, 8), (4, 2, 8), (128, 2, 8)]
    for window in windows:
        small = list(packs(*window))
        yield from small
        if window[2] in (8, 128):
            yield from (replace(small[1], kind=kind) for kind in (STEEP, MASKED))
    if device == "cpu":
        return
    yield Case("3x8192", 4, 2, 128, (8192,) * 3)
    yield Case("3x8192", 4, 2, 512, (8192,) * 3)
    for coff in (1, 2):
        yield Case("1x65536", 128, coff, 128, (65536,))
        yield Case("1x131072", 128, coff, 512, (131072,))


def inputs(case: Case, device: str) -> Pack:
    """Its values, the same for the same case."""
    pack = random_pack(
        list(case.lengths),
        ratio=case.ratio,
        coff=case.coff,
        head_dim=case.head_dim,
        padding=case.padding,
        after=case.after,
        device=device,
        seed=case.ratio * 1000 + case.coff * 100 + len(case.lengths),
        score_std=STEEP_STD if case.kind == STEEP else 1.5,
    )
    if case.kind == MASKED:
        dice = torch.Generator(device=device).manual_seed(7)
        hidden = torch.rand(pack.score.shape, generator=dice, device=device) < 0.5
        pack.score.masked_fill_(hidden, -torch.inf)
    return pack


def by_wrappers(system: System, pack: Pack, deterministic: bool) -> tuple[Any, ...]:
    """All four results in new tensors."""
    window = {**pack.options, "head_dim": pack.head_dim}
    out = system.forward(*pack.inputs, **window, total_comp=pack.total_comp)["out"]
    grads = system.backward(*pack.inputs, pack.grad_out, **window, deterministic=deterministic)
    return out, grads["grad_kv"], grads["grad_score"], grads["grad_ape"]


def by_classes(system: System, pack: Pack, deterministic: bool) -> tuple[Any, ...]:
    """All four, written into NaN; `grad_ape` holds ones, which the atomic mode adds to."""
    samples = (*pack.inputs, pack.grad_out)
    ahead = system.Forward(*samples, **pack.options)
    back = system.Backward(*samples, **pack.options, deterministic=deterministic)
    for operation in (ahead, back):
        operation.check_support()
        operation.compile()
    out, grad_kv, grad_score = (
        torch.full_like(like, torch.nan) for like in (pack.grad_out, pack.kv, pack.kv)
    )
    grad_ape = torch.ones_like(pack.ape)
    ahead.execute(*pack.inputs, out)
    workspace = None
    if deterministic:
        size = back.scratch_workspace_bytes()
        workspace = torch.empty(size, dtype=torch.uint8, device=pack.kv.device)
    back.execute(*pack.inputs, pack.grad_out, grad_kv, grad_score, grad_ape, workspace=workspace)
    return out, grad_kv, grad_score, grad_ape if deterministic else grad_ape - 1


def compare(one: torch.Tensor, two: torch.Tensor) -> tuple[int, float]:
    """How many elements differ as numbers, NaN equal to NaN, and how far apart finite ones are."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return max(one.numel(), 1), float("inf")
    differ = (one != two) & ~(one.isnan() & two.isnan())
    finite = one.isfinite() & two.isfinite()
    apart = torch.where(finite, (one.double() - two.double()).abs(), 0.0)
    return int(differ.sum()), float(apart.max()) if apart.numel() else 0.0


def judge(case: Case, name: str, found: dict[str, Any]) -> str:
    """What of the contract two systems break that differ so; "" for nothing."""
    bitwise = case.ratio in BITWISE and name in ("grad_kv", "grad_score")
    differing, elements = found["differing"], found["elements"]
    if bitwise:
        if differing and found["ours_off_eager"] == 0:
            return f"{name}: the peer is off eager in {found['peer_off_eager']}, csa_runtime is not"
        return f"{name}: {differing} of {elements} differ" if differing else ""
    if case.kind != GATE:
        return ""
    if name != "grad_ape" and differing > max(1, SHARE * elements):
        return f"{name}: {differing} of {elements} differ"
    limit = MAX_ABS[name]
    return "" if found["max_abs"] <= limit else f"{name}: {found['max_abs']:.3g} apart"


Calls = Callable[[System, Pack, bool], tuple[Any, ...]]


def run(
    case: Case, systems: tuple[System, System], path: Calls, deterministic: bool, device: str
) -> dict[str, Any]:
    """One case through one path of both; what a system raises is recorded."""
    pack = inputs(case, device)
    record: dict[str, Any] = {
        "case": case.title,
        "window": case.window,
        "kind": case.kind,
        "path": path.__name__.removeprefix("by_"),
        "deterministic": deterministic,
        "rows": pack.total_comp,
        "tensors": {},
        "broken": [],
    }
    found = {}
    for system in systems:
        begin = time.perf_counter()
        try:
            found[system.name] = path(system, pack, deterministic)
            wait(device)
        except Exception as error:
            record["broken"].append(f"{system.name}: {said(error)}")
        record[f"{system.name}_seconds"] = time.perf_counter() - begin
    if len(found) < len(systems):
        return record
    reference = eager(pack)
    for name, ours, theirs, wanted in zip(
        TENSORS, found[OURS], found[PEER], reference, strict=True
    ):
        differing, max_abs = compare(ours, theirs)
        tensor = {
            "elements": ours.numel(),
            "differing": differing,
            "max_abs": max_abs,
            "ours_off_eager": compare(ours, wanted)[0],
            "peer_off_eager": compare(theirs, wanted)[0],
        }
        record["tensors"][name] = tensor
        verdict = judge(case, name, tensor)
        record["broken"] += [verdict] if verdict else []
    return record


def compare_results(
    systems: tuple[System, System], device: str, show: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Every case through the wrappers, the ragged ones through the classes too."""
    records = []
    for case in cases(device):
        paths: list[Calls] = [by_wrappers]
        if "ragged" in case.name and case.kind == GATE:
            paths.append(by_classes)
        for path in paths:
            for deterministic in (False, True):
                records.append(run(case, systems, path, deterministic, device))
    show("Elements in which the two differ, of how many, and the largest distance; in brackets how")
    show("many of the peer's and of csa_runtime's differ from eager autograd.\n")
    show(f"| ratio, coff, d, values | runs | {' | '.join(TENSORS)} |")
    show(f"| {' | '.join(['---'] * (len(TENSORS) + 2))} |")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        ratio, coff, head_dim = record["window"]
        for window in (f"{ratio}, {coff}, {head_dim}", f"all of ratio {ratio}"):
            groups.setdefault((window, record["kind"]), []).append(record)
    for (window, kind), group in sorted(groups.items(), key=lambda item: item[0][0][0] == "a"):
        compared = [r["tensors"] for r in group if r["tensors"]]
        cells = [pooled(name, [tensors[name] for tensors in compared]) for name in TENSORS]
        show(f"| {window}, {kind} | {len(group)} | {' | '.join(cells)} |")
    remarks = [f"- {called(r)}: {text}" for r in records for text in r["broken"]]
    show(f"\n{len(records)} runs compared, {len(remarks)} remarks")
    for remark in remarks:
        show(remark)
    return records


def called(record: dict[str, Any]) -> str:
    """A run in words."""
    how = " deterministic" if record["deterministic"] else ""
    return f"{record['case']}, {record['path']}{how}"


def pooled(name: str, tensors: list[dict[str, Any]]) -> str:
    """One tensor over several runs."""
    if not tensors:
        return "-"
    total = {key: sum(t[key] for t in tensors) for key in tensors[0]}
    off = f" ({total['peer_off_eager']:,} / {total['ours_off_eager']:,})"
    if name == "grad_ape":  # a sum in another order than eager's
        off = ""
    if not total["differing"]:
        return f"equal, {total['elements']:,}{off}"
    share = total["differing"] / total["elements"]
    apart = max(t["max_abs"] for t in tensors)
    return f"{total['differing']:,} of {total['elements']:,}, {share:.4%}, {apart:.2g}{off}"
