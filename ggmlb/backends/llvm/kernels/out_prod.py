"""Sums of outer products (out_prod), the gradients of matrix products, for weights of any type and layout.

A thread dequantises some elements of `DEPTH` rows of the first operand into its scratch memory, and
multiplies them by all columns of the second. Sums are in registers, then added to the result of earlier rows.
"""

from __future__ import annotations

from ggmlb.backends.llvm.codegen.emit import F32, I32, Emitter, Level, Value, vec
from ggmlb.backends.llvm.codegen.simd import SIZES, load_float, load_floats
from ggmlb.backends.llvm.kernels.blocks import FORMATS, SCALES
from ggmlb.backends.llvm.kernels.convert import convert
from ggmlb.backends.llvm.kernels.float_tiles import add_result, columns_at_once
from ggmlb.backends.llvm.kernels.interleaved import ROWS, Interleaved, fields_of
from ggmlb.backends.llvm.kernels.interleaved import lanes as rows_of_vector
from ggmlb.backends.llvm.kernels.tiles import DEPTH, store, transposed

ARGS = (
    "a", "a_nb1", "a_nb2", "a_nb3", "b", "b_nb0", "b_nb1", "b_nb2", "b_nb3",
    "y", "y_nb1", "y_nb2", "y_nb3", "n", "m", "depth", "n2", "n3", "r2", "r3", "parts", "bands",
    "scratch", "nbytes",
)  # fmt: skip
"""Addresses of operands and result, with byte strides; extents of the result, and the number of rows to sum;
matrices, and broadcast factors of `a`; chunks of a matrix along `n`, and along `m`; scratch memory, and its
size per thread."""


def unit(level: Level, dtype: str, n: int) -> int:
    """Number of elements of a row that are dequantised together: whole blocks and whole vectors."""
    if dtype in FORMATS:
        return max(FORMATS[dtype].block, 2 * level.lanes)
    least = max(8, level.lanes)
    return least if n <= least else 2 * least


def scratch_nbytes(unit: int) -> int:
    """Scratch memory that a thread needs for `unit` elements of `DEPTH` rows [bytes]."""
    return DEPTH * unit * 4


BAND = 32
"""Columns of the second operand that stay in the cache, in multiples of those multiplied at once."""


class _OutProdChunk:
    """A chunk: a matrix, a part of the rows of the result, and a range of columns.

    Attributes:
        m: Elements of a row of the result.
        n: End of the chunk's rows of the result.
    """

    def __init__(self, k: Emitter, unit: int) -> None:
        p = self.args = k.named(*ARGS)
        chunk, band = k.chunk // p["bands"], k.chunk % p["bands"]
        matrix, part = chunk // p["parts"], chunk % p["parts"]
        i2, i3 = matrix % p["n2"], matrix // p["n2"]
        self.a = p["a"] + i2 // p["r2"] * p["a_nb2"] + i3 // p["r3"] * p["a_nb3"]
        self.b = p["b"] + i2 * p["b_nb2"] + i3 * p["b_nb3"]
        self.y = p["y"] + i2 * p["y_nb2"] + i3 * p["y_nb3"]
        self.m, self.depth = p["n"], p["depth"]
        units = (p["n"] + (unit - 1)) // unit
        self.first, self.last = units * part // p["parts"], units * (part + 1) // p["parts"]
        self.start, self.n = p["m"] * band // p["bands"], p["m"] * (band + 1) // p["bands"]

    def result(self, c: Value) -> Value:
        """Address of a row of the result."""
        return self.y + self.args["y_nb1"] * c


