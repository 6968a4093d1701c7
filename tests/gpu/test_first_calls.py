# SPDX-License-Identifier: Apache-2.0
"""First calls inside captures, in fresh processes: a few of each kind (tools/capture_storm: many).

Each replays its graph for other packs and compares with direct calls.
"""

from itertools import product

import pytest

from gpu import storm
from gpu.storm import MODES, RATIOS, Job, Outcome

pytestmark = [pytest.mark.gpu, pytest.mark.L1]

COUNT = 3
CELLS = storm.cells("driver")
BARE = [
    Job("driver", mode, ratio, "forward", ("--bare",)) for mode, ratio in product(MODES, RATIOS)
]
AUTOGRAD = [Job("torch", mode, ratio, "autograd") for mode, ratio in product(MODES, RATIOS)]
CLASSES = [Job("torch", mode, ratio, "classes") for mode, ratio in product(MODES, RATIOS)]
LITTERED = [Job("torch", mode, ratio, "littered") for mode, ratio in product(MODES, RATIOS)]


def name(job: Job) -> str:
    """A test's."""
    return f"{job.mode}-{job.ratio}-{job.what}"


@pytest.fixture(scope="module")
def outcomes() -> dict[Job, list[Outcome]]:
    """All processes, several at a time: most of their time is importing and making a context."""
    found: dict[Job, list[Outcome]] = {}
    for outcome in storm.run([*CELLS * COUNT, *BARE, *AUTOGRAD, *CLASSES, *LITTERED]):
        found.setdefault(outcome.job, []).append(outcome)
    return found


def assert_sound(outcomes: list[Outcome], count: int) -> None:
    """All of them proved what they were started for."""
    assert len(outcomes) == count
    assert not [outcome.failure for outcome in outcomes if outcome.failure]


@pytest.mark.parametrize("job", CELLS, ids=name)
def test_first_call_inside_a_capture(job: Job, outcomes: dict[Job, list[Outcome]]) -> None:
    assert_sound(outcomes[job], COUNT)


@pytest.mark.parametrize("job", BARE, ids=name)
def test_first_call_inside_a_capture_from_a_thread_without_a_context(
    job: Job, outcomes: dict[Job, list[Outcome]]
) -> None:
    assert_sound(outcomes[job], 1)


@pytest.mark.parametrize("job", AUTOGRAD, ids=name)
def test_first_call_inside_a_capture_with_backward_on_the_autograd_thread(
    job: Job, outcomes: dict[Job, list[Outcome]]
) -> None:
    assert_sound(outcomes[job], 1)


@pytest.mark.parametrize("job", CLASSES, ids=name)
def test_drop_in_classes_may_be_loaded_inside_a_capture(
    job: Job, outcomes: dict[Job, list[Outcome]]
) -> None:
    assert_sound(outcomes[job], 1)


@pytest.mark.parametrize("job", LITTERED, ids=name)
def test_dropped_arrays_and_handles_and_collections_inside_a_capture_spoil_nothing(
    job: Job, outcomes: dict[Job, list[Outcome]]
) -> None:
    assert_sound(outcomes[job], 1)


def test_every_variant_may_be_the_first_call_of_a_capture() -> None:
    jobs = storm.variants()
    assert_sound(storm.run(jobs), len(jobs))
