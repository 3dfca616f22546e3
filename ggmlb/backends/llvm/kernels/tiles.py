"""Products with many rows of activations, by packed tiles of the weight.

A tile is some rows of the weight, transposed so that lanes are rows: each value (or four neighbouring
bytes) of an activation row is multiplied by a vector of weights. A thread packs a tile into its own
memory, which stays in cache, and multiplies all activations with it. This module is shared by tiles of
bytes (`byte_tiles`) and of floats (`float_tiles`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ggmlb.backends.llvm.codegen.value import Value
from ggmlb.backends.llvm.kernels.elementwise import FUNCTIONS

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Emitter

    Finish = Callable[[Value, Value, Value, Value | None], Value]
    """Of results, their row of activations, the first one's row of the weight, and a mask."""


class Written(Protocol):
    """Protocol of a chunk of a product: `m` elements of a row of the result, `n` the end of its rows."""

    m: Value
    n: Value

    def result(self, c: Value) -> Value:
        """Address of a row of the result."""


DEPTH = 256
"""Elements of a row that are packed at a time."""


def columns(n: int, most: int) -> int:
    """Return the number of rows of activations per pass to cover `n`, at most `most`.

    Passes are as few and as even as possible; the last one may compute surplus rows.
    """
    return -(-n // -(-n // most))


class Epilogue(NamedTuple):
    """Operations on a product before it is written.

    Attributes:
        added: Whether something is added: a row of float32 for each row of activations, or one for all.
        function: What is then applied, by its name in `elementwise.FUNCTIONS`; `None` for nothing.
    """

    added: bool = False
    function: str | None = None

    def read(self, k: Emitter) -> Finish | None:
        """Read the arguments: where what is added lies, and bytes from one row of it to the next, or 0."""
        if self == Epilogue():
            return None
        at, nb1 = k.ints(2) if self.added else (None, None)
        function = FUNCTIONS[self.function or "copy"]

        def finish(value: Value, column: Value, row: Value, mask: Value | None) -> Value:
            if at is not None and nb1 is not None:
                of = at + column * nb1 + row * 4
                value = value + (
                    k.load(value.type, of) if mask is None else k.load_masked(value.type, of, mask)
                )
            return function(k, value)

        return finish


def transposed(vectors: Sequence[Value]) -> list[Value]:
    """Vectors whose lanes are the given ones' rows: as many vectors as each has lanes."""
    n = len(vectors)
    low = [i // 2 + n * (i % 2) for i in range(n)]
    high = [i + n // 2 for i in low]
    found, turns = list(vectors), n.bit_length() - 1
    for _ in range(turns):
        pairs = [(found[i], found[i + n // 2]) for i in range(n // 2)]
        found = [a.shuffle(order, b) for a, b in pairs for order in (low, high)]
    return found


def store(
    k: Emitter,
    sums: list[list[Value]],
    place: Written,
    first: Value,
    columns: tuple[Value, Value],
    finish: Finish | None = None,
) -> None:
    """Write the part of a tile inside the result.

    Args:
        k: The emitted kernel.
        sums: For each vector of the tile's rows, for each column.
        place: The product.
        first: The tile's first row.
        columns: The first column, and the first that is to be written.
        finish: What is done before.
    """
    n, (column, start) = k.level.lanes, columns
    with k.build.if_else((first + len(sums) * n <= place.m).raw) as (whole, partly):
        for inside, context in ((True, whole), (False, partly)):
            with context:
                # Two vectors as one: of each alone, a function would wait for its own operations in turn.
                joined = inside and len(sums) == 2
                lines = [[a.join(b) for a, b in zip(*sums, strict=True)]] if joined else sums
                for c in range(len(sums[0])):
                    at = column + c
                    inner = Value(k, k.build.and_((at >= start).raw, (at < place.n).raw))
                    with k.when(inner):
                        to = place.result(at) + first * 4
                        for v, row in enumerate(lines):
                            mask = None if inside else k.first_lanes(n, place.m - first - v * n)
                            value = row[c]
                            if finish is not None:
                                value = finish(value, at, first + v * n, mask)
                            if mask is None:
                                k.store(value, to + v * n * 4)
                            else:
                                k.store_masked(value, to + v * n * 4, mask)
