"""Arithmetic of two tensors: `b` is broadcast over `a`; the result has the type and shape of `a`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.ops.base import (
    OpBase,
    fail_contiguous,
    fail_dtype,
    fail_shape,
    method,
    require_repeat,
    require_type,
)
from ggmlb.core.ops.spec import OpSpec, copy_window, pass_gradient, summed
from ggmlb.core.sharding import MIRRORED, ShardOutcome, States, elementwise
from ggmlb.core.tensor import Tensor, extent_nbytes

if TYPE_CHECKING:
    from ggmlb.core.context import Context

Binary = Callable[["BinaryOps", Tensor, Tensor], Tensor]


def _pair(op: Op, sign: str) -> tuple[Binary, Binary]:
    """Create the method of a binary op and its in-place variant."""
    fn = op.value.lower()
    fn_inplace = f"{fn}_inplace"

    def new(self: BinaryOps, a: Tensor, b: Tensor) -> Tensor:
        require_repeat(fn, a, b)
        return self._op(op, a.dtype, a.ne, (a, b))

    def inplace(self: BinaryOps, a: Tensor, b: Tensor) -> Tensor:
        require_repeat(fn_inplace, a, b)
        return self._op_into(op, a, (a, b))

    return (
        method(new, fn, f"Return `a {sign} b`, with `b` tiled to the shape of `a`"),
        method(inplace, fn_inplace, f"Return `a {sign} b`, written into the memory of `a`"),
    )


class BinaryOps(OpBase):
    """add, sub, mul, div and their in-place forms, add_cast, add_id, add1, acc."""

    add: ClassVar[Binary]
    add_inplace: ClassVar[Binary]
    sub: ClassVar[Binary]
    sub_inplace: ClassVar[Binary]
    mul: ClassVar[Binary]
    mul_inplace: ClassVar[Binary]
    div: ClassVar[Binary]
    div_inplace: ClassVar[Binary]
    add, add_inplace = _pair(Op.ADD, "+")
    sub, sub_inplace = _pair(Op.SUB, "-")
    mul, mul_inplace = _pair(Op.MUL, "*")
    div, div_inplace = _pair(Op.DIV, "/")

    def add_cast(self, a: Tensor, b: Tensor, dtype: DType | str) -> Tensor:
        """Return `a + b` as `dtype`; `a` is f16, bf16 or quantised (ggml_add_cast).

        Raises:
            ShapeError: The rows of `b` do not tile `a`.
            DTypeError: `a` is of another type.
        """
        if a.ne[0] != b.ne[0]:
            fail_shape("add_cast", f"the rows must be equally long: {a.ne[0]} and {b.ne[0]}", a, b)
        require_repeat("add_cast", a, b)
        if not a.dtype.is_quantized:
            require_type("add_cast", "a", a, DType.F16, DType.BF16)
        return self._op(Op.ADD, DType.parse(dtype), a.ne, (a, b))

    def add_id(self, a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
        """Return `a` plus, on row `[i1, i2]`, the row `ids[i1, i2]` of `b` (ggml_add_id).

        Args:
            a: ne `[n, n_used, n_tokens]`.
            b: ne `[n, n_experts]`.
            ids: i32, ne `[n_used, n_tokens]`.

        Raises:
            ShapeError: The shapes do not fit.
            DTypeError: `ids` is not i32.
        """
        if a.ne[0] != b.ne[0] or a.ne[1] != ids.ne[0] or a.ne[2] != ids.ne[1]:
            fail_shape(
                "add_id", "ne[0] of a and b must be equal, and ids must have ne [a.ne[1], a.ne[2]]", a, b, ids
            )
        if ids.dtype is not DType.I32:
            fail_dtype("add_id", "ids", ids, DType.I32)
        return self._op(Op.ADD_ID, a.dtype, a.ne, (a, b, ids))

    def add1(self, a: Tensor, b: Tensor) -> Tensor:
        """Return `a` plus the scalar tensor `b` (ggml_add1).

        Raises:
            ShapeError: `b` is not a scalar, or `a` has gaps other than between rows.
        """
        return self._add1("add1", a, b, False)

    def add1_inplace(self, a: Tensor, b: Tensor) -> Tensor:
        """Return `add1`, written into the memory of `a` (ggml_add1_inplace)."""
        return self._add1("add1_inplace", a, b, True)

    def _add1(self, fn: str, a: Tensor, b: Tensor, inplace: bool) -> Tensor:
        if b.ne != (1, 1, 1, 1):
            fail_shape(fn, "b must be a scalar", a, b)
        if not is_padded_1d(a):
            fail_contiguous(fn, "a", a, "contiguous except for gaps between rows")
        return self._like(inplace, Op.ADD1, a, (a, b))

    def acc(self, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
        """Return a copy of `a` with `b` added to a window at byte `offset`, strides `nb1..nb3` (ggml_acc).

        The window has the shape of `b`, begins `offset` bytes into `a`, and has byte strides `nb1..nb3`.
        The node's params are `nb1, nb2, nb3, offset` and `inplace`.

        Raises:
            ShapeError: `a` is not contiguous, or the window lies outside of it or overlaps itself.
            DTypeError: One of them is not f32.
        """
        return self._acc("acc", a, b, nb1, nb2, nb3, offset, False)

    def acc_inplace(self, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
        """Return `acc`, written into the memory of `a` (ggml_acc_inplace)."""
        return self._acc("acc_inplace", a, b, nb1, nb2, nb3, offset, True)

    def _acc(
        self, fn: str, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int, inplace: bool
    ) -> Tensor:
        require_type(fn, "a", a, DType.F32)
        require_type(fn, "b", b, DType.F32)
        params = window_params(fn, a, b, nb1, nb2, nb3, offset, inplace)
        return self._like(inplace, Op.ACC, a, (a, b), params)


def is_padded_1d(a: Tensor) -> bool:
    """Whether `a` is contiguous but for gaps between rows, all of one size (ggml_is_padded_1d)."""
    ne, nb = a.ne, a.nb
    return nb[0] == a.dtype.type_size and nb[2] == nb[1] * ne[1] and nb[3] == nb[2] * ne[2]


def window_params(
    fn: str, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int, inplace: bool
) -> dict[str, int | bool]:
    """Return the params of an `acc` or `set` node after checking its window (the part of `a` that it writes).

    Raises:
        ShapeError: The window is invalid (`window_fault`).
    """
    if why := window_fault(a, b, nb1, nb2, nb3, offset):
        fail_shape(fn, why, a, b)
    return {"nb1": nb1, "nb2": nb2, "nb3": nb3, "offset": offset, "inplace": inplace}


def window_fault(a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> str | None:
    """Return why `b`, at `offset` with strides `nb1..nb3`, is no valid window of `a`; `None` if it is.

    `a` must be contiguous, as in ggml, so that a result of its shape has the same layout.
    """
    size, where = a.dtype.type_size, f"the window of b at byte {offset} with nb {[nb1, nb2, nb3]}"
    if not a.is_contiguous():
        return f"a has strides nb {list(a.nb)}; it must be contiguous: apply cont first"
    if (nb1 | nb2 | nb3 | offset) < 0:
        return f"nb {[nb1, nb2, nb3]} and offset {offset} must not be negative"
    if (
        offset + extent_nbytes(a.dtype, b.ne, (size, nb1, nb2, nb3))
        > a.n_elements // a.dtype.block_size * size
    ):
        return f"{where} ends outside of a"
    steps = sorted((nb, n) for nb, n in zip((nb1, nb2, nb3), b.ne[1:], strict=True) if n > 1)
    if offset % size or any(nb % size for nb, _ in steps):
        return f"{where} is not on elements of a; give multiples of {size} bytes"
    end = b.dtype.row_size(b.ne[0])
    for nb, n in steps:
        if nb < end and not b.is_empty:
            return f"{where} has rows that overlap or interleave"
        end = nb * (n - 1) + end
    return None


# -- how results are sharded over devices ---


def _shard_add_id(node: Tensor, states: States) -> ShardOutcome | None:
    """Shard by columns: each row of `b` is added to rows of `a`."""
    state = states[0]
    return ShardOutcome(state, (state, state, MIRRORED)) if state.is_cut and state.axis == 0 else None


# -- gradients ---


def _back_add_id(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    ids, b = node.operand(2), node.operand(1)
    rows = c.reshape_2d(grad, grad.ne[0], grad.ne[1] * grad.ne[2])
    return c.get_rows_back(rows, c.reshape_1d(c.cont(ids), ids.n_elements), b)


def _back_window(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    p = node.params
    return copy_window(c, grad, node.operand(1), p["offset"], (p["nb1"], p["nb2"], p["nb3"]))


def _back_sub(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    return c.neg(summed(c, grad, node.operand(1)))


def _back_mul_a(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    return c.mul(grad, node.operand(1))


def _back_mul_b(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    return summed(c, c.mul(grad, node.operand(0)), node.operand(1))


def _back_div_a(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    return c.div(grad, node.operand(1))


def _back_div_b(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    b = node.operand(1)
    return c.neg(summed(c, c.mul(grad, c.div(node, b)), b))


SPECS = (
    OpSpec(
        Op.ADD,
        backward={0: pass_gradient, 1: lambda c, t, g: summed(c, g, t.operand(1))},
        inplace=2,
        shard=elementwise,
        linear=((0, 1),),
    ),
    OpSpec(Op.ADD_ID, backward={0: pass_gradient, 1: _back_add_id}, inplace=1, shard=_shard_add_id),
    OpSpec(Op.ADD1, backward={0: pass_gradient, 1: lambda c, t, g: c.sum(g)}, inplace=1),
    OpSpec(
        Op.ACC,
        backward={0: pass_gradient, 1: _back_window},
        params=("nb1", "nb2", "nb3", "offset", "inplace"),
    ),
    OpSpec(Op.SUB, backward={0: pass_gradient, 1: _back_sub}, inplace=2, shard=elementwise, linear=((0, 1),)),
    OpSpec(Op.MUL, backward={0: _back_mul_a, 1: _back_mul_b}, inplace=2, shard=elementwise, linear=((0,),)),
    OpSpec(Op.DIV, backward={0: _back_div_a, 1: _back_div_b}, inplace=2, shard=elementwise, linear=((0,),)),
)
