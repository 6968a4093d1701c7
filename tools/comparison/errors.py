# SPDX-License-Identifier: Apache-2.0
"""Both systems given the same wrong arguments: what each raises, and where."""

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from comparison.bad_arguments import CASES, MISSING, READ, WIDE, Arguments, Case
from comparison.sequences import SEQUENCES, Sequence
from comparison.systems import OURS, PEER, System, wait
from csa_runtime.bench.record import said
from support.packs import random_pack

WINDOW = {"ratio": 4, "coff": 2}
HEAD_DIM = 128
LENGTHS = [37, 0, 3, 60]
GRADS = ("grad_out", "grad_kv", "grad_score", "grad_ape")
SERVED, NOT_ASKED = "served", "not asked"
# What Python raises where a value is used for what it is not: nobody documents or handles these.
ACCIDENTS, NO_ARRAY = ("AttributeError", "TypeError"), 16
Steps = list[tuple[str, Callable[[], Any]]]


class Answer(NamedTuple):
    """`kind`: "served" or an exception's type, `base` what that derives from, `stage` where."""

    kind: str
    stage: str
    text: str = ""
    base: tuple[str, ...] = ()


def sound(system: System, device: str) -> Arguments:
    """Arguments that both serve, new for each call."""
    pack = random_pack(LENGTHS, **WINDOW, head_dim=HEAD_DIM, padding=2, device=device)
    back = system.Backward(*pack.inputs, pack.grad_out, **WINDOW, deterministic=True)
    back.check_support()
    size = max(32, back.scratch_workspace_bytes())
    return {
        **dict(zip(READ, pack.inputs, strict=True)),
        "out": torch.empty_like(pack.grad_out),
        "grad_out": pack.grad_out,
        "grad_kv": torch.empty_like(pack.kv),
        "grad_score": torch.empty_like(pack.kv),
        "grad_ape": torch.zeros_like(pack.ape),
        "workspace": torch.empty(size, dtype=torch.uint8, device=device),
        "deterministic": True,
        "head_dim": HEAD_DIM,
        "total_comp": pack.total_comp,
        "rows": pack.total_comp,
        "stream": None,
        "streams": _streams,
        "colour": MISSING,
        **WINDOW,
    }


def _streams() -> tuple[Any, Any]:
    """A stream of torch's pool, and the same as cuda.bindings has it."""
    from cuda.bindings import driver

    stream = torch.cuda.Stream()
    return stream, driver.CUstream(stream.cuda_stream)


def _given(a: Arguments, names: tuple[str, ...], prefix: str = "") -> Arguments:
    """Those arguments, without the ones left out."""
    return {prefix + name: a[name] for name in names if a[name] is not MISSING}


class Call(NamedTuple):
    """One way to reach an operation: the arguments it takes, and its steps by name."""

    takes: tuple[str, ...]
    steps: Callable[[System, Arguments, Arguments], Steps]


# "colour" is an argument that no call has.
FORWARD = (*READ, "ratio", "head_dim", "coff", "total_comp", "stream", "colour")
BACKWARD = (*READ, "grad_out", "ratio", "head_dim", "coff", "stream", "deterministic", "colour")


def _wrapper(direction: str, takes: tuple[str, ...]) -> Call:
    def steps(system: System, a: Arguments, _: Arguments) -> Any:
        return [("call", lambda: getattr(system, direction)(**_given(a, takes)))]

    return Call(takes, steps)


def _samples(kind: str, last: str, options: tuple[str, ...]) -> Call:
    def steps(system: System, a: Arguments, _: Arguments) -> Any:
        given = _given(a, READ, "sample_") | _given(a, options)
        if a[last] is not MISSING:
            given["sample_out"] = a[last]
        made: list[Any] = []
        return [
            ("init", lambda: made.append(getattr(system, kind)(**given))),
            ("check_support", lambda: made[0].check_support()),
            ("compile", lambda: made[0].compile()),
        ]

    return Call((*READ, last, *options), steps)


def _execute(kind: str, results: tuple[str, ...], last: str) -> Call:
    takes = (*READ, *results, "stream", "colour", *(["workspace"] if kind == "Backward" else []))

    def steps(system: System, a: Arguments, good: Arguments) -> Any:
        options = dict(WINDOW)
        given = _given(a, (*READ, *results, "colour"))
        if kind == "Backward":
            options["deterministic"] = a["deterministic"]
            given["workspace"] = a["workspace"]
        if a["stream"] is not None:
            given["current_stream"] = a["stream"]
        made = getattr(system, kind)(*(good[name] for name in (*READ, last)), **options)
        made.check_support()
        made.compile()
        return [("execute", lambda: made.execute(**given))]

    return Call(takes, steps)


CALLS: dict[str, Call] = {
    "forward wrapper": _wrapper("forward", FORWARD),
    "backward wrapper": _wrapper("backward", BACKWARD),
    "forward samples": _samples("Forward", "out", ("ratio", "coff", "colour")),
    "backward samples": _samples(
        "Backward", "grad_out", ("ratio", "coff", "deterministic", "colour")
    ),
    "forward execute": _execute("Forward", ("out",), "out"),
    "backward execute": _execute("Backward", GRADS, "grad_out"),
}


