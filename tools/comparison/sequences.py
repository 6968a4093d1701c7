# SPDX-License-Identifier: Apache-2.0
"""Calls in an unusual order, or with sound arguments of another shape than the samples'."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from comparison.bad_arguments import READ, Arguments
from comparison.systems import System

DETERMINISTIC_MODE, WORKSPACE_BYTES = 8, 15
GRADS = ("grad_kv", "grad_score", "grad_ape")


class Sequence(NamedTuple):
    """What is called, and the number of the difference that explains another answer."""

    run: Callable[[System, Arguments], Any]
    known: int | None = None


def _forward(system: System, a: Arguments) -> Any:
    return system.Forward(*_read(a), a["out"], ratio=a["ratio"], coff=a["coff"])


def _backward(system: System, a: Arguments, deterministic: bool = True) -> Any:
    options = {"ratio": a["ratio"], "coff": a["coff"], "deterministic": deterministic}
    return system.Backward(*_read(a), a["grad_out"], **options)


def _read(a: Arguments) -> list[Any]:
    return [a[name] for name in READ]


def _run_forward(made: Any, a: Arguments) -> None:
    made.execute(*_read(a), a["out"])


def _run_backward(made: Any, a: Arguments, workspace: Any) -> None:
    made.execute(*_read(a), a["grad_out"], *(a[g] for g in GRADS), workspace=workspace)


def _ready(made: Any) -> Any:
    made.check_support()
    made.compile()
    return made


def _compiled_unchecked(system: System, a: Arguments) -> None:
    made = _forward(system, a)
    made.compile()
    _run_forward(made, a)


def _checked_only(system: System, a: Arguments) -> None:
    made = _forward(system, a)
    made.check_support()
    _run_forward(made, a)


def _twice(system: System, a: Arguments) -> None:
    made = _ready(_ready(_forward(system, a)))
    _run_forward(made, a)
    _run_forward(made, a)


def _longer(system: System, a: Arguments) -> None:
    """A call with more tokens than the samples had."""
    made = _ready(_forward(system, a))
    more = {name: torch.cat([a[name], a[name]]) for name in ("kv", "score")}
    _run_forward(made, a | more)


def _more_segments(system: System, a: Arguments) -> None:
    """A call with one segment more than the samples had, an empty one."""
    made = _ready(_forward(system, a))
    more = {name: torch.cat([a[name], a[name][-1:]]) for name in READ[3:]}
    _run_forward(made, a | more)


def _meta_samples(system: System, a: Arguments) -> None:
    _run_forward(_ready(_forward(system, {**a, **_on_meta(a)})), a)


def _on_meta(a: Arguments) -> Arguments:
    return {name: a[name].to("meta") for name in (*READ, "out")}


@contextmanager
def _deterministic_mode(warn_only: bool) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _mode(warn_only: bool, deterministic: bool) -> Callable[[System, Arguments], Any]:
    """The backward wrapper in torch's deterministic mode."""

    def run(system: System, a: Arguments) -> None:
        with _deterministic_mode(warn_only):
            system.backward(
                *_read(a), a["grad_out"], ratio=a["ratio"], coff=a["coff"],
                deterministic=deterministic,
            )  # fmt: skip

    return run


def _class_in_mode(system: System, a: Arguments) -> None:
    made = _ready(_backward(system, a, False))
    with _deterministic_mode(False):
        _run_backward(made, a, None)


def _names(results: Any, *names: str) -> None:
    """Results by name, in order and as a mapping."""
    assert [*results.keys()] == list(names)
    assert all(results[name] is one for name, one in zip(names, tuple(results), strict=True))


def _backward_names(system: System, a: Arguments) -> None:
    options = {"ratio": a["ratio"], "coff": a["coff"]}
    _names(system.backward(*_read(a), a["grad_out"], **options), *GRADS)


SEQUENCES: dict[str, Sequence] = {
    "forward execute at once": Sequence(lambda s, a: _run_forward(_forward(s, a), a)),
    "backward execute at once": Sequence(
        lambda s, a: _run_backward(_backward(s, a), a, a["workspace"])
    ),
    "forward execute after check_support alone": Sequence(_checked_only),
    "forward compile without check_support": Sequence(_compiled_unchecked),
    "check_support, compile and execute twice": Sequence(_twice),
    "forward execute with more tokens than the samples": Sequence(_longer),
    "forward execute with more segments than the samples": Sequence(_more_segments),
    "forward from meta samples": Sequence(_meta_samples),
    "scratch_workspace_bytes at once": Sequence(
        lambda s, a: _backward(s, a).scratch_workspace_bytes(), WORKSPACE_BYTES
    ),
    "scratch_workspace_bytes of a forward": Sequence(
        lambda s, a: _ready(_forward(s, a)).scratch_workspace_bytes(), WORKSPACE_BYTES
    ),
    "deterministic mode, backward wrapper": Sequence(_mode(False, False), DETERMINISTIC_MODE),
    "deterministic mode, deterministic backward wrapper": Sequence(_mode(False, True)),
    "deterministic mode that warns, backward wrapper": Sequence(
        _mode(True, False), DETERMINISTIC_MODE
    ),
    "deterministic mode, backward execute": Sequence(_class_in_mode, DETERMINISTIC_MODE),
    "forward wrapper without total_comp": Sequence(lambda s, a: s.forward(*_read(a))),
    "forward result by name and in order": Sequence(
        lambda s, a: _names(s.forward(*_read(a), total_comp=a["rows"]), "out")
    ),
    "backward results by name and in order": Sequence(_backward_names),
}
