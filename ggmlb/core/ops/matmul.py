"""Products of matrices; all results are f32.

MUL_MAT has the params `prec` (a `Prec`) and `hint` (a `Hint`); OUT_PROD has none. MUL_MAT_ID may have `prec`,
both products `prec_src1`: the least precisions of the accumulator and of the converted second operand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Hint, Op, Prec, as_enum
from ggmlb.core.ops.base import OpBase, divides, fail_arg, fail_contiguous, fail_dtype, fail_shape
from ggmlb.core.ops.spec import OpSpec, flat
from ggmlb.core.sharding import MIRRORED, PARTIAL, ShardOutcome, SplitState, States
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.core.context import Context

_PLAIN: Mapping[str, Any] = {"prec": Prec.DEFAULT, "hint": Hint.NONE}
_MUST = "not transposed"


class MatmulOps(OpBase):
    """mul_mat, mul_mat_set_prec, mul_mat_set_hint, mul_mat_id, out_prod."""

    def mul_mat(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the dot product of each row of `b` with each row of `a` (ggml_mul_mat).

        In NumPy order, with `a` repeated over the outer dimensions of `b`: `b @ swapaxes(a, -1, -2)`.

        Args:
            a: Usually weights, ne `[k, n, ...]`, not transposed.
            b: ne `[k, m, ...]`; its ne[2] and ne[3] are multiples of those of `a`.

        Returns:
            f32, ne `[n, m, b.ne[2], b.ne[3]]`.

        Raises:
            ShapeError: The shapes do not fit, or `a` is transposed.
        """
        p, q = a.ne, b.ne
        if not can_mul_mat(a, b):
            fail_shape(
                "mul_mat",
                f"a has rows of {p[0]} elements, b of {q[0]}; they must be equally long, "
                "and ne[2] and ne[3] of b must be multiples of those of a",
                a,
                b,
            )
        if a.nb[0] > a.nb[1]:
            fail_contiguous("mul_mat", "a", a, _MUST)
        return self._op(Op.MUL_MAT, DType.F32, (p[1], q[1], q[2], q[3]), (a, b), _PLAIN)

    def mul_mat_set_prec(self, a: Tensor, prec: Prec | int | str) -> Tensor:
        """Choose the accumulator's precision of a `mul_mat` node; return the node (ggml_mul_mat_set_prec).

        Raises:
            ArgumentError: `a` is no `mul_mat` node, or there is no such precision.
        """
        return _set("mul_mat_set_prec", a, "prec", as_enum("mul_mat_set_prec", Prec, prec))

    def prec_set_acc(self, a: Tensor, prec: Prec | int | str) -> Tensor:
        """Choose the accumulator's least precision of a product or of attention (ggml_prec_set_acc).

        Args:
            a: A `mul_mat`, `mul_mat_id` or `flash_attn_ext` node; returned.
            prec: F32; or BF16 or F16, which also allow what is more precise.

        Raises:
            ArgumentError: `a` is another node, or no sum has such a precision.
        """
        fn, found = "prec_set_acc", as_enum("prec_set_acc", Prec, prec)
        if a.op not in (Op.MUL_MAT, Op.MUL_MAT_ID, Op.FLASH_ATTN_EXT):
            fail_arg(fn, f"a is {a.describe()}; it must be a MUL_MAT, MUL_MAT_ID or FLASH_ATTN_EXT node")
        if found in (Prec.Q8, Prec.Q4):
            fail_arg(fn, f"no sum is kept in {found.name}; give F32, BF16, F16 or DEFAULT")
        a.params["prec"] = found
        return a

    def prec_set_src(self, a: Tensor, prec: Prec | int | str, idx: int) -> Tensor:
        """Choose the least precision that a product may convert its second operand to (ggml_prec_set_src).

        Args:
            a: A `mul_mat` or `mul_mat_id` node; returned.
            prec: F32, BF16, F16, Q8 or Q4; each allows the ones before it. DEFAULT: the device chooses.
            idx: The operand, 1; the first one, the weights, is not converted.

        Raises:
            ArgumentError: `a` is another node, `idx` is not 1, or there is no such precision.
        """
        fn, found = "prec_set_src", as_enum("prec_set_src", Prec, prec)
        if a.op not in (Op.MUL_MAT, Op.MUL_MAT_ID):
            fail_arg(fn, f"a is {a.describe()}; it must be a MUL_MAT or MUL_MAT_ID node")
        if idx != 1:
            fail_arg(fn, f"idx is {idx!r}; it must be 1: only the second operand of a product is converted")
        a.params["prec_src1"] = found
        return a

    def mul_mat_set_hint(self, a: Tensor, hint: Hint | int | str) -> Tensor:
        """Set a known property of a `mul_mat` node's first operand; return the node (ggml_mul_mat_set_hint).

        Raises:
            ArgumentError: `a` is no `mul_mat` node, or there is no such hint.
        """
        return _set("mul_mat_set_hint", a, "hint", as_enum("mul_mat_set_hint", Hint, hint))

    def mul_mat_id(self, as_: Tensor, b: Tensor, ids: Tensor) -> Tensor:
        """Return the product of each row of `b` with the matrices of `as_` chosen by `ids` (ggml_mul_mat_id).

        Args:
            as_: One matrix per expert, ne `[k, n, n_experts]`, not transposed.
            b: ne `[k, n_used or a divisor of it, n_tokens]`.
            ids: i32, ne `[n_used, n_tokens]`: the experts of each token.

        Returns:
            f32, ne `[n, n_used, n_tokens]`.

        Raises:
            ShapeError: The shapes do not fit, or `as_` is transposed.
            DTypeError: `ids` is not i32.
        """
        fn = "mul_mat_id"
        p, q, r = as_.ne, b.ne, ids.ne
        if as_.nb[0] > as_.nb[1]:
            fail_contiguous(fn, "as", as_, _MUST)
        if ids.dtype is not DType.I32:
            fail_dtype(fn, "ids", ids, DType.I32)
        if p[3] != 1 or q[3] != 1 or r[2] != 1 or r[3] != 1:
            fail_shape(fn, "as and b must be 3d, and ids 2d", as_, b, ids)
        if p[0] != q[0]:
            fail_shape(fn, f"as has rows of {p[0]} elements, b of {q[0]}; they must be equally long", as_, b)
        if r[1] != q[2] or not divides(q[1], r[0]):
            fail_shape(
                fn,
                f"ids, ne {list(r)}, must have ne[1] = b.ne[2] = {q[2]} and ne[0] a multiple of {q[1]}",
                as_,
                b,
                ids,
            )
        return self._op(Op.MUL_MAT_ID, DType.F32, (p[1], r[0], q[2], 1), (as_, b, ids))

    def out_prod(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the sum over dimension 1 of the outer products of `a` and `b` (ggml_out_prod).

        Args:
            a: ne `[n, k, ...]`, not transposed.
            b: ne `[m, k, ...]`; its ne[2] and ne[3] are multiples of those of `a`.

        Returns:
            f32, ne `[n, m, b.ne[2], b.ne[3]]`.

        Raises:
            ShapeError: The shapes do not fit, or `a` is transposed.
        """
        p, q = a.ne, b.ne
        if p[1] != q[1] or not divides(p[2], q[2]) or not divides(p[3], q[3]):
            fail_shape(
                "out_prod",
                f"ne[1] must be equal ({p[1]} and {q[1]}), and ne[2] and ne[3] of a divide b's",
                a,
                b,
            )
        if a.nb[0] > a.nb[1]:
            fail_contiguous("out_prod", "a", a, _MUST)
        return self._op(Op.OUT_PROD, DType.F32, (p[0], q[0], q[2], q[3]), (a, b))


def can_mul_mat(a: Tensor, b: Tensor) -> bool:
    """Whether `mul_mat(a, b)` has fitting shapes (ggml_can_mul_mat)."""
    p, q = a.ne, b.ne
    return p[0] == q[0] and divides(p[2], q[2]) and divides(p[3], q[3])


def _set(fn: str, a: Tensor, name: str, value: Prec | Hint) -> Tensor:
    if a.op is not Op.MUL_MAT:
        fail_arg(fn, f"a is {a.describe()}; it must be a MUL_MAT node")
    a.params[name] = value
    return a


# -- how results are sharded over devices ---


def _shard_mul_mat(node: Tensor, states: States) -> ShardOutcome | None:
    """`y = w x`: a cut through the rows of `w` cuts `y`; a cut along the sum gives partial sums."""
    w, x = states
    a, b = node.sources[:2]
    if w.is_cut and w.axis == 0:
        return ShardOutcome(PARTIAL, (w, w))
    for own, axis in ((w, w.axis), (x, x.axis)):
        if own.is_cut and axis >= 2:
            return _by_matrix(a, b, w if own is w else None, x if own is x else None)
    if w.is_cut:
        return ShardOutcome(w.moved(0), (w, MIRRORED))
    if x.axis == 1:
        return ShardOutcome(x, (MIRRORED, x))
    x.moved(0, over=a.dtype.block_size)  # the slices of `w` must be whole blocks
    return ShardOutcome(PARTIAL, (x, x))


def _by_matrix(a: Tensor, b: Tensor, w: SplitState | None, x: SplitState | None) -> ShardOutcome | None:
    """Shard by matrices of a batch; one of `w` may be broadcast over several of `x`."""
    axis = (w or x or MIRRORED).axis
    ratio = b.ne[axis] // a.ne[axis]
    if w is None:
        assert x is not None
        w = MIRRORED if a.ne[axis] == 1 else x.moved(axis, over=ratio)
    else:
        x = w.moved(axis, ratio)
    return ShardOutcome(x, (w, x))


def _shard_mul_mat_id(node: Tensor, states: States) -> ShardOutcome | None:
    """Shard as `mul_mat`, for each expert."""
    w, x = states[:2]
    if w.is_cut:
        if w.axis == 0:
            return ShardOutcome(PARTIAL, (w, w, MIRRORED))
        return ShardOutcome(w.moved(0), (w, MIRRORED, MIRRORED)) if w.axis == 1 else None
    if x.is_cut and x.axis == 2:
        return ShardOutcome(x, (MIRRORED, x, x.moved(1)))
    return None


# -- gradients ---


def _back_weight(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    a = node.operand(0)
    whole = c.out_prod(flat(c, node.operand(1)), grad)
    n, m, n2, n3 = whole.ne
    if (n2, n3) == a.ne[2:]:
        return whole
    # `a` is repeated in place, matrix by matrix: the sum is over neighbours.
    r2, r3 = n2 // a.ne[2], n3 // a.ne[3]
    like = Tensor(DType.F32, (n * m, 1, a.ne[2], n3))
    whole = c.repeat_back(c.reshape_4d(whole, n * m, r2, a.ne[2], n3), like)
    n *= m * a.ne[2]
    whole = c.repeat_back(c.reshape_4d(whole, n, r3, a.ne[3], 1), Tensor(DType.F32, (n, 1, a.ne[3], 1)))
    return c.reshape(whole, a)


def _back_columns(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    return c.out_prod(node.operand(0), c.transpose(grad))


SPECS = (
    OpSpec(
        Op.MUL_MAT,
        backward={0: _back_weight, 1: _back_columns},
        params=("prec", "hint"),
        shard=_shard_mul_mat,
    ),
    OpSpec(Op.MUL_MAT_ID, shard=_shard_mul_mat_id),
    OpSpec(Op.OUT_PROD),
)
