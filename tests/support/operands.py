"""Operands of op tests, written as text: `f32[4, 3]`, with the layout after a dot.

f32[4, 3].T    a transposed view: extents as written, strides swapped
f32[4, 3].P    a view whose dimensions 1 and 2 are permuted
f32[4, 3].G    a view of rows with gaps between them
f32[4, 3].W    a parameter (set_param)
"""

from __future__ import annotations

import re

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.tensor import Tensor


def operand(ctx: Context, text: str) -> Tensor:
    """Make the leaf or view that the text describes."""
    match = re.fullmatch(r"(\w*)\[([\d, ]*)\](?:\.(\w))?", text)
    assert match, text
    dtype = DType.parse(match[1] or "f32")
    ne = [*map(int, match[2].split(",")), 1, 1, 1][:4]
    match match[3]:
        case "T":
            return ctx.transpose(ctx.new_tensor(dtype, [ne[1], ne[0], *ne[2:]]))
        case "P":
            return ctx.permute(ctx.new_tensor(dtype, [ne[0], ne[2], ne[1], ne[3]]), 0, 2, 1, 3)
        case "G":
            wide = ctx.new_tensor(dtype, [ne[0] + 4 * dtype.block_size, *ne[1:]])
            (_, nb1, nb2, nb3), (ne0, ne1, ne2, ne3) = wide.nb, ne
            return ctx.view_4d(wide, ne0, ne1, ne2, ne3, nb1, nb2, nb3, 0)
        case "W":
            return ctx.set_param(ctx.new_tensor(dtype, ne))
    return ctx.new_tensor(dtype, ne)


def is_operand(arg: object) -> bool:
    """Whether an argument is the text of an operand."""
    return isinstance(arg, str) and "[" in arg


def call(ctx: Context, fn: str, args: tuple[object, ...]) -> Tensor:
    """Call a method of the context, its operands given as text."""
    result: Tensor = getattr(ctx, fn)(*(_argument(ctx, a) for a in args))
    return result


def _argument(ctx: Context, arg: object) -> object:
    if isinstance(arg, tuple):
        return tuple(_argument(ctx, a) for a in arg)
    return operand(ctx, arg) if isinstance(arg, str) and is_operand(arg) else arg
