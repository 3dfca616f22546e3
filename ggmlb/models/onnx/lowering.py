"""Lowering: builds ggml nodes from ONNX values, with ONNX's ranks and broadcasting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partialmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from ggmlb import Context, DType, Op, Tensor
from ggmlb.models.onnx.file import not_supported

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
MAX_ELEMENTS = 1 << 31
"""Limit of a tensor's elements."""

OF_ROWS = ("cumsum", "soft_max")
"""Functions of rows, not of elements."""

_VIEWS = (Op.NONE, Op.VIEW, Op.RESHAPE, Op.PERMUTE, Op.TRANSPOSE)


class NeedsValues(Exception):
    """An op reads a parameter (a shape, axes) that inputs of the model determine."""

    def __init__(self, op: str, names: frozenset[str]) -> None:
        super().__init__(f"{op} reads a parameter computed from {', '.join(sorted(names))}")
        self.op, self.names = op, names


@dataclass(frozen=True)
class Shaped:
    """A result of a node: a contiguous tensor with the elements in ONNX's order.

    Attributes:
        tensor: f32; i32 for indices. Booleans are 0 and 1; integers are exact up to 2^24.
        shape: ONNX's shape; the tensor's extents forget leading ones.
        dtype: ONNX's type.
        sources: Names of the model's inputs that determine it.
        permuted: The value and the axes of which it is a transposition.
        origin: The model's input whose elements these are, unchanged.
        scaled: The value and the number of which it is the product.
    """

    tensor: Tensor
    shape: Shape
    dtype: np.dtype[Any]
    sources: frozenset[str] = frozenset()
    permuted: tuple[Shaped, tuple[int, ...]] | None = None
    origin: str | None = None
    scaled: tuple[Shaped, float] | None = None

    @property
    def ndim(self) -> int:
        """Number of ONNX's axes."""
        return len(self.shape)


Operand = Shaped | Array
FLOAT = np.dtype(np.float32)
BOOL = np.dtype(np.bool_)
INT64 = np.dtype(np.int64)


def extents(shape: Sequence[int]) -> tuple[int, int, int, int]:
    """Return ggml's extents of a shape; leading axes beyond the fourth are merged."""
    lead = math.prod(shape[:-3]) if len(shape) > 3 else 1
    rest = [*[*shape[-3:]][::-1], 1, 1, 1]
    return rest[0], rest[1], rest[2], lead


