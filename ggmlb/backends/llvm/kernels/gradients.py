"""Kernels of training: sums, repeats, gradients of norms and soft max, losses, optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ggmlb.backends.llvm.codegen.emit import F32, Emitter, Value, vec
from ggmlb.backends.llvm.codegen.simd import (
    SIZES,
    exp,
    greatest,
    load_float,
    load_floats,
    log,
    store_floats,
    total,
)
from ggmlb.backends.llvm.kernels.convert import row_number
from ggmlb.backends.llvm.kernels.norm import row_sum
from ggmlb.backends.llvm.kernels.row_loop import RowPart, each_row, each_vector

if TYPE_CHECKING:
    Load = Callable[[Value, Value | None], Value]
    """Loads a vector of a row, given its first element and a mask."""

BLOCK = 4
"""Vectors of columns summed together, so that adjacent cache lines of a row are read together."""


def _loads(k: Emitter, row: RowPart, dtypes: Sequence[str], first: int = 1) -> list[Load]:
    """Return load functions for a row of each operand from `first` on; operand 0 is the result."""
    n = k.level.lanes

    def of(j: int, dtype: str) -> Load:
        return lambda i, mask: load_floats(k, dtype, row.at[j] + i * SIZES[dtype], n, mask)

    return [of(j, dtype) for j, dtype in enumerate(dtypes[first:], first)]


def _write(k: Emitter, out: str, row: RowPart, value: Load) -> None:
    def body(i: Value, mask: Value | None) -> None:
        store_floats(k, out, value(i, mask), row.at[0] + i * SIZES[out], mask)

    each_vector(k, row.start, row.stop, body)


# -- sums and repeats ------------------------------------------------------------------------------


def row_sums(k: Emitter, out: str, src: str) -> None:
    """Sum the elements of each row, and multiply the sum by a factor.

    Arguments: the factor, then `row_loop`'s for `y, x`.
    """
    factor = k.float_arg()
    with each_row(k, 2) as row:
        (x,) = _loads(k, row, (out, src))
        store_floats(k, out, (row_sum(k, row, x) * factor).splat(1), row.at[0])


def repeat_back(k: Emitter, out: str, src: str) -> None:
    """Sum the copies that `repeat` made, as its gradient.

    Arguments: `x, nb1..3, r1..3, ne1..3`, then `row_loop`'s for `y`.
    """
    x, nb1, nb2, nb3, r1, r2, r3, ne1, ne2, ne3 = k.ints(10)
    n, zero = k.level.lanes, k.const(vec(F32, k.level.lanes), 0)
    with each_row(k, 1) as row:
        i1, i2, i3 = row.place
        first = x + i1 * nb1 + i2 * nb2 + i3 * nb3

        def add(i: Value, mask: Value | None, n_vectors: int) -> None:
            sums = [k.variable(zero) for _ in range(n_vectors)]
            with k.loop(0, r3) as t3, k.loop(0, r2) as t2, k.loop(0, r1) as t1:
                at = first + t3 * ne3 * nb3 + t2 * ne2 * nb2 + t1 * ne1 * nb1
                for v, s in enumerate(sums):
                    s.set(s.now + load_floats(k, src, at + (i + v * n) * SIZES[src], n, mask))
            for v, s in enumerate(sums):
                store_floats(k, out, s.now, row.at[0] + (i + v * n) * SIZES[out], mask)

        whole = row.start + (row.stop - row.start) // (n * BLOCK) * (n * BLOCK)
        with k.loop(row.start, whole, n * BLOCK) as i:
            add(i, None, BLOCK)
        each_vector(k, whole, row.stop, lambda i, mask: add(i, mask, 1))


def get_rows_back(k: Emitter, src: str) -> None:
    """The gradient of `get_rows`: add each row of `x` to the row of its index in a zeroed `y`.

    A chunk is a range of columns. Arguments: `x, x_nb1, ids, nb0, count, y, y_nb1, n, limit, errors, step`.
    """
    x, x_nb1, ids, nb0, count, y, y_nb1, width, limit, errors, step = k.ints(11)
    n = k.level.lanes
    units = (width + (n - 1)) // n
    start = units * k.chunk // k.n_chunks * n
    stop = k.least(units * (k.chunk + 1) // k.n_chunks * n, width)
    with k.loop(0, limit) as r:
        each_vector(k, start, stop, _zeros(k, y + r * y_nb1))
    with k.loop(0, count) as r:
        number, right = row_number(k, ids + r * nb0, "i32", limit, (errors, step))
        with k.when(right):
            source, target = x + r * x_nb1, y + number * y_nb1

            def body(i: Value, mask: Value | None, source: Value = source, target: Value = target) -> None:
                value = load_floats(k, "f32", target + i * 4, n, mask)
                value = value + load_floats(k, src, source + i * SIZES[src], n, mask)
                store_floats(k, "f32", value, target + i * 4, mask)

            each_vector(k, start, stop, body)


def _zeros(k: Emitter, at: Value) -> Callable[[Value, Value | None], None]:
    zero = k.const(vec(F32, k.level.lanes), 0)
    return lambda i, mask: store_floats(k, "f32", zero, at + i * 4, mask)


# -- rows ------------------------------------------------------------------------------------------


def rms_norm_back(k: Emitter, dtypes: Sequence[str]) -> None:
    """The gradient of `rms_norm`. Arguments: `eps`, then `row_loop`'s for `y, dy, x`."""
    n, eps = k.level.lanes, k.float_arg()
    with each_row(k, 3) as row:
        dy, x = _loads(k, row, dtypes)
        count = row.n.to_float()
        mean = row_sum(k, row, lambda i, mask: x(i, mask) * x(i, mask)) / count + eps
        along = row_sum(k, row, lambda i, mask: x(i, mask) * dy(i, mask)) / (count * mean)
        along, scale = along.splat(n), (1.0 / k.generic("sqrt", mean)).splat(n)
        _write(k, dtypes[0], row, lambda i, mask: (dy(i, mask) - x(i, mask) * along) * scale)


