"""Arithmetic of two operands; the second repeats over the first."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ggmlb.backends.array.rules import F32, FLOAT, I32, VALUE, operands, rule, same_types, sources
from ggmlb.backends.array.views import View
from ggmlb.enums import Op

if TYPE_CHECKING:
    from ggmlb.backends.array.lowering import Lowering
    from ggmlb.backends.array.workspace import Array
    from ggmlb.tensor import Tensor


def _binary(ufunc: str, lw: Lowering, t: Tensor) -> None:
    fn = getattr(lw.xp, ufunc)

    def kernel(y: Array, a: Array, b: Array) -> None:
        fn(a, b, out=y)

    lw.elementwise(kernel, t, *sources(t))


for _op, _ufunc in (
    (Op.ADD, "add"),
    (Op.ADD1, "add"),
    (Op.SUB, "subtract"),
    (Op.MUL, "multiply"),
    (Op.DIV, "divide"),
):
    rule(_op, operands(VALUE, VALUE, out=VALUE))(partial(_binary, _ufunc))


@rule(Op.ADD_ID, operands(FLOAT, FLOAT, I32))
def add_id(lw: Lowering, t: Tensor) -> None:
    """`a[token, i] + b[ids[token, i]]`."""
    a, b, ids = sources(t)
    x, rows, index = lw.f32(a), lw.f32(b), lw.array(ids)[0, 0]
    y, chosen = lw.out_f32(t), lw.scratch((1, 1, index.size, b.ne[0]))
    flat = lw.scratch((1, 1, index.size), index.dtype)
    lw.emit(lw.xp.copyto, flat.reshape(index.shape), index)
    lw.emit(lw.take_rows, chosen, rows, flat)
    lw.emit(lw.xp.add, x, chosen.reshape(1, *index.shape, b.ne[0]), out=y)
    lw.store(t, y)


def _window(t: Tensor, like: Tensor) -> View:
    """The part of the result that `acc` and `set` write."""
    whole, p = View.of(t), t.params
    nb = (t.nb[0], p["nb1"], p["nb2"], p["nb3"])
    return View.lay(whole.buffer, t.dtype, whole.offset + p["offset"], like.ne, nb)


@rule(Op.ACC, operands(F32, F32, out=F32))
def acc(lw: Lowering, t: Tensor) -> None:
    """`a`, with `b` added to a window of it."""
    a, b = sources(t)
    if not t.params["inplace"]:
        lw.copy(View.of(t), View.of(a))
    window = lw.bind(_window(t, b))
    lw.emit(lw.xp.add, window, lw.array(b), out=window)


@rule(Op.SET, same_types)
def set_window(lw: Lowering, t: Tensor) -> None:
    """`a`, with a window of it replaced by `b`."""
    a, b = sources(t)
    if not t.params["inplace"]:
        lw.copy(View.of(t), View.of(a))
    lw.copy(_window(t, b), View.of(b))
