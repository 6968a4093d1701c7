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
    """One row: problems of at most `max_elements` run `variant` this way.

    max_elements: rows * head_dim; for the reduction, the elements of a plane.
    lanes_log2: at most 2**lanes_log2 threads of a block lie side by side along the columns.
    ctas: blocks wanted for backward's rows (0: one pass, no persistence).
    fill_ctas: backward's blocks share the zeroing of tokens that no row consumes; where fewer than
        this many have rows to do and there are tokens for more, blocks are added up to this many.
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

_REDUCE_ROWS = (
    (32, 65_535, "a small plane has few elements: many threads for each"),
    (256, ANY, "a large plane keeps the device busy with one thread for each element"),
)

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


def _reductions(architecture: int) -> list[Schedule]:
    by_elements = {v.columns: v for v in VARIANTS if v.operation == "reduce"}
    return [
        Schedule(architecture, by_elements[elements], limit, 0, 0, 0, evidence)
        for elements, limit, evidence in _REDUCE_ROWS
    ]


_ARCHITECTURES = sorted({a for v in VARIANTS for a in v.architectures})

SCHEDULES: tuple[Schedule, ...] = (
    *(
        schedule
        for architecture in _ARCHITECTURES
        for operation in _ROWS
        for ratio, coff in WINDOWS
        for schedule in _family(architecture, operation, ratio, coff)
    ),
    *(schedule for architecture in _ARCHITECTURES for schedule in _reductions(architecture)),
)
