"""Repeating, joining, padding and rolling.

REPEAT and REPEAT_BACK have no params (their node's shape is enough), CONCAT has `dim`, ROLL has `shifts`
(four), PAD has `left` and `right` (four each) and `circular`, PAD_REFLECT_1D has `left, right`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.ops.base import (
    OpBase,
    checked,
    fail_arg,
    fail_contiguous,
    fail_dtype,
    fail_shape,
    full_ne,
    require_repeat,
)
from ggmlb.core.ops.spec import OpSpec, copy_window
from ggmlb.core.sharding import ShardOutcome, States, first_cut
from ggmlb.core.tensor import Ne, Tensor, can_repeat

if TYPE_CHECKING:
    from ggmlb.core.context import Context

Padding = tuple[Tensor, Ne, Ne]
"""The operand, and the padding before and after each dimension."""


def _padding(fn: str, a: Tensor, left: Ne, right: Ne) -> Padding:
    if min(left) < 0 or min(right) < 0:
        fail_arg(fn, f"the widths are {list(left)} before and {list(right)} after; none may be negative")
    return a, left, right


def _after(fn: str, a: Tensor, p0: int, p1: int = 0, p2: int = 0, p3: int = 0) -> Padding:
    """Check the arguments of ggml_pad."""
    return _padding(fn, a, (0, 0, 0, 0), (p0, p1, p2, p3))


def _around(
    fn: str,
    a: Tensor,
    lp0: int,
    rp0: int,
    lp1: int = 0,
    rp1: int = 0,
    lp2: int = 0,
    rp2: int = 0,
    lp3: int = 0,
    rp3: int = 0,
) -> Padding:
    """Check the arguments of ggml_pad_ext."""
    return _padding(fn, a, (lp0, lp1, lp2, lp3), (rp0, rp1, rp2, rp3))


def _pad(self: ShapeOps, padding: Padding, circular: bool = False) -> Tensor:
    a, left, right = padding
    n0, n1, n2, n3 = (n + p + q for n, p, q in zip(a.ne, left, right, strict=True))
    params = {"left": left, "right": right, "circular": circular}
    return self._op(Op.PAD, a.dtype, (n0, n1, n2, n3), (a,), params)


def _pad_circular(self: ShapeOps, padding: Padding) -> Tensor:
    return _pad(self, padding, circular=True)


class ShapeOps(OpBase):
    """repeat, repeat_4d, repeat_back, concat, pad and its variants, roll.

    Raises:
        ArgumentError: A width of padding is negative.
    """

    def repeat(self, a: Tensor, b: Tensor) -> Tensor:
        """Return `a`, tiled to the shape of `b` (ggml_repeat).

        Raises:
            ShapeError: An extent of `a` does not divide that of `b`.
        """
        if not can_repeat(a, b):
            fail_shape("repeat", f"every extent of a, ne {list(a.ne)}, must divide that of b", a, b)
        return self._op(Op.REPEAT, a.dtype, b.ne, (a,))

    def repeat_4d(self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
        """Return `a`, tiled to ne `[ne0, ne1, ne2, ne3]` (ggml_repeat_4d).

        Raises:
            ShapeError: An extent of `a` does not divide the result's.
        """
        ne = full_ne((ne0, ne1, ne2, ne3), "repeat_4d")
        if any(n % m if m else n for n, m in zip(ne, a.ne, strict=True)):
            fail_shape("repeat_4d", f"every extent of a must divide that of ne {list(ne)}", a)
        return self._op(Op.REPEAT, a.dtype, ne, (a,))

    def repeat_back(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the sum of the tiles of `a` that have the shape of `b` (ggml_repeat_back).

        Raises:
            ShapeError: An extent of `b` does not divide that of `a`.
        """
        require_repeat("repeat_back", a, b)
        return self._op(Op.REPEAT_BACK, a.dtype, b.ne, (a,))

    def concat(self, a: Tensor, b: Tensor, dim: int = 0) -> Tensor:
        """Return `a` followed by `b` along dimension `dim` (ggml_concat).

        Raises:
            ArgumentError: `dim` is not 0 to 3.
            DTypeError: The types differ.
            ShapeError: Another extent differs.
        """
        if not 0 <= dim < 4:
            fail_arg("concat", f"dim is {dim}; it must be 0, 1, 2 or 3")
        if a.dtype is not b.dtype:
            fail_dtype("concat", "b", b, a.dtype)
        ne = list(a.ne)
        ne[dim] = b.ne[dim]
        if tuple(ne) != b.ne:
            fail_shape("concat", f"all extents but ne[{dim}] must be equal", a, b)
        ne[dim] += a.ne[dim]
        return self._op(Op.CONCAT, a.dtype, (ne[0], ne[1], ne[2], ne[3]), (a, b), {"dim": dim})

    pad = checked(_after, _pad, "pad", "Return `a` with zeros after the end of each dimension")
    pad_circular = checked(
        _after, _pad_circular, "pad_circular", "Return `a`, padded circularly after the end of each dimension"
    )
    pad_ext = checked(
        _around, _pad, "pad_ext", "Return `a` with zeros before (`lp`) and after (`rp`) each dimension"
    )
    pad_ext_circular = checked(
        _around,
        _pad_circular,
        "pad_ext_circular",
        "Return `a`, padded circularly on both sides of each dimension",
    )

    def pad_reflect_1d(self, a: Tensor, p0: int, p1: int) -> Tensor:
        """Return `a`, rows extended by `p0` elements before and `p1` after, mirrored (ggml_pad_reflect_1d).

        The elements at the ends are not repeated.

        Raises:
            ArgumentError: A width is negative, or not less than the row length.
            ShapeError: `a` is not contiguous.
            DTypeError: `a` is not f32.
        """
        fn = "pad_reflect_1d"
        if not (0 <= p0 < a.ne[0] and 0 <= p1 < a.ne[0]):
            fail_arg(fn, f"the widths {p0} and {p1} must be less than the row length of {a.describe()}")
        if not a.is_contiguous():
            fail_contiguous(fn, "a", a)
        if a.dtype is not DType.F32:
            fail_dtype(fn, "a", a, DType.F32)
        ne = (a.ne[0] + p0 + p1, a.ne[1], a.ne[2], a.ne[3])
        return self._op(Op.PAD_REFLECT_1D, a.dtype, ne, (a,), {"left": p0, "right": p1})

    def roll(self, a: Tensor, shift0: int, shift1: int = 0, shift2: int = 0, shift3: int = 0) -> Tensor:
        """Return `a` shifted circularly along each dimension (ggml_roll).

        Raises:
            ShapeError: The rows of `a` are not contiguous.
            ArgumentError: A shift is not smaller than its extent.
        """
        if a.nb[0] != a.dtype.type_size:
            fail_contiguous("roll", "a", a, "contiguous within its rows")
        shifts = (shift0, shift1, shift2, shift3)
        if any(abs(s) >= n for s, n in zip(shifts, a.ne, strict=True)):
            fail_arg("roll", f"the shifts {list(shifts)} must be smaller than the extents of {a.describe()}")
        return self._op(Op.ROLL, a.dtype, a.ne, (a,), {"shifts": shifts})