def attempt(steps: Steps, device: str) -> Answer:
    """Runs the steps until one raises."""
    for stage, step in steps:
        try:
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                step()
            wait(device)
        except Exception as error:
            base = tuple(kind.__name__ for kind in type(error).__mro__)
            return Answer(type(error).__name__, stage, said(error, 300), base)
    loud = [w for w in heard if issubclass(w.category, UserWarning)]
    return Answer(f"{SERVED}, {loud[0].category.__name__}" if loud else SERVED, "")


def ask(system: System, device: str, steps: Callable[[Arguments], Steps]) -> Answer:
    """One system's answer to steps made from sound arguments."""
    try:
        made = steps(sound(system, device))
    except Exception as error:
        return Answer(NOT_ASKED, "", said(error, 300))
    return attempt(made, device)


def asked(system: System, call: Call, case: Case, device: str) -> Answer:
    """One system's answer to one case through one call."""
    return ask(system, device, lambda good: call.steps(system, good | case.change(good), good))


def asked_in_order(system: System, sequence: Sequence, device: str) -> Answer:
    """One system's answer to a sequence of calls."""
    return ask(system, device, lambda good: [("", lambda: sequence.run(system, good))])


def agree(peer: Answer, ours: Answer) -> bool:
    """Whether code that handles the peer's answer handles this one."""
    if NOT_ASKED in (peer.kind, ours.kind):
        return False
    return peer.kind == ours.kind or peer.kind in ours.base


def difference(case: Case | Sequence, argument: str, peer: Answer, ours: Answer) -> int | None:
    """The number of the difference that explains another answer than the peer's."""
    if ours.kind == SERVED:
        return case.known
    if not isinstance(case, Case) or ours.kind != "ValueError":
        return None
    if not re.search(rf"\b{argument}\b", ours.text):
        return None
    return NO_ARRAY if peer.kind in ACCIDENTS else case.refused


def verdict(case: Case | Sequence, argument: str, peer: Answer, ours: Answer) -> str:
    """What a comparison says, in a word."""
    if agree(peer, ours):
        return "same" if peer.stage == ours.stage else "other stage"
    if NOT_ASKED in (peer.kind, ours.kind):
        return "NEW"
    known = difference(case, argument, peer, ours)
    return "NEW" if known is None else f"known ({known})"


def record_of(
    name: str, call: str, case: Case | Sequence, argument: str, answers: dict[str, Answer]
) -> Any:
    """A comparison, as JSON has it."""
    return {
        "case": name,
        "call": call,
        "verdict": verdict(case, argument, answers[PEER], answers[OURS]),
        **{who: answer._asdict() for who, answer in answers.items()},
    }


def compared(
    systems: tuple[System, System], device: str, show: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Every case through every call that takes its argument, then the sequences of calls."""
    for name, case in CASES.items():
        if case.known == WIDE and device == "cpu":
            continue
        try:
            first = next(iter(case.change(sound(systems[1], device))))
        except Exception as error:
            show(f"{name}: not asked, {said(error)}\n")
            continue
        for title, call in CALLS.items():
            if first in call.takes:
                answers = {s.name: asked(s, call, case, device) for s in systems}
                yield record_of(name, title, case, first, answers)
    for name, sequence in SEQUENCES.items():
        answers = {s.name: asked_in_order(s, sequence, device) for s in systems}
        yield record_of(name, "sequence", sequence, "", answers)


def compare_errors(
    systems: tuple[System, System], device: str, show: Callable[[str], None]
) -> list[dict[str, Any]]:
    """All answers, and a table of those that differ; ends where the device stops answering."""
    records = []
    for record in compared(systems, device, show):
        records.append(record)
        try:
            wait(device)
        except Exception as error:
            show(f"The device is lost after {record['case']}, {record['call']}: {said(error)}\n")
            break
    for text in table(records):
        show(text)
    return records


def cell(answer: dict[str, Any]) -> str:
    """An answer in a table."""
    return f"{answer['kind']} ({answer['stage']})" if answer["stage"] else str(answer["kind"])


def table(records: list[dict[str, Any]]) -> list[str]:
    """The answers that differ, the unexplained first, and how many do not."""
    lines = [
        "| arguments | call | peer | csa_runtime | verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    differing = [r for r in records if r["verdict"] != "same"]
    order = {"NEW": 0, "other stage": 2}
    for r in sorted(differing, key=lambda r: order.get(r["verdict"], 1)):
        cells = (r["case"], r["call"], cell(r[PEER]), cell(r[OURS]), r["verdict"])
        lines.append(f"| {' | '.join(cells)} |")
    counts = [f"{sum(r['verdict'] == v for r in records)} {v}" for v in ("same", "NEW")]
    known = sum(r["verdict"].startswith("known") for r in records)
    stage = sum(r["verdict"] == "other stage" for r in records)
    return [
        *lines,
        "",
        f"{len(records)} answers compared: {', '.join(counts)}, {known} known, "
        f"{stage} of the same type at another stage",
    ]