def broadcast(op: str, *shapes: Shape) -> Shape:
    """Return the common shape of operands, as NumPy has it."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise not_supported(op, f"shapes {', '.join(map(str, shapes))} do not broadcast") from None


def normal_axis(op: str, axis: int, rank: int) -> int:
    """Return an axis counted from the front."""
    if not -rank <= axis < rank:
        raise not_supported(op, f"axis {axis} of a tensor of {rank} axes")
    return axis % rank


class Lowering:
    """Builder of a graph: operations on ONNX values, as calls of a Context.

    Args:
        weight: Returns the leaf of a constant: `weight(array, form)`, where the form is `f32`, `i32` `rows`
            (read by index) or `matrix` (rows are the outputs of a product).

    Attributes:
        ctx: The context of the nodes.
        op: The op that is being converted, for messages.
        inputs: Leafs of the model's inputs, by name and by the number of rows that they are indices of
            (0: the values as f32).
    """

    def __init__(self, weight: Callable[[Array, str], Tensor]) -> None:
        self.ctx = Context()
        self.op = ""
        self.inputs: dict[tuple[str, int], Tensor] = {}
        self.weight = weight

    # -- operands ------------------------------------------------------------------------------

    def fail(self, reason: str) -> Exception:
        """Return (not raise) the error that the current op is not supported in this form."""
        return not_supported(self.op, reason)

    def const(self, x: Operand | None) -> Array:
        """Return the value of an operand that determines shapes."""
        if isinstance(x, Shaped):
            raise NeedsValues(self.op, x.sources)
        if x is None:
            raise self.fail("an operand is missing")
        return x

    def ints(self, x: Operand | None) -> list[int]:
        """Return an operand that determines shapes, as integers."""
        return [int(n) for n in self.const(x).reshape(-1)]

    def scalar(self, x: Operand | float | None) -> float | None:
        """Return the number that a constant of one element is; `None` for other operands."""
        if isinstance(x, (int, float)):
            return float(x)
        return float(x.reshape(())) if isinstance(x, np.ndarray) and x.size == 1 else None

    def value(self, x: Operand | float) -> Shaped:
        """Return an operand as a value of f32; constants become leafs."""
        if isinstance(x, Shaped):
            return self._cast(x, DType.F32)
        x = np.asarray(x)
        if x.dtype.kind in "iu" and x.size and max(abs(int(x.max())), abs(int(x.min()))) > 1 << 24:
            raise self.fail("integers beyond 2^24 in a computation")
        return Shaped(self.weight(x, "f32"), x.shape, x.dtype)

    def indices(self, x: Operand) -> Shaped:
        """Return an operand as a value of i32."""
        if isinstance(x, Shaped):
            return self._cast(x, DType.I32)
        return Shaped(self.weight(x, "i32"), x.shape, x.dtype)

    def _cast(self, x: Shaped, to: DType) -> Shaped:
        same = x.tensor.dtype is to
        return x if same else replace(x, tensor=self.ctx.cast(x.tensor, to), permuted=None)

    def input(self, name: str, shape: Shape, n_rows: int = 0) -> Tensor:
        """Return the leaf of an input: its values, or (`n_rows`) its values as indices of rows, in i32."""
        leaf = self.inputs.get((name, n_rows))
        if leaf is None:
            leaf = self.ctx.new_tensor("i32" if n_rows else "f32", extents(shape), name)
            self.inputs[name, n_rows] = self.ctx.set_input(leaf)
        return leaf

    def made(self, tensor: Tensor, shape: Sequence[int], dtype: np.dtype[Any] = FLOAT) -> Shaped:
        """Return a value of a new tensor's elements, which are as many."""
        if math.prod(shape) > MAX_ELEMENTS:
            raise self.fail(f"a result of {math.prod(shape)} elements")
        tensor = self.with_extents(tensor, extents(shape))
        return Shaped(tensor, tuple(int(n) for n in shape), dtype)

    def with_extents(self, t: Tensor, ne: tuple[int, int, int, int]) -> Tensor:
        """Return a tensor, one that it is a reshape of, or a reshape of that, with the extents `ne`."""
        found = _reshaped(t)
        return next((u for u in found if u.ne == ne), None) or self.ctx.reshape_4d(found[-1], *ne)

    # -- elements ------------------------------------------------------------------------------

    def unary(self, fn: str, x: Operand, *params: float) -> Shaped:
        """Apply a function of `Context` that takes one tensor, of elements or (`OF_ROWS`) of rows."""
        v = self.value(x)
        t = v.tensor if fn in OF_ROWS else _reshaped(v.tensor)[-1]
        return self.made(getattr(self.ctx, fn)(t, *params), v.shape, v.dtype)

    def affine(self, x: Operand, scale: float = 1.0, bias: float = 0.0) -> Shaped:
        """Return `x * scale + bias`; factors one after the other are one."""
        v = self.value(x)
        base, factor = v.scaled or (v, 1.0)
        scale *= factor
        if bias:
            return replace(self.unary("scale_bias", base, scale, bias), shape=v.shape, dtype=v.dtype)
        return replace(self.unary("scale", base, scale), shape=v.shape, dtype=v.dtype, scaled=(base, scale))

    def clamp(self, x: Operand, low: float = -np.inf, high: float = np.inf) -> Shaped:
        """Return `x` limited to a range."""
        v = self.value(x)
        big = float(np.finfo(np.float32).max)
        if math.isinf(low) and math.isinf(high):
            return v
        return self.unary("clamp", v, max(low, -big), min(high, big))

    def binary(self, fn: str, x: Operand | float, y: Operand | float) -> Shaped:
        """Return `add`, `sub`, `mul` or `div` of operands, broadcast as ONNX has it."""
        p, q = self.scalar(x), self.scalar(y)
        if isinstance(x, Shaped) and q is not None and math.isfinite(q) and getattr(y, "ndim", 0) <= x.ndim:
            if fn in ("add", "sub"):
                return self.affine(x, 1.0, q if fn == "add" else -q)
            if fn == "mul" or q:
                return self.affine(x, q if fn == "mul" else 1.0 / q)
        if isinstance(y, Shaped) and p is not None and math.isfinite(p) and getattr(x, "ndim", 0) <= y.ndim:
            if fn in ("add", "sub"):
                return self.affine(y, 1.0 if fn == "add" else -1.0, p)
            if fn == "mul":
                return self.affine(y, p)
            x = self.made(self.ctx.fill(self.value(y).tensor, p), y.shape)
        a, b = self.value(x), self.value(y)
        if fn in ("add", "mul") and b.tensor.n_elements > a.tensor.n_elements:
            a, b = b, a
        shape = broadcast(self.op, a.shape, b.shape)
        left, right, out = map(extents, _merged(self.op, a.shape, b.shape, shape))
        s, t = _reshaped(a.tensor)[-1], _reshaped(b.tensor)[-1]
        if not (a.shape == b.shape == shape and s.ne == t.ne):
            if shape == a.shape and len(shape) <= 4 and left not in [u.ne for u in _reshaped(a.tensor)]:
                left, right = extents(shape), extents(b.shape)
            s, t = self.with_extents(a.tensor, left), self.with_extents(b.tensor, right)
        if s.n_elements != math.prod(out):
            s = self.ctx.repeat_4d(s, *out)
        return self.made(getattr(self.ctx, fn)(s, t), shape, a.dtype)

    add, sub = partialmethod(binary, "add"), partialmethod(binary, "sub")
    mul, div = partialmethod(binary, "mul"), partialmethod(binary, "div")

    def as_bool(self, x: Shaped) -> Shaped:
        """Return the value, marked as boolean."""
        return replace(x, dtype=BOOL)

    def select(self, c: Operand, x: Operand, y: Operand) -> Shaped:
        """Return `x` where `c` is 1, `y` where it is 0; exact for all values."""
        for flip, (one, other) in enumerate(((x, y), (y, x))):
            number = self.scalar(other) if isinstance(other, np.ndarray) else None
            if number is not None and math.isinf(number):  # log(1) = 0, log(0) = -inf
                keep = self.value(c) if not flip else self.affine(c, -1.0, 1.0)
                hole = self.unary("log", keep)
                return self.add(one, hole if number < 0 else self.unary("neg", hole))
        shape = broadcast(self.op, c.shape, x.shape, y.shape)
        n = math.prod(shape)
        if n >= 1 << 23:
            raise self.fail("a choice between more than 2^23 elements")
        p, q, r = (self.reshape(self.expand(self.value(v), shape), (n, 1)) for v in (c, x, y))
        both = self.concat([r, q], 0)
        rows = self.add(self.affine(p, float(n)), np.arange(n, dtype=np.float32).reshape(n, 1))
        t = self.ctx.get_rows(both.tensor, self.indices(self.reshape(rows, (n,))).tensor)
        return self.made(t, shape, x.dtype)

    # -- shapes --------------------------------------------------------------------------------

    def reshape(self, x: Operand, shape: Sequence[int]) -> Shaped:
        """Return the elements in another shape."""
        v = x if isinstance(x, Shaped) else self.value(x)
        if math.prod(shape) != math.prod(v.shape):
            raise self.fail(f"shape {v.shape} cannot become {(*shape,)}")
        return replace(self.made(v.tensor, shape, v.dtype), origin=v.origin)

    def viewed(self, x: Operand, shape: Sequence[int]) -> Operand:
        """Return the elements in another shape; a constant stays one."""
        return np.reshape(x, shape) if isinstance(x, np.ndarray) else self.reshape(x, shape)

    def transpose(self, x: Operand, perm: Sequence[int]) -> Shaped:
        """Return a copy with the axes in another order."""
        v = x if isinstance(x, Shaped) else self.value(x)
        perm = tuple(perm)
        if sorted(perm) != list(range(v.ndim)):
            raise self.fail(f"perm {list(perm)} of a tensor of {v.ndim} axes")
        base, order = v, perm
        if v.permuted is not None:
            base, first = v.permuted
            order = tuple(first[i] for i in perm)
        groups, sizes = _runs(base.shape, order)
        t = base.tensor if groups == sorted(groups) else self._permuted(base.tensor, groups, sizes)
        return replace(self.made(t, [v.shape[i] for i in perm], v.dtype), permuted=(base, order))

    def _permuted(self, t: Tensor, order: list[int], sizes: list[int]) -> Tensor:
        """Copy a tensor whose axes (of `sizes`, by their old place) come in a new order."""
        n = len(order)
        if n <= 4:
            t = self.ctx.reshape_4d(t, *extents([sizes[i] for i in range(n)]))
            axes = [0, 1, 2, 3]
            for new, old in enumerate(order):
                axes[n - 1 - old] = n - 1 - new
            return self.ctx.cont(self.ctx.permute(t, *axes))
        now = list(range(n))
        for place, axis in enumerate(order):  # exchange two neighbouring blocks of axes at a time
            at = now.index(axis)
            if at != place:
                four = (math.prod(sizes[i] for i in part) for part in
                        (now[:place], now[place:at], now[at : at + 1], now[at + 1 :]))  # fmt: skip
                t = self.ctx.reshape_4d(t, *extents([*four]))
                t = self.ctx.cont(self.ctx.permute(t, 0, 2, 1, 3))
                now.insert(place, now.pop(at))
        return t

    def expand(self, x: Operand, shape: Sequence[int]) -> Shaped:
        """Return `x` repeated to a shape, as NumPy's broadcast_to."""
        v, shape = self.value(x), tuple(shape)
        if v.shape == shape:
            return v
        if broadcast(self.op, v.shape, shape) != shape or math.prod(shape) > MAX_ELEMENTS:
            raise self.fail(f"shape {v.shape} cannot be expanded to {shape}")
        a, _, out = _merged(self.op, v.shape, shape, shape)
        t = self.ctx.repeat_4d(self.ctx.reshape_4d(v.tensor, *extents(a)), *extents(out))
        return self.made(t, shape, x.dtype)

    def parted(self, x: Operand, axis: int) -> tuple[Shaped, int, int, int]:
        """Return `x` as (before, n, after) around an axis, and these three extents."""
        v = self.value(x)
        outer, inner = math.prod(v.shape[:axis]), math.prod(v.shape[axis + 1 :])
        n = v.shape[axis]
        return self.reshape(v, (outer, n, inner)), outer, n, inner

    def concat(self, parts: Sequence[Operand], axis: int) -> Shaped:
        """Join values along an axis."""
        values = [self.value(p) for p in parts]
        kept = [v for v in values if v.shape[axis]] or values[:1]
        rest = {(*v.shape[:axis], *v.shape[axis + 1 :]) for v in values}
        if len(rest) > 1:
            raise self.fail(f"shapes {[v.shape for v in values]} along axis {axis}")
        t, n = self.parted(kept[0], axis)[0].tensor, kept[0].shape[axis]
        for v in kept[1:]:
            t = self.ctx.concat(t, self.parted(v, axis)[0].tensor, 1)
            n += v.shape[axis]
        shape = (*values[0].shape[:axis], n, *values[0].shape[axis + 1 :])
        return self.made(t, shape, values[0].dtype)

    def slice(self, x: Operand, axis: int, start: int, stop: int) -> Shaped:
        """Return a range along an axis."""
        v, outer, n, inner = self.parted(x, axis)
        if (start, stop) == (0, n):
            return self.value(x)
        k = max(stop - start, 0)
        nb = v.tensor.nb
        t = self.ctx.view_4d(v.tensor, inner, k, outer, 1, nb[1], nb[2], nb[3], start * nb[1] if k else 0)
        shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
        return self.made(self.ctx.cont(t), shape, x.dtype)

    def take(self, x: Operand, indices: Operand, axis: int) -> Shaped:
        """Return the elements at indices along an axis, as NumPy's take."""
        outer, n, inner = math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :])
        if isinstance(x, np.ndarray) and axis == 0 and x.dtype.kind == "f":
            rows = self.weight(np.reshape(x, (n, inner)), "rows" if inner > 1 else "f32")
            rows = self.ctx.reshape_4d(rows, inner, n, 1, 1) if inner == 1 else rows
        else:
            rows = self.parted(x, axis)[0].tensor
        k = math.prod(indices.shape)
        if isinstance(indices, np.ndarray):
            if indices.size and not -n <= indices.min() <= indices.max() < n:
                raise self.fail(f"indices beyond {n}")
            at = self.weight(
                np.tile(np.where(indices < 0, indices + n, indices).reshape(1, k), (outer, 1)), "i32"
            )
        elif indices.origin is not None and outer == 1:
            at = self.input(indices.origin, indices.shape, n)
        else:
            v = self.from_first(self.reshape(indices, (1, k)), n)
            at = self.indices(self.expand(v, (outer, k))).tensor
        t = self.ctx.get_rows(rows, self.ctx.reshape_4d(at, k, outer, 1, 1))
        result = (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])
        return self.made(t, result, x.dtype)

    def from_first(self, indices: Operand, n: int) -> Shaped:
        """Return indices counted from the first of `n`: negative ones are counted from the end."""
        v = self.value(indices)
        return self.add(v, self.affine(self.unary("step", self.unary("neg", v)), float(n)))

    def last(self, x: Operand, axes: Sequence[int]) -> tuple[Shaped, list[int]]:
        """Return `x` with `axes` moved behind the others and merged, as (others, merged); and the order."""
        v = self.value(x)
        order = [i for i in range(v.ndim) if i not in axes] + list(axes)
        moved = self.transpose(v, order) if order != list(range(v.ndim)) else v
        n = math.prod(v.shape[i] for i in axes)
        return self.reshape(moved, (math.prod(v.shape) // n if n else 0, n)), order

    def along(self, x: Operand, axes: Sequence[int], *rows_of: Callable[[Shaped], Shaped]) -> list[Shaped]:
        """Apply functions of rows, which are `axes` of `x` merged; one axis may get another extent."""
        rows, order = self.last(x, axes)
        back = [order.index(i) for i in range(len(order))]
        found = []
        for y in (fn(rows) for fn in rows_of):
            shape = [x.shape[i] for i in order]
            shape[-1] = y.shape[1] if len(axes) == 1 else shape[-1]
            found.append(self.transpose(self.reshape(y, shape), back))
        return found

    def reduced(self, fn: str, rows: Shaped) -> Shaped:
        """Return the `sum_rows`, `mean` or `max` of rows, as (rows, 1)."""
        m, k = rows.shape
        if fn != "max":
            return self.made(getattr(self.ctx, fn)(rows.tensor), (m, 1), rows.dtype)
        at = self.ctx.reshape_2d(self.ctx.argmax(rows.tensor), 1, m)  # POOL_1D makes -inf the least float
        found = self.ctx.get_rows(self.ctx.reshape_3d(rows.tensor, 1, k, m), at)
        return self.made(self.ctx.reshape_2d(found, 1, m), (m, 1), rows.dtype)

    # -- products ------------------------------------------------------------------------------

    def rows(self, x: Operand) -> Shaped:
        """Return the right operand of a product; of a constant matrix, a weight for products."""
        if isinstance(x, np.ndarray):
            return Shaped(self.weight(x, "matrix" if x.ndim == 2 else "f32"), x.shape, x.dtype)
        return self.value(x)

    def swapped(self, x: Operand) -> Shaped:
        """Return `x` with the last two axes exchanged, without a copy where it came from such an exchange."""
        if isinstance(x, np.ndarray):
            return self.rows(np.swapaxes(x, -1, -2))
        order = list(range(x.ndim))
        order[-2:] = order[:-3:-1]
        return self.transpose(x, order)

    def matmul(self, x: Operand, rows: Shaped) -> Shaped:
        """Return `x @ rows.T` over the last two axes, with leading axes broadcast."""
        a = self.value(x)
        if a.shape[-1] != rows.shape[-1]:
            raise self.fail(f"a product of {a.shape} with rows of {rows.shape}")
        (m, k), n = a.shape[-2:], rows.shape[-2]
        lead = broadcast(self.op, a.shape[:-2], rows.shape[:-2])
        if math.prod(rows.shape[:-2]) == 1:
            w = self.ctx.reshape_4d(rows.tensor, k, n, 1, 1) if rows.tensor.ne[2:] != (1, 1) else rows.tensor
            flat = self.reshape(a, (math.prod(a.shape[:-1]), k))
            t = self.ctx.mul_mat(w, flat.tensor)
        else:
            b = math.prod(lead)
            left = self.reshape(self.expand(a, (*lead, m, k)), (b, m, k))
            right = self.reshape(self.expand(rows, (*lead, n, k)), (b, n, k))
            t = self.ctx.mul_mat(right.tensor, left.tensor)
        return self.made(t, (*lead, m, n), a.dtype)

    def result(self, x: Shaped) -> Tensor:
        """Return a tensor of its own for a result of the model."""
        t = x.tensor
        return self.ctx.set_output(self.ctx.cont(t) if t.op in _VIEWS else t)


def _reshaped(t: Tensor) -> list[Tensor]:
    """Return a tensor, the one that it is a reshape of, and so on."""
    found = [t]
    while found[-1].op is Op.RESHAPE:
        found.append(found[-1].sources[0])
    return found


def _merged(op: str, a: Shape, b: Shape, out: Shape) -> tuple[list[int], list[int], list[int]]:
    """Merge neighbouring axes that both operands have, or that one repeats, to at most four."""
    rank = len(out)
    a, b = (1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b
    groups: list[list[int]] = []
    last: tuple[bool, bool] | None = None
    for p, q, n in zip(a, b, out, strict=True):
        if n == 1:
            continue
        kind = (p == n, q == n)
        if kind == last:
            groups[-1] = [x * y for x, y in zip(groups[-1], (p, q, n), strict=True)]
        else:
            groups.append([p, q, n])
        last = kind
    if len(groups) > 4:
        raise not_supported(op, f"broadcasting {a} and {b} takes more than four axes")
    columns = [*zip(*groups, strict=True)] or [(1,), (1,), (1,)]
    return [*columns[0]], [*columns[1]], [*columns[2]]


def _runs(shape: Shape, order: Sequence[int]) -> tuple[list[int], list[int]]:
    """Merge axes that stay neighbours in a new order; return the new order of these, and their sizes."""
    kept = [i for i in order if shape[i] != 1]
    runs: list[list[int]] = []
    for i in kept:
        if runs and all(shape[j] == 1 for j in range(runs[-1][-1] + 1, i)) and i > runs[-1][-1]:
            runs[-1].append(i)
        else:
            runs.append([i])
    by_place = sorted(range(len(runs)), key=lambda r: runs[r][0])
    place = {r: p for p, r in enumerate(by_place)}
    sizes = [math.prod(shape[i] for i in runs[r]) for r in by_place]
    return [place[r] for r in range(len(runs))], sizes
