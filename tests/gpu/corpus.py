# SPDX-License-Identifier: Apache-2.0
"""Random problems, each drawn from a seed alone: shapes, prefixes, memory layout, kind of values.

The draw uses no device, so a seed names the same problem everywhere.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from gpu import problems
from gpu.problems import LONG, Packing

BIG = 2**31 - 1
ELEMENTS = (4_000, 20_000, 100_000)  # of kv, about
HUGE_ELEMENTS = 1_500_000
MOST_SEGMENTS = 400

# Kinds of values whose results stay near 1, so that absolute tolerances say something.
CLOSE = ("gate", "gaps", "masks", "subnormal", "equal", "steep", "zeros")
SHORT_KINDS = (*CLOSE, "scales", "lowest", "finite_bits", "overflow", "any_bits", "largest")
# Scores far apart and grad_out * kv beyond fp32 at once are left out of long windows: their
# weights are subnormal, and there such a window has fewer bits of them than R.
LONG_KINDS = (*CLOSE, "scales", "lowest", "finite_bits", "products", "any_bits", "largest")
# Scores that lie 70 to 105 apart: weights down to the smallest, and beyond.
APART = ("gaps", "steep", "scales", "overflow")
SPRINKLED = ("kv", "score", "ape", "grad_out")


@dataclass(frozen=True)
class Place:
    """Bytes that a tensor's base lies off a 256-byte boundary; elements from row to row."""

    offset: int
    stride: int


@dataclass(frozen=True)
class Spec:
    """One problem in words.

    kind: of values. special: tensors sprinkled with NaN, infinities, zeros and subnormals, of about
    `rate` in a window; `extreme` adds the largest numbers. joined: pairs of tensors that are the
    halves of one buffer. accumulate: whether a call that adds to grad_ape is checked as well.
    """

    seed: int
    ratio: int
    coff: int
    head_dim: int
    packing: Packing
    kind: str
    special: tuple[str, ...]
    rate: float
    extreme: bool
    ape: bool
    accumulate: bool
    joined: tuple[tuple[str, str], ...]
    places: dict[str, Place]

    @property
    def width(self) -> int:
        """Columns of kv."""
        return self.coff * self.head_dim

    @property
    def close(self) -> bool:
        """Whether all that is finite in the results is near 1 or below."""
        return self.kind in CLOSE and not (self.special and self.extreme)

    @property
    def gate(self) -> bool:
        """Whether the values are the gate's: shares of differing elements are promised on them."""
        return (
            self.kind == "gate"
            and not self.special
            and self.places["kv"].stride >= self.width
            and self.places["score"].stride >= self.width
        )


