# SPDX-License-Identifier: Apache-2.0
"""Many fresh processes, each of whose first call is inside a capture. Imports no framework."""

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

import csa_runtime
from csa_runtime import _native
from gpu import names
from gpu.processes import SCRIPTS, finish, start

MODES = ("global", "thread_local", "relaxed")
RATIOS = (4, 128)
DIRECTIONS = ("forward", "backward")
PROOF = "replays equal direct calls"


@dataclass(frozen=True)
class Job:
    """What one process does.

    through: "driver" for the pointer API and cuda.bindings, "torch" for the array calls and
    torch.cuda.graph. what: a direction; for torch a name of the script's CAPTURED.
    more: further arguments of capture_once.py, for "driver" alone.
    """

    through: str
    mode: str
    ratio: int
    what: str
    more: tuple[str, ...] = ()

    def arguments(self) -> tuple[str, ...]:
        """The script's name and its command line."""
        if self.through == "torch":
            return "first_call_in_capture.py", self.mode, str(self.ratio), self.what
        words = ("--mode", self.mode, "--ratio", str(self.ratio), "--direction", self.what)
        return "capture_once.py", *words, *self.more


@dataclass(frozen=True)
class Outcome:
    """How a process ended: seconds it took, and what it said if it failed, else ""."""

    job: Job
    seconds: float
    failure: str


def cells(through: str) -> list[Job]:
    """Each capture mode, family and direction."""
    return [Job(through, *cell) for cell in product(MODES, RATIOS, DIRECTIONS)]


def _finish_job(variant: str, mode: str) -> Job:
    """A backward small or large enough to be finished by `variant` on this device."""
    _, capability, limit = names.device()
    for power in range(3, 20):
        explained = csa_runtime.explain(
            "backward", ratio=4, coff=1, head_dim=1 << power, total_tokens=80, total_comp=22,
            segments=5, compute_capability=capability, shared_limit=limit,
        )  # fmt: skip
        if explained["launches"][-1]["variant"] == variant:
            more = ("--coff", "1", "--head-dim", str(1 << power), "--expect", variant)
            return Job("driver", mode, 4, "backward", more)
    raise AssertionError(f"no backward is finished by {variant}")


def variants() -> list[Job]:
    """Each variant of this device once, forced by name; capture modes in turn."""
    records = {record["name"]: record for record in _native.bundle_info()["variants"]}
    jobs = []
    for number, name in enumerate(names.shipped()):
        mode, record = MODES[number % len(MODES)], records[name]
        if record["operation"] == "finish":
            jobs.append(_finish_job(name, mode))
            continue
        more = ("--coff", str(record["coff"]), "--variant", name, "--expect", name)
        jobs.append(Job("driver", mode, record["ratio"], record["operation"], more))
    return jobs


def run_one(job: Job, seconds: float = 120) -> Outcome:
    """Runs one process to its end."""
    script, *words = job.arguments()
    begin = time.monotonic()
    try:
        log = finish(start(SCRIPTS / script, *words), seconds)
        failure = "" if PROOF in log else f"ended without a word:\n{log}"
    except AssertionError as error:
        failure = str(error)
    return Outcome(job, time.monotonic() - begin, failure)


def run(jobs: Iterable[Job], at_once: int = 8) -> list[Outcome]:
    """Runs them, `at_once` at a time; outcomes in the jobs' order."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(run_one, jobs))
