"""Views: the memory of a tensor under another shape, with other strides, or from another offset.

`Op.VIEW` and `Op.RESHAPE` have no params; `Op.PERMUTE` has `axes`. Nothing is computed: a view is its
shape, strides and `view_offs`.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, NoReturn

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.errors import BoundsError
from ggmlb.core.ops.base import OpBase, fail_arg, fail_contiguous, fail_shape
from ggmlb.core.ops.binary import window_fault
from ggmlb.core.ops.spec import OpSpec, flat, pass_gradient
from ggmlb.core.tensor import Ne, Tensor

if TYPE_CHECKING:
    from ggmlb.core.context import Context


class ViewOps(OpBase):
    """view_tensor, view_1d..4d, reshape, reshape_1d..4d, permute, transpose."""

    def view_tensor(self, src: Tensor) -> Tensor:
        """Return a leaf over the whole memory of `src`, with its shape and strides (ggml_view_tensor)."""
        return self._view(src, src.ne, src.nb, 0, Op.NONE, ())

    def view_1d(self, a: Tensor, ne0: int, offset: int = 0) -> Tensor:
        """Return `ne0` elements of `a` from a byte `offset` on (ggml_view_1d).

        Raises:
            ShapeError: `ne0` is negative or not a whole number of blocks.
            BoundsError: The view begins or ends outside the memory of `a`.
        """
        ne0, offset = _whole("view_1d", ne0, offset)
        row = a.dtype.type_size * (ne0 // a.dtype.block_size)
        return self._window("view_1d", a, (ne0, 1, 1, 1), (a.dtype.type_size, row, row, row), offset)

    def view_2d(self, a: Tensor, ne0: int, ne1: int, nb1: int, offset: int = 0) -> Tensor:
        """Return rows of `ne0` elements, `nb1` bytes apart, from a byte `offset` on (ggml_view_2d).

        Raises:
            ShapeError: An extent or stride is negative, or `ne0` is not a whole number of blocks.
            BoundsError: The view begins or ends outside the memory of `a`.
        """
        ne0, ne1, nb1, offset = _whole("view_2d", ne0, ne1, nb1, offset)
        nb2 = nb1 * ne1
        return self._window("view_2d", a, (ne0, ne1, 1, 1), (a.dtype.type_size, nb1, nb2, nb2), offset)

    def view_3d(self, a: Tensor, ne0: int, ne1: int, ne2: int, nb1: int, nb2: int, offset: int = 0) -> Tensor:
        """Return a view, ne `[ne0, ne1, ne2]`, byte strides `nb1`, `nb2`, from byte `offset` (ggml_view_3d).

        Raises:
            ShapeError: An extent or stride is negative, or `ne0` is not a whole number of blocks.
            BoundsError: The view begins or ends outside the memory of `a`.
        """
        ne0, ne1, ne2, nb1, nb2, offset = _whole("view_3d", ne0, ne1, ne2, nb1, nb2, offset)
        nb = (a.dtype.type_size, nb1, nb2, nb2 * ne2)
        return self._window("view_3d", a, (ne0, ne1, ne2, 1), nb, offset)

    def view_4d(
        self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, nb1: int, nb2: int, nb3: int, offset: int = 0
    ) -> Tensor:
        """Return a view of four extents, byte strides `nb1..nb3`, from byte `offset` of `a` (ggml_view_4d).

        Raises:
            ShapeError: An extent or stride is negative, or `ne0` is not a whole number of blocks.
            BoundsError: The view begins or ends outside the memory of `a`.
        """
        n0, n1, n2, n3, nb1, nb2, nb3, offset = _whole("view_4d", ne0, ne1, ne2, ne3, nb1, nb2, nb3, offset)
        return self._window("view_4d", a, (n0, n1, n2, n3), (a.dtype.type_size, nb1, nb2, nb3), offset)

    def _window(self, fn: str, a: Tensor, ne: Ne, nb: Ne, offset: int) -> Tensor:
        """Return a view with any strides, the innermost included; it must be within the memory of `a`."""
        if (ne[0] | ne[1] | ne[2] | ne[3] | nb[1] | nb[2] | nb[3]) < 0:
            fail_shape(fn, f"ne {list(ne)} and nb {list(nb)} must not be negative", a)
        if ne[0] % a.dtype.block_size:
            fail_shape(fn, f"ne0 = {ne[0]} must be a multiple of the block size {a.dtype.block_size}", a)
        view = self._view(a, ne, nb, offset)
        root = a.view_src or a
        if offset < 0 or (view.nbytes and view.view_offs + view.nbytes > root.nbytes):
            self.tensors.pop()
            _fail_bounds(fn, a, ne, nb, offset, root)
        return view

    def reshape(self, a: Tensor, b: Tensor) -> Tensor:
        """Return `a` with the shape of `b` (ggml_reshape).

        Raises:
            ShapeError: `a` is not contiguous, or the numbers of elements differ.
        """
        return self._reshape("reshape", a, b.ne)

    def reshape_1d(self, a: Tensor, ne0: int) -> Tensor:
        """Return `a` as one row (ggml_reshape_1d); errors as in `reshape`."""
        return self._reshape("reshape_1d", a, (ne0, 1, 1, 1))

    def reshape_2d(self, a: Tensor, ne0: int, ne1: int) -> Tensor:
        """Return `a` with ne `[ne0, ne1]` (ggml_reshape_2d); errors as in `reshape`."""
        return self._reshape("reshape_2d", a, (ne0, ne1, 1, 1))

    def reshape_3d(self, a: Tensor, ne0: int, ne1: int, ne2: int) -> Tensor:
        """Return `a` with ne `[ne0, ne1, ne2]` (ggml_reshape_3d); errors as in `reshape`."""
        return self._reshape("reshape_3d", a, (ne0, ne1, ne2, 1))

    def reshape_4d(self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
        """Return `a` with ne `[ne0, ne1, ne2, ne3]` (ggml_reshape_4d); errors as in `reshape`."""
        return self._reshape("reshape_4d", a, (ne0, ne1, ne2, ne3))

    def _reshape(self, fn: str, a: Tensor, ne: Ne) -> Tensor:
        if not a.is_contiguous():
            fail_contiguous(fn, "a", a)
        n0, n1, n2, n3 = _whole(fn, *ne)
        ne, old = (n0, n1, n2, n3), a.ne
        if ne[0] * ne[1] * ne[2] * ne[3] != old[0] * old[1] * old[2] * old[3] or min(ne) < 0:
            fail_shape(fn, f"ne {list(ne)} must have as many elements as a, {a.n_elements}", a)
        return self._view(a, ne, None, 0, Op.RESHAPE, suffix="reshaped")

    def permute(self, a: Tensor, axis0: int, axis1: int, axis2: int, axis3: int) -> Tensor:
        """Return `a` with its dimension `i` moved to place `axis_i` (ggml_permute).

        Raises:
            ArgumentError: The axes are not 0, 1, 2 and 3 in some order.
        """
        axes = (axis0, axis1, axis2, axis3)
        if sorted(axes) != [0, 1, 2, 3]:
            fail_arg("permute", f"the axes are {axes}; give 0, 1, 2 and 3 in some order")
        ne, nb = [0, 0, 0, 0], [0, 0, 0, 0]
        ne[axis0], ne[axis1], ne[axis2], ne[axis3] = a.ne
        nb[axis0], nb[axis1], nb[axis2], nb[axis3] = a.nb
        return self._view(
            a,
            (ne[0], ne[1], ne[2], ne[3]),
            (nb[0], nb[1], nb[2], nb[3]),
            0,
            Op.PERMUTE,
            params={"axes": axes},
            suffix="permuted",
        )

    def transpose(self, a: Tensor) -> Tensor:
        """Return `a` with its first two dimensions swapped (ggml_transpose)."""
        ne, nb = a.ne, a.nb
        return self._view(
            a,
            (ne[1], ne[0], ne[2], ne[3]),
            (nb[1], nb[0], nb[2], nb[3]),
            0,
            Op.TRANSPOSE,
            suffix="transposed",
        )


def _whole(fn: str, *numbers: int) -> tuple[int, ...]:
    """Return extents, strides and offset as Python integers, because NumPy's 32-bit ones overflow at 2 GiB.

    Raises:
        ArgumentError: One of them is not a whole number.
    """
    for number in numbers:
        if type(number) is not int:
            break
    else:
        return numbers
    try:
        return tuple(map(index, numbers))
    except TypeError:
        fail_arg(fn, f"the numbers are {numbers}; extents, strides and offsets must be whole numbers")


def _fail_bounds(fn: str, a: Tensor, ne: Ne, nb: Ne, offset: int, root: Tensor) -> NoReturn:
    raise BoundsError(
        f"{fn}({a.describe()}): ne {list(ne)} with strides nb {list(nb)} at byte offset {offset} "
        f"does not lie within the {root.nbytes} bytes of {root.describe()}"
    )


# -- gradients ---


def view_base(node: Tensor) -> Tensor:
    """Return the tensor that a chain of views begins with; `node` itself if it is no view."""
    while node.op in (Op.VIEW, Op.RESHAPE, Op.PERMUTE, Op.TRANSPOSE):
        node = node.operand(0)
    return node


def _back_view(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    """Add the gradient to zeros: of the base, because the strides of the view are in its memory."""
    base, size = view_base(node), node.dtype.type_size
    offset = node.view_offs - base.view_offs
    if why := window_fault(base, node, *node.nb[1:], offset):
        fail_shape("view", f"it has no gradient: {why}", base, node)
    if node.nb[0] != size:
        fail_contiguous("view", "the view", node, "contiguous within its rows")
    scale = 4 // size  # strides in the gradient, f32
    nb1, nb2, nb3 = (n * scale for n in node.nb[1:])
    zeros = c.fill(base if base.dtype is DType.F32 else c.cast(base, DType.F32), 0)
    return c.acc_inplace(zeros, grad, nb1, nb2, nb3, offset * scale)


def _back_permute(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    axes = node.params["axes"]
    return flat(c, c.permute(grad, *(axes.index(i) for i in range(4))))


SPECS = (
    OpSpec(Op.NONE),
    OpSpec(Op.RESHAPE, backward={0: pass_gradient}),
    OpSpec(Op.VIEW, backward={0: _back_view}),
    # Four axes: dimension i of the source is dimension axes[i] of the view.
    OpSpec(Op.PERMUTE, backward={0: _back_permute}, params=("axes",)),
    OpSpec(Op.TRANSPOSE, backward={0: lambda c, t, g: flat(c, c.transpose(g))}),
)
