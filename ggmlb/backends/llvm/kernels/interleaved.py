"""Strips: 16 rows of a weight, interleaved field by field.

A vector has a scale, or four neighbouring codes, of each of 16 rows, and each lane sums the product of
one row. A strip has the bytes of its rows in another order: by block, then by field of the type, then by
unit of the field, then by row. It is thus read from its first byte to its last, in one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from ggmlb.backends.llvm.codegen.simd import SIZES
from ggmlb.backends.llvm.codegen.value import I1, I8, I16, I32, I64, Value, vec
from ggmlb.core.dtypes import DType

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Emitter
    from ggmlb.backends.llvm.codegen.host import Level

ROWS = 16
"""Rows of a strip."""

AHEAD = 12288
"""Prefetch distance [bytes]: what a fast core reads of one stream while memory takes 200 ns to answer."""

BITS = 0
"""As a field's unit: bits of 32 elements, of which those of four neighbours stay together."""


class Field(NamedTuple):
    """A part of a type's block.

    Attributes:
        name: As the type's record has it.
        offset: Where it begins [bytes].
        nbytes: How long it is.
        unit: Bytes of a row that stay together; or `BITS`.
    """

    name: str
    offset: int
    nbytes: int
    unit: int


@cache
def fields_of(dtype: str) -> tuple[Field, ...]:
    """The fields of a type, all of a block in order: one of floats, or those of its record.

    What stays together are numbers as the record has them, of codes four neighbours.
    """
    if dtype in SIZES:
        return (Field("", 0, SIZES[dtype], SIZES[dtype]),)
    codec, found = DType.parse(dtype).codec, []
    for name, offset in codec.offsets.items():
        type_ = codec.layout[name]
        unit = BITS if dtype in ("q5_0", "q5_1") and name == "qh" else min(4, type_.base.itemsize)
        found.append(Field(name, offset, type_.itemsize, unit))
    return tuple(found)


def lanes(level: Level) -> int:
    """Rows of a strip that a vector has."""
    return max(8, level.lanes)


def prefetches(k: Emitter, dtype: str, strip: Value, block: Value, first: Value) -> list[Callable[[], None]]:
    """What asks for the cache lines `AHEAD` bytes after a block.

    Calls of these belong between the instructions that use the block: asked for at once, the lines would
    hold up later reads until the first of them has come.

    Args:
        k: The kernel.
        dtype: The type's name.
        strip: The strip's address.
        block: Which one.
        first: The first row of a vector: each of a strip's has its part of the lines.
    """
    size = _size(fields_of(dtype))
    start = strip + block * (ROWS * size) + first * size + AHEAD
    return [partial(_ask, k, start, at) for at in range(0, lanes(k.level) * size, 64)]


def _size(fields: Sequence[Field]) -> int:
    """Bytes of a block."""
    return sum(field.nbytes for field in fields)


def spread(calls: Sequence[Callable[[], None]], n: int) -> Iterator[None]:
    """Make the calls in `n` turns, as evenly as possible."""
    for i in range(n):
        for call in calls[len(calls) * i // n : len(calls) * (i + 1) // n]:
            call()
        yield


def _ask(k: Emitter, start: Value, at: int) -> None:
    k.prefetch(start + at)


class Words:
    """A run of elements of the rows of a strip: a vector for each four neighbours, four bytes a row.

    The vectors are made when they are first asked for, so that they need not all lie in registers at once.
    """

    def __init__(self, n: int, make: Callable[[int], Value]) -> None:
        self._n = n
        self._make = cache(make)

    def __getitem__(self, i: int) -> Value:
        return self._make(i)

    def map(self, fn: Callable[[Value], Value]) -> Words:
        """Apply a function to each vector."""
        return Words(self._n, lambda i: fn(self[i]))

    def join(self, other: Words) -> Words:
        """Return these words followed by others."""
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
    """Where a block of each row of a strip is, or a part of it: what stands for its address.

    Attributes:
        k: The kernel.
        fields: The type's.
        base: Address of the strip.
        block: Which one.
        first: The first row of a vector.
        offset: Of the part, in a block as ggml has it [bytes].
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
        """Where a field is."""
        return self + next(f.offset for f in self.fields if f.name == field)

    def _address(self) -> tuple[Value, int]:
        """Where the field has it, and the field's unit."""
        field = next(f for f in self.fields if 0 <= self.offset - f.offset < f.nbytes)
        start = self.base + self.block * (ROWS * _size(self.fields))
        return start + ROWS * self.offset + self.first * field.unit, field.unit

    def each(self) -> Value:
        """A unit of each row, as integers."""
        address, unit = self._address()
        return self.k.load(vec(_INTS[unit], lanes(self.k.level)), address)

    def bytes(self, n: int) -> Words:
        """The next `n` bytes of each row."""
        address, _ = self._address()
        type_ = vec(I8, 4 * lanes(self.k.level))
        return Words(n // 4, lambda i: self.k.load(type_, address + 4 * ROWS * i))

    def bits(self, value: int) -> Words:
        """A value for each of the next 32 bits of each row that is set."""
        address, _ = self._address()
        n = 4 * lanes(self.k.level)
        whole = I64 if n == 64 else I32

        def make(i: int) -> Value:
            mask = self.k.load(whole, address + self.first // 2 + ROWS // 2 * i).bits(vec(I1, n))
            return self.k.select(mask, self.k.const(vec(I8, n), value), 0)

        return Words(8, make)


_INTS = {1: I8, 2: I16, 4: I32}
