"""Greatest elements of rows: arg max, sorting, and the first elements of the order (top-k).

An element's *key* is a 32-bit integer of the same order, in which NaN is above all numbers. Rows are sorted
as 64-bit integers, the key above the index: as no two are equal, a network of exchanges (bitonic sort) is
stable.
"""

from __future__ import annotations

from collections.abc import Callable

from ggmlb.backends.llvm.codegen.emit import I1, I32, I64, Emitter, Level, Value, like, vec
from ggmlb.backends.llvm.codegen.simd import SIZES, fold, load_floats
from ggmlb.backends.llvm.kernels.row_loop import each_row, each_vector

_LAST, _NAN = 2**63 - 1, 0x7FC00000


def sort_lanes(level: Level) -> int:
    """Return the number of 64-bit lanes of a vector."""
    return level.lanes // 2


def _key(k: Emitter, x: Value) -> Value:
    """Integers in the order of a vector of floats, by which these are sorted; +0 and -0 are equal."""
    ints = like(x.type, I32)
    bits = k.select(x.equals(x), (x + 0.0).bits(ints), _NAN)
    return bits ^ k.select(bits < 0, k.const(ints, 0x7FFFFFFF), 0)


def _join(key: Value, low: Value) -> Value:
    """64-bit integers of 32-bit halves."""
    return (key.sext(I64) << 32) | low.zext(I64)


def argmax(k: Emitter, src: str) -> None:
    """Write the index of each row's greatest element, of equal ones the first.

    Arguments: `row_loop`'s for `y, x`; `y` has one element per row.
    """
    n = k.level.lanes
    lanes, ints = k.table(vec(I32, n), range(n)), vec(I32, n)
    with each_row(k, 2) as row:
        best, place = k.variable(k.const(ints, -(2**31))), k.variable(lanes)

        def body(i: Value, mask: Value | None) -> None:
            key = _key(k, load_floats(k, src, row.at[1] + i * SIZES[src], n, mask))
            is_greater = key > best.now
            if mask is not None:
                is_greater = is_greater & mask
            best.set(k.select(is_greater, key, best.now))
            place.set(k.select(is_greater, lanes + i.trunc(I32).splat(n), place.now))

        each_vector(k, k.i64(0), row.n, body)
        first = fold(_join(best.now, place.now ^ -1), k.maximum)
        k.store((first ^ -1).trunc(I32), row.at[0])


def sort(k: Emitter, src: str, descending: bool, whole: bool) -> None:
    """Write the first indices of the order of each row's elements.

    Arguments: `count` of indices, `size`, a power of two, and its logarithm, scratch for `size` 64-bit
    integers, for twice as many unless `whole`, the scratch per thread [bytes], then `row_loop`'s for `y, x`.

    Args:
        k: The emitted kernel.
        src: The type of `x`.
        descending: Whether the greatest element is first.
        whole: Whether rows of at most `size` elements are sorted. Else the first `size` so far are kept, and
            elements before the last of these are collected, sorted and merged with them, `size` at a time.
    """
    count, size, log_size, scratch, stride = k.ints(5)
    n = sort_lanes(k.level)
    first = scratch + k.thread * stride
    with each_row(k, 2) as row:

        def keys(i: Value) -> Value:
            """Keys and indices of elements from `i` on; those beyond the row come last."""
            mask = k.first_lanes(n, k.maximum(row.n - i, 0))
            key = _key(k, load_floats(k, src, row.at[1] + i * SIZES[src], n, mask))
            places = k.table(vec(I32, n), range(n)) + i.trunc(I32).splat(n)
            return k.select(mask, _join(key ^ -1 if descending else key, places), _LAST)

        if whole:
            with k.loop(0, size, n) as i:
                k.store(keys(i), first + i * 8)
            _sort(k, first, size, log_size)
        else:
            _first(k, keys, row.n, first, size, log_size)
        with k.loop(0, count, n) as i:
            indices = _read(k, first + i * 8).trunc(I32)
            k.store_masked(indices, row.at[0] + i * 4, k.first_lanes(n, count - i))


