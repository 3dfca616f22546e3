"""Products of matrices."""

from __future__ import annotations

from typing import Final, NamedTuple

from ggmlb.backends.common.fusion import Group, Product
from ggmlb.backends.common.rules import FLOATS, in_rows, operands
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu.launch import BadIndex, Launch, Target, elementwise, launch
from ggmlb.backends.gpu.lowering.base import RULES
from ggmlb.backends.gpu.source import types_with
from ggmlb.core.enums import GluOp, Op
from ggmlb.core.placement import overlap
from ggmlb.core.tensor import Tensor

READ_IN_EIGHTS = types_with("DEQ8_FN", "rows.h", "rows_k.h", "rows_iq.h")
"""Types of weights that the kernels read, eight elements at a time."""

VEC_COLUMNS = 8
"""Most columns of the matrix-vector kernel, which dequantises each row of the weights once for all."""

TILE = 64
TILE_WG = 256
PANEL_ROWS = 16
PANEL_COLUMNS = 252
PANEL_K = 256

MIN_COLUMNS_OF_EXPERT = 2
"""Fewest columns per expert for which they are gathered, to dequantise the expert's rows once."""


PRODUCT: Final = operands(READ_IN_EIGHTS, FLOATS), in_rows(0, 1)
"""Conditions on the operands of products."""


def has_tiles(target: Target) -> bool:
    """Whether the device can run the tiled kernels: every CPU, and GPUs with work-groups of 256 items."""
    return target.on_cpu or target.max_wg >= TILE_WG


def _rest(a: Mem) -> dict[str, str | int]:
    return {"REST": 1} if a.ne[0] % 8 else {}


