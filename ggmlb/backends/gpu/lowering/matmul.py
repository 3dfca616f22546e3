"""Products of matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ggmlb.backends.common.fusion import Group, Product
from ggmlb.backends.common.rules import FLOATS, in_rows, operands
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu.launch import BadIndex, elementwise, launch
from ggmlb.backends.gpu.lowering.base import GROUP_RULES, RULES
from ggmlb.backends.gpu.source import types_with
from ggmlb.core.enums import GluOp, Op
from ggmlb.core.placement import overlap
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.gpu.launch import Launch, Target

READ_IN_EIGHTS = types_with("DEQ8_FN", "rows.h", "rows_k.h")
"""Types whose rows the kernels read."""

VEC_COLUMNS = 8
"""Most columns for which each row of the weights is decoded once for all of them."""

TILE = 64
TILE_WG = 256
PANEL_ROWS = 16
PANEL_COLUMNS = 252
PANEL_K = 256

MIN_COLUMNS_OF_EXPERT = 2
"""Least columns per expert for which they are gathered, so that the expert's rows are decoded once."""


def has_tiles(target: Target) -> bool:
    """Whether many columns are computed in panels, or in tiles by groups that the device can have."""
    return target.on_cpu or target.max_wg >= TILE_WG


def _rest(a: Mem) -> dict[str, str | int]:
    return {"REST": 1} if a.ne[0] % 8 else {}


