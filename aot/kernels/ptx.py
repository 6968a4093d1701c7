# SPDX-License-Identifier: Apache-2.0
"""Single instructions that the DSL has no function for."""

from typing import Any, TypeVar

from cutlass import Boolean, Float32
from cutlass._mlir.dialects import arith as mlir_arith
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

Scalar = TypeVar("Scalar", bound=Any)


@dsl_user_op
def ptx(result: type[Scalar], name: str, *operands: Any, loc: Any = None, ip: Any = None) -> Scalar:
    """The PTX instruction `name` on Float32 and Uint32 operands, giving a `result`.

    It has no side effects: the compiler may move and drop it, but sees no way to fuse it.
    """
    registers = ["f" if kind is Float32 else "r" for kind in (result, *map(type, operands))]
    places = ", ".join(f"${i}" for i in range(len(registers)))
    value = llvm.inline_asm(
        result.mlir_type,
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        f"{name} {places};",
        "=" + ",".join(registers),
        has_side_effects=False,
        loc=loc,
        ip=ip,
    )
    return result(value)


def select(condition: Boolean, chosen: Scalar, otherwise: Scalar) -> Scalar:
    """`chosen` where the condition holds, else `otherwise`, without a branch."""
    return type(otherwise)(
        mlir_arith.select(condition.ir_value(), chosen.ir_value(), otherwise.ir_value())
    )
