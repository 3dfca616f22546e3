"""Products of matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.dtypes import DType
from ggmlb.enums import Op
from ggmlb.kernels.launch import Mem, launch
from ggmlb.kernels.lowering.base import FLOATS, Rule, not_in_rows

if TYPE_CHECKING:
    from ggmlb.kernels.launch import Launch, Target
    from ggmlb.tensor import Tensor

READ_IN_EIGHTS = FLOATS | {
    DType.Q4_0, DType.Q4_1, DType.Q5_0, DType.Q5_1, DType.Q8_0, DType.Q8_1, DType.Q1_0,
    DType.Q2_K, DType.Q3_K, DType.Q4_K, DType.Q5_K, DType.Q6_K, DType.Q8_K,
    DType.IQ4_NL, DType.IQ4_XS, DType.MXFP4, DType.NVFP4, DType.TQ1_0, DType.TQ2_0,
}  # fmt: skip
"""Types whose rows the kernels read (`deq8_*` in rows.h and rows_k.h)."""

VEC_COLUMNS = 8
"""Up to so many columns, each row of the weights is decoded once and used at once."""

TILE = 64
TILE_WG = 256
PANEL_ROWS = 16
PANEL_COLUMNS = 252

MIN_COLUMNS_OF_EXPERT = 2
"""From so many columns an expert on, the columns of each are gathered, and its rows decoded once for them."""


def _declines(node: Tensor) -> str | None:
    a, b = node.src[0], node.src[1]
    assert a is not None and b is not None
    if a.dtype not in READ_IN_EIGHTS:
        return f"no kernel reads {a.dtype.name.lower()} rows"
    if b.dtype not in FLOATS:
        return f"b is {b.dtype.name.lower()}: only f32, f16 and bf16"
    return not_in_rows(a, b)


def _rest(a: Tensor) -> dict[str, int]:
    return {"REST": 1} if a.ne[0] % 8 else {}


def _rows_per_group(target: Target, a: Tensor, n_columns: int) -> int:
    """Return how many rows of the weights a group takes: one, or a core's fair share."""
    if not target.on_cpu:
        return 1
    most = -(-a.ne[1] // (4 * target.n_units))
    return max(1, min(most, 65536 // (a.ne[0] * n_columns + 1)))


def _rows_at_once(target: Target, a: Tensor, columns: int) -> int:
    """Return how many rows of the weights a group takes side by side, to have independent sums to work on."""
    if not target.on_cpu:
        return 1
    return max(1, min(2 if a.dtype.is_quantized else 4, 8 // columns))


def _mul_mat(node: Tensor, target: Target) -> list[Launch]:
    a, b = node.src
    assert a is not None and b is not None
    m, n, n_matrices = a.ne[1], b.ne[1], b.ne[2] * b.ne[3]
    mems = [Mem.of(a), Mem.of(b), Mem.of(node)]
    r2, r3 = b.ne[2] // a.ne[2], b.ne[3] // a.ne[3]
    if n <= VEC_COLUMNS:
        columns = 1 << (n - 1).bit_length()
        rows = _rows_per_group(target, a, columns)
        groups = (-(-m // rows), 1, n_matrices)
        flags = {"COLUMNS": columns, "ROWS": _rows_at_once(target, a, columns), **_rest(a)}
        return [launch("mul_mat_vec", [*mems, r2, r3, rows], groups, target.wg, **flags)]
    if target.on_cpu:
        columns = _columns_per_group(target, m, n, n_matrices)
        groups = (-(-m // PANEL_ROWS), -(-n // columns), n_matrices)
        return [launch("mul_mat_panel", [*mems, r2, r3, columns], groups, 1, **_rest(a))]
    groups = (-(-m // TILE), -(-n // TILE), n_matrices)
    return [launch("mul_mat_tile", [*mems, r2, r3], groups, TILE_WG, **_rest(a))]


def _columns_per_group(target: Target, m: int, n: int, n_matrices: int) -> int:
    """Return a multiple of 3 near which all cores have work, and a panel once decoded is used long enough."""
    panels = -(-m // PANEL_ROWS) * n_matrices
    shares = max(1, -(-4 * target.n_units // panels))
    return max(48, min(PANEL_COLUMNS, -(-n // shares) + 2)) // 3 * 3


def _mul_mat_id(node: Tensor, target: Target) -> list[Launch]:
    a, b, ids = node.src
    assert a is not None and b is not None and ids is not None
    m, n_pairs, n_experts = a.ne[1], ids.ne[0] * ids.ne[1], a.ne[2]
    mems = [Mem.of(a), Mem.of(b), Mem.of(ids), Mem.of(node)]
    if n_pairs >= MIN_COLUMNS_OF_EXPERT * n_experts:
        kernel, rows, columns, wg = (
            ("mul_mat_id_panel", PANEL_ROWS, PANEL_COLUMNS, 1)
            if target.on_cpu
            else ("mul_mat_id_tile", TILE, TILE, TILE_WG)
        )
        groups = (-(-m // rows), -(-n_pairs // (columns * n_experts)), n_experts)
        return [launch(kernel, mems, groups, wg, **_rest(a))]
    rows = _rows_per_group(target, a, 1)
    groups = (-(-m // rows), ids.ne[0], ids.ne[1])
    flags = {"COLUMNS": 1, "ROWS": _rows_at_once(target, a, 1), **_rest(a)}
    return [launch("mul_mat_id", [*mems, rows], groups, target.wg, **flags)]


RULES = {Op.MUL_MAT: Rule(_declines, _mul_mat), Op.MUL_MAT_ID: Rule(_declines, _mul_mat_id)}