def draw(seed: int, ratio: int, coff: int, elements: tuple[int, ...] = ELEMENTS) -> Spec:
    """The well-formed problem of that seed. elements: sizes of kv to choose from."""
    dice = random.Random(f"{ratio} {coff} {seed}")
    head_dim = _head_dim(dice)
    most = dice.choice(elements)
    if elements is ELEMENTS and dice.random() < 0.03:
        most = HUGE_ELEMENTS
    packing = _packing(dice, ratio, max(most // (coff * head_dim), 3 * ratio))
    long = ratio == LONG
    kinds = LONG_KINDS if long else SHORT_KINDS
    kind = "gate" if dice.random() < 0.25 else dice.choice(kinds)
    special = tuple(name for name in SPRINKLED if dice.random() < 0.25)
    joined, places = _layout(dice, coff * head_dim, head_dim)
    return Spec(
        seed, ratio, coff, head_dim, packing, kind,
        special if kind not in ("any_bits", "finite_bits") and dice.random() < 0.6 else (),
        dice.choice((0.1, 0.4, 2.0)),
        dice.random() < 0.3,
        dice.random() < 0.85,
        dice.random() < 0.4,
        joined, places,
    )  # fmt: skip


def hostile(seed: int, ratio: int, coff: int) -> Spec:
    """The problem of that seed with prefixes that hold anything."""
    sound = draw(seed, ratio, coff, (4_000,))
    dice = random.Random(f"hostile {ratio} {coff} {seed}")
    packing = sound.packing
    prefixes = [
        list(entries)
        if dice.random() < 0.25
        else _garbage(dice, list(entries), scale, dice.choice(GARBAGE))
        for entries, scale in (
            (packing.cu_seqlens, packing.tokens),
            (packing.cu_seqlens_comp, packing.rows),
        )
    ]
    cu, comp = (tuple(max(-BIG - 1, min(BIG, entry)) for entry in p) for p in prefixes)
    return replace(sound, packing=replace(packing, cu_seqlens=cu, cu_seqlens_comp=comp))


def _head_dim(dice: random.Random) -> int:
    kind = dice.random()
    if kind < 0.2:
        return dice.randrange(1, 41)
    if kind < 0.55:
        return 8 * dice.randrange(1, 17)
    if kind < 0.7:
        return dice.choice((1, 2, 4)) * dice.randrange(1, 65)
    return dice.choice((127, 128, 128, 129, 130, 252, 255, 256, 260, 511, 512, 512, 576))


def _packing(dice: random.Random, ratio: int, tokens: int) -> Packing:
    style = dice.choice(("mixed",) * 5 + ("huge", "many", "exact") * 2 + ("tiny", "idle"))
    lengths = _lengths(dice, style, ratio, tokens)
    start, after = (dice.choice((0, 0, 1, ratio - 1, ratio, 2 * ratio + 3)) for _ in range(2))
    extra = dice.choice((0, 0, 0, 1, 5, 40))
    drop = dice.choice((0,) * 8 + (1, 2))
    made = problems.packing(
        style, ratio, lengths, start=start, after=after, extra_rows=extra, drop=drop
    )
    capacity = dice.random()
    if capacity < 0.05:
        made = replace(made, rows=0)
    elif capacity < 0.12:
        made = replace(made, rows=dice.randrange(made.rows + 1))
    if made.rows and made.tokens < ratio:
        made = replace(made, tokens=made.tokens + ratio)
    return made


def _lengths(dice: random.Random, style: str, ratio: int, tokens: int) -> list[int]:
    if style == "idle":
        return [0] * dice.randrange(0, 4)
    if style == "huge":
        before, behind = (
            [dice.randrange(2 * ratio) for _ in range(dice.randrange(3))] for _ in "ab"
        )
        return [*before, tokens, *behind]
    one_of = {
        "tiny": lambda: dice.randrange(ratio),
        "exact": lambda: ratio * dice.randrange(1, 5),
        "many": lambda: dice.choice((0, ratio, dice.randrange(2 * ratio))),
        "mixed": lambda: dice.choice(
            (
                0,
                dice.randrange(1, ratio),
                ratio,
                ratio * dice.randrange(1, 7),
                dice.randrange(9 * ratio),
            )
        ),
    }[style]
    most = MOST_SEGMENTS if style == "many" else dice.choice((2, 5, 33, 70))
    lengths: list[int] = []
    while len(lengths) < most and sum(lengths) < tokens:
        lengths.append(one_of())
    return lengths


def _layout(
    dice: random.Random, width: int, head_dim: int
) -> tuple[tuple[tuple[str, str], ...], dict[str, Place]]:
    """Alignments are mostly common to all tensors: what one lacks, a wide variant cannot serve."""
    common = dice.choice((16,) * 8 + (8, 8, 4, 4, 2, 2))
    mixed = dice.random() < 0.12
    apart = dice.random() < 0.6  # rows
    places = {}
    for name in ("kv", "score", "out", "grad_out", "grad_kv", "grad_score"):
        alignment = dice.choice((16, 8, 4, 2)) if mixed else common
        unit = alignment // 2
        columns = head_dim if name.endswith("out") else width
        stride = columns
        if apart:
            stride = -(-columns // unit) * unit + unit * dice.choice((0, 1, 3))
        if name in ("kv", "score", "grad_out"):
            repeated = dice.random()
            if repeated < 0.05:
                stride = 0
            elif repeated < 0.1:
                stride = unit * dice.randrange(1, max(columns // unit, 2))
        places[name] = Place(alignment * dice.randrange(256 // alignment), stride)
    for name, alignment in (("ape", dice.choice((16,) * 6 + (8, 4))), ("grad_ape", 4)):
        places[name] = Place(alignment * dice.randrange(256 // alignment), width)
    for name in ("cu_seqlens", "cu_seqlens_comp"):
        places[name] = Place(4 * dice.randrange(64), 1)
    joined = []
    for pair in (("kv", "score"), ("grad_kv", "grad_score")):
        if dice.random() < 0.15:
            joined.append(pair)
            stride = 2 * width + max(places[pair[0]].stride - width, 0)
            offset = places[pair[0]].offset
            places[pair[0]] = Place(offset, stride)
            places[pair[1]] = Place((offset + 2 * width) % 256, stride)
    return tuple(joined), places


GARBAGE = (
    "any", "near", "negative", "decreasing", "beyond", "huge", "lowest", "one_wrong", "shuffled",
    "shifted",
)  # fmt: skip


def _garbage(dice: random.Random, entries: list[int], scale: int, kind: str) -> list[int]:
    """As many entries that are no prefix, mostly. scale: what a sound last entry is at most."""
    count = len(entries)
    scale = max(scale, 1)
    if kind == "any":
        return [dice.randrange(-BIG - 1, BIG + 1) for _ in entries]
    if kind == "near":
        return [dice.randrange(-2 * scale, 3 * scale) for _ in entries]
    if kind == "negative":
        return [-dice.randrange(1, 4 * scale) for _ in entries]
    if kind == "decreasing":
        return sorted((dice.randrange(2 * scale) for _ in entries), reverse=True)
    if kind == "beyond":
        return [0, *sorted(dice.randrange(1000 * scale) for _ in range(count - 1))]
    if kind == "huge":
        return sorted(BIG - dice.randrange(2 * scale) for _ in entries)
    if kind == "lowest":
        return [-BIG - 1 + dice.randrange(2 * scale) for _ in entries]
    if kind == "one_wrong":
        entries[dice.randrange(count)] = dice.choice((-BIG - 1, -1, scale + 1, 2**30, BIG))
        return entries
    if kind == "shuffled":
        dice.shuffle(entries)
        return entries
    by = dice.choice((-scale, -1, 1, scale, BIG - scale))
    return [entry + by for entry in entries]
