"""Greatest elements of rows: arg max, sorting, and the first elements of the order (top-k).

An element's *key* is a 32-bit integer of the same order, in which NaN is above all numbers. Rows are sorted
as 64-bit integers, the key above the index: as no two are equal, a network of exchanges (bitonic sort) is
stable.
"""

from __future__ import annotations

from ggmlb.backends.llvm.codegen.emit import I1, I32, I64, Emitter, Level, Value, like, vec
from ggmlb.backends.llvm.codegen.simd import SIZES, fold, load_floats
from ggmlb.backends.llvm.kernels.row_loop import each_row, each_vector

_LAST, _NAN = 2**63 - 1, 0x7FC00000


def sort_lanes(level: Level) -> int:
    """Return the number of 64-bit lanes of a vector."""
    return level.lanes // 2


def _key(k: Emitter, x: Value) -> Value:
    """The keys of a vector of floats; equal for both zeros."""
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
        first = fold(k, _join(best.now, place.now ^ -1), k.maximum)
        k.store((first ^ -1).trunc(I32), row.at[0])


def sort(k: Emitter, src: str, descending: bool) -> None:
    """Write the first indices of the order of each row's elements.

    `size` elements are sorted at a time, a power of two; of longer rows, those that come first are kept, and
    merged with the next ones. Arguments: `count` of indices, `size`, its logarithm, scratch for twice `size`
    64-bit integers, the scratch per thread [bytes], then `row_loop`'s for `y, x`.
    """
    count, size, log_size, scratch, stride = k.ints(5)
    n = sort_lanes(k.level)
    first = scratch + k.thread * stride
    more = first + size * 8
    with each_row(k, 2) as row:
        with k.loop(0, (row.n + size - 1) // size) as part:
            at = k.select(part.equals(0), first, more)
            _load(k, src, descending, (row.at[1], row.n, part * size), at, size)
            _sort(k, at, size, log_size)
            with k.when(part > 0):
                with k.loop(0, size, n) as i:
                    lesser = k.minimum(
                        _read(k, first + i * 8), _reversed(_read(k, more + (size - n - i) * 8))
                    )
                    k.store(lesser, first + i * 8)
                _merge(k, first, size, log_size)
        with k.loop(0, count, n) as i:
            indices = _read(k, first + i * 8).trunc(I32)
            k.store_masked(indices, row.at[0] + i * 4, k.first_lanes(n, count - i))


def _load(
    k: Emitter, src: str, descending: bool, part: tuple[Value, Value, Value], to: Value, size: Value
) -> None:
    """Write keys and indices of a part of a row, given as row, its length and the part's start."""
    (row, length, start), n = part, sort_lanes(k.level)
    with k.loop(0, size, n) as i:
        index = start + i
        mask = k.first_lanes(n, k.maximum(length - index, 0))
        key = _key(k, load_floats(k, src, row + index * SIZES[src], n, mask))
        places = k.table(vec(I32, n), range(n)) + index.trunc(I32).splat(n)
        k.store(k.select(mask, _join(key ^ -1 if descending else key, places), _LAST), to + i * 8)


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
