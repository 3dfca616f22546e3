"""Operators of tensors: NumPy's notation for ops of their context; nothing is computed here.

Shapes, axes and indices are in NumPy's order, which is `ne` reversed. As in `Tensor.shape`,
leading extents of 1 are dropped: ne `[4, 1]` is a vector of 4.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any, NoReturn, cast

from ggmlb.core.arguments import checked
from ggmlb.core.enums import Op
from ggmlb.core.errors import ArgumentError, BoundsError, GraphError, ShapeError

if TYPE_CHECKING:
    from ggmlb.core.context import Context
    from ggmlb.core.tensor import Tensor

Index = int | slice | None | Any
"""A whole number, a slice, `...` or `None` (a new axis); or a tuple of them."""

Axes = int | tuple[int, ...] | None
"""Axes in NumPy's order, negative ones from the last; `None` for all."""

Elementwise = Callable[["Context", "Tensor", "Tensor"], "Tensor"]
WithNumber = Callable[["Context", "Tensor", float], "Tensor"]


class Operators:
    """Base class of `Tensor`, with NumPy's arithmetic, `<`, `>`, indexing, `transpose`, `sum` and `mean`.

    A result belongs to the context of its operands.

    Raises:
        ArgumentError: The operands are of two contexts, or one is neither a tensor nor a number.
        GraphError: The context was garbage-collected.
        ShapeError: The shapes do not fit by NumPy's rules.
        DTypeError: The op does not take the types.
    """

    __slots__ = ()

    __array_priority__ = 1000.0
    """NumPy's arrays leave `array + tensor` to the tensor."""

    # -- arithmetic ----------------------------------------------------------------------------

    def __add__(self, other: Any) -> Tensor:
        """Return the sum, as `Context.add` or `scale_bias`; extents of 1 are repeated."""
        return _binary(self, "+", other, lambda c, a, b: c.add(a, b), lambda c, a, x: c.scale_bias(a, 1.0, x))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Tensor:
        """Return the difference, as `Context.sub` or `scale_bias`; extents of 1 are repeated."""
        return _difference(self, "-", other)

    def __rsub__(self, other: Any) -> Tensor:
        """Return a number minus the tensor, as `Context.scale_bias`."""
        return _binary(self, "-", other, None, lambda c, a, x: c.scale_bias(a, -1.0, x))

    def __mul__(self, other: Any) -> Tensor:
        """Return the product of elements, as `Context.mul` or `scale`; extents of 1 are repeated."""
        return _binary(self, "*", other, lambda c, a, b: c.mul(a, b), lambda c, a, x: c.scale(a, x))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Tensor:
        """Return the quotient, as `Context.div` or `scale`; extents of 1 are repeated."""
        return _binary(self, "/", other, lambda c, a, b: c.div(a, b), _over_number)

    def __rtruediv__(self, other: Any) -> Tensor:
        """Return a number divided by the tensor, as `Context.fill` and `div`."""
        return _binary(self, "/", other, None, lambda c, a, x: c.div(c.fill(a, x), a))

    def __neg__(self) -> Tensor:
        """Return `-a`, as `Context.neg`."""
        a = _tensor(self)
        return _context("-", a).neg(a)

    def __matmul__(self, other: Any) -> Tensor:
        """Return NumPy's `a @ b`, as `Context.mul_mat(transpose of b, a)`.

        `a @ w.T` is `mul_mat(w, a)`: weights with a row for each output need no copy; another `b` is
        transposed by one. A matrix times a vector is `mul_mat(a, b)`. Leading extents of `b` may be 1.
        """
        if not isinstance(other, Operators):
            return _refuse("@", other)
        a, b = _tensor(self), _tensor(other)
        ctx = _context("@", a, b)
        rows = b.ne[0] if b.n_dims == 1 else b.ne[1]
        if a.ne[0] != rows:
            raise ShapeError(
                f"{a.describe()} @ {b.describe()}: shapes {a.shape} and {b.shape} do not fit: the last "
                "extent of the first must be the last but one of the second (a vector's only one)"
            )
        if b.n_dims == 1:
            return ctx.mul_mat(a, b)
        if b.op is Op.TRANSPOSE:
            return ctx.mul_mat(b.operand(0), a)
        return ctx.mul_mat(ctx.cont(ctx.transpose(b)), a)

    def __pow__(self, exponent: Any) -> Tensor:
        """Return a power by `Context.sqr`, `sqrt`, `mul` and `div`.

        Raises:
            ArgumentError: The exponent is neither a whole number from -16 to 16 nor 0.5 or -0.5.
        """
        a = _tensor(self)
        ctx = _context("**", a)
        if isinstance(exponent, Real):
            x = float(exponent)
            if abs(x) == 0.5:
                return ctx.sqrt(a) if x > 0 else 1 / ctx.sqrt(a)
            if x.is_integer() and abs(x) <= 16:
                return _power(ctx, a, int(x)) if x >= 0 else 1 / _power(ctx, a, int(-x))
        raise ArgumentError(
            f"{a.describe()} ** {exponent}: give a whole number from -16 to 16, 0.5 or -0.5; for another "
            "power of positive values, use ctx.exp(ctx.log(a) * exponent)"
        )

    def __rpow__(self, base: Any) -> NoReturn:
        """Refuse, because ggml has no such op."""
        raise ArgumentError(
            f"{base} ** {_tensor(self).describe()}: ggml has no op for it; use ctx.exp(a * math.log(base))"
        )

    # -- comparisons: `==` stays identity ------------------------------------------------------

    def __gt__(self, other: Any) -> Tensor:
        """Return 1 where greater, else 0, as `Context.step` of the difference."""
        difference = _difference(self, ">", other)
        return _context(">", difference).step(difference)

    def __lt__(self, other: Any) -> Tensor:
        """Return 1 where less, else 0, as `Context.step` of the difference."""
        if isinstance(other, Operators):
            return other > self
        difference = _binary(self, "<", other, None, lambda c, a, x: c.scale_bias(a, -1.0, x))
        return _context("<", difference).step(difference)

    def __ge__(self, other: Any) -> NoReturn:
        """Refuse, because ggml has no such op."""
        raise ArgumentError(f"{_tensor(self).describe()} >= b: ggml has no op for it; use 1 - (a < b) (step)")

    def __le__(self, other: Any) -> NoReturn:
        """Refuse, because ggml has no such op."""
        raise ArgumentError(f"{_tensor(self).describe()} <= b: ggml has no op for it; use 1 - (a > b) (step)")

    # -- sums ----------------------------------------------------------------------------------

    @checked
    def sum(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Return sums over axes, or of all elements, as `Context.sum` or `sum_rows`.

        Axes other than the last ones are brought there by a copy.

        Raises:
            BoundsError: There is no such axis.
            ArgumentError: An axis is no whole number, or is given twice.
        """
        return _reduced(_tensor(self), "sum", axis, keepdims, lambda c, a: c.sum_rows(a))

    @checked
    def mean(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Return means over axes, or of all elements, as `Context.mean`: f32; otherwise as `sum`."""
        return _reduced(_tensor(self), "mean", axis, keepdims, lambda c, a: c.mean(a))

    # -- shape ---------------------------------------------------------------------------------

    def transpose(self, *axes: int | tuple[int, ...]) -> Tensor:
        """Return a view with the axes in another order (`Context.permute`); without `axes`, as `T`.

        Raises:
            BoundsError: There is no such axis.
            ArgumentError: An axis is missing, given twice, or no whole number.
        """
        a = _tensor(self)
        if not axes:
            return self.T
        order = _axes(a, "transpose", axes[0] if len(axes) == 1 else axes)
        n = a.n_dims
        if len(order) != n:
            raise ArgumentError(f"transpose of {a.describe()}: the axes are {axes}; give each of {n} once")
        places = [0, 1, 2, 3]
        for place, axis in enumerate(order):
            places[n - 1 - axis] = n - 1 - place
        ctx = _context("transpose", a)
        return ctx.transpose(a) if places == [1, 0, 2, 3] else ctx.permute(a, *places)

    @property
    def T(self) -> Tensor:
        """A view with the axes reversed (`transpose`, `permute`); of a vector, the tensor itself."""
        a = _tensor(self)
        return a if a.n_dims == 1 else self.transpose(tuple(range(a.n_dims))[::-1])

    def reshape(self, *shape: int | tuple[int, ...]) -> Tensor:
        """Return the elements in another shape, in NumPy's order; one extent may be -1.

        A view, as `Context.reshape_4d`; of a copy (`cont`) if the tensor is not contiguous.

        Raises:
            ShapeError: It has another number of elements, or more than four extents.
        """
        a = _tensor(self)
        ctx = _context("reshape", a)
        given: Any = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        extents = [index(n) for n in given]
        known = 1
        for n in extents:
            known *= 1 if n == -1 else n
        if extents.count(-1) == 1 and known > 0 and a.n_elements % known == 0:
            extents[extents.index(-1)] = a.n_elements // known
            known = a.n_elements
        if known != a.n_elements or min(extents, default=1) < 0 or len(extents) > 4:
            raise ShapeError(
                f"reshape of {a.describe()} to {shape}: give at most four extents with a product of "
                f"{a.n_elements}, one of which may be -1"
            )
        ne = [*extents[::-1], 1, 1, 1, 1][:4]
        return ctx.reshape_4d(a if a.is_contiguous() else ctx.cont(a), *ne)

    def __getitem__(self, key: Index) -> Tensor:
        """Return a view of a part, by whole numbers, slices with positive steps, `...` and `None`.

        Raises:
            BoundsError: A number is out of range, or there are too many.
            ArgumentError: A step is not positive, or an index is an array: use `Context.get_rows` for rows.
            ShapeError: Blocks of a quantised tensor would be cut, or the view has over four axes.
        """
        a = _tensor(self)
        ctx = _context("[]", a)
        dims, offset = _window(a, _expanded(a, key))
        if len(dims) > 4:
            raise ShapeError(f"{_indexed(a, key)}: the view has {len(dims)} axes; a tensor has at most four")
        ne, nb = [n for n, _ in reversed(dims)], [stride for _, stride in reversed(dims)]
        if a.dtype.is_quantized and (not dims or nb[0] != a.dtype.type_size):
            raise ShapeError(f"{_indexed(a, key)}: blocks must stay along the last axis; apply cont first")
        while len(ne) < 4:
            nb.append(nb[-1] * ne[-1] if ne else a.dtype.type_size)
            ne.append(1)
        return ctx._window("[]", a, (ne[0], ne[1], ne[2], ne[3]), (nb[0], nb[1], nb[2], nb[3]), offset)

    def __len__(self) -> int:
        """The first extent of `shape`."""
        return _tensor(self).shape[0]

    def __bool__(self) -> bool:
        """Always true: the values are not known until a graph is computed."""
        return True

    def __iter__(self) -> NoReturn:
        """Refuse, because each item would be a node."""
        a = _tensor(self)
        raise ArgumentError(
            f"iteration over {a.describe()}: each item would be a node of the graph; index it "
            "(a[i]), or iterate over to_numpy() once it is computed"
        )


def _tensor(a: Operators) -> Tensor:
    return cast("Tensor", a)


def _refuse(symbol: str, other: object) -> NoReturn:
    raise ArgumentError(
        f"{symbol}: {type(other).__name__} is neither a tensor nor a number; convert it by Context.from_array"
    )


def _context(symbol: str, *operands: Tensor) -> Context:
    """The context that operands have in common."""
    contexts = [a.context for a in operands]
    first = contexts[0]
    for a, ctx in zip(operands, contexts, strict=True):
        if ctx is None:
            raise GraphError(
                f"{symbol} of {a.describe()}: it has no Context, or that was garbage-collected; "
                "keep a reference, or call the ops of another Context"
            )
        if ctx is not first:
            raise ArgumentError(
                f"{symbol}: {operands[0].describe()} and {a.describe()} are of two contexts; call "
                "the op of the one that the result belongs to: ctx.add(a, b)"
            )
    assert first is not None
    return first


def _binary(
    self: Operators, symbol: str, other: Any, with_tensor: Elementwise | None, with_number: WithNumber
) -> Tensor:
    a = _tensor(self)
    if isinstance(other, Real):
        return with_number(_context(symbol, a), a, float(other))
    if not isinstance(other, Operators) or with_tensor is None:
        return _refuse(symbol, other)
    b = _tensor(other)
    ctx = _context(symbol, a, b)
    ne = [max(n, m) if n and m else 0 for n, m in zip(a.ne, b.ne, strict=True)]
    if any(n != full and n != 1 for operand in (a, b) for n, full in zip(operand.ne, ne, strict=True)):
        raise ShapeError(
            f"{a.describe()} {symbol} {b.describe()}: shapes {a.shape} and {b.shape} do not fit: "
            "extents must be equal, or 1"
        )
    if list(a.ne) != ne:
        if symbol in "+*" and list(b.ne) == ne:
            a, b = b, a
        else:
            a = ctx.repeat_4d(a, *ne)
    return with_tensor(ctx, a, b)


def _over_number(ctx: Context, a: Tensor, divisor: float) -> Tensor:
    if divisor == 0:
        raise ArgumentError(f"{a.describe()} / 0: give another number")
    return ctx.scale(a, 1.0 / divisor)


def _difference(self: Operators, symbol: str, other: Any) -> Tensor:
    return _binary(self, symbol, other, lambda c, a, b: c.sub(a, b), lambda c, a, x: c.scale_bias(a, 1.0, -x))


def _power(ctx: Context, a: Tensor, n: int) -> Tensor:
    if n < 2:
        return a if n else ctx.fill(a, 1.0)
    square = ctx.sqr(a) if n < 4 else ctx.sqr(_power(ctx, a, n // 2))
    return ctx.mul(square, a) if n % 2 else square


def _axes(a: Tensor, name: str, axes: Any) -> list[int]:
    found = []
    for axis in axes if isinstance(axes, tuple) else (axes,):
        try:
            i = index(axis)
        except TypeError:
            raise ArgumentError(f"{name} of {a.describe()}: axis {axis!r}; give whole numbers") from None
        if not -a.n_dims <= i < a.n_dims:
            raise BoundsError(f"{name} of {a.describe()}: axis {i}; there are {a.n_dims}, of {a.shape}")
        found.append(i % a.n_dims)
    if len(set(found)) < len(found):
        raise ArgumentError(f"{name} of {a.describe()}: the axes are {axes}; give each only once")
    return found


def _reduced(
    a: Tensor, name: str, axis: Axes, keepdims: bool, by_row: Callable[[Context, Tensor], Tensor]
) -> Tensor:
    """Bring the axes to the end, reduce them as one row, and restore the shape."""
    ctx = _context(name, a)
    shape, n = a.shape, a.n_dims
    axes = list(range(n)) if axis is None else sorted(_axes(a, name, axis))
    if not axes:
        return a
    kept = [i for i in range(n) if i not in axes]
    rows = a if kept + axes == list(range(n)) else a.transpose(tuple(kept + axes))
    outer = [shape[i] for i in kept]
    if name == "sum" and not kept:
        result = ctx.sum(a if a.is_contiguous() else ctx.cont(a))
    else:
        result = by_row(ctx, rows.reshape(*outer, prod(shape[i] for i in axes)))
    return result.reshape(
        tuple(1 if i in axes else e for i, e in enumerate(shape)) if keepdims else tuple(outer)
    )


# -- indices ---


def _indexed(a: Tensor, key: Index) -> str:
    return f"{a.describe()}[{key}]"


def _expanded(a: Tensor, key: Index) -> list[Index]:
    """An index for each axis, and `None` for each new one."""
    keys: list[Index] = list(key) if isinstance(key, tuple) else [key]
    n_missing = a.n_dims - sum(k is not None and k is not Ellipsis for k in keys)
    if n_missing < 0:
        raise BoundsError(f"{_indexed(a, key)}: there are only {a.n_dims} axes, of extents {a.shape}")
    places = [i for i, k in enumerate(keys) if k is Ellipsis]
    if len(places) > 1:
        raise ArgumentError(f"{_indexed(a, key)}: give `...` only once")
    at = places[0] if places else len(keys)
    return [*keys[:at], *[slice(None)] * n_missing, *keys[at + 1 :]]


def _window(a: Tensor, keys: list[Index]) -> tuple[list[tuple[int, int]], int]:
    """Return extent and byte stride of each axis that stays, outermost first, and the byte offset."""
    dims: list[tuple[int, int]] = []
    offset, axis = 0, a.n_dims
    for key in keys:
        if key is None:
            dims.append((1, a.nb[axis - 1] * a.ne[axis - 1] if axis else a.dtype.type_size))
            continue
        axis -= 1
        n, stride = a.ne[axis], a.nb[axis]
        if isinstance(key, slice):
            start, stop, step = key.indices(n)
            if step < 0:
                raise ArgumentError(
                    f"{_indexed(a, key)}: a tensor has no negative strides; give a positive step"
                )
            taken = len(range(start, stop, step))
        else:
            start, step, taken = _position(a, key, n), 1, 1
        if axis == 0 and a.dtype.is_quantized:
            block = a.dtype.block_size
            if not isinstance(key, slice) or step != 1 or start % block or taken % block:
                raise ShapeError(
                    f"{_indexed(a, key)}: rows consist of blocks of {block} elements; take whole blocks"
                )
            offset += start // block * stride
        else:
            offset += start * stride if taken else 0
        if isinstance(key, slice):
            dims.append((taken, stride * step))
    return dims, offset


def _position(a: Tensor, key: Any, n: int) -> int:
    try:
        i = index(key)
    except TypeError:
        raise ArgumentError(
            f"{_indexed(a, key)}: give whole numbers and slices; for rows by index, use Context.get_rows"
        ) from None
    if not -n <= i < n:
        raise BoundsError(f"{_indexed(a, key)}: the extent is {n}")
    return i % n
