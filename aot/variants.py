# SPDX-License-Identifier: Apache-2.0
"""The table of kernel variants: one frozen row is one name is one kernel.

What a kernel needs to know at compile time is a field here; all else (head_dim, strides, counts)
is a run-time parameter. Names are derived in this file and nowhere else.
"""

from dataclasses import dataclass
from typing import Any

ARCHITECTURES = (80, 90, 100, 120)

# Identity and width in bytes of every kernel parameter. The ids are part of the bundle's format:
# append, never renumber.
PARAMETERS: dict[str, tuple[int, int]] = {
    "kv": (0, 8),
    "score": (1, 8),
    "ape": (2, 8),
    "cu_seqlens": (3, 8),
    "cu_seqlens_comp": (4, 8),
    "out": (5, 8),
    "grad_out": (6, 8),
    "grad_kv": (7, 8),
    "grad_score": (8, 8),
    "grad_ape": (9, 8),
    "workspace": (10, 8),
    "kv_stride": (11, 8),
    "score_stride": (12, 8),
    "out_stride": (13, 8),
    "grad_out_stride": (14, 8),
    "grad_kv_stride": (15, 8),
    "grad_score_stride": (16, 8),
    "plane_elements": (17, 8),
    "tokens": (18, 4),
    "segments": (19, 4),
    "rows": (20, 4),
    "head_dim": (21, 4),
    "lanes_log2": (22, 4),
    "column_tiles": (23, 4),
    "groups": (24, 4),
    "fill_ctas": (25, 4),
    "accumulate": (26, 4),
    "ratio": (27, 4),
    "coff": (28, 4),
}

# Every kernel of an operation takes this list, in this order, at natural offsets.
OPERATION_PARAMETERS: dict[str, tuple[str, ...]] = {
    "forward": (
        "kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp", "out",
        "kv_stride", "score_stride", "out_stride",
        "tokens", "segments", "rows", "head_dim", "lanes_log2",
    ),
    "backward": (
        "kv", "score", "ape", "cu_seqlens", "cu_seqlens_comp",
        "grad_out", "grad_kv", "grad_score", "workspace",
        "kv_stride", "score_stride", "grad_out_stride", "grad_kv_stride", "grad_score_stride",
        "tokens", "segments", "rows", "head_dim", "lanes_log2", "column_tiles", "groups",
    ),
    "finish": (
        "workspace", "grad_ape", "cu_seqlens", "cu_seqlens_comp", "grad_kv", "grad_score",
        "plane_elements", "grad_kv_stride", "grad_score_stride",
        "groups", "accumulate", "tokens", "segments", "rows", "head_dim",
        "ratio", "coff", "fill_ctas",
    ),
}  # fmt: skip

# Bytes that the second-level cache fetches at a time where nothing else is said.
PREFETCH_SIZE = 256


