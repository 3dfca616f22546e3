"""Matrix products: which kernel, how many rows at a time, and activations as bytes where weights are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.numba.kernels import activations, matvec, tiles
from ggmlb.backends.numba.kernels.blocks import FORMS
from ggmlb.backends.numba.lowering.rules import FLOATS, Rule, name, not_f32, not_floats, not_in_rows
from ggmlb.enums import Op

if TYPE_CHECKING:
    from collections.abc import Callable

    from ggmlb.backends.numba.lowering.steps import Steps
    from ggmlb.tensor import Tensor

ROWS = {1: 8, 2: 4, 3: 4, 4: 2, 5: 2, 6: 2, 7: 2, 8: 2}
"""Rows of the weight that are multiplied together, by rows of activations."""


FEW = 4
"""Rows of activations up to which the weight is read as it lies."""


def _declines(node: Tensor) -> str | None:
    a, b = node.src[:2]
    assert a is not None and b is not None
    if name(a) not in FORMS and a.dtype not in FLOATS:
        return f"no kernel multiplies {name(a)} weights"
    return not_floats(b) or not_f32(node) or not_in_rows(a, b, node)


def _mul_mat(node: Tensor, steps: Steps) -> None:
    a, b = node.src[:2]
    assert a is not None and b is not None
    quantized = a.dtype.is_quantized
    k, m, n = *a.ne[:2], b.ne[1]
    address, nb = quantized_activations(b, steps) if quantized else (steps.address(b), b.nb)
    y, y_nb = steps.address(node), node.nb
    matrices = b.ne[2] * b.ne[3]

    def args(first: int, count: int, parts: int) -> tuple[int, ...]:
        return (
            steps.address(a), *a.nb[1:], address + first * nb[1], *nb[1:], y + first * y_nb[1], *y_nb[1:],
            k, m, count, *b.ne[2:], b.ne[2] // a.ne[2], b.ne[3] // a.ne[3], parts,
        )  # fmt: skip

    if n > FEW:
        level = steps.library.target.level
        rows = tiles.BYTE_ROWS if quantized else tiles.float_rows(level)
        nbytes = tiles.byte_scratch(k, name(a)) if quantized else tiles.float_scratch(level)
        nbytes = -(-nbytes // 64) * 64
        scratch = steps.scratch(nbytes * steps.n_threads)
        parts = _parts(steps, matrices, k * m * n / (60 if quantized else 25), -(-m // rows))
        kernel: Callable[..., None] = tiles.quantized if quantized else tiles.floats
        params: tuple[str | int, ...] = (name(a),) if quantized else (name(a), name(b))
        steps.emit(kernel, params, (*args(0, n, parts), scratch, nbytes), parts * matrices)
        return
    for first in range(0, n, 8):
        count = min(8, n - first)
        rows = ROWS[count] if m >= ROWS[count] else 1
        parts = _parts(steps, matrices, k * m * (count + 1) / 40, -(-m // rows))
        kernel = matvec.quantized if quantized else matvec.floats
        params = (name(a), rows, count) if quantized else (name(a), rows, count, name(b))
        steps.emit(kernel, params, args(first, count, parts), parts * matrices)


def _parts(steps: Steps, matrices: int, work: float, most: int) -> int:
    """Into how many chunks to cut each matrix; `work` is of one [ns]."""
    chunks = steps.chunks(work * matrices, most * matrices)
    return max(1, -(-chunks // matrices))


def quantized_activations(b: Tensor, steps: Steps) -> tuple[int, tuple[int, int, int, int]]:
    """Emit the step that quantises activations, unless it was; return their address and strides."""
    k = b.ne[0]
    row = activations.row_nbytes(k)
    # Tiles read some rows beyond the last; what comes of them is not used.
    nbytes = row * (b.ne[1] * b.ne[2] * b.ne[3] + tiles.byte_columns(steps.library.target.level))
    address, there = steps.activations(b, nbytes)
    if not there:
        work = b.n_elements * 0.6
        args = (steps.address(b), *b.nb[1:], *b.ne, address)
        steps.emit(activations.quantize, (name(b),), args, steps.chunks(work, b.n_elements // 32))
    return address, (1, row, row * b.ne[1], row * b.ne[1] * b.ne[2])


RULES = {Op.MUL_MAT: Rule(_declines, _mul_mat)}
