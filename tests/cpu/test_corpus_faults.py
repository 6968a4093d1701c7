# SPDX-License-Identifier: Apache-2.0
"""The net of random problems finds faults planted in what the CPU reference computes."""

import functools
from collections.abc import Callable

import pytest
import torch

from gpu import corpus, problems
from gpu.corpus import Spec
from gpu.corpus_check import Shares, check, check_hostile
from gpu.harness import Problem
from support.corpus_reference import ORACLES, Reference, own_tally

pytestmark = pytest.mark.L0
__all__ = ["own_tally"]  # a fixture of every test here

WINDOWS = [*problems.CONFIGS, *problems.LONG_CONFIGS]
CONFIGS = pytest.mark.parametrize(("ratio", "coff"), WINDOWS)
ELEMENTS = (500, 3_000)
Written = tuple[torch.Tensor, ...]


@functools.cache
def ordinary(ratio: int, coff: int) -> Spec:
    """The first problem in which every kind of fault has a place."""

    def fits(spec: Spec) -> bool:
        outputs = ("out", "grad_kv", "grad_score")
        return (
            spec.gate
            and spec.ape
            and spec.accumulate
            and not spec.joined
            and 3 <= spec.packing.computed <= spec.packing.rows
            and spec.packing.tokens > spec.packing.cu_seqlens[-1]
            and all(spec.places[name].stride > spec.width for name in outputs)
        )

    drawn = (corpus.draw(seed, ratio, coff, ELEMENTS) for seed in range(100_000))
    return next(spec for spec in drawn if fits(spec))


def around(view: torch.Tensor, words: int) -> torch.Tensor:
    """The 16-bit word so far after a tensor's first one."""
    everything = torch.empty(0, dtype=torch.int16).set_(view.untyped_storage())
    return everything[(view.data_ptr() - everything.data_ptr()) // 2 + words :][:1]


def bits(view: torch.Tensor) -> torch.Tensor:
    """A tensor of 16-bit floats as integers."""
    return view.view(torch.int16)


def wrong_element(runner: Reference, p: Problem, written: Written) -> None:
    written[0][1, 0] += 0.5


def wrong_bit(runner: Reference, p: Problem, written: Written) -> None:
    bits(written[1])[p.packing.cu_seqlens[-1] - 1, -1] ^= 4


def wrong_ape_gradient(runner: Reference, p: Problem, written: Written) -> None:
    written[2][-1, -1] += 0.01


def lost_row(runner: Reference, p: Problem, written: Written) -> None:
    bits(written[0])[2].fill_(around(written[0], -1).item())


def unwritten_tail(runner: Reference, p: Problem, written: Written) -> None:
    bits(written[1])[-1, -1] = around(written[1], -1)[0]


def minus_zero(runner: Reference, p: Problem, written: Written) -> None:
    written[0][-1, 0] = -0.0


def word_before(runner: Reference, p: Problem, written: Written) -> None:
    around(written[0], -1).fill_(7)


def word_behind(runner: Reference, p: Problem, written: Written) -> None:
    last = written[-1]
    rows, width = last.shape
    words = ((rows - 1) * last.stride(0) + width) * last.itemsize // 2
    around(last, words).fill_(7)


def word_between_rows(runner: Reference, p: Problem, written: Written) -> None:
    around(written[0], written[0].shape[1]).fill_(7)


def changed_input(runner: Reference, p: Problem, written: Written) -> None:
    bits(p.given.score)[-1, -1] ^= 1


def changed_prefix(runner: Reference, p: Problem, written: Written) -> None:
    p.cu_seqlens_comp[-1] += 1


def other_output(runner: Reference, p: Problem, written: Written) -> None:
    """A forward writes to what lies between its output and the gradients."""
    view = written[0]
    around(view, view.shape[0] * view.stride(0) + 300).fill_(7)


def stray_read(runner: Reference, p: Problem, written: Written) -> None:
    if around(p.given.kv, -1).item() == -1:
        bits(written[0])[0, 0] += 1


def other_bits_next_time(runner: Reference, p: Problem, written: Written) -> None:
    bits(written[0])[0, 0] += runner.calls % 2


def added_twice(runner: Reference, p: Problem, written: Written) -> None:
    if runner.calls == 2:  # the third run accumulates
        written[2][0, 0] += 1.0


FAULTS: list[tuple[str, Callable[[Reference, Problem, Written], None], str]] = [
    ("forward", wrong_element, "out"),
    ("backward", wrong_element, "grad_kv"),
    ("backward", wrong_ape_gradient, "grad_ape"),
    ("forward", lost_row, "unwritten"),
    ("backward", lost_row, "unwritten"),
    ("backward", unwritten_tail, "unwritten"),
    ("backward", minus_zero, "not [+]0"),
    *((operation, word_before, "outside the outputs") for operation in ("forward", "backward")),
    *((operation, word_behind, "behind") for operation in ("forward", "backward")),
    *((operation, word_between_rows, "behind row 0") for operation in ("forward", "backward")),
    ("forward", changed_input, "in score at"),
    ("backward", changed_input, "in score at"),
    ("backward", changed_prefix, "in cu_seqlens_comp at"),
    ("forward", other_output, "outside the outputs"),
    ("forward", stray_read, "other surroundings"),
    ("backward", stray_read, "other surroundings"),
    ("forward", other_bits_next_time, "between two runs"),
    ("backward", other_bits_next_time, "between two runs"),
    ("backward", added_twice, "grad_ape: 1 of"),
]


@CONFIGS
def test_what_the_faults_are_planted_in_is_sound(ratio: int, coff: int) -> None:
    check(ordinary(ratio, coff), Reference(), ORACLES, Shares())


@CONFIGS
@pytest.mark.parametrize(
    ("operation", "fault", "message"), FAULTS, ids=lambda x: getattr(x, "__name__", x)
)
def test_planted_fault_is_found(
    operation: str, fault: Callable[..., None], message: str, ratio: int, coff: int
) -> None:
    with pytest.raises(AssertionError, match=message):
        check(ordinary(ratio, coff), Reference(operation, fault), ORACLES, Shares())


@pytest.mark.parametrize(("ratio", "coff"), problems.CONFIGS)
def test_one_wrong_bit_of_a_short_windows_gradient_is_found(ratio: int, coff: int) -> None:
    with pytest.raises(AssertionError, match="grad_score: 1 of"):
        check(ordinary(ratio, coff), Reference("backward", wrong_bit), ORACLES, Shares())


def loses_nan(runner: Reference, p: Problem, written: Written) -> None:
    for tensor in written:
        tensor.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


@CONFIGS
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_a_number_where_r_has_nan_is_found(operation: str, ratio: int, coff: int) -> None:
    drawn = (corpus.draw(seed, ratio, coff, ELEMENTS) for seed in range(100_000))
    spec = next(
        s
        for s in drawn
        if s.kind == "gate" and "score" in s.special and s.rate == 2.0 and s.packing.computed > 5
    )
    check(spec, Reference(), ORACLES, Shares())
    with pytest.raises(AssertionError):
        check(spec, Reference(operation, loses_nan), ORACLES, Shares())


@CONFIGS
@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("fault", [word_before, word_behind, changed_prefix])
def test_harm_under_hostile_prefixes_is_found(
    operation: str, fault: Callable[..., None], ratio: int, coff: int
) -> None:
    drawn = (corpus.hostile(seed, ratio, coff) for seed in range(1000))
    spec = next(s for s in drawn if s.packing.rows and s.ape)
    with pytest.raises(AssertionError, match="outside the outputs"):
        check_hostile(spec, Reference(operation, fault))
