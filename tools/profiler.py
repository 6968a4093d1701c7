# SPDX-License-Identifier: Apache-2.0
"""Calls under Nsight Compute (`ncu`): made, counted and read; for `traffic` and `counters`."""

from __future__ import annotations

import csv
import math
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from csa_runtime.bench.packs import CALLS, Pack

# All counters of a kernel in one line, in bytes and nanoseconds, at whatever clocks there are.
OPTIONS = (
    "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off",
    "--clock-control", "none",
)  # fmt: skip
MAIN = ("csa_forward_", "csa_backward_")

Counters = dict[str, float]
Kernel = tuple[str, Counters]


class Printed(NamedTuple):
    """What the profiler wrote to stdout and to stderr, and its exit status."""

    out: str
    err: str
    status: int

    @property
    def text(self) -> str:
        """Both, each on lines of its own."""
        return self.out.rstrip("\n") + "\n" + self.err

    @property
    def complaints(self) -> list[str]:
        """The profiler's own lines, complaints among them."""
        return [line for line in self.text.splitlines() if line.startswith("==")]

    def failed(self, ncu: str, error: Exception) -> RuntimeError:
        """An error to raise where this has not what was asked for, with the end of the text."""
        tail = "\n".join(self.text.splitlines()[-20:])
        return RuntimeError(f"{ncu} ended with {self.status}: {error}\n{tail}")


def run(ncu: str, options: Iterable[str], program: list[str], raw: Path | None = None) -> Printed:
    """The program under the profiler; raw: a file to keep all that was printed."""
    command = [ncu, *OPTIONS, *options, *program]
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    printed = Printed(done.stdout, done.stderr, done.returncode)
    if raw:
        raw.write_text(printed.text)
    return printed


def launch(packs: Iterable[Pack], before: int = 1, variant: str | None = None) -> None:
    """In that program: a forward and a backward of each pack, counted after `before` uncounted.

    variant: forced where it serves.
    """
    import torch

    from csa_runtime.bench.ours import Ours
    from csa_runtime.bench.problem import Problem

    profiler: Any = torch.cuda.cudart()
    for pack in packs:
        problem = Problem(pack)
        calls = Ours(variant).calls(problem)
        for call in CALLS:
            for _ in range(before):
                calls[call]()
            torch.cuda.synchronize()
            profiler.cudaProfilerStart()
            calls[call]()
            torch.cuda.synchronize()
            profiler.cudaProfilerStop()
        del problem, calls
        torch.cuda.empty_cache()  # or the profiler saves and restores it with the next pack's


def parse(text: str) -> list[Kernel]:
    """Kernels in launch order and their counters, by name, all that are numbers.

    Raises:
        ValueError: there is no table in it.
    """
    lines = text.splitlines()
    head = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if head is None:
        raise ValueError("the profiler printed no table")
    found = []
    for row in csv.DictReader(lines[head:], restkey=""):
        if row["ID"] and row["ID"].isdigit():  # below the headings stand the units
            del row["ID"]
            name = row.pop("Kernel Name")
            values = {key: number(cell) for key, cell in row.items() if key}
            found.append((name, {key: v for key, v in values.items() if v is not None}))
    return found


def number(text: str | None) -> float | None:
    """`1,234.5`; None for what was not measured."""
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def per_call(kernels: Iterable[Kernel]) -> list[list[Kernel]]:
    """The kernels of each call: what finishes a backward belongs to it."""
    calls: list[list[Kernel]] = []
    for name, counters in kernels:
        if any(main in name for main in MAIN) or not calls:
            calls.append([])
        calls[-1].append((name, counters))
    return calls


def first_of(counters: Counters, names: Iterable[str]) -> float | None:
    """The first of these counters that there is."""
    return next((counters[name] for name in names if name in counters), None)


def markdown(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table."""
    lines = [headings, tuple("---" for _ in headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
