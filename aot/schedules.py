# SPDX-License-Identifier: Apache-2.0
"""Which variant and launch shape serves which problem, per architecture: data, with its evidence.

Rows of one (architecture, operation, ratio, coff, dtype) family are tried in order; the first that
the problem's size, rows per segment and alignment and the device's shared memory allow is taken.
The launcher's `plan` says how a row becomes a grid.
"""

from dataclasses import dataclass

from aot.machines import MACHINES, MEASURED, blocks, elements
from aot.variants import BUFFERED_WINDOWS, BY_NAME, SHORT_WINDOWS, VARIANTS, Variant

ANY = -1


@dataclass(frozen=True)
class Schedule:
    """One row: problems of at most `max_elements` and rows per segment run `variant` this way.

    max_elements: rows * head_dim; for what finishes a backward, the elements of a plane.
    max_rows_per_segment: rows / segments; for what finishes a backward, always ANY.
    lanes_log2: at most 2**lanes_log2 threads of a block lie side by side along the columns.
    ctas: blocks wanted for backward's rows (0: one pass, no persistence). The number is fixed, not
        asked of the device: it orders the sums of grad_ape.
    fill_ctas: at most this many blocks of what finishes a backward write zeros.
    """

    architecture: int
    variant: Variant
    max_elements: int
    max_rows_per_segment: int
    lanes_log2: int
    ctas: int
    fill_ctas: int
    evidence: str


@dataclass(frozen=True)
class Cached:
    """At most so many elements where measured, elsewhere by the size of the second-level cache."""

    elements: int


@dataclass(frozen=True)
class Dense:
    """Any size, but at most so many rows per segment."""

    rows_per_segment: int


# Rows are (variant, limit, lanes_log2, ctas, fill_ctas, evidence), tried in order; a number as
# limit is max_elements. Measured on an H200 (132 multiprocessors); the short windows' rows at ratio
# 4, coff 2, and taken over. `machines` says what other architectures make of them.
Row = tuple[str, int | Cached | Dense, int, int, int, str]


def _short(ratio: int, coff: int) -> tuple[Row, ...]:
    forward = f"csa_forward_r{ratio}_c{coff}_bf16_v"
    backward = f"csa_backward_r{ratio}_c{coff}_bf16_v"

    def moving(megabytes: int) -> int:
        """Elements of `out` of a forward that moves so much."""
        return megabytes * 1_000_000 // (4 * ratio * coff + 2)

    def moving_back(megabytes: int) -> int:
        """Elements of `out` of a backward that moves so much."""
        return megabytes * 1_000_000 // (8 * ratio * coff + 2)

    cached, twice = (Cached(moving(n * MACHINES[MEASURED].cache)) for n in (1, 2))
    buffered: tuple[Row, ...] = (
        (backward + "2_a8", moving_back(20), 5, 264, 0,
         "7.9 us, unbuffered 9.0, at 2**18 elements"),
        (backward + "4_a8", moving_back(140), 5, 132, 0,
         "40 us at 138 MB, unbuffered 43; 61 at 208"),
    )  # fmt: skip
    smallest: tuple[Row, ...] = (
        (forward + "2", moving(13), 7, 0, 0, "3.1 us, 4 columns 3.3, at 9 MB; at 36 9.4 to 8.4"),
    )
    if (ratio, coff) == (4, 2):
        smallest = (
            (forward + "2_early", moving(13), 7, 0, 0, "3.0 us, looked up first 3.15, at 9 MB"),
            (forward + "4_early", moving(30), 7, 0, 0, "6.0 us, looked up first 6.5, at 27 MB"),
        )
    return (
        *smallest,
        (forward + "4", cached, 7, 0, 0, "8.4 us, past the first-level cache 10.2, at 36 MB"),
        # Below some size the last blocks of several rows a thread finish too late. Twice the cache
        # is a guess at it which no architecture's `cached` exceeds.
        (forward + "2_once", twice, 7, 0, 0, "as up to 400 MB; the border is to be measured"),
        (forward + "4_n8", Dense(4), 7, 0, 0, "short segments: to be measured"),
        (forward + "2_once", moving(400), 7, 0, 0, "65 us in 1 or 512 segments, 4 columns 68, 72"),
        (forward + "4", moving(800), 7, 0, 0, "132 us in 1 segment, four rows a thread 135"),
        (forward + "4_n4", ANY, 7, 0, 0, "264 us in 1 or 2,048 segments, a row a thread 261, 280"),
        (forward + "2", ANY, 7, 0, 0, "for what 4 columns cannot serve"),
        (forward + "1", ANY, 7, 0, 0, "serves everything"),
        *(buffered if (ratio, coff) in BUFFERED_WINDOWS else ()),
        (backward + "2", 400_000, 5, 264, 0, "8.1 us, 4 columns 9.1, at 2**18 elements"),
        (backward + "4", ANY, 5, 264, 0, "59 us, 2 columns 67, at 3 * 2**20 elements"),
        (backward + "2", ANY, 5, 264, 0, "for what 4 columns cannot serve"),
        (backward + "1", ANY, 5, 264, 0, "serves everything"),
    )