# -- how results are sharded over devices ---


def _shard_concat(node: Tensor, states: States) -> ShardOutcome | None:
    """Shard if concatenated along another dimension than the cut."""
    state = first_cut(states)
    return ShardOutcome(state, (state, state)) if state.axis != node.params["dim"] else None


# -- gradients ---


def _back_concat(second: bool, c: Context, node: Tensor, grad: Tensor) -> Tensor:
    dim = node.params["dim"]
    offset = node.operand(0).ne[dim] * grad.nb[dim] if second else 0
    return copy_window(c, grad, node.operand(int(second)), offset, (grad.nb[1], grad.nb[2], grad.nb[3]))


def _back_pad(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    if node.params["circular"]:
        fail_arg("pad_circular", "circular padding has no gradient; use concat")
    offset = sum(n * b for n, b in zip(node.params["left"], grad.nb, strict=True))
    return copy_window(c, grad, node.operand(0), offset, (grad.nb[1], grad.nb[2], grad.nb[3]))


def _back_roll(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    return c.roll(grad, *(-s for s in node.params["shifts"]))


SPECS = (
    OpSpec(Op.REPEAT, backward={0: lambda c, t, g: c.repeat_back(g, t.operand(0))}),
    OpSpec(Op.REPEAT_BACK, backward={0: lambda c, t, g: c.repeat(g, t.operand(0))}),
    OpSpec(
        Op.CONCAT,
        backward={0: partial(_back_concat, False), 1: partial(_back_concat, True)},
        params=("dim",),
        shard=_shard_concat,
    ),
    OpSpec(Op.PAD, backward={0: _back_pad}, params=("left", "right", "circular")),
    OpSpec(Op.PAD_REFLECT_1D, params=("left", "right")),
    OpSpec(Op.ROLL, backward={0: _back_roll}, params=("shifts",)),
)
