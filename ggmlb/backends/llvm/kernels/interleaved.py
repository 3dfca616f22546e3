"""Strips: 16 rows of a weight, interleaved field by field (like ggml's repacked `q4_0_8x8`).

A vector has the scale, or four neighbouring codes, of each of 16 rows, so that lane `i` sums the product of
row `i`. Bytes are ordered by block, then by unit of a field (such as four codes), then by row. The units of a
block are in the order in which a product uses them: it reads a strip as one stream, which the hardware
prefetcher follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

from ggmlb.backends.llvm.codegen.emit import I1, I8, I16, I32, I64, Emitter, Level, Value, vec
from ggmlb.backends.llvm.codegen.simd import SIZES
from ggmlb.backends.llvm.kernels.tiles import transposed
from ggmlb.core.dtypes import DType

ROWS = 16
"""Rows of a strip."""

AHEAD = 12288
"""Prefetch distance of tiles [bytes]: a fast core reads this much in the 200 ns of a memory access."""

BITS = 0
"""Unit of fields with one bit per element: the bits of four neighbouring elements stay together."""


class Field(NamedTuple):
    """A field of a type's block, such as its scale or codes.

    Attributes:
        name: Name in the type's layout, such as `qs`.
        offset: Offset in the block [bytes].
        nbytes: Size [bytes].
        unit: Bytes of a row that stay contiguous in a strip; or `BITS`.
        places: Offset of each unit in the strip's order of a block [bytes]; of `BITS`, of the field.
    """

    name: str
    offset: int
    nbytes: int
    unit: int
    places: tuple[int, ...]


_BY_USE: dict[str, Sequence[Sequence[tuple[str, int, int]]]] = {
    "q2_k": [[("d", 0, 1)], [("dmin", 0, 1)], [("scales", 0, 16)], [("qs", 0, 16)]],
    "q3_k": [[("d", 0, 1)], [("scales", 0, 3)], [("hmask", 0, 8), ("qs", 0, 8), ("qs", 8, 16)]],
    "q5_k": [
        [("d", 0, 1)], [("dmin", 0, 1)], [("scales", 0, 3)],
        [("qh", 0, 8), *(("qs", i, i + 8) for i in range(0, 32, 8))],
    ],
    "q6_k": [
        [("d", 0, 1)], [("scales", 0, 16)],
        *([("ql", 2 * i, 2 * i + 8), ("ql", 2 * i + 8, 2 * i + 16), ("qh", i, i + 8)] for i in (0, 8)),
    ],
}  # fmt: skip
"""Ranges of units in the order of use, of types whose fields are not in it; a list's are taken in turn."""