_LONG: tuple[Row, ...] = (
    ("csa_forward_r128_c1_bf16_v2_early_t256", 20_000, 5, 0, 0, "2.6 us, found first 2.7: 2**13"),
    ("csa_forward_r128_c1_bf16_v2_t256", ANY, 5, 0, 0, "2.6 us at 2**13, 17.0 at 2**17 elements"),
    ("csa_forward_r128_c1_bf16_v1_t512", ANY, 5, 0, 0, "serves everything; 23 us at 2**17"),
    ("csa_forward_r128_c2_bf16_v2_early_t512", 20_000, 5, 0, 0, "3.9 us, 4 columns 7.1, at 2**13"),
    ("csa_forward_r128_c2_bf16_v4_t256", ANY, 5, 0, 0, "17.8 us, 2 columns 20.8, at 2**16"),
    ("csa_forward_r128_c2_bf16_v2_t512", ANY, 5, 0, 0, "for what 4 columns cannot serve"),
    ("csa_forward_r128_c2_bf16_v1_t512", ANY, 5, 0, 0, "serves everything; 26 us at 2**16"),
    ("csa_backward_r128_c1_bf16_v1_t256_a8_ape", 20_000, 5, 132, 0, "6.7 us, 2 columns 7.6: 2**13"),
    ("csa_backward_r128_c1_bf16_v2_t256_a8_ape", 400_000, 5, 132, 0, "41.9 us, 1 column 47: 2**17"),
    ("csa_backward_r128_c1_bf16_v4_t256_a8_ape", ANY, 5, 132, 0, "278 us, 2 columns 292, at 2**20"),
    ("csa_backward_r128_c1_bf16_v2_t256_a8_ape", ANY, 5, 132, 0, "for 163 KB of shared memory"),
    ("csa_backward_r128_c1_bf16_v1_t256_a8_ape", ANY, 5, 264, 0, "for 99 KB of shared memory"),
    ("csa_backward_r128_c1_bf16_v1_t256", ANY, 5, 264, 0, "serves everything; 64 us at 2**17"),
    ("csa_backward_r128_c2_bf16_v1_t256_a8_ape", 150_000, 5, 132, 0, "44 us, 2 columns 45: 2**16"),
    ("csa_backward_r128_c2_bf16_v2_t256_a8_ape", ANY, 5, 132, 0, "142 us, 1 column 149, at 2**18"),
    ("csa_backward_r128_c2_bf16_v1_t256_a8_ape", ANY, 5, 132, 0, "for 163 KB of shared memory"),
    ("csa_backward_r128_c2_bf16_v1_t256_a8", ANY, 5, 132, 0, "for 99 KB of shared memory; 58 us"),
    ("csa_backward_r128_c2_bf16_v1_t256", ANY, 5, 132, 0, "serves everything; 74 us at 2**16"),
)  # fmt: skip

_FINISH: tuple[Row, ...] = (
    ("csa_finish_f32_e32", 8_192, 0, 0, 528, "1.6 us, 64 elements 2.2, at 2**10 elements"),
    ("csa_finish_f32_e64", 65_536, 0, 0, 528, "2.3 us, 32 elements 3.3, at 2**15 elements"),
    ("csa_finish_f32_e256", ANY, 0, 0, 528, "2.1 us, 32 elements 9.7, at 2**17 elements"),
)


def _schedule(architecture: int, row: Row) -> Schedule:
    name, limit, lanes_log2, ctas, fill_ctas, evidence = row
    variant = BY_NAME[name]
    size, rows_per_segment = ANY, ANY
    if isinstance(limit, Cached):
        size = limit.elements * MACHINES[architecture].cache // MACHINES[MEASURED].cache
    elif isinstance(limit, Dense):
        rows_per_segment = limit.rows_per_segment
    else:
        size = elements(architecture, limit)
    ctas, fill_ctas = (blocks(architecture, variant, found) for found in (ctas, fill_ctas))
    if architecture != MEASURED:
        evidence = "unmeasured"
    limits = size, rows_per_segment
    return Schedule(architecture, variant, *limits, lanes_log2, ctas, fill_ctas, evidence)


SCHEDULES: tuple[Schedule, ...] = tuple(
    _schedule(architecture, row)
    for architecture in sorted({a for v in VARIANTS for a in v.architectures})
    for rows in (*(_short(ratio, coff) for ratio, coff in SHORT_WINDOWS), _LONG, _FINISH)
    for row in rows
    if architecture in BY_NAME[row[0]].architectures
)
