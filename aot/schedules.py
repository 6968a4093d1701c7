# SPDX-License-Identifier: Apache-2.0
"""Which variant and launch shape serves which problem, per architecture: data, with its evidence.

Rows of one (architecture, operation, ratio, coff, dtype) family are tried in order; the first that
the problem's size, rows per segment and alignment and the device's shared memory allow is taken.
The launcher's `plan` says how a row becomes a grid.
"""

from dataclasses import dataclass

from aot.machines import MACHINES, MEASURED, blocks, elements
from aot.variants import BY_NAME, SHORT_WINDOWS, VARIANTS, Variant

ANY = -1


@dataclass(frozen=True)
class Schedule:
    """One row: problems of at most `max_elements` and rows per segment run `variant` this way.

    max_elements: rows * head_dim; for what finishes a backward, the elements of a plane.
    max_rows_per_segment: rows / segments; for what finishes a backward, always ANY.
    lanes_log2: at most 2**lanes_log2 threads of a block lie side by side along the columns.
    ctas: blocks wanted for backward's rows (0: one pass, no persistence). The number is fixed, not
        asked of the device: it orders the sums of grad_ape.
    fill_ctas: at most this many blocks of what finishes a backward look for tokens without a row;
        of long windows up to eight times as many write zeros.
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
class Moving:
    """At most so many megabytes that the call moves: 10**6 bytes where measured."""

    megabytes: int


@dataclass(frozen=True)
class Cached:
    """At most so much of what the second-level cache holds, in percent, of what the call moves."""

    percent: int = 100


@dataclass(frozen=True)
class Dense:
    """At most so many rows per segment, of any size or as `Moving` says."""

    rows_per_segment: int
    megabytes: int | None = None


# Rows are (variant, limit, lanes_log2, ctas, fill_ctas, evidence), tried in order; a number as
# limit is max_elements. Measured on an H200 (132 multiprocessors), most of the short windows' by
# `tools/tune`. `machines` says what other architectures make of them.
Limit = int | Moving | Cached | Dense
Row = tuple[str, Limit, int, int, int, str]

# (columns and what else names the variant, limit, lanes_log2, evidence)
_FORWARD: dict[tuple[int, int], tuple[tuple[str, Limit, int, str], ...]] = {
    (2, 1): (
        ("4", Moving(400), 7, "3.6, 10.6, 43 us, 2 columns 4.3, 14.4, 54, at 10, 42, 168 MB"),
        ("4_n8", ANY, 7, "161 us, a row a thread 173, at 671 MB"),
    ),
    (2, 2): (
        ("4", Moving(28), 7, "3.3 us, 2 columns 3.7, at 9 MB; 5.0, four rows 5.1, at 19"),
        ("4_n4", Cached(), 7, "8.2 us, a row a thread 8.8, at 38 MB"),
        ("4", Moving(400), 7, "36 us, four rows 37.5, at 151 MB; 72 in 512 segments, too, at 302"),
        ("4_n8", ANY, 6, "140 us, a row a thread 146, at 604 MB"),
    ),
    (4, 1): (
        ("4", Moving(28), 7, "3.4 us, four rows 4.0, at 9 MB"),
        ("4_n4", Cached(), 6, "8.1 us, a row a thread 8.6, at 38 MB"),
        ("4", Moving(800), 7, "38 us in 512 segments, four rows 39, at 151 MB; 137, 145 at 604"),
        ("4_n8", ANY, 7, "140 us, four rows 145, a row a thread 137, at 604 MB; none beyond"),
    ),
    (4, 2): (
        ("2_early", Moving(13), 7, "3.0 us, 4 columns 3.2, at 9 MB"),
        ("4_early", Moving(30), 7, "5.8 us, looked up first 6.5, at 27 MB"),
        ("2", Moving(20), 7, "4.9 us at 18 MB, d 64, 4 columns 5.2, early 5.4"),
        ("4", Moving(30), 7, "6.3 us at 27 MB, d 64, 2 columns 6.7, early 6.7"),
        ("4_n4", Dense(64, 40), 7, "8.1 us, early 8.5, at 36 MB in 64 segments"),
        ("4_early", Moving(40), 7, "7.4 us, looked up first 8.0, four rows 8.2, at 36 MB"),
        ("4_n4", Cached(), 6, "7.8 us at 36 MB, d 64, a row a thread 8.3; none beyond"),
        ("4", Cached(), 7, "for heads too narrow for four rows"),
        ("2_once", Moving(200), 6, "34.4 us, 4 columns 35.1, at 143 MB"),
        ("4_n8", Dense(8), 7, "208 us, four rows 211, at 872 MB in 32,768 segments"),
        ("4_n4", Dense(64), 7, "257 us, eight rows 261, at 1,141 MB in 2,048 segments"),
        ("4", Moving(800), 7, "67 and 133 us, four rows 68 and 134, at 285 and 570 MB"),
        ("4_n4", ANY, 7, "260 us, eight rows 264; 265, a row a thread 270"),
    ),
}  # fmt: skip

_FALLBACK = (
    ("4", ANY, 7, "for heads too narrow for several rows a thread"),
    ("2", ANY, 7, "for what 4 columns cannot serve"),
    ("1", ANY, 7, "serves everything"),
)

# (columns and what else names the variant, limit, ctas, evidence)
_BACKWARD: dict[tuple[int, int], tuple[tuple[str, Limit, int, str], ...]] = {
    (2, 1): (
        ("4_t256_a8_p128", Moving(12), 132, "5.8 us, 264 blocks 6.3, unbuffered 6.8, at 9 MB"),
        ("4_t256_a8_p128", Moving(50), 264, "7.9, 11.0 us, unbuffered 9.4, 14.4, at 19 and 38 MB"),
        ("4_t256_a8_p128", ANY, 396, "22.3, 294 us, 256 bytes prefetched 22.6, 297: 75, 1,208 MB"),
        ("2_t256_a8", Moving(12), 264, "6.5 us, unbuffered 7.1, at 9 MB of d 64"),
        ("4", Moving(45), 264, "9.0 us, 396 blocks 10.1, at 19 MB"),
        ("4", ANY, 396, "26.6, 89, 337 us, 264 blocks 29.6, 100, 386, at 75, 302, 1,208 MB"),
        ("2", ANY, 528, "447 us at 1,208 MB; for what 4 columns cannot serve"),
        ("1", ANY, 528, "serves everything; 834 us at 1,208 MB"),
    ),
    (2, 2): (
        ("4_t256_a8", Moving(28), 132, "7.4, 9.2 us, 512 threads 7.9, 9.3, at 18 and 27 MB"),
        ("4_t512_a8", ANY, 132, "10.7 us, 256 threads 11.3; 39, 2 columns 45, at 36 and 143 MB"),
        ("2_t256_a8", ANY, 264, "for heads narrower than 128"),
        ("4", ANY, 264, "for what is not aligned to 8 elements"),
        ("2", ANY, 396, "for what 4 columns cannot serve"),
        ("1", ANY, 528, "serves everything"),
    ),
    (4, 1): (
        ("2_t256_a8", Moving(3), 264, "4.0 us, 4 columns 4.4, at 2 MB"),
        ("4_t256_a8", Moving(28), 132, "4.6, 5.5, 7.3 us, 2 columns 5.2, 6.0, 7.5: 4, 9, 18 MB"),
        ("4_t512_a8", ANY, 132, "21.3, 74, 292 us, 256 threads 24.3 at 71 MB, unbuffered 82, 311"),
        ("2_t256_a8", Moving(20), 264, "6.4 us, 396 blocks 7.7, at 9 MB of d 64; for narrow heads"),
        ("2_t256_a8", ANY, 396, "22, 78, 297 us at 71, 285, 1,141 MB; for narrow heads"),
        ("4", ANY, 264, "for what is not aligned to 8 elements"),
        ("2", ANY, 528, "for what 4 columns cannot serve"),
        ("1", ANY, 528, "serves everything"),
    ),
    (4, 2): (
        ("2_t256_a8", Moving(20), 132, "7.6 and, d 64, 5.8 us, 264 blocks 7.6, 6.5: 17, 9 MB"),
        ("2_t256_a8_p128", Moving(100), 264, "15.4 us, 256 bytes prefetched 15.8, at 52 MB"),
        ("2_t256_a8", Moving(600), 264, "56, 143 us, 128 bytes prefetched 56.4, 148: 208, 554 MB"),
        ("4_t256_a8", Dense(32), 528, "509, 567 us, 132 blocks 529, 586: 32,768; 2,048 ragged"),
        ("4_t256_a8", ANY, 132, "212 and 281 us, 2 columns 214 and 286, at 830 and 1,107 MB"),
        ("2_t256_a8", ANY, 264, "for heads narrower than 128"),
        ("4", ANY, 264, "for what is not aligned to 8 elements"),
        ("2", ANY, 264, "for what 4 columns cannot serve"),
        ("1", ANY, 396, "serves everything"),
    ),
}  # fmt: skip


def _short(ratio: int, coff: int) -> tuple[Row, ...]:
    window = f"r{ratio}_c{coff}_bf16_v"
    forward = [
        (f"csa_forward_{window}{name}", limit, lanes_log2, 0, 0, evidence)
        for name, limit, lanes_log2, evidence in (*_FORWARD[ratio, coff], *_FALLBACK)
    ]
    backward = [
        (f"csa_backward_{window}{name}", limit, 5, ctas, 0, evidence)
        for name, limit, ctas, evidence in _BACKWARD[ratio, coff]
    ]
    return (*forward, *backward)


_LONG: tuple[Row, ...] = (
    ("csa_forward_r128_c1_bf16_v1_early_t256", 4_224, 5, 0, 0, "2.1 us, 2 columns 2.3: 2**12"),
    ("csa_forward_r128_c1_bf16_v2_early_t256", 20_000, 5, 0, 0, "2.5 us, found first 2.6: 2**13"),
    ("csa_forward_r128_c1_bf16_v2_t256", Cached(), 5, 0, 0, "8.8 us, once 10.4, at 2**16"),
    ("csa_forward_r128_c1_bf16_v2_once_t256", Moving(100), 5, 0, 0, "17.1 us, plain 17.5: 67 MB"),
    ("csa_forward_r128_c1_bf16_v2_once_t256_ahead", 400_000, 5, 0, 0, "32 us, not ahead 32.5"),
    ("csa_forward_r128_c1_bf16_v4_once_t128", ANY, 5, 0, 0, "125 us, 2 columns 139, at 2**20"),
    ("csa_forward_r128_c1_bf16_v2_once_t256", ANY, 5, 0, 0, "for what 4 columns cannot serve"),
    ("csa_forward_r128_c1_bf16_v1_once_t512", ANY, 5, 0, 0, "serves everything; 23 us at 2**17"),
    ("csa_forward_r128_c2_bf16_v1_early_t256", 4_224, 5, 0, 0, "3.1 us, 2 columns 3.4: 2**12"),
    ("csa_forward_r128_c2_bf16_v2_early_t512", 18_000, 5, 0, 0, "4.9 us, 256 threads 5.2: 2**14"),
    ("csa_forward_r128_c2_bf16_v2_early_t256", 28_000, 5, 0, 0, "6.8 us, 4 columns 7.6, at 24,576"),
    ("csa_forward_r128_c2_bf16_v4_t256", Cached(120), 5, 0, 0, "8.4 us, once 11.1, at 2**15"),
    ("csa_forward_r128_c2_bf16_v4_once_t256", 200_000, 5, 0, 0, "49 us, 128 threads 53: 196,608"),
    ("csa_forward_r128_c2_bf16_v4_once_t128", ANY, 5, 0, 0, "62.2 us, 256 threads 63.7: 2**18"),
    ("csa_forward_r128_c2_bf16_v2_once_t512", ANY, 5, 0, 0, "for what 4 columns cannot serve"),
    ("csa_forward_r128_c2_bf16_v1_once_t512", ANY, 5, 0, 0, "serves everything; 26 us at 2**16"),
    ("csa_backward_r128_c1_bf16_v1_t256_a8_ape", 10_000, 5, 132, 0, "6.6 us, 2 columns 7.5: 2**13"),
    ("csa_backward_r128_c1_bf16_v1_t256_a8_ape", 40_000, 5, 264, 0, "8.7 us, 2 columns 9.1: 2**14"),
    ("csa_backward_r128_c1_bf16_v2_t256_a8_ape_ahead_p128", ANY, 5, 132, 0, "39.6 us: 2**17"),
    ("csa_backward_r128_c1_bf16_v1_t256_a8_ape", ANY, 5, 264, 0, "for 99 KB, and narrow heads"),
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
    ("csa_finish_f32_e256", ANY, 0, 0, 1_056, "437 us, 528 blocks 445: 2,048x128, older zeros"),
)


def _schedule(architecture: int, row: Row) -> Schedule:
    name, limit, lanes_log2, ctas, fill_ctas, evidence = row
    variant = BY_NAME[name]
    size, dense = ANY, ANY
    if isinstance(limit, Dense):
        dense = limit.rows_per_segment
        limit = ANY if limit.megabytes is None else Moving(limit.megabytes)
    if isinstance(limit, Cached):
        size = moved_elements(variant, MACHINES[architecture].cache * limit.percent // 100)
    elif isinstance(limit, Moving):
        size = elements(architecture, moved_elements(variant, limit.megabytes))
    else:
        size = elements(architecture, limit)
    ctas, fill_ctas = (blocks(architecture, variant, found) for found in (ctas, fill_ctas))
    if architecture != MEASURED:
        evidence = "unmeasured"
    return Schedule(architecture, variant, size, dense, lanes_log2, ctas, fill_ctas, evidence)


def moved_elements(variant: Variant, megabytes: int) -> int:
    """Elements of `out` of a call of a variant's window that moves so much."""
    each = 8 if variant.operation == "backward" else 4  # bytes of a position: kv, score, gradients
    return megabytes * 1_000_000 // (each * variant.ratio * variant.coff + 2)


SCHEDULES: tuple[Schedule, ...] = tuple(
    _schedule(architecture, row)
    for architecture in sorted({a for v in VARIANTS for a in v.architectures})
    for rows in (*(_short(ratio, coff) for ratio, coff in SHORT_WINDOWS), _LONG, _FINISH)
    for row in rows
    if architecture in BY_NAME[row[0]].architectures
)
