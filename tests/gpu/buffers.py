# SPDX-License-Identifier: Apache-2.0
"""Poisoned tensors inside guard bytes: what a kernel forgets or oversteps shows."""

import torch

DEVICE = torch.device("cuda", 0)
GUARD = 1024
POISON = 0xFF  # every byte: NaN in bf16 and fp32, -1 in int32
INTEGER = {2: torch.int16, 4: torch.int32}


class Guarded:
    """One allocation: guard bytes, then `rows` rows of views side by side, then guard bytes.

    widths: elements of each view's row; two widths make the halves of a fused buffer.
    pad: elements left untouched after each row. offset: bytes the first view's base lies after a
    256-byte boundary, a multiple of the element size.
    """

    def __init__(
        self, rows: int, widths: tuple[int, ...], dtype: torch.dtype, pad: int = 0, offset: int = 0
    ) -> None:
        """Allocates and poisons."""
        size = dtype.itemsize
        stride = sum(widths) + pad
        first = (GUARD + offset) // size
        self.raw = torch.full(
            ((GUARD + offset + rows * stride * size + GUARD + 15) // 16 * 16,),
            POISON,
            dtype=torch.uint8,
            device=DEVICE,
        )
        self.places = []
        for width in widths:
            self.places.append(((rows, width), (stride, 1), first))
            first += width
        self.views = [self.raw.view(dtype).as_strided(*place) for place in self.places]
        self.size = size

    @property
    def view(self) -> torch.Tensor:
        """The only view, or the first."""
        return self.views[0]

    def poison(self) -> None:
        """Poisons everything again."""
        self.raw.fill_(POISON)

    def untouched(self) -> bool:
        """Whether every byte, the views' too, still holds the poison."""
        return bool((self.raw == POISON).all())

    def outside_untouched(self) -> bool:
        """Whether every byte outside the views still holds the poison."""
        copy = self.raw.clone()
        for place in self.places:
            copy.view(INTEGER[self.size]).as_strided(*place).fill_(-1)
        return bool((copy == POISON).all())


def placed(values: torch.Tensor, pad: int = 0, offset: int = 0) -> torch.Tensor:
    """A copy of a 2-D tensor inside guard bytes, so that a stray read meets NaN."""
    guarded = Guarded(values.shape[0], (values.shape[1],), values.dtype, pad, offset)
    guarded.view.copy_(values)
    return guarded.view
