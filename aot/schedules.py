# SPDX-License-Identifier: Apache-2.0
"""Which variant and launch shape serves which problem, per architecture: data, with its evidence.

Rows of one (architecture, operation, ratio, coff, dtype) family are tried in order; the first that
the problem's size, alignment and the device's shared memory allow is taken. The launcher's `plan`
says how a row becomes a grid.
"""

from dataclasses import dataclass

from aot.variants import VARIANTS, WINDOWS, Variant

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


# Per operation, (columns, max_elements, lanes_log2, ctas, fill_ctas, evidence), tried in order.
# 264 blocks are two on each of 132 multiprocessors. The number is fixed, not asked of the device:
# it orders the sums of grad_ape.
_ROWS = {
    "forward": (
        (2, 400_000, 7, 0, 0, "3.1 us to 3.3 with 4 columns at 2**18; 7.4 to 6.6 at 3 * 2**18"),
        (4, ANY, 7, 0, 0, "132 us to 132-163 with 2 columns at 2**24 elements"),
        (2, ANY, 7, 0, 0, "for what 4 columns cannot serve"),
        (1, ANY, 7, 0, 0, "serves everything"),
    ),
    "backward": (
        (2, 400_000, 5, 264, 132, "8.1 us to 9.1 with 4 columns at 2**18 elements"),
        (4, ANY, 5, 264, 132, "59 us to 67 with 2 columns at 3 * 2**20 elements"),
        (2, ANY, 5, 264, 132, "for what 4 columns cannot serve"),
        (1, ANY, 5, 264, 132, "serves everything"),
    ),
}  # fmt: skip

# Where the evidence was measured, with ratio 4 and coff 2; every other family takes it over.
_MEASURED = (90, 4, 2)


def _family(architecture: int, operation: str, ratio: int, coff: int) -> list[Schedule]:
    by_columns = {
        v.columns: v
        for v in VARIANTS
        if (v.operation, v.ratio, v.coff) == (operation, ratio, coff)
        and architecture in v.architectures
    }
    measured = (architecture, ratio, coff) == _MEASURED
    return [
        Schedule(
            architecture, by_columns[columns], limit, lanes_log2, ctas, fill_ctas,
            evidence if measured else "unmeasured",
        )
        for columns, limit, lanes_log2, ctas, fill_ctas, evidence in _ROWS[operation]
        if columns in by_columns
    ]  # fmt: skip


SCHEDULES: tuple[Schedule, ...] = tuple(
    schedule
    for architecture in sorted({a for v in VARIANTS for a in v.architectures})
    for operation in _ROWS
    for ratio, coff in WINDOWS
    for schedule in _family(architecture, operation, ratio, coff)
)