def soft_max_back(k: Emitter, dtypes: Sequence[str]) -> None:
    """The gradient of `soft_max`. Arguments: `scale`, then `row_loop`'s for `dx, dy, y`."""
    n, scale = k.level.lanes, k.float_arg().splat(k.level.lanes)
    with each_row(k, 3) as row:
        dy, y = _loads(k, row, dtypes)
        along = row_sum(k, row, lambda i, mask: y(i, mask) * dy(i, mask)).splat(n)
        _write(k, dtypes[0], row, lambda i, mask: (dy(i, mask) - along) * y(i, mask) * scale)


def _row_max(k: Emitter, row: RowPart, x: Load) -> Value:
    infinity = float("-inf")
    maximum = k.variable(k.const(vec(F32, k.level.lanes), infinity))

    def body(i: Value, mask: Value | None) -> None:
        value = x(i, mask)
        maximum.set(k.maximum(maximum.now, value if mask is None else k.select(mask, value, infinity)))

    each_vector(k, row.start, row.stop, body)
    return greatest(k, maximum.now)


def cross_entropy(k: Emitter, dtypes: Sequence[str]) -> None:
    """The negative cross entropy of each row. Arguments: `row_loop`'s for `y, x, p`; `y` has one per row."""
    n = k.level.lanes
    with each_row(k, 3) as row:
        x, p = _loads(k, row, dtypes)
        row_max = _row_max(k, row, x).splat(n)

        def power(i: Value, mask: Value | None) -> Value:
            e = exp(k, x(i, mask) - row_max)
            return e if mask is None else k.select(mask, e, 0.0)

        scale = log(k, row_sum(k, row, power).splat(n))

        def term(i: Value, mask: Value | None) -> Value:
            value = (x(i, mask) - row_max - scale) * p(i, mask)
            return value if mask is None else k.select(mask, value, 0.0)

        store_floats(k, dtypes[0], row_sum(k, row, term).splat(1), row.at[0])


def cross_entropy_back(k: Emitter, dtypes: Sequence[str], grad: str) -> None:
    """The gradient of `cross_entropy_loss`. Arguments: `1 / n_rows, grad`; `row_loop`'s for `dx, x, p`."""
    n, inv_rows = k.level.lanes, k.float_arg()
    factor = (load_float(k, grad, k.int_arg()) * inv_rows).splat(n)
    with each_row(k, 3) as row:
        x, p = _loads(k, row, dtypes)
        row_max = _row_max(k, row, x).splat(n)
        sums = k.variable(k.const(vec(F32, n), 0))

        def power(i: Value, mask: Value | None) -> None:
            e = exp(k, x(i, mask) - row_max)
            store_floats(k, "f32", e, row.at[0] + i * 4, mask)
            sums.set(sums.now + (e if mask is None else k.select(mask, e, 0.0)))

        each_vector(k, row.start, row.stop, power)
        inv_sum = (1.0 / total(sums.now)).splat(n)

        def value(i: Value, mask: Value | None) -> Value:
            e = load_floats(k, "f32", row.at[0] + i * 4, n, mask)
            return (e * inv_sum - p(i, mask)) * factor

        _write(k, "f32", row, value)


# -- optimizer steps -------------------------------------------------------------------------------


def adamw(k: Emitter, grad: str) -> None:
    """Update weights `w` in place by a step of AdamW.

    Arguments: address of `alpha, beta1, beta2, eps, decay, correct1, correct2`; `row_loop`'s: `w, g, m, v`.
    """
    n, at = k.level.lanes, k.int_arg()
    numbers = [k.load(F32, at + 4 * i).splat(n) for i in range(7)]
    alpha, beta1, beta2, eps, decay, correct1, correct2 = numbers
    with each_row(k, 4) as row:
        w, g, m, v = _loads(k, row, ("f32", grad, "f32", "f32"), first=0)

        def body(i: Value, mask: Value | None) -> None:
            slope = g(i, mask)
            first = m(i, mask) * beta1 + slope * (1.0 - beta1)
            second = v(i, mask) * beta2 + slope * slope * (1.0 - beta2)
            for j, value in ((2, first), (3, second)):
                store_floats(k, "f32", value, row.at[j] + i * 4, mask)
            step = first * correct1 / (k.generic("sqrt", second * correct2) + eps)
            value = w(i, mask) * (1.0 - alpha * decay) - alpha * step
            store_floats(k, "f32", value, row.at[0] + i * 4, mask)

        each_vector(k, row.start, row.stop, body)


def sgd(k: Emitter, grad: str) -> None:
    """Update weights `w` in place by a step of SGD.

    Arguments: address of rate and decay, then `row_loop`'s for `w, g`.
    """
    n, at = k.level.lanes, k.int_arg()
    alpha, decay = (k.load(F32, at + 4 * i).splat(n) for i in range(2))
    with each_row(k, 2) as row:
        w, g = _loads(k, row, ("f32", grad), first=0)
        _write(k, "f32", row, lambda i, mask: w(i, mask) * (1.0 - alpha * decay) - alpha * g(i, mask))