@dataclass(frozen=True)
class Variant:
    """One kernel: an operation, its window shape and how many columns a thread owns.

    What finishes a backward serves every window: its ratio and coff are 0, its dtype is "f32" and
    its columns are the elements of grad_ape that a block owns.
    min_blocks: blocks that must fit a multiprocessor, which caps the registers; 0 lets the
    compiler choose.
    dynamic_shared: bytes of shared memory that a launch asks for.
    kind: "short" where a thread holds the whole window, "buffered" where in addition a warp takes
    one row and the next is on its way to shared memory, "long" where a block's warps share the
    window, "finish" for what finishes a backward. The bundle calls a short one that is `early` so.
    alignment: elements; head_dim and every 16-bit tensor's base and row stride are multiples of
    it. 0 means `columns`.
    holds_ape: whether a block keeps its tile of the APE in shared memory.
    batch: positions that a thread of a long window loads together.
    reread: of the positions of a thread, the first ones, whose kv it reads twice instead of keeping
    a product.
    staged: whether gradients pass through shared memory and leave 16 bytes at a time.
    rows: consecutive rows of a thread that holds whole windows.
    together: of those rows, how many it loads before it pools the first of them.
    once: whether a window is loaded past the first-level cache, by `load_word_once`.
    early: whether a forward loads a window from where `Pack.presumable` lets it lie before it has
    found its row.
    prefetch_size: bytes that the second-level cache fetches where a block copies 16 of kv or score
    asynchronously.
    ahead: whether a row's lines are fetched to the second-level cache, if they are whole ones: by
    the first blocks of a forward, and by a backward for a block's first row, from where
    `Pack.presumable` lets the row lie; by a backward for the row after the next, which is known.
    architectures: those it is built for.
    """

    operation: str
    ratio: int
    coff: int
    dtype: str
    columns: int
    threads: int
    min_blocks: int = 0
    dynamic_shared: int = 0
    architectures: tuple[int, ...] = ARCHITECTURES
    kind: str = "short"
    alignment: int = 0
    holds_ape: bool = False
    batch: int = 0
    rows: int = 1
    together: int = 1
    once: bool = False
    early: bool = False
    reread: int = 0
    staged: bool = False
    prefetch_size: int = PREFETCH_SIZE
    ahead: bool = False

    def __post_init__(self) -> None:
        """Rows are loaded in whole lots, and no field is without effect; else a ValueError."""
        if self.rows % self.together:
            raise ValueError(f"{self.rows} rows, {self.together} together")
        if self.ahead and (self.early or self.kind != "long"):
            raise ValueError(f"{self.kind} and early {self.early}, but ahead")
        if self.prefetch_size != PREFETCH_SIZE and self.required_alignment % 8:
            raise ValueError(f"fetches {self.prefetch_size} bytes, but copies no 16")

    @property
    def required_alignment(self) -> int:
        """`alignment`, resolved."""
        return self.alignment or self.columns

    @property
    def name(self) -> str:
        """The kernel's name: its cubin's stem, its symbol without the `_0` the compiler adds."""
        if self.operation == "finish":
            return f"csa_finish_{self.dtype}_e{self.columns}"
        window = f"r{self.ratio}_c{self.coff}"
        name = f"csa_{self.operation}_{window}_{self.dtype}_v{self.columns}"
        if self.rows > 1:
            name += f"_n{self.rows}"
        if self.once:
            name += "_once"
        if self.early:
            name += "_early"
        if self.kind in OWN_MODULES:
            name += f"_t{self.threads}"
        if self.required_alignment != self.columns:
            name += f"_a{self.required_alignment}"
        if self.holds_ape:
            name += "_ape"
        if self.ahead:
            name += "_ahead"
        if self.prefetch_size != PREFETCH_SIZE:
            name += f"_p{self.prefetch_size}"
        return name

    @property
    def module(self) -> str:
        """The file of aot/kernels that holds the kernel."""
        return f"{self.operation}_{self.kind}" if self.kind in OWN_MODULES else self.operation

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the kernel's parameters, in order."""
        return OPERATION_PARAMETERS[self.operation]


OWN_MODULES = ("long", "buffered")

FORWARD_THREADS = 128
BACKWARD_THREADS = 256
# (elements of a block, threads): many threads for each element of a small plane, one of a large.
FINISH_BLOCKS = ((32, 512), (64, 256), (256, 256))

# Windows that a thread holds in registers, and the ratio of those that a block's warps share.
SHORT_WINDOWS = tuple((ratio, coff) for ratio in (2, 4) for coff in (1, 2))
# Buffered kernels of the short ones: ratio, coff, columns, threads, min_blocks, prefetch_size.
BUFFERED = (
    (2, 1, 2, 256, 2, 256), (2, 1, 4, 256, 3, 128),
    (2, 2, 2, 256, 2, 256), (2, 2, 4, 256, 1, 256), (2, 2, 4, 512, 1, 256),
    (4, 1, 2, 256, 2, 256), (4, 1, 4, 256, 1, 256), (4, 1, 4, 512, 1, 256),
    (4, 2, 2, 256, 2, 256), (4, 2, 2, 256, 2, 128), (4, 2, 4, 256, 2, 256),
)  # fmt: skip
LONG_RATIO = 128


def _backward_blocks(ratio: int, coff: int, columns: int) -> int:
    # As many blocks as the registers for a thread's window allow without spilling.
    return 2 if ratio * coff * columns >= 16 else 3


def _backward_architectures(ratio: int, coff: int, columns: int) -> tuple[int, ...]:
    # Elsewhere the compiler cannot fit the widest window into two blocks' registers.
    return (90, 100) if ratio * coff * columns == 32 else ARCHITECTURES


def _long(operation: str, coff: int, columns: int, threads: int, **fields: Any) -> Variant:
    return Variant(operation, LONG_RATIO, coff, "bf16", columns, threads, kind="long", **fields)