@cache
def fields_of(dtype: str) -> tuple[Field, ...]:
    """The fields of a type's block, in memory order; a float type has a single one.

    A unit is one number of the field, or four neighbouring codes.
    """
    if dtype in SIZES:
        return (Field("", 0, SIZES[dtype], SIZES[dtype], (0,)),)
    codec, sizes = DType.parse(dtype).codec, {}
    for name in codec.offsets:
        type_ = codec.layout[name]
        unit = BITS if dtype in ("q5_0", "q5_1") and name == "qh" else min(4, type_.base.itemsize)
        sizes[name] = type_.itemsize, unit
    counts = {name: nbytes // (unit or nbytes) for name, (nbytes, unit) in sizes.items()}
    order = _BY_USE.get(dtype) or [[(name, 0, n)] for name, n in counts.items()]
    places: dict[str, dict[int, int]] = {name: {} for name in sizes}
    place = 0
    for ranges in order:
        for units in zip(*(range(first, last) for _, first, last in ranges), strict=True):
            for (name, *_), i in zip(ranges, units, strict=True):
                places[name][i] = place
                place += sizes[name][0] // counts[name]
    return tuple(
        Field(name, codec.offsets[name], *sizes[name], tuple(places[name][i] for i in range(n)))
        for name, n in counts.items()
    )


def lanes(level: Level) -> int:
    """Number of rows of a strip (16 interleaved rows) in one vector."""
    return max(8, level.lanes)


def prefetches(
    k: Emitter,
    dtype: str,
    strip: Value,
    block: Value,
    first: Value,
    ahead: Value | int = AHEAD,
    hint: int = 3,
) -> list[Callable[[], None]]:
    """Return functions that prefetch the cache lines `ahead` bytes after block number `block` of a strip.

    Call them between the instructions that use the block: prefetches in one burst would delay later loads.

    Args:
        k: The kernel.
        dtype: The type's name.
        strip: The strip's address.
        block: Number of the block.
        first: First row of the current vector; each vector of a strip prefetches its part of the lines.
        ahead: The prefetch distance.
        hint: Of `Emitter.prefetch`.
    """
    size = _size(fields_of(dtype))
    start = strip + block * (ROWS * size) + first * size + ahead
    return [partial(k.prefetch, start + at, hint) for at in range(0, lanes(k.level) * size, 64)]


def _size(fields: Sequence[Field]) -> int:
    """Bytes of a block."""
    return sum(field.nbytes for field in fields)


def spread(calls: Sequence[Callable[[], None]], n: int) -> Iterator[None]:
    """Yield `n` times; call an equal part of `calls` before each."""
    for i in range(n):
        for call in calls[len(calls) * i // n : len(calls) * (i + 1) // n]:
            call()
        yield


class Words:
    """A lazy sequence of vectors of a strip's codes: item `i` has codes `4 i` to `4 i + 3` of each row.

    An item is emitted at its first use, so that they need not all be in registers.
    """

    def __init__(self, n: int, make: Callable[[int], Value]) -> None:
        self._n = n
        self._make = cache(make)

    def __getitem__(self, i: int) -> Value:
        return self._make(i)

    def map(self, fn: Callable[[Value], Value]) -> Words:
        """Return the words with a function applied to each vector."""
        return Words(self._n, lambda i: fn(self[i]))

    def join(self, other: Words) -> Words:
        """Return the two sequences concatenated."""
        return Words(self._n + other._n, lambda i: self[i] if i < self._n else other[i - self._n])

    def __and__(self, mask: int) -> Words:
        return self.map(lambda v: v & mask)

    def __rshift__(self, n: int) -> Words:
        return self.map(lambda v: v >> n)

    def __lshift__(self, n: int) -> Words:
        return self.map(lambda v: v << n)

    def __or__(self, other: Words) -> Words:
        return Words(self._n, lambda i: self[i] | other[i])


@dataclass(frozen=True)
class Interleaved:
    """A cursor into a strip (16 interleaved rows): a block, and an offset in it, the same for all rows.

    Attributes:
        k: The kernel.
        fields: The fields of the type.
        base: Address of the strip.
        block: Number of the block.
        first: First row of the vector.
        offset: Offset in a block of ggml's layout [bytes].
    """

    k: Emitter
    fields: tuple[Field, ...]
    base: Value
    block: Value
    first: Value
    offset: int = 0

    def __add__(self, n: int) -> Interleaved:
        return replace(self, offset=self.offset + n)

    def __getitem__(self, field: str) -> Interleaved:
        """The position of a field."""
        return self + next(f.offset for f in self.fields if f.name == field)

    def _address(self, ahead: int = 0) -> tuple[Value, int]:
        """The address in the strip of the unit that is `ahead` bytes on, and the unit of the field."""
        offset = self.offset + ahead
        field = next(f for f in self.fields if 0 <= offset - f.offset < f.nbytes)
        start = self.base + self.block * (ROWS * _size(self.fields))
        place = field.places[(offset - field.offset) // (field.unit or field.nbytes)]
        return start + ROWS * place + self.first * field.unit, field.unit

    def each(self) -> Value:
        """Load one unit of the field (such as a scale; see `Field.unit`) of each row, as integers."""
        address, unit = self._address()
        return self.k.load(vec(_INTS[unit], lanes(self.k.level)), address)

    def bytes(self, n: int) -> Words:
        """The `n` bytes from the cursor on, of each row."""
        type_ = vec(I8, 4 * lanes(self.k.level))
        return Words(n // 4, lambda i: self.k.load(type_, self._address(4 * i)[0]))

    def bits(self, value: int) -> Words:
        """The 32 bits from the cursor on, of each row, as bytes that are `value` for 1, else 0."""
        address, _ = self._address()
        n = 4 * lanes(self.k.level)
        whole = I64 if n == 64 else I32

        def make(i: int) -> Value:
            mask = self.k.load(whole, address + self.first // 2 + ROWS // 2 * i).bits(vec(I1, n))
            return self.k.select(mask, self.k.const(vec(I8, n), value), 0)

        return Words(8, make)


_INTS = {1: I8, 2: I16, 4: I32}


# -- packing ---------------------------------------------------------------------------------------

_VECTOR = 16
"""Bytes of a row copied at a time."""


def pack(k: Emitter, dtype: str, size: int) -> None:
    """Pack rows of a weight to strips (16 interleaved rows); a block has `size` bytes.

    Arguments: `strips, rows, n_blocks, n_strips`.
    """
    _move(k, dtype, size, to_rows=False)


def unpack(k: Emitter, dtype: str, size: int) -> None:
    """Unpack strips (16 interleaved rows) to rows; the inverse of `pack`, with the same arguments."""
    _move(k, dtype, size, to_rows=True)


def _move(k: Emitter, dtype: str, size: int, to_rows: bool) -> None:
    strips, rows, n_blocks, n_strips = k.ints(4)
    with k.loop(0, n_strips) as number:
        start = number * n_blocks * (ROWS * size)
        strip, row = strips + start, rows + start

        def blocks(first: Value, stop: Value, n: int) -> None:
            """Copy `n` blocks at a time; for floats `n` may exceed 1."""
            with k.loop(first, stop, n) as block:
                for field in fields_of(dtype):
                    at = strip + block * (ROWS * size)
                    by_row = [row + n_blocks * (r * size) + block * size + field.offset for r in range(ROWS)]
                    if field.unit == BITS:
                        _transpose_bits(k, by_row, at + ROWS * field.places[0], to_rows)
                    else:
                        places = field.places if n == 1 else range(0, n * size, size)
                        _transpose_units(k, by_row, at, field.unit, places, to_rows)

        several = _VECTOR // size if dtype in SIZES else 1
        whole = n_blocks // several * several
        blocks(k.i64(0), whole, several)
        blocks(whole, n_blocks, 1)


def _transpose_units(
    k: Emitter, rows: list[Value], strip: Value, unit: int, places: Sequence[int], to_rows: bool
) -> None:
    """Copy units of 16 rows, by square transposes."""
    done, n_units = 0, len(places)
    while done < n_units:
        n = min(_VECTOR // unit, 1 << (n_units - done).bit_length() - 1)
        for first in range(0, ROWS, n):
            ends = (
                [strip + (places[done + i] * ROWS + first * unit) for i in range(n)],
                [rows[first + i] + done * unit for i in range(n)],
            )
            target, source = ends[::-1] if to_rows else ends
            found = transposed([k.load(vec(_INTS[unit], n), at) for at in source])
            for at, value in zip(target, found, strict=True):
                k.store(value, at)
        done += n


def _transpose_bits(k: Emitter, rows: list[Value], strip: Value, to_rows: bool) -> None:
    """Copy 32 bits of 16 rows; a byte of the strip has four bits of an even row and of the next."""
    four, half = vec(I8, 4), range(0, ROWS, 2)
    bytes_, pairs = range(4), vec(I8, ROWS // 2)
    at = [[strip + (ROWS * i + ROWS // 2 * part) for part in range(2)] for i in bytes_]
    if to_rows:
        mixed = [_swapped(*(k.load(pairs, place) for place in places)) for places in at]
        lanes = [low.shuffle([r // 2 + r % 2 * ROWS // 2 for r in range(ROWS)], high) for low, high in mixed]
        for r in range(0, ROWS, 4):
            group = [lane.shuffle(range(r, r + 4)) for lane in lanes]
            for place, value in zip(rows[r : r + 4], transposed(group), strict=True):
                k.store(value, place)
        return
    groups = [transposed([k.load(four, place) for place in rows[r : r + 4]]) for r in range(0, ROWS, 4)]
    for i in bytes_:
        a, b, c, d = (group[i] for group in groups)
        lane = a.join(b).join(c.join(d))
        found = _swapped(lane.shuffle(half), lane.shuffle([r + 1 for r in half]))
        for value, place in zip(found, at[i], strict=True):
            k.store(value, place)


def _swapped(even: Value, odd: Value) -> tuple[Value, Value]:
    """Exchange the high nibbles of `even` with the low nibbles of `odd`."""
    return (even & 15) | (odd << 4), (even >> 4) | (odd & -16)
