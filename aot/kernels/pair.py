# SPDX-License-Identifier: Apache-2.0
"""kv and score, or their gradients, which every part of backward treats alike."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from aot.kernels.memory import Matrix

KV, SCORE = 0, 1  # also their order in shared memory


@dataclass(frozen=True)
class Pair:
    """The two tensors."""

    kv: Matrix
    score: Matrix

    def at(self, row: Int32, column: Int32) -> tuple[cute.Pointer, cute.Pointer]:
        """The addresses of an element of either."""
        return self.kv.at(row, column), self.score.at(row, column)

    def both(self) -> tuple[tuple[int, Matrix], tuple[int, Matrix]]:
        """(KV, kv) and (SCORE, score)."""
        return (KV, self.kv), (SCORE, self.score)