_LONG = (
    _long("forward", 1, 2, 256, batch=16),
    _long("forward", 1, 1, 256, batch=16, early=True),
    _long("forward", 1, 2, 256, batch=16, early=True),
    _long("forward", 1, 2, 256, batch=16, once=True),
    _long("forward", 1, 2, 256, batch=16, once=True, ahead=True),
    # Elsewhere the compiler cannot fit it into four blocks' registers.
    _long("forward", 1, 4, 128, batch=16, min_blocks=4, once=True, architectures=(90,)),
    _long("forward", 1, 1, 512, batch=8, min_blocks=4, once=True),
    # For sm_80 the compiler cannot fit them into four blocks' registers.
    _long("forward", 2, 4, 256, batch=4, min_blocks=4, architectures=(90, 100, 120)),
    _long("forward", 2, 4, 256, batch=4, min_blocks=4, once=True, architectures=(90, 100, 120)),
    _long("forward", 2, 4, 128, batch=4, min_blocks=8, once=True),
    _long("forward", 2, 2, 512, batch=8, min_blocks=2, once=True),
    _long("forward", 2, 1, 256, batch=16, early=True),
    _long("forward", 2, 2, 512, batch=8, min_blocks=2, early=True),
    _long("forward", 2, 2, 256, batch=8, early=True),
    _long("forward", 2, 1, 512, batch=8, once=True),
    # Aligned to 8 elements, rows are copied asynchronously, 16 bytes at a time. A block of sm_120
    # has 99 KB of shared memory.
    _long("backward", 1, 2, 256, batch=16, min_blocks=1, alignment=8, holds_ape=True,
          dynamic_shared=108_544, architectures=(80, 90, 100), ahead=True, prefetch_size=128),
    _long("backward", 1, 1, 256, batch=16, min_blocks=2, alignment=8, holds_ape=True,
          dynamic_shared=56_320),
    _long("backward", 1, 1, 256, batch=16, min_blocks=2, dynamic_shared=39_936),
    _long("backward", 2, 2, 256, batch=16, min_blocks=1, alignment=8, holds_ape=True,
          dynamic_shared=206_848, architectures=(90, 100), reread=24, staged=True),
    _long("backward", 2, 1, 256, batch=16, min_blocks=1, alignment=8, holds_ape=True,
          dynamic_shared=105_472, architectures=(80, 90, 100)),
    _long("backward", 2, 1, 256, batch=16, min_blocks=1, alignment=8, dynamic_shared=72_704),
    _long("backward", 2, 1, 256, batch=16, min_blocks=1, dynamic_shared=72_704),
)  # fmt: skip


def _buffered(
    ratio: int, coff: int, columns: int, threads: int, min_blocks: int, prefetch_size: int
) -> Variant:
    positions, tile = ratio * coff, 32 * columns
    # Of fp32: the APE, zeros for what a first block lacks; of int32: a thread's two prefixes.
    words = (2 * positions - ratio) * tile + 2 * threads
    # Of bf16, two rows of each warp: kv and score at every position, and grad_out.
    elements = threads // 32 * 2 * (2 * positions + 1) * tile
    return Variant(
        "backward", ratio, coff, "bf16", columns, threads, min_blocks, kind="buffered",
        alignment=8, dynamic_shared=4 * words + 2 * elements, prefetch_size=prefetch_size,
        # Elsewhere the compiler cannot fit two blocks of the widest window into the registers.
        architectures=(90,) if positions * columns == 32 else ARCHITECTURES,
    )  # fmt: skip


VARIANTS: tuple[Variant, ...] = (
    *(
        Variant("forward", ratio, coff, "bf16", columns, FORWARD_THREADS)
        for ratio, coff in SHORT_WINDOWS
        for columns in (1, 2, 4)
    ),
    *(
        Variant(
            "forward", ratio, coff, "bf16", 4, FORWARD_THREADS, rows=rows,
            # In flight together, 16 positions of a thread fill the registers of four blocks.
            together=2 if ratio * coff == 8 else 1, min_blocks=4 if ratio * coff == 8 else 0,
        )
        for ratio, coff in SHORT_WINDOWS
        for rows in ((8,) if (ratio, coff) == (2, 1) else (4, 8))
    ),
    Variant("forward", 4, 2, "bf16", 2, FORWARD_THREADS, once=True),
    *(
        Variant("forward", 4, 2, "bf16", columns, FORWARD_THREADS, early=True)
        for columns in (2, 4)
    ),
    *(
        Variant(
            "backward", ratio, coff, "bf16", columns, BACKWARD_THREADS,
            _backward_blocks(ratio, coff, columns),
            architectures=_backward_architectures(ratio, coff, columns),
        )
        for ratio, coff in SHORT_WINDOWS
        for columns in (1, 2, 4)
    ),
    *(_buffered(*row) for row in BUFFERED),
    *_LONG,
    *(
        Variant("finish", 0, 0, "f32", elements, threads, kind="finish", alignment=1)
        for elements, threads in FINISH_BLOCKS
    ),
)  # fmt: skip

BY_NAME: dict[str, Variant] = {variant.name: variant for variant in VARIANTS}
