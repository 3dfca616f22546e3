"""Normalisation of rows, optionally fused with a product and a sum; soft max."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ggmlb.backends.llvm.codegen.emit import F32, Emitter, Value, vec
from ggmlb.backends.llvm.codegen.simd import SIZES, exp, greatest, load_floats, store_floats, total
from ggmlb.backends.llvm.kernels.row_loop import RowPart, each_row, each_vector


def row_sum(k: Emitter, row: RowPart, term: Callable[[Value, Value | None], Value]) -> Value:
    """The sum over a row of the vectors `term(i, mask)`, which must be 0 in lanes not set in the mask."""
    n, unroll = k.level.lanes, 4
    sums = [k.variable(k.const(vec(F32, n), 0)) for _ in range(unroll)]
    whole = row.n // (n * unroll) * (n * unroll)
    with k.loop(0, whole, n * unroll) as i:
        for j, s in enumerate(sums):
            s.set(s.now + term(i + n * j, None))

    def body(i: Value, mask: Value | None) -> None:
        sums[0].set(sums[0].now + term(i, mask))

    each_vector(k, whole, row.n, body)
    return total((sums[0].now + sums[1].now) + (sums[2].now + sums[3].now))


def normalise(
    k: Emitter, kind: str, dtypes: Sequence[str], factors: int, added: bool = False, kept: bool = False
) -> None:
    """Normalise rows, of a sum if `added` (written if `kept`); multiply by and add other rows (`factors`).

    Arguments: `eps`; `row_loop`'s for `y, x`, `b` if `added`, `s` if `kept`, the factors.

    Args:
        k: The emitted kernel.
        kind: `norm`, `rms_norm` or `l2_norm`.
        dtypes: Types of `y` and `x`.
        factors: 1: multiply the result by float32 rows; 2: then also add others.
        added: Whether to normalise `x + b`; all are float32 then.
        kept: Whether to also write this sum, to `s`.
    """
    out, src = dtypes
    n = k.level.lanes
    eps = k.float_arg()
    with each_row(k, 2 + factors + added + kept) as row:
        if kept:
            _add(k, row)

        def x(i: Value, mask: Value | None) -> Value:
            value = load_floats(k, src, row.at[1] + i * SIZES[src], n, mask)
            if added and not kept:
                value = value + load_floats(k, "f32", row.at[2] + i * 4, n, mask)
            return value

        count = row.n.to_float()
        mean = k.const(F32, 0)
        if kind == "norm":
            mean = row_sum(k, row, x) / count
        shift = mean.splat(n)

        def square(i: Value, mask: Value | None) -> Value:
            value = x(i, mask)
            if kind == "norm":
                value = value - shift
                if mask is not None:
                    value = k.select(mask, value, 0.0)
            return value * value

        squares = row_sum(k, row, square)
        if kind == "l2_norm":
            factor = 1.0 / k.maximum(k.generic("sqrt", squares), eps)
        else:
            factor = 1.0 / k.generic("sqrt", squares / count + eps)
        scale = factor.splat(n)

        def write(i: Value, mask: Value | None) -> None:
            value = x(i, mask)
            if kind == "norm":
                value = value - shift
            value = value * scale
            for j in range(factors):
                other = load_floats(k, "f32", row.at[2 + added + kept + j] + i * 4, n, mask)
                value = value + other if j else value * other
            store_floats(k, out, value, row.at[0] + i * SIZES[out], mask)

        each_vector(k, row.start, row.stop, write)


def _add(k: Emitter, row: RowPart) -> None:
    """Write the sum of operands 1 and 2 to operand 3, which then replaces operand 1."""
    n = k.level.lanes

    def body(i: Value, mask: Value | None) -> None:
        a, b = (load_floats(k, "f32", row.at[j] + i * 4, n, mask) for j in (1, 2))
        store_floats(k, "f32", a + b, row.at[3] + i * 4, mask)

    each_vector(k, row.start, row.stop, body)
    row.at[1] = row.at[3]


def soft_max(k: Emitter, mask_type: str | None, has_sinks: bool) -> None:
    """Compute the soft max of rows, with optional mask, ALiBi slopes and sinks.

    Arguments: `scale, slopes, sinks, mask, nb1..3, ne2..3`; `row_loop`'s for `y, x`.
    """
    n = k.level.lanes
    scale = k.float_arg().splat(n)
    slopes, sinks, mask_at, nb1, nb2, nb3, ne2, ne3 = k.ints(8)
    with each_row(k, 2) as row:
        i1, i2, i3 = row.place
        bias = mask_at + i1 * nb1 + i2 % ne2 * nb2 + i3 % ne3 * nb3
        slope = k.load(F32, slopes + i2 * 4).splat(n)
        infinity = float("-inf")
        maximum = k.variable(k.const(vec(F32, n), infinity))

        def logits(i: Value, mask: Value | None) -> Value:
            # Not fused: the row maximum must round alike, so that its difference is exactly 0.
            z = load_floats(k, "f32", row.at[1] + i * 4, n, mask).times(scale)
            if mask_type is not None:
                z = z + load_floats(k, mask_type, bias + i * SIZES[mask_type], n, mask) * slope
            return z

        def highest(i: Value, mask: Value | None) -> None:
            z = logits(i, mask)
            maximum.set(k.maximum(maximum.now, z if mask is None else k.select(mask, z, infinity)))

        each_vector(k, row.start, row.stop, highest)
        row_max = greatest(k, maximum.now)
        if has_sinks:
            sink = k.load(F32, sinks + i2 * 4)
            row_max = k.maximum(row_max, sink)
        subtracted = row_max.splat(n)
        sums, last = (k.variable(k.const(vec(F32, n), 0)) for _ in range(2))

        def powers(i: Value, mask: Value | None) -> None:
            e = exp(k, logits(i, mask) - subtracted)
            if mask is None:
                k.store(e, row.at[0] + i * 4)
            else:
                e = k.select(mask, e, 0.0)
                last.set(e)
            sums.set(sums.now + e)

        each_vector(k, row.start, row.stop, powers)
        sum_ = total(sums.now)
        if has_sinks:
            sum_ = sum_ + exp(k, (sink - row_max).splat(n))[0]
        inv_sum = (1.0 / sum_).splat(n)

        def scaled(i: Value, mask: Value | None) -> None:
            at = row.at[0] + i * 4
            if mask is None:
                k.store(k.load(vec(F32, n), at) * inv_sum, at)
            else:
                _store_first(k, last.now * inv_sum, at, row.stop - i)

        each_vector(k, row.start, row.stop, scaled)


def _store_first(k: Emitter, value: Value, address: Value, count: Value) -> None:
    """Write the first `count` lanes without a masked store, which would stall later loads."""
    rest, to, n = k.variable(value), k.variable(address), value.type.count
    while n > 1:
        n //= 2
        with k.when((count & n) > 0):
            k.store(rest.now.shuffle(range(n)), to.now)
            to.set(to.now + 4 * n)
            rest.set(rest.now.shuffle([i % value.type.count for i in range(n, n + value.type.count)]))
