# SPDX-License-Identifier: Apache-2.0
"""What a run found: one row a time, and what the times depend on; written and read as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from csa_runtime.bench.packs import CALLS, Pack

SCHEMA = 1
OURS, EAGER, PEER = "csa_runtime", "eager", "peer"
COPY, TWIN = "copy", "twin"  # what moves the same bytes: by the driver, by a kernel of this mix
LARGE_COPY = 50e6  # bytes moved; from here on all copies of a GPU should be about as fast
SLOW_COPY = 4 / 5  # of the speed of another copy, as large or larger


def said(error: BaseException, limit: int = 160) -> str:
    """An exception in one line, fit for a table."""
    line = " ".join(f"{type(error).__name__}: {error}".replace("|", "/").split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


class Key(NamedTuple):
    """What was measured: no two rows of a record have the same."""

    section: str
    pack: str
    system: str
    call: str


@dataclass(frozen=True)
class Row:
    """Microseconds of one call by one system, or why there are none."""

    section: str
    pack: str
    system: str
    call: str
    us: float | None
    kernels: dict[str, float] = field(default_factory=dict)  # us, by kernel
    error: str = ""
    note: str = ""

    @property
    def key(self) -> Key:
        """Its place in a record."""
        return Key(self.section, self.pack, self.system, self.call)


@dataclass(frozen=True)
class Sizes:
    """Of a pack: bytes are those moved, forward and backward."""

    ratio: int
    coff: int
    head_dim: int
    tokens: int
    segments: int
    bytes: dict[str, int]

    @property
    def window(self) -> str:
        """As tables show it."""
        return f"{self.ratio}, {self.coff}, {self.head_dim}"


@dataclass
class Record:
    """A run.

    machine: gpu, torch and more, all that times depend on. systems: what each is, or why it was
    left out. seconds: of each section. packs: by name. rows: in the order measured.
    """

    machine: dict[str, str] = field(default_factory=dict)
    systems: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    packs: dict[str, Sizes] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def add(self, pack: Pack, row: Row) -> None:
        """A row, and its pack."""
        self.packs[pack.name] = Sizes(
            *pack[:3], pack.tokens, pack.segments, {call: pack.bytes(call) for call in CALLS}
        )
        self.rows.append(row)

    def times(self) -> dict[Key, float]:
        """Microseconds of what could be measured."""
        return {row.key: row.us for row in self.rows if row.us is not None}

    def slow_copies(self) -> set[Key]:
        """Copies that say nothing: large, and far slower than another of as many bytes or more.

        In graphs the driver copies some sizes at two thirds of its speed. Copies of fewer bytes may
        be faster for a reason, where the second-level cache holds them.
        """
        copies = {
            key: (self.packs[key.pack].bytes.get(key.call, 0), us)
            for key, us in self.times().items()
            if key.system == COPY
        }
        return {
            key
            for key, (moved, us) in copies.items()
            if moved >= LARGE_COPY
            and any(
                other.section == key.section
                and more >= moved
                and moved / us < SLOW_COPY * more / its
                for other, (more, its) in copies.items()
            )
        }

    def packs_of(self, section: str) -> list[str]:
        """In the order measured."""
        return list(dict.fromkeys(row.pack for row in self.rows if row.section == section))

    def write(self, path: Path) -> None:
        """As JSON.

        Raises:
            OSError: the file cannot be written.
        """
        found = {"schema": SCHEMA} | asdict(self)
        rows = [{name: value for name, value in row.items() if value} for row in found.pop("rows")]
        lines = ",\n  ".join(json.dumps(row) for row in rows)  # a row a line, for diffs
        head = json.dumps(found, indent=1)[:-2]
        path.write_text(f'{head},\n "rows": [\n  {lines}\n ]\n}}\n')


def read(path: Path) -> Record:
    """A record that `write` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no record, or one of another schema.
    """
    try:
        found: Any = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"it is no JSON: {error}") from error
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise ValueError(
            f"its schema is {schema}; {SCHEMA}, which `csa-runtime bench --json` writes, is wanted"
        )
    try:
        return Record(
            found["machine"],
            found["systems"],
            found["seconds"],
            {name: Sizes(**sizes) for name, sizes in found["packs"].items()},
            [Row(**{"us": None} | row) for row in found["rows"]],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no record of a run: {type(error).__name__}: {error}") from error