def _rows_per_group(target: Target, a: Mem, n_columns: int) -> int:
    """Return the rows of the weights per group: one, or on CPUs several."""
    if not target.on_cpu:
        return 1
    most = -(-a.ne[1] // (4 * target.n_units))
    return max(1, min(most, 65536 // (a.ne[0] * n_columns + 1)))


def _rows_at_once(target: Target, a: Mem, columns: int) -> int:
    """Return the number of rows of the weights that a group computes at once, for independent sums."""
    if not target.on_cpu:
        return 1
    return max(1, min(2 if a.dtype.is_quantized else 4, 8 // columns))


def too_many_groups(target: Target, y: int, z: int) -> str | None:
    """Return why a grid of `y` by `z` work-groups is too large for the device, or `None` if it is not."""
    if y <= target.max_groups >= z:
        return None
    return f"its {y} x {z} groups of work exceed the device's limit of {target.max_groups}"


def _columns_fit(node: Tensor, target: Target) -> str | None:
    wide = TILE if has_tiles(target) else VEC_COLUMNS
    return too_many_groups(target, -(-node.ne[1] // wide), node.ne[2] * node.ne[3])


@RULES.rule(Op.MUL_MAT, *PRODUCT, on=_columns_fit)
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
    """Return a multiple of 3 that balances work for all cores against reuse of a dequantised panel."""
    panels = -(-m // PANEL_ROWS) * n_matrices
    shares = max(1, -(-4 * target.n_units // panels))
    return max(48, min(PANEL_COLUMNS, -(-n // shares) + 2)) // 3 * 3


def expert_tiles(target: Target, node: Tensor) -> tuple[int, int] | None:
    """Return the number of groups over columns and over experts; `None` without gathering in tiles."""
    n_experts, (slots, tokens) = node.operand(0).ne[2], node.operand(2).ne[:2]
    if not has_tiles(target) or not n_experts or slots * tokens < MIN_COLUMNS_OF_EXPERT * n_experts:
        return None
    return -(-slots * tokens // ((PANEL_COLUMNS if target.on_cpu else TILE) * n_experts)), n_experts


def _experts_fit(node: Tensor, target: Target) -> str | None:
    return too_many_groups(target, *(expert_tiles(target, node) or node.operand(2).ne[:2]))


@RULES.rule(Op.MUL_MAT_ID, *PRODUCT, on=_experts_fit)
def _mul_mat_id(node: Tensor, target: Target) -> list[Launch]:
    tiles = expert_tiles(target, node)
    if tiles is None:
        return [_of_pairs(target, node, Mem.of(node), None)]
    a, b, ids = (Mem.of(t) for t in node.src if t is not None)
    mems = [a, b, ids, BadIndex(node, a.ne[2]).mem, Mem.of(node)]
    kernel, rows, wg = (
        ("mul_mat_id_panel", PANEL_ROWS, 1) if target.on_cpu else ("mul_mat_id_tile", TILE, TILE_WG)
    )
    return [launch(kernel, mems, (-(-a.ne[1] // rows), *tiles), wg, **_rest(a))]


def _of_pairs(target: Target, node: Tensor, d: Mem, bias: Mem | None, glu: Glu | None = None) -> Launch:
    """Return the launch of a product, plus a bias, for each pair of token and expert, or of a gated unit."""
    a, b, ids = (Mem.of(t) for t in node.src if t is not None)
    rows = _rows_per_group(target, a, 1)
    flags = {"COLUMNS": 1, "ROWS": _rows_at_once(target, a, 1), **_rest(a)}
    numbers = (0.0, 0.0) if glu is None else (glu.alpha, glu.limit)
    if glu is not None:
        flags["GLU"] = f"glu_{glu.op.name.lower()}"
    if bias is not None:
        flags["ADDED"] = 1
    others = [bias or d, *([a, d] if glu is None else [glu.a, glu.bias or d])]
    mems = [a, *others, b, ids, BadIndex(node, a.ne[2]).mem, d]
    groups = (-(-a.ne[1] // rows), ids.ne[0], ids.ne[1])
    return launch("mul_mat_id", [*mems, rows, *numbers], groups, target.wg, **flags)


@RULES.rule(Op.OUT_PROD, operands(READ_IN_EIGHTS, FLOATS))
def _out_prod(node: Tensor, target: Target) -> list[Launch]:
    a, b, d = Mem.all_of(node)
    factors = d.ne[2] // a.ne[2], d.ne[3] // a.ne[3]
    if not a.dtype.is_quantized:
        return [elementwise(target, "out_prod", [a, b, d], *factors)]
    eights = d.window((d.ne[0] // 8, *d.ne[1:]))
    return [elementwise(target, "out_prod", [a, b, eights], *factors, EIGHTS=1)]


# -- fused -------------------------------------------------------------------------------------


class Glu(NamedTuple):
    """The up product of a gated unit (weights, bias), and the unit's activation and its parameters."""

    a: Mem
    bias: Mem | None
    op: GluOp
    alpha: float
    limit: float


def _can_add(group: Group, target: Target) -> str | None:
    weights, x = group["mul_mat"].sources
    other = group.other("add")
    if other.ne[0] > 1 and other.nb[0] != other.dtype.type_size:
        return "the bias or residual does not have contiguous rows"
    # For long rows, a panel accumulates in the result's memory before it reads the residual.
    in_parts = target.on_cpu and x.ne[1] > VEC_COLUMNS and weights.ne[0] > PANEL_K
    return "the result overlaps the residual" if in_parts and overlap(group.result, other) else None


@RULES.rule("mul_mat_add", on=_can_add)
def _mul_mat_add(group: Group, target: Target) -> list[Launch]:
    d, (product,) = Mem.of(group.result), group.products
    weights, bias = _operands(product, d.ne[0])
    return [_launch(target, weights, Mem.of(product.node.operand(1)), d, bias)]


def _few_columns(group: Group) -> str | None:
    return None if group.result.ne[1] <= VEC_COLUMNS else "many columns"


@RULES.rule("glu", _few_columns)
def _glu(group: Group, target: Target) -> list[Launch]:
    weights, bias, glu = gated(group)
    return [_launch(target, weights, Mem.of(group["gate"].operand(1)), Mem.of(group.result), bias, glu)]


def _in_pairs(group: Group, target: Target) -> str | None:
    node = group.products[0].node
    return None if expert_tiles(target, node) is None else "columns enough for tiles"


@RULES.rule(("glu_id", "mul_mat_id_add"), on=_in_pairs)
def _experts(group: Group, target: Target) -> list[Launch]:
    bias, glu = of_experts(group)
    return [_of_pairs(target, group.products[0].node, Mem.of(group.result), bias, glu)]


def of_experts(group: Group) -> tuple[Mem | None, Glu | None]:
    """Return the bias of a product with experts, or that of a gated unit's gate, and the rest of the unit."""
    if "glu" in group:
        return gated(group)[1:]
    return _operands(group.products[0], group.result.ne[0])[1], None


def gated(group: Group) -> tuple[Mem, Mem | None, Glu]:
    """Return a gated unit's gate (the activated product) as weights and bias, and the rest as `Glu`."""
    p = group["glu"].params
    (weights, bias), up = (_operands(product, group.result.ne[0]) for product in group.products)
    return weights, bias, Glu(*up, p["op"], p.get("alpha", 0.0), p.get("limit", 0.0))


def _operands(product: Product, m: int) -> tuple[Mem, Mem | None]:
    """Return `m` rows of the weights of a product, and the same part of its bias."""
    node, added, first = product
    a = Mem.of(node.operand(0))
    weights = a.window((a.ne[0], m, *a.ne[2:]), offset=first * a.nb[1])
    if added is None:
        return weights, None
    bias = Mem.of(added).tiled_to(node.ne)
    return weights, bias.window((m, *bias.ne[1:]), offset=first * bias.nb[0])
