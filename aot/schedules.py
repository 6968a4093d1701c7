# SPDX-License-Identifier: Apache-2.0
"""Which variant and launch shape serves which problem, per architecture: data, with its evidence.

Rows of one (architecture, operation, ratio, coff, dtype) family are tried in order; the first that
the problem's size, alignment and the device's shared memory allow is taken. The launcher's `plan`
says how a row becomes a grid.
"""

from dataclasses import dataclass

from aot.variants import VARIANTS, Variant

ANY = -1


@dataclass(frozen=True)
class Schedule:
    """One row: problems of at most `max_elements` = rows * head_dim run `variant` this way.

    lanes_log2: at most 2**lanes_log2 threads of a block lie side by side along the columns.
    ctas: blocks wanted for the persistent part of backward (0: one pass, no persistence).
    fill_ctas: at most this many blocks zero the tokens that no row consumes.
    """

    architecture: int
    variant: Variant
    max_elements: int
    lanes_log2: int
    ctas: int
    fill_ctas: int
    evidence: str


def _family(architecture: int, operation: str, ratio: int, coff: int) -> list[Schedule]:
    rows = []
    for columns in (4, 2, 1):
        variant = next(
            v
            for v in VARIANTS
            if (v.operation, v.ratio, v.coff, v.columns) == (operation, ratio, coff, columns)
        )
        if operation == "forward":
            rows.append(Schedule(architecture, variant, ANY, 7, 0, 0, "unmeasured"))
        else:
            rows.append(Schedule(architecture, variant, ANY, 5, 396, 132, "unmeasured"))
    return rows


SCHEDULES: tuple[Schedule, ...] = tuple(
    schedule
    for architecture in sorted({a for v in VARIANTS for a in v.architectures})
    for operation in ("forward", "backward")
    for ratio in (2, 4)
    for coff in (1, 2)
    for schedule in _family(architecture, operation, ratio, coff)
)
