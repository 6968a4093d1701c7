# SPDX-License-Identifier: Apache-2.0
"""The shapes that are measured, and how many bytes each of them moves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import csa_runtime

ELEMENT = 2  # bytes of a bf16
CALLS = ("forward", "backward")
BOTH = (*CALLS, "both")  # forward and then backward


class Pack(NamedTuple):
    """A window and the tokens of each segment."""

    ratio: int
    coff: int
    head_dim: int
    lengths: tuple[int, ...]

    @property
    def window(self) -> str:
        """Ratio, coff and head_dim, as tables show them."""
        return f"{self.ratio}, {self.coff}, {self.head_dim}"

    @property
    def tokens(self) -> int:
        """Of all segments."""
        return sum(self.lengths)

    @property
    def segments(self) -> int:
        """How many."""
        return len(self.lengths)

    @property
    def rows(self) -> int:
        """Of `out`."""
        return sum(length // self.ratio for length in self.lengths)

    @property
    def name(self) -> str:
        """Unlike any other's: `4, 2, 512, 3x8192` is three segments of 8192 tokens."""
        if len(set(self.lengths)) == 1:
            return f"{self.window}, {self.segments}x{self.lengths[0]}"
        return f"{self.window}, {self.segments} ragged of {self.tokens}"

    @property
    def used(self) -> int:
        """Rows of `head_dim` elements that windows consume of kv, and as many of score.

        No tail, and with coff 2 nothing of the first halves of a segment's last block.
        """
        block = self.ratio * self.coff
        return sum(
            length // self.ratio * block - (self.coff - 1) * self.ratio
            for length in self.lengths
            if length >= self.ratio
        )

    def bytes(self, call: str) -> int:
        """What "forward" or "backward" reads and writes: bf16 tensors, each element once.

        Of both inputs only what some row consumes. Backward writes both gradients in full.
        """
        read = 2 * self.used + (self.rows if call == "backward" else 0)
        return ELEMENT * read * self.head_dim + self.written(call)

    def written(self, call: str) -> int:
        """The bytes of `bytes` that are written."""
        rows = 2 * self.tokens * self.coff if call == "backward" else self.rows
        return ELEMENT * rows * self.head_dim

    def explain(self, call: str) -> dict[str, Any]:
        """What the launcher chooses for "forward" or "backward", as `csa_runtime.explain`."""
        return csa_runtime.explain(
            call,
            ratio=self.ratio,
            coff=self.coff,
            head_dim=self.head_dim,
            total_tokens=self.tokens,
            total_comp=self.rows,
            segments=self.segments,
        )


def parse(text: str) -> Pack:
    """A pack from `RATIO,COFF,HEAD_DIM,SEGMENTSxLENGTH`, such as `4,2,512,3x8192`.

    Raises:
        ValueError: anything else, or a number below 1.
    """
    try:
        ratio, coff, head_dim, segments = text.split(",")
        count, length = map(int, segments.split("x"))
        pack = Pack(int(ratio), int(coff), int(head_dim), (length,) * count)
    except ValueError:
        pack = Pack(0, 0, 0, ())
    if min(pack[:3]) < 1 or pack.coff > 2 or pack.tokens < 1 or pack.rows < 1:
        raise ValueError(
            f"pack {text!r}: RATIO,COFF,HEAD_DIM,SEGMENTSxLENGTH is wanted, such as 4,2,512,3x8192,"
            " with segments of at least RATIO tokens"
        )
    return pack


def ragged(tokens: int, segments: int) -> tuple[int, ...]:
    """Lengths drawn at random, the same every time: no two neighbours need be alike."""
    cuts = sorted(random.Random(0).sample(range(1, tokens), segments - 1))
    return tuple(b - a for a, b in pairwise([0, *cuts, tokens]))


# The rows that docs/performance.md has published from the start.
TWELVE = (
    Pack(4, 2, 128, (8192,)),
    Pack(4, 2, 128, (8192,) * 3),
    Pack(4, 2, 512, (8192,)),
    Pack(4, 2, 512, (8192,) * 3),
    Pack(4, 2, 512, (131072,)),
    Pack(128, 1, 128, (8192,)),
    Pack(128, 1, 128, (131072,)),
    Pack(128, 2, 128, (8192,)),
    Pack(128, 2, 128, (65536,)),
    Pack(128, 1, 512, (65536,)),
    Pack(128, 2, 512, (65536,)),
    Pack(128, 2, 512, (131072,)),
)
MORE = (
    Pack(2, 2, 128, (8192,)),
    Pack(2, 2, 512, (65536,)),
    Pack(4, 1, 512, (65536,)),
    Pack(4, 2, 64, (65536,)),
    Pack(4, 2, 512, ragged(65536, 64)),
    Pack(128, 2, 128, ragged(65536, 64)),
    Pack(128, 2, 512, (127,) * 1031 + (128, 7)),  # one row in all: backward writes zeros
)
PACKS = TWELVE + MORE

SEGMENT_TOKENS = 262144
# The most segments have two rows each at ratio 4, one at ratio 128.
SEGMENT_COUNTS = {4: (16, 128, 512, 2048, 8192, 32768), 128: (16, 128, 512, 2048)}


def segments() -> Iterator[Pack]:
    """The same tokens in one segment, in many alike and in many ragged ones, for each ratio."""
    for ratio, counts in SEGMENT_COUNTS.items():
        yield Pack(ratio, 2, 512, (SEGMENT_TOKENS,))
        for count in counts:
            yield Pack(ratio, 2, 512, (SEGMENT_TOKENS // count,) * count)
            yield Pack(ratio, 2, 512, ragged(SEGMENT_TOKENS, count))


TOKENS = tuple(
    Pack(ratio, 2, head_dim, (tokens,))
    for ratio, head_dim in ((4, 128), (4, 512), (128, 512))
    for tokens in (1024 << power for power in range(8))
)

# A launch dominates the first and the third, kernels the second.
HOST = (Pack(4, 2, 128, (64,)), Pack(4, 2, 128, (8192,)), Pack(128, 1, 128, (512,)))
