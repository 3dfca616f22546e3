"""Arithmetic of two tensors: `b` is broadcast over `a`; the result has the type and shape of `a`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

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
from ggmlb.core.ops.spec import (
    ANY,
    BF16,
    F16,
    F32,
    I32,
    PADDED,
    PLAIN,
    ROW,
    ROWS,
    OpSpec,
    Perf,
    cut_out,
    f32,
    i32,
    main,
    passed_on,
    rows,
    summed,
    tolerance,
    window,
)
from ggmlb.core.sharding import MIRRORED, ShardOutcome, States, elementwise
from ggmlb.core.tensor import Tensor, extent_nbytes

if TYPE_CHECKING:
    from ggmlb.core.context import Context
    from ggmlb.testing.draw import Program

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
        """Return a copy of `a` with `b` added to a window of it (ggml_acc).

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
    """Whether only rows have gaps between them (ggml_is_padded_1d)."""
    ne, nb = a.ne, a.nb
    return nb[0] == a.dtype.type_size and nb[2] == nb[1] * ne[1] and nb[3] == nb[2] * ne[2]


def window_params(
    fn: str, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int, inplace: bool
) -> dict[str, int | bool]:
    """Return the params of `acc` or `set`, which write a window of `a` of the shape of `b`.

    Raises:
        ShapeError: As `window_fault` says.
    """
    if why := window_fault(a, b, nb1, nb2, nb3, offset):
        fail_shape(fn, why, a, b)
    return {"nb1": nb1, "nb2": nb2, "nb3": nb3, "offset": offset, "inplace": inplace}


def window_fault(a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> str | None:
    """Return why a window does not consist of elements of `a`, each once; `None` if it does.

    `a` is contiguous, as ggml demands, so that it and a result of its shape have the same bytes and no gaps.
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
    return cut_out(c, grad, node.operand(1), p["offset"], (p["nb1"], p["nb2"], p["nb3"]))


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


# -- cases ---


BLOCKS_32 = (DType.Q4_0, DType.Q4_1, DType.Q5_0, DType.Q5_1, DType.Q8_0)


def _draw_binary(name: str, p: Program) -> None:
    a, b = p.one_of((F32, F32), (F16, F16), (F16, F32), (BF16, BF16), (BF16, F32), beyond=((F32, F16),))
    small = p.ne(24, 4, 3, 2)
    large = tuple(n * p.extra(1, 3) for n in small)
    p.nmse = tolerance(a, b)
    positive: Any = {"low": 0.5, "high": 2}
    x = p.operand(a, large, *ROWS, beyond=ANY)
    y = p.operand(b, small, *ROWS, beyond=ANY, **positive)
    p.out(name + p.one_of("", "_inplace"), x, y)


def _draw_add_blocks(p: Program) -> None:
    ne = p.ne(3, 5, 3, 2)
    ne = (32 * ne[0], *ne[1:])
    p.nmse, p.rule = 1e-3, "dequant"
    p.out("add", p.leaf(p.one_of(*BLOCKS_32), ne), p.operand(F32, ne, *ROWS))


def _draw_add_cast(p: Program) -> None:
    ne = p.ne()
    p.nmse = 1e-6
    p.out("add_cast", p.leaf(F16, ne), p.leaf(F32, ne), F32)


def _draw_add1(p: Program) -> None:
    a, b = p.one_of((F32, F32), (F16, F32), (F16, F16), (BF16, F32), (BF16, BF16))
    p.nmse = tolerance(a, b)
    p.out(p.one_of("add1", "add1_inplace"), p.leaf(a, p.ne()), p.leaf(b, (1,)))


def _draw_add_id(p: Program) -> None:
    n, n_used, n_tokens, _ = p.ne(70, 5, 6)
    n_experts = p.int(1, 6)
    ids = p.random.integers(0, n_experts, (n_tokens, n_used + 2))
    if p.bool():
        many = p.leaf(I32, (n_used + 2, n_tokens), ids)
        chosen = p.step("view_2d", many, n_used, n_tokens, 4 * (n_used + 2), 4)
    else:
        chosen = p.leaf(I32, (n_used, n_tokens), ids[:, :n_used])
    a = p.operand(F32, (n, n_used, n_tokens), *ROWS)
    p.out("add_id", a, p.operand(F32, (n, n_experts), PLAIN, PADDED), chosen)


def _draw_acc(p: Program) -> None:
    a, b, nb, offset = window(p, F32)
    p.out(p.one_of("acc", "acc_inplace"), a, b, *nb, offset)


SPECS = (
    OpSpec(
        Op.ADD,
        backward={0: passed_on, 1: lambda c, t, g: summed(c, g, t.operand(1))},
        inplace=2,
        shard=elementwise,
        samples={"add": lambda c, t: c.add(main(c, t), f32(c, ROW, 4))},
        cases={
            "add": partial(_draw_binary, "add"),
            "add of blocks": _draw_add_blocks,
            "add_cast": _draw_add_cast,
        },
        perf=(
            Perf("add", "f32,f32", lambda c, s: c.add(rows(c, s), rows(c, s))),
            Perf("add", "f32,f32;one row", lambda c, s: c.add(rows(c, s), rows(c, s, n=1))),
        ),
    ),
    OpSpec(
        Op.ADD_ID,
        backward={0: passed_on, 1: _back_add_id},
        inplace=1,
        shard=_shard_add_id,
        samples={"add_id": lambda c, t: c.add_id(main(c, t, ROW, 2, 3), f32(c, ROW, 4), i32(c, 2, 3))},
        cases={"add_id": _draw_add_id},
    ),
    OpSpec(
        Op.ADD1,
        backward={0: passed_on, 1: lambda c, t, g: c.sum(g)},
        inplace=1,
        samples={"add1": lambda c, t: c.add1(main(c, t), f32(c, 1))},
        cases={"add1": _draw_add1},
    ),
    OpSpec(
        Op.ACC,
        backward={0: passed_on, 1: _back_window},
        params=("nb1", "nb2", "nb3", "offset", "inplace"),
        samples={"acc": lambda c, t: c.acc(main(c, t), f32(c, ROW, 2), 4 * ROW, 8 * ROW, 8 * ROW, 0)},
        cases={"acc": _draw_acc},
    ),
    OpSpec(
        Op.SUB,
        backward={0: passed_on, 1: _back_sub},
        inplace=2,
        shard=elementwise,
        samples={"sub": lambda c, t: c.sub(main(c, t), f32(c, ROW, 4))},
        cases={"sub": partial(_draw_binary, "sub")},
    ),
    OpSpec(
        Op.MUL,
        backward={0: _back_mul_a, 1: _back_mul_b},
        inplace=2,
        shard=elementwise,
        samples={"mul": lambda c, t: c.mul(main(c, t), f32(c, ROW, 4))},
        cases={"mul": partial(_draw_binary, "mul")},
        perf=(Perf("mul", "f32,f32", lambda c, s: c.mul(rows(c, s), rows(c, s))),),
    ),
    OpSpec(
        Op.DIV,
        backward={0: _back_div_a, 1: _back_div_b},
        inplace=2,
        shard=elementwise,
        samples={"div": lambda c, t: c.div(main(c, t), f32(c, ROW, 4))},
        cases={"div": partial(_draw_binary, "div")},
    ),
)
