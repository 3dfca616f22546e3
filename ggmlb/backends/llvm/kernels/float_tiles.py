"""Products of float weights with many rows of float activations, by packed tiles of the weight.

What tiles are, and what both kinds share, is in `tiles`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ggmlb.backends.llvm.codegen.emit import F32, I16, I32, Emitter, Level, Value, Variable, vec
from ggmlb.backends.llvm.codegen.simd import SIZES, add_bfloats, load_float, load_floats
from ggmlb.backends.llvm.kernels import tiles
from ggmlb.backends.llvm.kernels.interleaved import AHEAD, ROWS
from ggmlb.backends.llvm.kernels.matvec import ExpertChunk, MatChunk
from ggmlb.backends.llvm.kernels.tiles import DEPTH, Epilogue, ResultChunk, store, transposed

if TYPE_CHECKING:
    from ggmlb.backends.llvm.kernels.tiles import Finish

STRIP_DEPTH = 2048
"""Elements of a row multiplied in one pass, if the weight is in strips and needs no packing."""


def tile_rows(level: Level, dtype: str = "", of_experts: bool = False) -> int:
    """Return the number of weight rows in a tile, which a thread packs and multiplies by all activations."""
    return 2 * level.lanes


def columns_at_once(level: Level) -> int:
    """Largest number of rows of activations multiplied at once by a packed tile of the weight."""
    return 12 if level.lanes == 16 else 6


def columns(level: Level, dtype: str, n: int) -> int:
    """Return how many of `n` rows of activations are multiplied at once by a packed tile of weights."""
    return tiles.columns(n, columns_at_once(level))


def depth(is_interleaved: bool) -> int:
    """Elements of a row multiplied in one pass; products in several passes cannot have an epilogue."""
    return STRIP_DEPTH if is_interleaved else DEPTH


def scratch_nbytes(level: Level, dtype: str, k: int, of_experts: bool = False) -> int:
    """Scratch memory that a thread needs for a packed tile of the weight [bytes]."""
    return tile_rows(level) * DEPTH * 4


def many(
    k: Emitter, dtype: str, b_dtype: str, is_interleaved: bool, n_columns: int, epilogue: Epilogue
) -> None:
    """Multiply a float weight by many rows of activations, `n_columns` at a time, and apply `epilogue`.

    Arguments as of `byte_tiles.many`.
    """
    _of_matrix(k, (dtype, b_dtype), is_interleaved, n_columns, MatChunk(k, tile_rows(k.level)), epilogue)


def many_experts(k: Emitter, dtype: str, b_dtype: str, is_interleaved: bool) -> None:
    """Multiply experts' float matrices by activations of the tokens that selected them (mul_mat_id)."""
    chunk = ExpertChunk(k, tile_rows(k.level))
    _of_matrix(k, (dtype, b_dtype), is_interleaved, columns_at_once(k.level), chunk, Epilogue())


def _of_matrix(
    k: Emitter, types: tuple[str, str], is_interleaved: bool, n_columns: int, chunk: MatChunk,
    epilogue: Epilogue
) -> None:  # fmt: skip
    source: Tiles = partial(_pack, k, types[0], types[1] == tiles.PAIRS, chunk)
    if is_interleaved:  # a strip has a tile's layout
        source = partial(_strip_vectors, k, chunk, SIZES[types[0]])
    multiply(k, types, n_columns, chunk, epilogue.read, source, depth(is_interleaved), is_interleaved)


Tiles = Callable[[Value, Value, Value, Value], "list[Value]"]
"""Finds a tile or packs it to scratch, and returns the addresses of its vectors:
`tiles(first row, first element, number of elements, scratch)`."""


