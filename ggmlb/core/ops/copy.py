"""Copies to another buffer, type, shape or layout.

DUP, CONT and CPY have no params. A node of `cast` is a CPY with one source; a node of `cpy` has two, and is
a view of the second. SET has `nb1, nb2, nb3, offset, inplace`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.ops.base import OpBase, fail_dtype, fail_shape, require_type
from ggmlb.core.ops.binary import window_params
from ggmlb.core.ops.spec import OpSpec, copy_window, pass_gradient, zero_gradient
from ggmlb.core.sharding import ShardOutcome, States
from ggmlb.core.tensor import Ne, Tensor

if TYPE_CHECKING:
    from ggmlb.core.context import Context


class CopyOps(OpBase):
    """dup, cpy, cast, cont, cont_1d..4d, set, set_1d, set_2d and their in-place forms."""

    def dup(self, a: Tensor) -> Tensor:
        """Return a contiguous copy of `a` (ggml_dup)."""
        return self._op(Op.DUP, a.dtype, a.ne, (a,))

    def dup_inplace(self, a: Tensor) -> Tensor:
        """Return a DUP node in the memory of `a`: no copy (ggml_dup_inplace)."""
        return self._op_into(Op.DUP, a, (a,))

    def cpy(self, a: Tensor, b: Tensor) -> Tensor:
        """Copy `a` into the memory of `b`, converting its type; return a view of `b` (ggml_cpy).

        Elements keep their order, so the shapes may differ.

        Raises:
            ShapeError: The numbers of elements differ.
        """
        if a.ne != b.ne and a.n_elements != b.n_elements:
            fail_shape("cpy", f"a has {a.n_elements} elements, b {b.n_elements}; they must be equal", a, b)
        node = self._op_into(Op.CPY, b, (a, b), suffix=f"copy of {a.name}" if a.name else "copy")
        if a.name and not b.name:
            node.name = f"{a.name} (copy)"
        return node

    def cast(self, a: Tensor, dtype: DType | str) -> Tensor:
        """Return a contiguous copy of `a` as `dtype` (ggml_cast).

        Raises:
            DTypeError: There is no such type.
            ShapeError: The rows are not whole blocks of that type.
        """
        name = f"{a.name} (copy)" if a.name else ""
        return self._op(Op.CPY, DType.parse(dtype), a.ne, (a,), None, name)

    def cont(self, a: Tensor) -> Tensor:
        """Return a contiguous copy of `a` (ggml_cont)."""
        return self._op(Op.CONT, a.dtype, a.ne, (a,), None, f"{a.name} (cont)" if a.name else "")

    def cont_1d(self, a: Tensor, ne0: int) -> Tensor:
        """Return a contiguous copy of `a` as one row; errors as in `cont_4d` (ggml_cont_1d)."""
        return self._cont("cont_1d", a, (ne0, 1, 1, 1))

    def cont_2d(self, a: Tensor, ne0: int, ne1: int) -> Tensor:
        """Return a contiguous copy with ne `[ne0, ne1]`; errors as in `cont_4d` (ggml_cont_2d)."""
        return self._cont("cont_2d", a, (ne0, ne1, 1, 1))

    def cont_3d(self, a: Tensor, ne0: int, ne1: int, ne2: int) -> Tensor:
        """Return a contiguous copy with ne `[ne0, ne1, ne2]`; errors as in `cont_4d` (ggml_cont_3d)."""
        return self._cont("cont_3d", a, (ne0, ne1, ne2, 1))

    def cont_4d(self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
        """Return a contiguous copy of `a` with another shape (ggml_cont_4d).

        Raises:
            ShapeError: The numbers of elements differ.
        """
        return self._cont("cont_4d", a, (ne0, ne1, ne2, ne3))

    def _cont(self, fn: str, a: Tensor, ne: Ne) -> Tensor:
        if min(ne) < 0 or ne[0] * ne[1] * ne[2] * ne[3] != a.n_elements:
            fail_shape(fn, f"ne {list(ne)} must have as many elements as a, {a.n_elements}", a)
        return self._op(Op.CONT, a.dtype, ne, (a,), None, f"{a.name} (cont)" if a.name else "")

    def set(self, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
        """Return a copy of `a` with `b` put into a window at byte `offset`, strides `nb1..nb3` (ggml_set).

        The window has the shape of `b`, begins `offset` bytes into `a`, and has byte strides `nb1..nb3`.

        Raises:
            ShapeError: `a` is not contiguous, or the window lies outside of it or overlaps itself.
            DTypeError: The types differ.
        """
        return self._set("set", a, b, nb1, nb2, nb3, offset, False)

    def set_inplace(self, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
        """Return `set`, written into the memory of `a` (ggml_set_inplace)."""
        return self._set("set_inplace", a, b, nb1, nb2, nb3, offset, True)

    def set_1d(self, a: Tensor, b: Tensor, offset: int) -> Tensor:
        """Return a copy of `a` with `b` written at byte `offset`, with the strides of `a` (ggml_set_1d)."""
        return self._set("set_1d", a, b, *a.nb[1:], offset, False)

    def set_1d_inplace(self, a: Tensor, b: Tensor, offset: int) -> Tensor:
        """Return `set_1d`, written into the memory of `a` (ggml_set_1d_inplace)."""
        return self._set("set_1d_inplace", a, b, *a.nb[1:], offset, True)

    def set_2d(self, a: Tensor, b: Tensor, nb1: int, offset: int) -> Tensor:
        """Return a copy of `a` with `b` written at byte `offset`, rows `nb1` bytes apart (ggml_set_2d)."""
        return self._set("set_2d", a, b, nb1, *a.nb[2:], offset, False)

    def set_2d_inplace(self, a: Tensor, b: Tensor, nb1: int, offset: int) -> Tensor:
        """Return `set_2d`, written into the memory of `a` (ggml_set_2d_inplace)."""
        return self._set("set_2d_inplace", a, b, nb1, *a.nb[2:], offset, True)

    def _set(
        self, fn: str, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int, inplace: bool
    ) -> Tensor:
        if a.dtype is not b.dtype:
            fail_dtype(fn, "b", b, a.dtype)
        params = window_params(fn, a, b, nb1, nb2, nb3, offset, inplace)
        return self._like(inplace, Op.SET, a, (a, b), params)


# -- how results are sharded over devices ---


def _shard_copy(node: Tensor, states: States) -> ShardOutcome | None:
    """Shard like an elementwise op, if the shapes are equal."""
    src = node.src[0]
    if src is None or src.ne != node.ne:
        return None
    state = states[-1] if states[-1].is_cut else states[0]
    return ShardOutcome(state, (state,) * len(states))


# -- gradients ---


def _back_set(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    require_type("set", "a", node, DType.F32)
    p = node.params
    nb = (p["nb1"], p["nb2"], p["nb3"])
    return c.acc(grad, c.neg(copy_window(c, grad, node.operand(1), p["offset"], nb)), *nb, p["offset"])


def _back_set_window(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    require_type("set", "a", node, DType.F32)
    p = node.params
    return copy_window(c, grad, node.operand(1), p["offset"], (p["nb1"], p["nb2"], p["nb3"]))


SPECS = (
    OpSpec(Op.DUP, backward={0: pass_gradient}, shard=_shard_copy),
    OpSpec(
        Op.SET,
        backward={0: _back_set, 1: _back_set_window},
        params=("nb1", "nb2", "nb3", "offset", "inplace"),
    ),
    OpSpec(Op.CPY, backward={0: pass_gradient, 1: zero_gradient}, shard=_shard_copy),
    OpSpec(Op.CONT, backward={0: pass_gradient}, shard=_shard_copy, linear=((0,),)),
)
