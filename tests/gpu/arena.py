# SPDX-License-Identifier: Apache-2.0
"""All tensors of a call in one allocation, in two surroundings: what a call touches shows.

Everything that is no input is a pattern: bytes between tensors, between rows, outputs. A second run
in the other pattern must give the same bits, so an element left unwritten shows, and so does a
stray read that reaches a result; one comparison with the surroundings shows every stray write.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu.buffers import GUARD, INTEGER

# As 16-bit words: NaN in bf16 and fp32 and -1 in int32; 1.5e16 and a large int32.
PATTERNS = (-1, 0x5A5A)
WORD = 2  # bytes


@dataclass(frozen=True)
class Area:
    """One tensor: rows of `columns` elements, `stride` elements apart, or with 0 the same row.

    offset: bytes that its base lies off a 256-byte boundary.
    """

    rows: int
    columns: int
    dtype: torch.dtype
    offset: int
    stride: int

    @property
    def extent(self) -> int:
        """Elements from the first to the last."""
        return (self.rows - 1) * self.stride + self.columns if self.rows else 0


class Arena:
    """Places areas, fills in inputs and keeps both surroundings."""

    def __init__(
        self,
        areas: dict[str, Area],
        contents: dict[str, torch.Tensor],
        joined: tuple[tuple[str, str], ...],
        device: torch.device,
    ) -> None:
        """Lays the areas out in order, GUARD bytes apart at least.

        contents: of areas that are inputs, on the CPU. joined: pairs of areas whose rows lie side
        by side, the second right behind the first's columns.
        """
        self.areas = areas
        self.starts: dict[str, int] = {}  # bytes
        seconds = {second: first for first, second in joined}
        end = 0
        for name, area in areas.items():
            size = area.dtype.itemsize
            if name in seconds:
                start = self.starts[seconds[name]] + areas[seconds[name]].columns * size
            else:
                start = -(-(end + GUARD) // 256) * 256 + area.offset
            self.starts[name] = start
            end = max(end, start + area.extent * size)
        words = -(-(end + 4 * GUARD) // 16) * 16 // WORD
        backgrounds = []
        for pattern in PATTERNS:
            background = torch.full((words,), pattern, dtype=torch.int16)
            for name, values in contents.items():
                _fill(self._view(background, name), areas[name], values)
            backgrounds.append(background.to(device))
        self.backgrounds = backgrounds
        self.raw = backgrounds[0].clone()

    def _view(self, words: torch.Tensor, name: str) -> torch.Tensor:
        area = self.areas[name]
        typed = words.view(area.dtype)
        shape, strides = (area.rows, area.columns), (area.stride, 1)
        return typed.as_strided(shape, strides, self.starts[name] // area.dtype.itemsize)

    def view(self, name: str) -> torch.Tensor:
        """The area as a tensor."""
        return self._view(self.raw, name)

    def restore(self, surroundings: int) -> None:
        """Inputs as they were, all else the pattern."""
        self.raw.copy_(self.backgrounds[surroundings])

    def writable(self, names: tuple[str, ...]) -> torch.Tensor:
        """Which words belong to these areas."""
        mask = torch.zeros_like(self.raw)
        for name in names:
            view = self._view(mask, name)
            view.view(INTEGER[view.dtype.itemsize]).fill_(-1)
        return mask.bool()

    def strays(self, surroundings: int, writable: torch.Tensor) -> str:
        """What changed outside the writable words, in words; "" if nothing."""
        changed = (self.raw != self.backgrounds[surroundings]) & ~writable
        if not bool(changed.any()):
            return ""
        places = changed.nonzero()[:, 0]
        return f"{len(places)} words changed, first {self._where(int(places[0]) * WORD)}"

    def _where(self, byte: int) -> str:
        """A byte in relation to the area that starts last before it."""
        name = max(
            (name for name, start in self.starts.items() if start <= byte),
            key=lambda name: self.starts[name],
            default=None,
        )
        if name is None:
            return f"{min(self.starts.values()) - byte} bytes before the first tensor"
        area, at = self.areas[name], (byte - self.starts[name]) // self.areas[name].dtype.itemsize
        if at >= area.extent:
            return f"{at - area.extent} elements behind {name}"
        row, column = divmod(at, area.stride) if area.stride else (0, at)
        if column >= area.columns:
            return f"{column - area.columns} elements behind row {row} of {name}"
        return f"in {name} at ({row}, {column})"


def _fill(view: torch.Tensor, area: Area, values: torch.Tensor) -> None:
    if 1 < area.rows and area.stride < area.columns:
        # Rows share elements: the first ones of all values, in order.
        flat = values.flatten()[: area.extent]
        view.as_strided((area.extent,), (1,)).copy_(flat)
    else:
        view.copy_(values)
