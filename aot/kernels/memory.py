# SPDX-License-Identifier: Apache-2.0
"""Tensors in global memory, and accesses to several adjacent elements at once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cute import arch
from cutlass.cutlass_dsl import T, dsl_user_op

from aot.kernels.bf16 import WORD
from aot.variants import PREFETCH_SIZE


@dataclass(frozen=True)
class Matrix:
    """A tensor of bf16 whose rows are contiguous and `stride` elements apart."""

    base: cute.Pointer
    stride: Int64

    def at(self, row: Int32, column: Int32) -> cute.Pointer:
        """The address of an element."""
        return self.base + (Int64(row) * self.stride + column)


# The assembler sinks plain loads towards their uses and then waits for each of them; relaxed ones
# it leaves where they stand, all in flight together.
PINNED = {"sem": "relaxed", "scope": "cta"}


def load_word(address: cute.Pointer, columns: int, **hints: Any) -> Any:
    """`columns` adjacent bf16 of global memory as one word."""
    return arch.load(address, WORD[columns], **PINNED, **hints)


def load_word_once(address: cute.Pointer, columns: int) -> Any:
    """`load_word` of what nobody reads again: it leaves the first-level cache to the APE.

    By the times of an H200 its lines also are the first to leave the second-level cache.
    """
    return load_word(address, columns, level1_eviction_priority="evict_no_allocate")


@dsl_user_op
def load_f32(
    pointer: cute.Pointer, count: int, pinned: bool = False, *, loc: Any = None, ip: Any = None
) -> list[Float32]:
    """`count` adjacent fp32 in one access."""
    hints = PINNED if pinned else {}
    if count == 1:
        return [arch.load(pointer, Float32, **hints)]
    vector = arch.load(pointer, ir.VectorType.get([count], T.f32()), **hints)
    return [
        Float32(llvm.extractelement(vector, Int32(i).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))
        for i in range(count)
    ]


@dsl_user_op
def store_f32(
    pointer: cute.Pointer, values: list[Float32], *, loc: Any = None, ip: Any = None
) -> None:
    """Adjacent fp32 in one access."""
    if len(values) == 1:
        arch.store(pointer, values[0])
        return
    vector = llvm.mlir_undef(ir.VectorType.get([len(values)], T.f32()), loc=loc, ip=ip)
    for i, value in enumerate(values):
        index = Int32(i).ir_value(loc=loc, ip=ip)
        vector = llvm.insertelement(vector, value.ir_value(), index, loc=loc, ip=ip)
    arch.store(pointer, vector)


def load_ape(
    ape: cute.Pointer,
    address: Callable[[int], cute.Pointer],
    positions: int,
    columns: int,
    pinned: bool = False,
) -> list[list[Float32]]:
    """`columns` adjacent fp32 of each position, [position][column]; zeros where `ape` is null.

    address: of a position's floats. It is asked within the branch that loads, so that nothing of
    it stays in registers across the branch. pinned: whether the loads stay where they stand.
    """
    table = cute.make_rmem_tensor((positions, columns), Float32)
    _fill_from_ape(table, ape, address, pinned)
    return [[table[k, v] for v in range(columns)] for k in range(positions)]


@cute.jit
def _fill_from_ape(
    table: cute.Tensor, ape: cute.Pointer, address: cutlass.Constexpr, pinned: cutlass.Constexpr
) -> None:
    positions, columns = table.shape
    if ape.toint() == 0:
        table.fill(0.0)
    else:
        for k in cutlass.range_constexpr(positions):
            values = load_f32(address(k), columns, pinned)
            for v in cutlass.range_constexpr(columns):
                table[k, v] = values[v]


def load_16(address: cute.Pointer) -> Any:
    """16 aligned bytes of shared memory."""
    return arch.load(address, ir.VectorType.get([4], T.i32()), ss="cta")


PIECE = 8  # bf16 of 16 bytes


def copy_async(
    target: cute.Pointer, source: cute.Pointer, size: int, prefetch_size: int = PREFETCH_SIZE
) -> None:
    """Starts copying 4, 8 or 16 bytes, both ends aligned, from global to shared memory.

    16 bytes pass by the first-level cache, and the second-level one fetches the `prefetch_size`
    that they lie in: a line of 128, or two of them, for the block of the next columns.
    """
    cache = f"cg.shared.global.L2::{prefetch_size}B" if size == 16 else "ca.shared.global"
    arch.inline_ptx(
        f"cp.async.{cache} [{{$r0}}], [{{$r1}}], {size};",
        read_only_args=[target, source],
    )


def fetch_line(address: Int64) -> None:
    """Starts fetching the line of 128 bytes that an address lies in to the second-level cache."""
    arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])