def multiply(
    k: Emitter,
    types: tuple[str, str],
    n_columns: int,
    chunk: MatChunk,
    read: Callable[[Emitter], Finish | None],
    tiles_: Tiles,
    most: int,
    is_interleaved: bool = False,
) -> None:
    """Multiply tiles by rows of activations, `n_columns` at a time.

    Arguments: scratch and its size per thread; those of `read`, which returns the epilogue. `most`: elements
    of a row in one pass. Tiles that are not interleaved are packed as float32, or as pairs.
    """
    n_rows, n = tile_rows(k.level), k.level.lanes
    (dtype, b_dtype), pairs = types, types[1] == tiles.PAIRS
    together = 2 if pairs else 1
    step = ROWS * SIZES[dtype] * together if is_interleaved else 4 * n_rows
    scratch, stride = k.ints(2)
    finish = read(k)
    packed = scratch + k.thread * stride
    b_size = 4 if pairs else SIZES[b_dtype]
    with k.loop(chunk.first, chunk.last) as tile:
        first = tile * n_rows
        with k.loop(0, chunk.k, most) as begin:
            count = k.least(chunk.k - begin, most)
            vectors = tiles_(first, begin, count // together, packed)
            with k.loop(chunk.start, chunk.n, n_columns) as column:
                sums = [[k.variable(k.const(vec(F32, n), 0)) for _ in range(n_columns)] for _ in range(2)]
                # Beyond the last row of activations the last one is read again.
                rows = [
                    chunk.column(k.least(column + c, chunk.n - 1)) + begin // together * b_size
                    for c in range(n_columns)
                ]
                with k.loop(0, count // together) as i:
                    if is_interleaved:
                        for at in vectors:
                            k.prefetch(at + i * step + AHEAD)
                    weights = [_weights(k, dtype, pairs, is_interleaved, at + i * step) for at in vectors]
                    for c, row in enumerate(rows):
                        at = row + i * b_size
                        x = (k.load(I32, at) if pairs else load_float(k, b_dtype, at)).splat(n)
                        for v in range(2):
                            now = sums[v][c].now
                            sums[v][c].set(
                                add_bfloats(k, now, weights[v], x) if pairs else k.fma(weights[v], x, now)
                            )
                if finish is None:
                    with k.when(begin > 0):
                        add_result(k, sums, chunk, first, column)
                values = [[slot.now for slot in row] for row in sums]
                store(k, values, chunk, first, (column, column), finish)


def _strip_vectors(
    k: Emitter, chunk: MatChunk, size: int, first: Value, begin: Value, count: Value, scratch: Value
) -> list[Value]:
    """Addresses of the first values of a tile's rows in their strips, for each vector."""
    n, found = k.level.lanes, []
    for v in range(2):
        row = k.least(first + v * n, chunk.m - n)
        strip = chunk.a + row // ROWS * ROWS * chunk.a_nb1
        found.append(strip + begin * (ROWS * size) + row % ROWS * size)
    return found


def _weights(k: Emitter, dtype: str, pairs: bool, is_interleaved: bool, address: Value) -> Value:
    """Load an element, or a pair, of each row of a vector from a packed tile or a strip."""
    n = k.level.lanes
    if not is_interleaved:
        return k.load(vec(I32 if pairs else F32, n), address)
    if not pairs:
        return load_floats(k, dtype, address, n)
    both = k.load(vec(I16, 2 * n), address)
    return both.shuffle([j // 2 + n * (j % 2) for j in range(2 * n)]).bits(vec(I32, n))


def _pack(
    k: Emitter,
    dtype: str,
    pairs: bool,
    chunk: MatChunk,
    first: Value,
    begin: Value,
    depth: Value,
    packed: Value,
) -> list[Value]:
    """Pack `depth` elements, as float32, or pairs of the tile's rows."""
    n, size = k.level.lanes, SIZES[dtype]
    n_rows, step = tile_rows(k.level), 2 * size if pairs else size
    for v in range(0, n_rows, n):
        rows = [chunk.a + k.least(first + v + r, chunk.m - 1) * chunk.a_nb1 + begin * size for r in range(n)]
        whole = depth // n * n
        with k.loop(0, whole, n) as i:
            at = [row + i * step for row in rows]
            loaded = [k.load(vec(I32, n), a) if pairs else load_floats(k, dtype, a, n) for a in at]
            for j, column in enumerate(transposed(loaded)):
                k.store(column, packed + (i + j) * (4 * n_rows) + v * 4, 4)
        with k.loop(whole, depth) as i:
            for r, row in enumerate(rows):
                value = k.load(I32, row + i * step) if pairs else load_float(k, dtype, row + i * step)
                k.store(value, packed + i * (4 * n_rows) + (v + r) * 4)
    return [packed, packed + 4 * n]


def add_result(
    k: Emitter, sums: list[list[Variable]], chunk: ResultChunk, first: Value, column: Value
) -> None:
    """Add the result in memory, the sums of earlier passes along the rows, to a tile's sums."""
    n = k.level.lanes
    for c in range(len(sums[0])):
        with k.when(column + c < chunk.n):
            at = chunk.result(column + c) + first * 4
            for v, row in enumerate(sums):
                mask = k.first_lanes(n, chunk.m - first - v * n)
                row[c].set(row[c].now + k.load_masked(vec(F32, n), at + v * n * 4, mask))