def out_prod(
    k: Emitter, dtype: str, b_dtype: str, is_interleaved: bool, unit: int, b_steps: tuple[int, int]
) -> None:
    """Sum the outer products of the rows of two operands.

    Arguments: `ARGS`; `b_steps`: `b_nb0, b_nb1`, or 0 where not the element size.
    """
    chunk, n, n_columns = _OutProdChunk(k, unit), k.level.lanes, columns_at_once(k.level)
    p, n_vectors, band = chunk.args, min(2, unit // n), BAND * n_columns
    packed = p["scratch"] + k.thread * p["nbytes"]
    across, along = (step or p[name] for step, name in zip(b_steps, ("b_nb0", "b_nb1"), strict=True))
    zero = k.const(vec(F32, n), 0)
    with k.loop(0, chunk.depth, DEPTH) as begin:
        count = k.least(chunk.depth - begin, DEPTH)
        with k.loop(chunk.start, chunk.n, band) as left, k.loop(chunk.first, chunk.last) as number:
            first = number * unit
            end, right = k.least(first + unit, chunk.m), k.least(left + band, chunk.n)
            if is_interleaved:
                _unpack_strips(k, dtype, chunk, (begin, count), (first, end), packed, unit)
            else:
                with k.loop(0, count) as i:
                    row = chunk.a + (begin + i) * p["a_nb1"]
                    convert(k, "f32", dtype, packed + i * (4 * unit) - first * 4, row, first, end)
            with k.loop(first, end, n_vectors * n) as at, k.loop(left, right, n_columns) as column:
                sums = [[k.variable(zero) for _ in range(n_columns)] for _ in range(n_vectors)]

                def multiply(columns: list[Value], at: Value = at, first: Value = first) -> None:
                    of = packed + (at - first) * 4
                    with k.loop(0, count) as i:
                        weights = [
                            k.load(vec(F32, n), of + i * (4 * unit) + v * n * 4) for v in range(n_vectors)
                        ]
                        for c, x in enumerate(columns):
                            factor = load_float(k, b_dtype, x + i * along).splat(n)
                            for v in range(n_vectors):
                                slot = sums[v][c]
                                slot.set(k.fma(weights[v], factor, slot.now))

                b = chunk.b + begin * along
                # Addresses at fixed distances are cheaper; columns beyond the last one read the last.
                with k.build.if_else((column + n_columns <= chunk.n).raw) as (whole, partly):
                    with whole:
                        multiply([b + column * across + c * across for c in range(n_columns)])
                    with partly:
                        multiply([b + k.least(column + c, chunk.n - 1) * across for c in range(n_columns)])
                with k.when(begin > 0):
                    add_result(k, sums, chunk, at, column)
                store(k, [[s.now for s in row] for row in sums], chunk, at, (column, left))


def _unpack_strips(
    k: Emitter,
    dtype: str,
    chunk: _OutProdChunk,
    rows: tuple[Value, Value],
    elements: tuple[Value, Value],
    packed: Value,
    unit: int,
) -> None:
    """Dequantise a range of elements of `rows` (first, count) of a weight in strips."""
    (begin, count), n = rows, rows_of_vector(k.level)
    unpack = _unpack_floats if dtype in SIZES else _unpack_blocks
    with k.loop(0, count, n) as i:
        row = begin + i
        strip = chunk.a + row // ROWS * ROWS * chunk.args["a_nb1"]
        unpack(k, dtype, strip, row % ROWS, elements, packed + i * (4 * unit) - elements[0] * 4, 4 * unit)


def _unpack_floats(
    k: Emitter, dtype: str, strip: Value, row: Value, elements: tuple[Value, Value], to: Value, step: int
) -> None:
    n, size = rows_of_vector(k.level), SIZES[dtype]
    (first, end), at = elements, strip + row * size
    with k.loop(first, end, n) as i:
        # Beyond the last element the last one is read again.
        places = [at + k.least(i + j, end - 1) * (ROWS * size) for j in range(n)]
        columns = [load_floats(k, dtype, place, n) for place in places]
        _store_rows(k, columns, to + i * 4, step)


def _unpack_blocks(
    k: Emitter, dtype: str, strip: Value, row: Value, elements: tuple[Value, Value], to: Value, step: int
) -> None:
    n, form = rows_of_vector(k.level), FORMATS[dtype]
    with k.loop(elements[0] // form.block, elements[1] // form.block) as block:
        at = Interleaved(k, fields_of(dtype), strip, block, row)
        runs, scales = form.codes(k, at), SCALES[dtype](at)
        for first in range(0, form.block, n):
            columns = []
            for i in range(first, first + n):
                code = runs[i // 32][i % 32 // 4].shuffle([4 * r + i % 4 for r in range(n)])
                wide = code.sext(I32) if form.offset is None else code.zext(I32) - form.offset
                value = wide.to_float() * scales.scale(i // form.group)
                minimum = scales.minimum(i // form.group)
                columns.append(value if minimum is None else value + minimum)
            _store_rows(k, columns, to + block * (4 * form.block) + 4 * first, step)


def _store_rows(k: Emitter, columns: list[Value], to: Value, step: int) -> None:
    """Write a square of vectors transposed, as rows `step` bytes apart."""
    for r, values in enumerate(transposed(columns)):
        k.store(values, to + r * step)