def _first(
    k: Emitter, keys: Callable[[Value], Value], length: Value, first: Value, size: Value, log_size: Value
) -> None:
    """Write the least `size` of the 64-bit integers `keys` of a row to `first`, in order."""
    n, more = sort_lanes(k.level), first + size * 8
    last, n_more = k.variable(k.i64(_LAST)), k.variable(k.i64(0))
    all_last = k.const(vec(I64, n), _LAST)
    with k.loop(0, size, n) as i:
        k.store(all_last, first + i * 8)
    with k.loop(0, length + n, n) as i:  # the last turn, beyond the row, merges the rest
        found = keys(i)
        with k.when(k.any(found < last.now.splat(n))):
            k.store(found, more + n_more.now * 8)
            n_more.set(n_more.now + n)
        with k.when((n_more.now.equals(size)) | (i >= length)):
            with k.loop(n_more.now, size, n) as j:
                k.store(all_last, more + j * 8)
            _sort(k, more, size, log_size)
            with k.loop(0, size, n) as j:
                lesser = k.minimum(_read(k, first + j * 8), _reversed(_read(k, more + (size - n - j) * 8)))
                k.store(lesser, first + j * 8)
            _merge(k, first, size, log_size)
            last.set(k.load(I64, first + size * 8 - 8))
            n_more.set(k.i64(0))


def _read(k: Emitter, at: Value) -> Value:
    return k.load(vec(I64, sort_lanes(k.level)), at)


def _reversed(x: Value) -> Value:
    return x.shuffle(range(x.type.count)[::-1])


def _exchanged(k: Emitter, x: Value, distance: int) -> Value:
    """Order each lane and the one whose number differs in the bits of `distance`, the lesser first."""
    lanes = range(x.type.count)
    other = x.shuffle([i ^ distance for i in lanes])
    is_first = k.table(vec(I1, len(lanes)), [int(i < i ^ distance) for i in lanes])
    return k.select(is_first, k.minimum(x, other), k.maximum(x, other))


def _exchange(k: Emitter, a: Value, b: Value, is_mirrored: bool = False) -> None:
    """Order the vectors at two addresses lane by lane, the second one from its end if mirrored."""
    x, y = _read(k, a), _read(k, b)
    if is_mirrored:
        y = _reversed(y)
    greater = k.maximum(x, y)
    k.store(k.minimum(x, y), a)
    k.store(_reversed(greater) if is_mirrored else greater, b)


def _sort(k: Emitter, at: Value, size: Value, log_size: Value) -> None:
    n = sort_lanes(k.level)
    log_n = n.bit_length() - 1
    with k.loop(0, size, n) as i:
        x = _read(k, at + i * 8)
        for upper in range(log_n):
            x = _exchanged(k, x, (2 << upper) - 1)
            for lower in reversed(range(upper)):
                x = _exchanged(k, x, 1 << lower)
        k.store(x, at + i * 8)
    with k.loop(log_n, log_size) as log:
        half = k.i64(1) << log
        with k.loop(0, size >> 1, n) as i:
            inside = i & (half - 1)
            begin = at + (i - inside) * 16
            _exchange(k, begin + inside * 8, begin + (half * 2 - n - inside) * 8, is_mirrored=True)
        _merge(k, at, size, log)


def _merge(k: Emitter, at: Value, size: Value, log: Value) -> None:
    """Sort each run of `2^log` elements, which is bitonic."""
    n = sort_lanes(k.level)
    log_n = n.bit_length() - 1
    with k.loop(0, log - log_n) as i:
        distance = k.i64(1) << (log - 1 - i)
        with k.loop(0, size >> 1, n) as j:
            inside = j & (distance - 1)
            begin = at + ((j - inside) * 2 + inside) * 8
            _exchange(k, begin, begin + distance * 8)
    with k.loop(0, size, n) as i:
        x = _read(k, at + i * 8)
        for lower in reversed(range(log_n)):
            x = _exchanged(k, x, 1 << lower)
        k.store(x, at + i * 8)