def _rows_per_group(target: Target, a: Mem, n_columns: int) -> int:
    """Return the rows of the weights per group: one, or a core's share."""
    if not target.on_cpu:
        return 1
    most = -(-a.ne[1] // (4 * target.n_units))
    return max(1, min(most, 65536 // (a.ne[0] * n_columns + 1)))


def _rows_at_once(target: Target, a: Mem, columns: int) -> int:
    """Return how many rows of the weights a group takes side by side, to have independent sums to work on."""
    if not target.on_cpu:
        return 1
    return max(1, min(2 if a.dtype.is_quantized else 4, 8 // columns))


@RULES.rule(Op.MUL_MAT, operands(READ_IN_EIGHTS, FLOATS), in_rows(0, 1))
def _mul_mat(node: Tensor, target: Target) -> list[Launch]:
    a, b = node.sources
    return [_launch(target, Mem.of(a), Mem.of(b), Mem.of(node))]


def _launch(
    target: Target, a: Mem, b: Mem, d: Mem, bias: Mem | None = None, glu: Glu | None = None
) -> Launch:
    """Return the launch of `d = a b + bias`, or of a gated unit of that and another product."""
    m, n, n_matrices = a.ne[1], b.ne[1], b.ne[2] * b.ne[3]
    mems = [a, b, bias or d]
    r2, r3 = b.ne[2] // a.ne[2], b.ne[3] // a.ne[3]
    flags = _rest(a)
    if bias is not None:
        flags["ADDED"] = 1
    if n <= VEC_COLUMNS or not has_tiles(target):
        columns = 1 << (min(n, VEC_COLUMNS) - 1).bit_length()
        rows = _rows_per_group(target, a, columns)
        flags |= {"COLUMNS": columns, "ROWS": _rows_at_once(target, a, columns)}
        numbers, others = (r2, r3, rows, 0.0, 0.0), [a, d]
        if glu is not None:
            flags["GLU"] = f"glu_{glu.op.name.lower()}"
            numbers, others = (*numbers[:3], glu.alpha, glu.limit), [glu.a, glu.bias or d]
        return launch(
            "mul_mat_vec",
            [*mems, *others, d, *numbers],
            (-(-m // rows), -(-n // columns), n_matrices),
            target.wg,
            **flags,
        )
    if target.on_cpu:
        columns = _columns_per_group(target, m, n, n_matrices)
        groups = (-(-m // PANEL_ROWS), -(-n // columns), n_matrices)
        return launch("mul_mat_panel", [*mems, d, r2, r3, columns], groups, 1, **flags)
    groups = (-(-m // TILE), -(-n // TILE), n_matrices)
    return launch("mul_mat_tile", [*mems, d, r2, r3], groups, TILE_WG, **flags)


def _columns_per_group(target: Target, m: int, n: int, n_matrices: int) -> int:
    """Return a multiple of 3 near which all cores have work, and a panel once decoded is used long enough."""
    panels = -(-m // PANEL_ROWS) * n_matrices
    shares = max(1, -(-4 * target.n_units // panels))
    return max(48, min(PANEL_COLUMNS, -(-n // shares) + 2)) // 3 * 3


@RULES.rule(Op.MUL_MAT_ID, operands(READ_IN_EIGHTS, FLOATS), in_rows(0, 1))
def _mul_mat_id(node: Tensor, target: Target) -> list[Launch]:
    a, b, ids = (Mem.of(t) for t in node.src if t is not None)
    m, n_pairs, n_experts = a.ne[1], ids.ne[0] * ids.ne[1], a.ne[2]
    mems = [a, b, ids, BadIndex(node, n_experts).mem, Mem.of(node)]
    if n_experts and n_pairs >= MIN_COLUMNS_OF_EXPERT * n_experts and has_tiles(target):
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


@RULES.rule(Op.OUT_PROD, operands(READ_IN_EIGHTS, FLOATS))
def _out_prod(node: Tensor, target: Target) -> list[Launch]:
    a, b, d = Mem.all_of(node)
    factors = d.ne[2] // a.ne[2], d.ne[3] // a.ne[3]
    if not a.dtype.is_quantized:
        return [elementwise(target, "out_prod", [a, b, d], *factors)]
    eights = d.window((d.ne[0] // 8, *d.ne[1:]))
    return [elementwise(target, "out_prod", [a, b, eights], *factors, EIGHTS=1)]


# -- with what follows -------------------------------------------------------------------------


class Glu(NamedTuple):
    """The second product of a gated unit."""

    a: Mem
    bias: Mem | None
    op: GluOp
    alpha: float
    limit: float


def _takes_add(group: Group, target: Target) -> bool:
    weights, x = group["mul_mat"].sources
    other = group.other("add")
    # Of long rows, a panel adds up parts in the result's memory before it reads what is added.
    in_parts = target.on_cpu and x.ne[1] > VEC_COLUMNS and weights.ne[0] > PANEL_K
    in_rows = other.ne[0] == 1 or other.nb[0] == other.dtype.type_size
    return in_rows and not (in_parts and overlap(group.result, other))


def _mul_mat_add(group: Group, target: Target) -> list[Launch]:
    d, (product,) = Mem.of(group.result), group.products
    weights, bias = _operands(product, d.ne[0])
    return [_launch(target, weights, Mem.of(product.node.operand(1)), d, bias)]


def _takes_glu(group: Group, target: Target) -> bool:
    packings = {Mem.of(product.node.operand(0)).packing for product in group.products}
    return group.result.ne[1] <= VEC_COLUMNS and len(packings) == 1


def _glu(group: Group, target: Target) -> list[Launch]:
    weights, bias, glu = gated(group)
    return [_launch(target, weights, Mem.of(group["gate"].operand(1)), Mem.of(group.result), bias, glu)]


def gated(group: Group) -> tuple[Mem, Mem | None, Glu]:
    """Return the weights and bias of the product that is activated, and the other one."""
    p = group["glu"].params
    (weights, bias), up = (_operands(product, group.result.ne[0]) for product in group.products)
    return weights, bias, Glu(*up, p["op"], p.get("alpha", 0.0), p.get("limit", 0.0))


def _operands(product: Product, m: int) -> tuple[Mem, Mem | None]:
    """Return `m` rows of the weights of a product, and what is added to what they give."""
    node, added, first = product
    a = Mem.of(node.operand(0))
    weights = a.window((a.ne[0], m, *a.ne[2:]), offset=first * a.nb[1])
    if added is None:
        return weights, None
    bias = Mem.of(added).tiled_to(node.ne)
    return weights, bias.window((m, *bias.ne[1:]), offset=first * bias.nb[0])


GROUP_RULES["mul_mat_add"] = _takes_add, _mul_mat_add
GROUP_RULES["glu"] = _takes_glu, _glu
