"""Matrix products: which kernel, how many rows at a time, and activations as bytes where weights are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ggmlb.backends.common.rules import F32, FLOATS, RESULT, in_rows, operands
from ggmlb.backends.llvm.kernels import (
    activations,
    byte_tiles,
    float_bands,
    float_tiles,
    interleaved,
    interleaved_products,
    matvec,
    out_prod,
    tiles,
)
from ggmlb.backends.llvm.lowering.rules import READ, RULES, name
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.llvm.lowering.steps import Steps

_FLOAT_ROWS = {1: 4, 2: 4, 3: 4, 4: 2, 5: 2, 6: 2, 7: 2, 8: 2}
_BLOCK_ROWS = 8
"""Rows of a weight that are multiplied together: of floats by rows of activations, and of blocks."""

CACHED_NBYTES = 1 << 24
"""Bytes of a weight up to which caches keep it, and give one row of floats faster than several at once."""

FEW, FEW_FLOATS = 4, 8
"""Rows of activations up to which the weight is read as it lies: of blocks, and of floats."""

FEW_PACKED = 5
"""The same of floats in strips, where a tile is soon made: with more, registers of AVX2 do not suffice."""

PANEL_NBYTES = 1 << 19
"""Bytes of quantised activations that meet all of a weight, tile after tile; floats gain nothing by it."""

PANEL_ROWS = 32
"""The fewest rows of activations for which a weight is packed anew."""

NO_TAIL = tiles.Epilogue()


_PRODUCT = operands(READ, FLOATS, out=F32), in_rows(0, 1, RESULT)


def _three_dimensions(node: Tensor) -> str | None:
    if node.operand(0).ne[3] != 1:
        return "the matrices lie in more than three dimensions"
    return None


@RULES.rule(Op.MUL_MAT, *_PRODUCT)
def _mul_mat(node: Tensor, steps: Steps) -> None:
    product(node, steps)


def product(
    node: Tensor,
    steps: Steps,
    result: Tensor | None = None,
    epilogue: tiles.Epilogue = NO_TAIL,
    added: Tensor | None = None,
) -> None:
    """Emit the steps of a product; `result` is what the epilogue makes of it; see `can_have_epilogue`."""
    a, b = node.operand(0), node.operand(1)
    quantized, packed = a.dtype.is_quantized, is_interleaved(a)
    k, m, n = *a.ne[:2], b.ne[1]
    address, nb = (
        quantized_activations(a, b, steps, not is_many(node)) if quantized else (steps.address(b), b.nb)
    )
    to = node if result is None else result
    y, y_nb = steps.address(to), to.nb
    matrices = b.ne[2] * b.ne[3]

    def args(first: int, count: int, parts: int) -> tuple[int, ...]:
        return (
            steps.address(a), *a.nb[1:], address + first * nb[1], *nb[1:], y + first * y_nb[1], *y_nb[1:],
            k, m, count, *extents, b.ne[2] // a.ne[2] * panels, b.ne[3] // a.ne[3], parts,
        )  # fmt: skip

    panels, extents, level = 1, b.ne[2:], steps.library.target.level
    if not quantized and not packed and float_bands.suits(level, k, m, n):
        parts = _parts(steps, matrices, k * m * n / 25, -(-m // float_bands.rows_at_once(level, n)))
        nbytes = float_bands.scratch_nbytes(level, n)
        scratch = steps.scratch(nbytes * steps.n_threads)
        params: tuple[Any, ...] = (name(a), name(b), float_bands.columns_at_once(n))
        steps.emit(float_bands.floats, params, (*args(0, n, parts), scratch, nbytes), parts * matrices)
        return
    if is_many(node):
        if quantized and matrices == 1 and (added is None or added.ne[1] == 1):
            panels = matrices = _panels(n, nb[1], byte_tiles.rows_together(level, name(a)))
        if panels > 1:  # the rows of a panel are those of a matrix, whose weight is the same
            n //= panels
            nb, y_nb = (1, nb[1], n * nb[1], 0), (4, y_nb[1], n * y_nb[1], 0)
            extents = (panels, 1)
        rows, nbytes = _tile_shape(steps, name(a), k, quantized)
        scratch = steps.scratch(nbytes * steps.n_threads)
        parts = _parts(steps, matrices, k * m * n / (60 if quantized else 25), -(-m // rows))
        kernel: Callable[..., None] = byte_tiles.quantized if quantized else float_tiles.floats
        params = (name(a),) if quantized else (name(a), name(b))
        columns = (
            byte_tiles.columns(level, name(a), n)
            if quantized
            else tiles.columns(n, float_tiles.columns_at_once(level))
        )
        params = (*params, packed, columns, epilogue)
        more = () if added is None else (steps.address(added), added.nb[1] if added.ne[1] > 1 else 0)
        steps.emit(kernel, params, (*args(0, n, parts), scratch, nbytes, *more), parts * matrices)
        return
    for first in range(0, n, 8):
        count = min(8, n - first)
        rows = rows_at_once(a, count)
        rows = rows if packed or m >= rows else 1
        parts = _parts(steps, matrices, k * m * (count + 1) / 40, -(-m // rows))
        if packed:
            kernel = interleaved_products.quantized if quantized else interleaved_products.floats
            params = (name(a), count) if quantized else (name(a), count, name(b))
        else:
            kernel = matvec.quantized if quantized else matvec.floats
            params = (name(a), rows, count) if quantized else (name(a), rows, count, name(b))
        steps.emit(kernel, params, args(first, count, parts), parts * matrices)


def is_many(node: Tensor) -> bool:
    """Whether a product has more rows of activations than those for which the weight is read as it lies."""
    a, b = node.operand(0), node.operand(1)
    few = FEW if a.dtype.is_quantized else FEW_PACKED if is_interleaved(a) else FEW_FLOATS
    return b.ne[1] > few


def can_have_epilogue(node: Tensor) -> bool:
    """Whether a product of many rows is written once, by a kernel that may do more before."""
    a = node.operand(0)
    if not is_many(node) or RULES.declines(node) is not None:
        return False
    return a.dtype.is_quantized or a.ne[0] <= float_tiles.depth(is_interleaved(a))


def is_interleaved(weight: Tensor) -> bool:
    """Whether a weight lies in strips; one without a place does not yet."""
    return weight.buffer is not None and bool(weight.buffer.packing(weight))


def rows_at_once(weight: Tensor, n: int) -> int:
    """Return how many rows of a weight are multiplied together, as it lies, with `n` rows of activations."""
    if is_interleaved(weight):
        return interleaved.ROWS
    if weight.dtype.is_quantized:
        return _BLOCK_ROWS
    return 1 if n == 1 and weight.nbytes <= CACHED_NBYTES else _FLOAT_ROWS[n]


def _panels(n: int, row_nbytes: int, together: int) -> int:
    """Into how many panels to cut rows of activations: each stays in a cache while it meets a weight."""
    fits = max(PANEL_NBYTES // row_nbytes, together)
    return next((p for p in range(-(-n // fits), n // PANEL_ROWS + 1) if n % p == 0), 1)


def _parts(steps: Steps, matrices: int, work: float, most: int) -> int:
    """Into how many chunks to cut each matrix; `work` is of one [ns]."""
    chunks = steps.chunks(work * matrices, most * matrices)
    return max(1, -(-chunks // matrices))


def quantized_activations(
    a: Tensor, b: Tensor, steps: Steps, few: bool
) -> tuple[int, tuple[int, int, int, int]]:
    """Emit the step that quantises activations for a weight, unless it was; return address and strides.

    `few`: the weight is read as it lies.
    """
    if not few:
        layout = byte_tiles.layout(name(a))
    elif is_interleaved(a):
        layout = interleaved_products.layout(name(a))
    else:
        layout = matvec.layout(name(a), steps.library.target.level)
    row = layout.row_nbytes(b.ne[0])
    nbytes = row * b.ne[1] * b.ne[2] * b.ne[3]
    address, there = steps.activations(b, nbytes, layout)
    if not there:
        work = b.n_elements * 0.6
        args = (steps.address(b), *b.nb[1:], *b.ne, address)
        steps.emit(activations.quantize, (name(b), layout), args, steps.chunks(work, b.n_elements // 32))
    return address, (1, row, row * b.ne[1], row * b.ne[1] * b.ne[2])


@RULES.rule(Op.MUL_MAT_ID, *_PRODUCT, _three_dimensions)
def _chosen(node: Tensor, steps: Steps) -> None:
    """Products with matrices that each token chooses; the choices are sorted by matrix first."""
    a, b, ids = node.operand(0), node.operand(1), node.operand(2)
    quantized, packed = a.dtype.is_quantized, is_interleaved(a)
    (k, m, n_matrices), (n_used, n_tokens) = a.ne[:3], ids.ne[:2]
    n = n_used * n_tokens
    few = n <= (FEW if quantized else FEW_FLOATS) * n_matrices
    address, nb = quantized_activations(a, b, steps, few) if quantized else (steps.address(b), b.nb)
    starts, order = steps.scratch(8 * (n_matrices + 2)), steps.scratch(8 * n)
    steps.emit(
        matvec.sort, (),
        (steps.address(ids), *ids.nb[:2], n_used, n_tokens, n_matrices, starts, order, *steps.report),
    )  # fmt: skip
    shape = _tile_shape(steps, name(a), k, quantized, is_chosen=True)
    rows = rows_at_once(a, 1) if few else shape.rows
    rows = rows if packed or m >= rows else 1
    parts = _parts(steps, n_matrices, k * m * n / n_matrices / 20, -(-m // rows))
    args: tuple[int, ...] = (
        steps.address(a), *a.nb[1:3], address, *nb[1:3], b.ne[1], steps.address(node), *node.nb[1:3],
        k, m, n_used, parts, starts, order,
    )  # fmt: skip
    types = (name(a),) if quantized else (name(a), name(b))
    kernel: Callable[..., None]
    if few and packed:
        kernel = interleaved_products.chosen_quantized if quantized else interleaved_products.chosen_floats
        steps.emit(kernel, types, args, parts * n_matrices)
    elif few:
        steps.emit(matvec.chosen, (name(a), rows, name(b)), args, parts * n_matrices)
    else:
        args = (*args, steps.scratch(shape.nbytes * steps.n_threads), shape.nbytes)
        kernel = byte_tiles.chosen_quantized if quantized else float_tiles.chosen_floats
        steps.emit(kernel, (*types, packed), args, parts * n_matrices)


SHARED_NBYTES = 1 << 18
"""Bytes of columns of an outer product from which on few chunks share them, each with many rows."""


@RULES.rule(Op.OUT_PROD, operands(READ, FLOATS, out=F32), in_rows(0, RESULT))
def _out_prod(node: Tensor, steps: Steps) -> None:
    a, b = node.operand(0), node.operand(1)
    (n, m), depth, matrices = node.ne[:2], a.ne[1], node.ne[2] * node.ne[3]
    level = steps.library.target.level
    unit = out_prod.unit(level, name(a), n)
    units, most_bands = -(-n // unit), -(-m // float_tiles.columns_at_once(level))
    chunks = steps.chunks(n * m * depth * matrices / 25, units * most_bands * matrices)
    if m * tiles.DEPTH * 4 > SHARED_NBYTES:
        chunks = min(chunks, 3 * steps.n_threads * matrices)
    parts = -(-units // max(1, units * matrices // chunks))
    bands = min(most_bands, -(-chunks // (matrices * parts)))
    nbytes = -(-out_prod.scratch_nbytes(unit) // 64) * 64
    args = (
        steps.address(a), *a.nb[1:], steps.address(b), *b.nb, steps.address(node), *node.nb[1:],
        n, m, depth, *node.ne[2:], node.ne[2] // a.ne[2], node.ne[3] // a.ne[3], parts, bands,
        steps.scratch(nbytes * steps.n_threads), nbytes,
    )  # fmt: skip
    b_steps = tuple(nb if nb == b.dtype.type_size else 0 for nb in b.nb[:2])
    params = (name(a), name(b), is_interleaved(a), unit, b_steps)
    steps.emit(out_prod.out_prod, params, args, matrices * parts * bands)


class _TileShape(NamedTuple):
    """How many rows a tile has, and the bytes that a thread needs for one."""

    rows: int
    nbytes: int


def _tile_shape(steps: Steps, dtype: str, k: int, quantized: bool, is_chosen: bool = False) -> _TileShape:
    level = steps.library.target.level
    if quantized:
        rows = byte_tiles.tile_rows(level, dtype, is_chosen)
        return _TileShape(rows, -(-byte_tiles.scratch_nbytes(k, dtype, rows) // 64) * 64)
    return _TileShape(float_tiles.tile_rows(level), -(-float_tiles.scratch_nbytes(level) // 64) * 64)
