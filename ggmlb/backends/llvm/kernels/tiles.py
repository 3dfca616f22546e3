"""Products with many rows of activations (GEMM), by packed tiles of the weight.

A tile is some rows of the weight, transposed so that lanes are rows: each value (or four neighbouring
bytes) of the activations is broadcast and multiplied by a vector of weights. A thread packs a tile into its
own scratch memory, which stays in the cache, and multiplies all activations by it. `byte_tiles` (quantised
weights) and `float_tiles` share this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ggmlb.backends.llvm.codegen.emit import Emitter, Value
from ggmlb.backends.llvm.kernels.elementwise import FUNCTIONS

if TYPE_CHECKING:
    Finish = Callable[[Value, Value, Value, Value | None], Value]
    """Applies the epilogue: `f(results, row of activations, first row of the weight, mask)`."""


class ResultChunk(Protocol):
    """The part, of `n` rows of `m` elements, of a product's result that `store` may write."""

    m: Value
    n: Value

    def result(self, c: Value) -> Value:
        """Address of row `c` of the result."""


PAIRS = "bf16 pairs"
"""As the type of activations: bfloat16, multiplied by bfloat16 in pairs; rows have an even length."""

DEPTH = 256
"""Elements of a row packed at a time."""


def columns(n: int, most: int) -> int:
    """Return the number of rows of activations per pass, at most `most`, for `n` rows in all.

    Passes are as few and even as possible; the last one may compute padding rows.
    """
    return -(-n // -(-n // most))


class Epilogue(NamedTuple):
    """The epilogue of a matrix product: add a bias or residual, apply a function.

    Attributes:
        added: Whether float32 rows are added: one per row of activations, or one for all.
        function: Name in `elementwise.FUNCTIONS` of the function applied last; or `None`.
    """

    added: bool = False
    function: str | None = None

    def read(self, k: Emitter) -> Finish | None:
        """Read the epilogue's arguments; return a function that applies it, or `None` if it is empty.

        Arguments: address and byte stride of the rows to add (0: one for all).
        """
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
    """Transpose a square matrix of vectors, as many as each has lanes."""
    n = len(vectors)
    low = [i // 2 + n * (i % 2) for i in range(n)]
    high = [i + n // 2 for i in low]
    found, rounds = list(vectors), n.bit_length() - 1
    for _ in range(rounds):
        pairs = [(found[i], found[i + n // 2]) for i in range(n // 2)]
        found = [a.shuffle(order, b) for a, b in pairs for order in (low, high)]
    return found


def store(
    k: Emitter,
    sums: list[list[Value]],
    chunk: ResultChunk,
    first: Value,
    columns: tuple[Value, Value],
    finish: Finish | None = None,
) -> None:
    """Write a tile's sums, after the epilogue (`finish`), without padding rows and columns.

    Args:
        k: The emitted kernel.
        sums: Sums for each vector of the tile's rows, for each row of activations.
        chunk: The chunk of the product.
        first: The tile's first row of the weight.
        columns: The first row of activations, and the first to write.
        finish: The epilogue.
    """
    n, (column, start) = k.level.lanes, columns
    with k.build.if_else((first + len(sums) * n <= chunk.m).raw) as (whole, partly):
        for inside, context in ((True, whole), (False, partly)):
            with context:
                # Two vectors are joined so that the latencies of the function's operations overlap.
                joined = inside and len(sums) == 2
                lines = [[a.join(b) for a, b in zip(*sums, strict=True)]] if joined else sums
                for c in range(len(sums[0])):
                    at = column + c
                    inner = Value(k, k.build.and_((at >= start).raw, (at < chunk.n).raw))
                    with k.when(inner):
                        to = chunk.result(at) + first * 4
                        for v, row in enumerate(lines):
                            mask = None if inside else k.first_lanes(n, chunk.m - first - v * n)
                            value = row[c]
                            if finish is not None:
                                value = finish(value, at, first + v * n, mask)
                            if mask is None:
                                k.store(value, to + v * n * 4)
                            else:
                                k.store_masked(value, to + v * n * 4, mask)
