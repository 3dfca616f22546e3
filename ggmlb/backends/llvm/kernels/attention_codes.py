"""Attention of few queries to a quantised KV cache, by 16-bit integer products (`vpmaddwd`).

Queries, and soft max weights times the scales of values, are rounded to 16 bits. For `Q K` a vector has four
keys, lane `i` summing products of key `i % 4`; for the sums of values, lanes are elements, and a pair of
16-bit products adds two keys.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from ggmlb.backends.llvm.codegen.emit import F32, I8, I16, I32, Emitter, Value, like, vec
from ggmlb.backends.llvm.codegen.simd import Dot, folds, greatest, total
from ggmlb.backends.llvm.kernels.blocks import FORMATS, BlockFormat
from ggmlb.core.dtypes import DType

_MOST, _LEAST = 32767.0, 1e-33
_ROUND = 12582912.0
"""Adding this to a number below 2^22 leaves the nearest integer in the lowest bits."""


def greatest_divisor(n: int, most: int) -> int:
    """The greatest divisor of `n` that does not exceed `most`; 1 if `most` is below 1."""
    return max(i for i in range(1, n + 1) if n % i == 0 and i <= max(1, most))


def codes_of(k: Emitter, dtype: str, block: Value, first: int, n: int) -> Value:
    """Load `code - offset` for codes `first` to `first + n - 1` of a block of 32."""
    form = FORMATS[dtype]
    if dtype == "q8_0":
        return k.load(vec(I8, n), block + (DType.Q8_0.codec.offsets["qs"] + first))
    codes: Value = form.codes(k, block)[0]
    return (codes - form.offset if form.offset else codes).shuffle(range(first, first + n))


class Rounding:
    """Quantises floats to 16-bit integers with a common scale, found in a first pass over all of them.

    Args:
        k: The emitted kernel.
    """

    def __init__(self, k: Emitter) -> None:
        self._k = k
        self._type = vec(F32, k.level.lanes)
        self._most, self._odd = (k.variable(k.const(self._type, 0)) for _ in range(2))

    def see(self, x: Value) -> None:
        """First pass: update the largest magnitude with a vector of numbers."""
        k = self._k
        self._most.set(k.maximum(k.generic("fabs", x), self._most.now))
        self._odd.set(self._odd.now + x * 0.0)

    def factor(self) -> Value:
        """The common scale; infinite or NaN if one of the numbers is."""
        return greatest(self._k, self._most.now) * (1 / _MOST) + total(self._odd.now)

    def write(self, values: Value, n: Value | int, to: Value) -> None:
        """Second pass: quantise `n` numbers in memory, and write them to `to` in whole vectors."""
        k, most = self._k, greatest(self._k, self._most.now)
        inverse = k.select(most > _LEAST, _MOST / most, 0.0).splat(self._type.count)
        with k.loop(0, n, self._type.count) as i:
            x = k.fma(k.load(self._type, values + i * 4), inverse, k.const(self._type, _ROUND))
            k.store(x.bits(like(x.type, I32)).trunc(I16), to + i * 2)


# -- keys ------------------------------------------------------------------------------------------


class Queries:
    """Queries quantised to 16 bits; pairs of elements are stored four times, for products with four keys.

    Args:
        k: The emitted kernel.
        d_k: The head size.
        n_rows: Number of queries.
        has_min: Whether keys have minimums.
    """

    def __init__(self, k: Emitter, d_k: int, n_rows: int, has_min: bool) -> None:
        self.k, self.d_k = k, d_k
        self._words = k.local(2 * d_k)
        self._pairs = [k.local(8 * d_k) for _ in range(n_rows)]
        self._sums = [k.local(d_k // 8) for _ in range(n_rows)] if has_min else []
        self._factors = [k.variable(k.const(F32, 0)) for _ in range(n_rows)]

    def take(self, r: int, query: Value) -> None:
        """Quantise the float32 query at the address `query`, and store it as number `r`."""
        k, lanes, rounding = self.k, self.k.level.lanes, Rounding(self.k)
        with k.loop(0, self.d_k, lanes) as i:
            rounding.see(k.load(vec(F32, lanes), query + i * 4))
        rounding.write(query, self.d_k, self._words)
        self._factors[r].set(rounding.factor())
        with k.loop(0, self.d_k // 2, lanes) as i:
            pairs = k.load(vec(I32, lanes), self._words + i * 4)
            for column in range(4):
                copies = pairs.shuffle([part + column for part in range(0, lanes, 4) for _ in range(4)])
                k.store(copies, self._pairs[r] + i * 16 + column * (lanes * 4))
        if self._sums:
            with k.loop(0, self.d_k // 32) as block:
                codes = k.load(vec(I16, 32), self._words + block * 64).sext(I32).to_float()
                k.store(total(codes), self._sums[r] + block * 4)

    def products(self, dtype: str, keys: Sequence[Value]) -> list[Value]:
        """Return each query's dot products with `keys`: addresses of a key for each lane of a vector."""
        k, lanes, form = self.k, self.k.level.lanes, FORMATS[dtype]
        fours = [keys[i : i + 4] for i in range(0, lanes, 4)]
        zero, none = k.const(vec(F32, lanes), 0), k.const(vec(I32, lanes), 0)
        sums = [[k.variable(zero) for _ in fours] for _ in self._pairs]
        more = [k.variable(zero) for _ in self._sums]
        with k.loop(0, self.d_k // 32) as block:
            at = block * form.nbytes
            scales, minimums = form.scales(k, [key + at for key in keys])
            for i, four in enumerate(fours):
                ints = [none] * len(sums)
                for first in range(0, 32, 2 * lanes):
                    codes = [codes_of(k, dtype, key + at, first, 2 * lanes).sext(I16) for key in four]
                    for column, of_keys in enumerate(_columns(codes)):
                        place = block * 256 + (first * 8 + column * lanes * 4)
                        for r, pairs in enumerate(self._pairs):
                            pair = k.load(of_keys.type, pairs + place)
                            ints[r] = ints[r] + Dot(k, lanes).pairs(of_keys, pair)
                scale = scales.shuffle([4 * i + j % 4 for j in range(lanes)])
                for of_row, line in zip(ints, sums, strict=True):
                    line[i].set(k.fma(of_row.to_float(), scale, line[i].now))
            if minimums is not None:
                for slot, at_sum in zip(more, self._sums, strict=True):
                    slot.set(k.fma(k.load(F32, at_sum + block * 4).splat(lanes), minimums, slot.now))
        found = [folds([slot.now for slot in line], operator.add, 4) for line in sums]
        if more:
            found = [x + slot.now for x, slot in zip(found, more, strict=True)]
        return [x * factor.now.splat(lanes) for x, factor in zip(found, self._factors, strict=True)]


def _columns(rows: Sequence[Value]) -> list[Value]:
    """Transpose four vectors of 4-byte words, within each 16 bytes."""
    type_ = rows[0].type
    n = type_.count // 2
    a, b, c, d = (row.bits(vec(I32, n)) for row in rows)
    parts, two, both = range(0, n, 4), (0, 1), (0, n)
    orders = [[part + at + i + other for part in parts for i in two for other in both] for at in (0, 2)]
    pairs = [[part + at + i + other for part in parts for other in both for i in two] for at in (0, 2)]
    found = []
    for order in orders:
        first, second = a.shuffle(order, b), c.shuffle(order, d)
        found += [first.shuffle(pair, second).bits(type_) for pair in pairs]
    return found


# -- values ----------------------------------------------------------------------------------------


def add_values(
    k: Emitter, dtype: str, d_v: int, row: Callable[[Value], Value], count: Value, most: int, weights: Value,
    to: Sequence[Value], n_sums: int, prefetch: Callable[[Value, Value], None],
) -> None:  # fmt: skip
    """Add `count` rows of quantised values (`row(i)`: address), times soft max `weights`, to sums at `to`.

    Args:
        k: The emitted kernel.
        dtype: Type of the values.
        d_v: Elements of a row.
        row: Returns the address of row `i` of the values.
        count: Number of rows.
        most: Largest number of rows.
        weights: Address of the weights, `most` float32 per query; 0 from `count` to the end of a vector.
        to: Address of each query's sums.
        n_sums: Number of accumulator vectors that fit in registers.
        prefetch: Prefetches later rows; called for every second row and each block.
    """
    form, lanes, n_rows, n_blocks = FORMATS[dtype], k.level.lanes, len(to), d_v // 32
    n = 2 * lanes  # codes of one key, paired with those of another
    at_once = max(1, n_sums // (2 * n_rows))
    together = greatest_divisor(n_blocks, max(4, at_once * n // 32))
    words = [[k.local(2 * most) for _ in to] for _ in range(together)]
    half = min(16, n) // 2
    low = [i + j for i in range(0, n, 2 * half) for j in range(half)]
    places = [low, [i + half for i in low]]
    whole = places[0] + places[1]
    with k.loop(0, n_blocks, together) as first:
        factors = _scaled(k, form, row, first, count, most, weights, words)
        segments = [(i, at) for i in range(together) for at in range(0, 32, n)]
        for start in range(0, len(segments), at_once):
            some = segments[start : start + at_once]
            zero = k.const(vec(I32, lanes), 0)
            sums = [[[k.variable(zero) for _ in places] for _ in to] for _ in some]
            with k.loop(0, count, 2) as j:
                rows = [row(j), row(k.least(j + 1, count - 1))]
                for (i, at), of_segment in zip(some, sums, strict=True):
                    if not at:
                        prefetch(j, first + i)
                    a, b = (codes_of(k, dtype, x + (first + i) * form.nbytes, at, n) for x in rows)
                    pairs = [k.load(I32, line + j * 2).splat(lanes).bits(vec(I16, n)) for line in words[i]]
                    for part, order in enumerate(places):
                        both = a.shuffle([c + n * of for c in order for of in (0, 1)], b).sext(I16)
                        for slots, pair in zip(of_segment, pairs, strict=True):
                            slots[part].set(slots[part].now + Dot(k, lanes).pairs(both, pair))
            for (i, at), of_segment in zip(some, sums, strict=True):
                for r, slots in enumerate(of_segment):
                    factor, bias = factors[i][r]
                    found = [slot.now.to_float() * factor.splat(lanes) for slot in slots]
                    for part in range(2):
                        address = to[r] + ((first + i) * 32 + (at + part * lanes)) * 4
                        order = [whole.index(part * lanes + c) for c in range(lanes)]
                        value = found[0].shuffle(order, found[1]) + k.load(vec(F32, lanes), address)
                        k.store(value if bias is None else value + bias.splat(lanes), address)


def _scaled(
    k: Emitter, form: BlockFormat, row: Callable[[Value], Value], first: Value, count: Value, most: int,
    weights: Value, words: Sequence[Sequence[Value]],
) -> list[list[tuple[Value, Value | None]]]:  # fmt: skip
    """Quantise weights times the scales of some blocks; return scales and minimums by block and query."""
    lanes, zero = k.level.lanes, k.const(vec(F32, k.level.lanes), 0)
    scaled = [[k.local(4 * most) for _ in line] for line in words]
    roundings = [[Rounding(k) for _ in line] for line in words]
    biases = [[k.variable(zero) for _ in line] for line in words] if form.has_min else []
    with k.loop(0, count, lanes) as j:
        rows = [row(k.least(j + i, count - 1)) + first * form.nbytes for i in range(lanes)]
        weight = [k.load(zero.type, weights + (j + r * most) * 4) for r in range(len(words[0]))]
        for i, (line, seen) in enumerate(zip(scaled, roundings, strict=True)):
            scales, minimums = form.scales(k, [at + i * form.nbytes for at in rows])
            for r, (of, to, rounding) in enumerate(zip(weight, line, seen, strict=True)):
                rounding.see(of * scales)
                k.store(of * scales, to + j * 4)
                if minimums is not None:
                    biases[i][r].set(k.fma(of, minimums, biases[i][r].now))
    found = []
    for i, of_block in enumerate(words):
        for values, rounding, at in zip(scaled[i], roundings[i], of_block, strict=True):
            rounding.write(values, count, at)
        added = [total(slot.now) for slot in biases[i]] if biases else [None] * len(of_block)
        found.append([(rounding.factor(), bias) for rounding, bias in zip(roundings[i], added, strict=True)])
    return found
