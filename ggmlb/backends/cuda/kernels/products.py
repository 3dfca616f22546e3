"""Matrix products: dp4a or vector loads for few columns, int8 tensor cores or cuBLAS for many."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from ggmlb.backends.common.fusion import Group
from ggmlb.backends.common.rules import FLOATS, keeps_operand
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.cuda.cublas import cannot_describe, gemms
from ggmlb.backends.cuda.kernels.base import PACKAGE, RULES
from ggmlb.backends.gpu import BadIndex, Launch, PreparedOperand, Scratch
from ggmlb.backends.gpu.launch import elementwise, flattened, launch, mapped
from ggmlb.backends.gpu.lowering.copy import copy
from ggmlb.backends.gpu.lowering.matmul import (
    MIN_COLUMNS_OF_EXPERT,
    PRODUCT,
    Glu,
    expert_tiles,
    gated,
    of_experts,
    too_many_groups,
)
from ggmlb.backends.gpu.source import kernels, types_with
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, Prec
from ggmlb.core.placement import overlap
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.cuda.kernels.base import Step
    from ggmlb.backends.gpu import Target

IN_SUB_BLOCKS = types_with("QUANTS", "sub_blocks.h", "sub_blocks_iq.h", package=PACKAGE)
"""Quantised types that the dp4a kernels multiply as integers."""

FEW_COLUMNS = 8
"""Most columns for one pass over the weights: of vector loads, and of dp4a where there is `mul_mat_mma`."""

FEW_COLUMNS_Q8 = 32
"""Most columns of dp4a where there is no `mul_mat_mma`, eight per pass over the weights. Estimated from the
instructions' throughput, to be measured."""

MMA = 80
"""Oldest compute capability with `mul_mat_mma`."""

BLAS_COLUMNS = {80: 1024, 90: 256, 100: 128, 103: 48}
"""Fewest columns for which cuBLAS multiplies quantised weights as f16, where `mul_mat_mma` can: capabilities
whose tensor cores are as fast with f16 as with bytes scaled by the other pipes, or slow with bytes (103).
Estimated (docs/cuda.md)."""

MMA_ROWS = (128, 64, 32, 16)
"""Rows of the weights of a block of `mul_mat_mma`."""

MMA_COLUMNS = 64
"""Most columns of a block of `mul_mat_mma`, limited by registers."""

MMA_COLUMNS_OF_EXPERT = 48
"""The same where blocks loop over an expert's columns."""

MMA_WG = 256
MOST_STAGES = 6
ROWS_BESIDE = 32
"""What a block does for each tile beside its rows (copies, scales), in rows that take as long."""

CYCLES_OF_LAUNCH, CYCLES_OF_SUM = 4000, 0.3
"""Of adding the sums of splits: a launch, and a multiprocessor's share of a sum."""

GRIDS_IN_HALVES = frozenset({DType.IQ2_XS, DType.IQ2_S, DType.IQ1_M})
"""Those of `IN_HALVES` whose quants are entries of tables: with 64 columns, registers spill."""

SPILLING_EXPERTS = GRIDS_IN_HALVES | {DType.Q5_K}
"""Types of which blocks of 128 rows by 16 columns of an expert spill registers."""

IN_HALVES = frozenset({DType.Q2_K, DType.Q3_K, DType.Q6_K}) | GRIDS_IN_HALVES
"""Types with two scales per sub-block of 32 elements."""

WITH_MINS = frozenset({DType.Q4_1, DType.Q5_1, DType.Q2_K, DType.Q4_K, DType.Q5_K})
"""Types with a min per scale."""

GLU_COLUMNS = 2
"""Most columns for which one kernel computes both products of a gated unit; beyond, sums spill."""

MAX_MATRICES = 3
"""Most weights that one kernel multiplies by one operand: queries, keys and values."""

WG = 128
WARPS = WG // 32
GROUPS_EACH = 3
"""Fewest groups per multiprocessor for which warps do not share rows: as many as fit at once."""
TILE = 1024
"""Elements of a row per warp and iteration."""
FUSED = 8192
"""Longest row of activations that each group quantises itself: more leave little shared memory."""


def _kernel(
    name: str,
    mems: list[Mem],
    numbers: tuple[int | float, ...],
    groups: tuple[int, int, int],
    **flags: str | int,
) -> Launch:
    made = launch(kernels(PACKAGE)[name], [*mems, *numbers], groups, WG, **flags)
    return replace(made, persistent=name in ("mul_mat_q8", "mul_mats_q8", "mul_mat_id_q8"))


def _shape(
    target: Target, a: Tensor | Mem, n: int, n_matrices: int, tile: int
) -> tuple[int, int, dict[str, int]]:
    """Return groups over rows and columns, and how a group's warps share the work.

    Where rows are too few to keep all multiprocessors busy, the warps of a group share rows.
    """
    columns = 1 << (min(n, 8) - 1).bit_length()
    rows = 4
    n_groups = -(-n // columns)
    split = 1
    while split < WARPS and split * tile < a.ne[0]:
        if -(-a.ne[1] * split // (rows * WARPS)) * n_groups * n_matrices >= GROUPS_EACH * target.n_units:
            break
        split *= 2
    return -(-a.ne[1] * split // (rows * WARPS)), n_groups, {
        "ROWS": rows, "COLUMNS": columns, "SPLIT": split, "ONE_MATRIX": int(n_matrices == 1),
    }  # fmt: skip


def _activations(b: Tensor, n: int) -> tuple[list[Step | PreparedOperand], tuple[Mem, ...], dict[str, int]]:
    """Return the quantisation of activations for a product, their memory, and the kernel's macros.

    `b` is quantised to 8 bits: quants, and the scales and sums of sub-blocks (activations_q8.h).
    """
    if n == 1 and b.ne[0] <= FUSED and _in_vectors(b):
        return [], (Mem.of(b), Mem.of(b)), {"FUSED": FUSED}
    n_rows, padded = b.ne[1] * b.ne[2] * b.ne[3], -(-b.ne[0] // 256) * 256
    numbers = Scratch(n_rows * padded).mem(DType.I8, (padded, n_rows, 1, 1))
    facts = Scratch(n_rows * padded // 4).mem(DType.I32, (padded // 16, n_rows, 1, 1))
    groups = min(-(-n_rows * b.ne[0] // 32 // (WG // 8)), 1 << 16)
    made = _kernel("quantize_q8", [Mem.of(b), numbers, facts], (), (max(groups, 1), 1, 1))
    return [PreparedOperand(b, "q8", [made], (numbers, facts))], (numbers, facts), {"FUSED": 0}


def _align(*weights: Tensor | Mem) -> dict[str, int]:
    """Return the alignment of all rows: a power of two, up to 16 [bytes]."""
    return {"ALIGN": math.gcd(16, *(x for a in weights for x in (a.offset, *a.nb[1:])))}


def _in_vectors(b: Tensor, *weights: Tensor | Mem) -> bool:
    """Whether rows of all are whole numbers of aligned vectors of 16 bytes, and b is f32."""
    if b.dtype is not DType.F32 or not b.is_contiguous_rows():
        return False
    if any(a.dtype not in FLOATS or a.ne[0] * a.dtype.type_size % 16 for a in weights):
        return False
    return not any(x % 16 for t in (b, *weights) for x in (t.offset, *t.nb[1:]))


# -- few columns -----------------------------------------------------------------------------------


class _Way(Enum):
    """What computes a product: few columns at once, int8 tensor cores, or a library if there is one."""

    FEW, MMA, BLAS = range(3)


def _way(target: Target, a: Tensor | Mem, n: int) -> _Way:
    """Return what computes a product with `n` columns."""
    by_mma = a.dtype in IN_SUB_BLOCKS and target.capability >= MMA
    few = FEW_COLUMNS_Q8 if a.dtype in IN_SUB_BLOCKS and not by_mma else FEW_COLUMNS
    if n <= few:
        return _Way.FEW
    if by_mma and not (target.blas and n >= BLAS_COLUMNS.get(target.capability, n + 1)):
        return _Way.MMA
    return _Way.BLAS


def _not_by_kernels(target: Target, b: Tensor, *weights: Tensor) -> str | None:
    """Return why `_by_kernels` does not compute products of `b` with weights."""
    way = _way(target, weights[0], b.ne[1])
    if way is _Way.BLAS:
        return "many columns"
    if weights[0].dtype not in IN_SUB_BLOCKS and not _in_vectors(b, *weights):
        return "rows that are no aligned vectors of 16 bytes"
    n_rows = -(-max(a.ne[1] for a in weights) // MMA_ROWS[-1]) if way is _Way.MMA else 1
    return too_many_groups(target, n_rows, b.ne[2] * b.ne[3])


def _by_kernels(
    target: Target, a: Mem, b: Tensor, d: Mem, bias: Mem | None = None, glu: Glu | None = None
) -> list[Step | PreparedOperand]:
    """Return the steps of a product without cuBLAS, plus a bias, or of a gated unit of that and another."""
    n, n_matrices = b.ne[1], b.ne[2] * b.ne[3]
    if _way(target, a, n) is _Way.MMA:
        return _by_mma(target, a, b, d, bias)
    weights = [a] if glu is None else [a, glu.a]
    others = [bias or d, *([a, d] if glu is None else [glu.a, glu.bias or d]), d]
    numbers = b.ne[2] // a.ne[2], b.ne[3] // a.ne[3], *((0.0, 0.0) if glu is None else (glu.alpha, glu.limit))
    also: dict[str, str | int] = {"ADDED": 1} if bias is not None else {}
    if glu is not None:
        also["GLU"] = f"glu_{glu.op.name.lower()}"
    if a.dtype not in IN_SUB_BLOCKS:
        x, y, flags = _shape(target, a, n, n_matrices, 512 // a.dtype.type_size)
        mems = [a, Mem.of(b), *others]
        return [_kernel("mul_mat_vec16", mems, numbers, (x, y, n_matrices), **flags, **also)]
    forms, activations, fused = _activations(b, n)
    x, y, flags = _shape(target, a, n, n_matrices, TILE)
    flags |= _align(*weights) | fused
    mems = [a, *activations, *others]
    return [*forms, _kernel("mul_mat_q8", mems, numbers, (x, y, n_matrices), **flags, **also)]


# -- up to some hundred columns, by int8 tensor cores -----------------------------------------


class Tile(NamedTuple):
    """What a block of `mul_mat_mma` computes, and what it takes of a multiprocessor.

    Attributes:
        rows: Of the weights.
        columns: Of the activations.
        splits: Parts of the rows' elements that different blocks multiply.
        stages: Tiles of both in shared memory.
        shared: Shared memory [bytes].
    """

    rows: int
    columns: int
    splits: int
    stages: int
    shared: int

    @property
    def sets(self) -> int:
        """Sets of 16 rows of a warp."""
        return 1 if self.rows < 64 else 2

    @property
    def blocks(self) -> int:
        """Blocks that registers leave room for on a multiprocessor."""
        return 2 if self.columns == 16 else 1


def tile(target: Target, a: Tensor | Mem, n: int, n_matrices: int = 1, n_experts: int = 0) -> Tile:
    """Return the tile of a product that takes least time, of those that fit shared memory.

    Estimated in cycles by the kernels' instructions (docs/cuda.md). Blocks that wait for a processor count
    as much as the first ones. More than one split must be worth the launch that adds their sums.

    Args:
        target: The card.
        a: The weights.
        n: Columns of each product, or pairs of token and expert.
        n_matrices: Products with these weights.
        n_experts: Matrices of which each pair is multiplied by one; 0: it is a product of all columns.
    """
    most = MMA_COLUMNS_OF_EXPERT if n_experts else MMA_COLUMNS
    if a.dtype in GRIDS_IN_HALVES:
        most = MMA_COLUMNS // 2
    if n_experts:
        n_tiles = {columns: _tiles_of_experts(n, n_experts, columns) for columns in range(16, most + 1, 16)}
    else:
        columns = 16 * -(-n // (16 * -(-n // most)))
        n_tiles = {columns: -(-n // columns) * n_matrices}
    nbytes, k_tiles = a.dtype.type_size * 256 // a.dtype.block_size, -(-a.ne[0] // 256)
    is_skewed = nbytes % 16 != 0 or _align(a)["ALIGN"] < 16
    row = 16 * (-(-(nbytes + 15 * is_skewed) // 16) | 1)
    halves, mins = 1 + (a.dtype in IN_HALVES), a.dtype in WITH_MINS
    found: list[tuple[float, Tile]] = []
    for (columns, n_each), rows in itertools.product(n_tiles.items(), MMA_ROWS):
        if n_experts and columns == 16 and rows > 64 and a.dtype in SPILLING_EXPERTS:
            continue
        stage = rows * row + columns * (17 + 4) * 16
        made = 32 * (halves * (rows + mins * (rows + 8 + columns + 8)) + columns) + 16
        one = Tile(rows, columns, 1, 0, 0)
        warps_k = MMA_WG // 32 * 16 * one.sets // rows
        lists = 8 * columns if n_experts else 0  # where an expert's columns are read and written
        stages = min((target.shared // one.blocks - 1024 - lists - made) // stage, MOST_STAGES)
        if stages < 2:
            continue
        shared = max(stages * stage + made, 4 * (warps_k - 1) * rows * columns)
        n_blocks = -(-a.ne[1] // rows) * n_each
        for splits in (1, 2, 4, 8):
            per_split = -(-k_tiles // splits)
            if splits > 1 and (n_experts or per_split * (splits - 1) >= k_tiles):
                break
            waves = math.ceil(n_blocks * splits / target.n_units)
            cycles = waves * per_split * (rows + ROWS_BESIDE) * (4 + columns / 6)
            if splits > 1:
                sums = splits * n * n_matrices * a.ne[1] / target.n_units
                cycles = 1.2 * (cycles + CYCLES_OF_LAUNCH + CYCLES_OF_SUM * sums)
            found.append((cycles, one._replace(splits=splits, stages=stages, shared=shared)))
    return min(found)[1]


def _tiles_of_experts(n_pairs: int, n_experts: int, columns: int) -> float:
    """Return the tiles of columns of all experts, if each has from 0 to twice the mean of pairs, evenly."""
    most = 2 * n_pairs / n_experts
    whole = int(most / columns)
    return n_experts * (whole + 1) * (most - columns * whole / 2) / most


def _mma_flags(a: Mem, t: Tile) -> dict[str, str | int]:
    return {
        "ROWS": t.rows, "COLUMNS": t.columns, "SETS_16": t.sets, "STAGES": t.stages, "SHARED": t.shared,
        "BLOCKS_PER_SM": t.blocks, "WITH_MINS": int(a.dtype in WITH_MINS), **_align(a),
    }  # fmt: skip


def _by_mma(
    target: Target, a: Mem, b: Tensor, d: Mem, bias: Mem | None = None
) -> list[Step | PreparedOperand]:
    """Return the steps of a product, plus a bias, by int8 tensor cores."""
    n, n_matrices = b.ne[1], b.ne[2] * b.ne[3]
    forms, activations, _ = _activations(b, n)
    t = tile(target, a, n, n_matrices)
    flags = _mma_flags(a, t) | {"SPLITS": t.splits, "ONE_MATRIX": int(n_matrices == 1)}
    added = {"ADDED": 1} if bias is not None else {}
    whole, found = (a.ne[1], n, n_matrices, t.splits), kernels(PACKAGE)
    parts = Scratch(4 * math.prod(whole)).mem(DType.F32, whole) if t.splits > 1 else d
    k_tiles = -(-a.ne[0] // 256)
    numbers = b.ne[2] // a.ne[2], b.ne[3] // a.ne[3], -(-k_tiles // t.splits)
    groups = -(-n // t.columns) * t.splits, -(-a.ne[1] // t.rows), n_matrices
    mems = [a, *activations, bias or d, parts, d]
    if t.splits > 1:
        last: list[Step] = [elementwise(target, found["add_splits"], [parts, bias or d, d], **added)]
    else:
        last = []
        flags.update(added)
    made = launch(found["mul_mat_mma"], [*mems, *numbers], groups, MMA_WG, **flags)
    return [*forms, replace(made, shared=t.shared), *last]


def _few_columns(node: Tensor, target: Target) -> str | None:
    if node.nb[0] != DType.F32.type_size:
        return "the result is not in rows of f32"
    return _not_by_kernels(target, node.operand(1), node.operand(0))


@RULES.rule(Op.MUL_MAT, *PRODUCT, keeps_operand, on=_few_columns)
def _mul_mat(node: Tensor, target: Target) -> list[Step | PreparedOperand]:
    return _by_kernels(target, Mem.of(node.operand(0)), node.operand(1), Mem.of(node))


def _few_columns_and_sum(group: Group, target: Target) -> str | None:
    """CuBLAS' products are not fused: the bias would have to be copied to the result first."""
    return _not_by_kernels(target, group["mul_mat"].operand(1), group["mul_mat"].operand(0))


@RULES.rule("mul_mat_add", on=_few_columns_and_sum)
def _mul_mat_add(group: Group, target: Target) -> list[Step | PreparedOperand]:
    a, b = map(group["mul_mat"].operand, (0, 1))
    d = Mem.of(group.result)
    return _by_kernels(target, Mem.of(a), b, d, Mem.of(group.other("add")).tiled_to(d.ne))


def _few_columns_of_two(group: Group, target: Target) -> str | None:
    b = group["gate"].operand(1)
    if b.ne[1] > GLU_COLUMNS:
        return "many columns"
    return _not_by_kernels(target, b, *[product.node.operand(0) for product in group.products])


@RULES.rule("glu", on=_few_columns_of_two)
def _glu(group: Group, target: Target) -> list[Step | PreparedOperand]:
    weights, bias, other = gated(group)
    return _by_kernels(target, weights, group["gate"].operand(1), Mem.of(group.result), bias, other)


def _few_columns_of_several(group: Group, target: Target) -> str | None:
    products = group.products
    added = [product.added is not None for product in products]
    b, results = products[0].node.operand(1), [product.node for product in products]
    if len(products) > MAX_MATRICES or (any(added) and not all(added)):
        return f"more than {MAX_MATRICES} products, or biases of some"
    if any(t.ne[2:] != (1, 1) for t in results) or any(t.nb[0] != 4 for t in (*results, *group.nodes)):
        return "several matrices of each weight, or results that are not in rows of f32"
    if _way(target, products[0].node.operand(0), b.ne[1]) is not _Way.FEW:
        return "many columns"
    return _not_by_kernels(target, b, *[product.node.operand(0) for product in products])


@RULES.rule("mul_mats", on=_few_columns_of_several)
def _mul_mats(group: Group, target: Target) -> list[Step | PreparedOperand]:
    """Return the steps of products of one operand: the rows of all weights are divided among the groups."""
    products = group.products
    b, n = products[0].node.operand(1), products[0].node.ne[1]
    results = [node for node in group.nodes if node.op is Op.ADD or products[0].added is None]
    weights = [Mem.of(product.node.operand(0)) for product in products]
    out = [Mem.of(node) for node in results]
    biases = [
        d if added is None else Mem.of(added).tiled_to(d.ne)
        for (_, added, _), d in zip(products, out, strict=True)
    ]
    flags = {"MATRICES": len(products)} | ({"ADDED": 1} if products[0].added is not None else {})
    many, biased, written = ([*mems, mems[-1]][:MAX_MATRICES] for mems in (weights, biases, out))
    rows = weights[0].window((b.ne[0], sum(a.ne[1] for a in weights), 1, 1))  # as of one matrix
    if rows.dtype not in IN_SUB_BLOCKS:
        x, y, split = _shape(target, rows, n, 1, 512 // rows.dtype.type_size)
        x += len(products) - 1  # each matrix may end with a part of a set
        return [
            _kernel("mul_mats_vec16", [*many, Mem.of(b), *biased, *written], (), (x, y, 1), **split, **flags)
        ]
    forms, activations, fused = _activations(b, n)
    x, y, split = _shape(target, rows, n, 1, TILE)
    x += len(products) - 1
    mems = [*many, *activations, *biased, *written]
    return [
        *forms,
        _kernel("mul_mats_q8", mems, (), (x, y, 1), **split, **flags, **_align(*weights), **fused),
    ]


# -- experts ---------------------------------------------------------------------------------------


def _rows_of_experts(node: Tensor, target: Target) -> str | None:
    a, b, ids = map(node.operand, range(3))
    if a.dtype not in IN_SUB_BLOCKS:
        if not _in_vectors(b, a):
            return "rows that are no vectors of 16 bytes"
        if expert_tiles(target, node) is not None:
            return "columns enough for tiles of floating-point weights"
    if _experts_by_mma(node, target):
        return too_many_groups(target, -(-a.ne[1] // MMA_ROWS[-1]), a.ne[2])
    return too_many_groups(target, *(_expert_grid(node) or ids.ne)[:2])


def _rows_of_all_experts(group: Group, target: Target) -> str | None:
    if "glu" in group and any(_experts_by_mma(product.node, target) for product in group.products):
        return "many columns"
    found = [_rows_of_experts(product.node, target) for product in group.products]
    return next(filter(None, found), None)


def _experts_by_mma(node: Tensor, target: Target) -> bool:
    """Whether int8 tensor cores multiply: with more pairs per expert than one pass of dp4a takes."""
    a, ids = node.operand(0), node.operand(2)
    if a.dtype not in IN_SUB_BLOCKS or target.capability < MMA:
        return False
    return ids.ne[0] * ids.ne[1] > FEW_COLUMNS * a.ne[2]


def _expert_grid(node: Tensor) -> tuple[int, int, int] | None:
    """Return the groups over pairs and over experts, and the columns of each; `None`: a group per pair."""
    n_experts, (slots, tokens) = node.operand(0).ne[2], node.operand(2).ne[:2]
    n_pairs = slots * tokens
    if n_pairs < MIN_COLUMNS_OF_EXPERT * n_experts or node.operand(0).dtype not in IN_SUB_BLOCKS:
        return None
    columns = 4 if n_pairs < 4 * n_experts else 8
    return min(-(-2 * n_pairs // (columns * n_experts)), -(-n_pairs // columns)), n_experts, columns


@RULES.rule(Op.MUL_MAT_ID, *PRODUCT, keeps_operand, on=_rows_of_experts)
def _mul_mat_id(node: Tensor, target: Target) -> list[Step | PreparedOperand]:
    return _experts(target, node, Mem.of(node), None)


@RULES.rule(("glu_id", "mul_mat_id_add"), on=_rows_of_all_experts)
def _fused_experts(group: Group, target: Target) -> list[Step | PreparedOperand]:
    return _experts(target, group.products[0].node, Mem.of(group.result), *of_experts(group))


def _experts(
    target: Target, node: Tensor, d: Mem, bias: Mem | None, glu: Glu | None = None
) -> list[Step | PreparedOperand]:
    """Return the steps of products with chosen experts, plus biases, or of gated units of two such."""
    a, b, ids = map(node.operand, range(3))
    slots, tokens = ids.ne[:2]
    weights = [Mem.of(a)] if glu is None else [Mem.of(a), glu.a]
    mine = [Mem.of(a), bias or d, *([Mem.of(a), d] if glu is None else [glu.a, glu.bias or d])]
    numbers = (0.0, 0.0) if glu is None else (glu.alpha, glu.limit)
    also: dict[str, str | int] = {} if bias is None else {"ADDED": 1}
    if glu is not None:
        also["GLU"] = f"glu_{glu.op.name.lower()}"
    ends = [Mem.of(ids), BadIndex(node, a.ne[2]).mem, d]
    if a.dtype not in IN_SUB_BLOCKS:
        x, _, split = _shape(target, a, 1, slots * tokens, 512 // a.dtype.type_size)
        mems = [*mine, Mem.of(b), *ends]
        return [_kernel("mul_mat_id_vec16", mems, numbers, (x, slots, tokens), **split, **also)]
    grid_of_experts = _expert_grid(node)
    if grid_of_experts is None:
        forms, activations, fused = _activations(b, 1)
        x, _, split = _shape(target, a, 1, slots * tokens, TILE)
        mems = [*mine, *activations, *ends]
        also |= split | _align(*weights) | fused
        return [*forms, _kernel("mul_mat_id_q8", mems, (b.ne[1], *numbers), (x, slots, tokens), **also)]
    y, n_experts, columns = grid_of_experts
    pairs = Scratch(4 * slots * tokens).mem(DType.I32, (slots * tokens, 1, 1, 1))
    firsts = Scratch(4 * n_experts + 4).mem(DType.I32, (n_experts + 1, 1, 1, 1))
    sort = _kernel("sort_pairs", [*ends[:2], pairs, firsts], (), (n_experts, 1, 1))
    forms, activations, fused = _activations(b, 0)
    forms.insert(0, PreparedOperand(ids, f"pairs of {n_experts}", [sort], (pairs, firsts)))
    read = [*activations, pairs, firsts, d]
    if _experts_by_mma(node, target):
        t = tile(target, a, slots * tokens, n_experts=n_experts)
        y = min(-(-2 * slots * tokens // (t.columns * n_experts)), -(-slots * tokens // t.columns))
        grid = y, -(-a.ne[1] // t.rows), n_experts
        kernel, also = kernels(PACKAGE)["mul_mat_experts_mma"], _mma_flags(weights[0], t) | also
        made = launch(kernel, [*mine[:2], *read, slots, b.ne[1]], grid, MMA_WG, **also)
        return [*forms, replace(made, shared=t.shared)]
    x, _, split = _shape(target, a, columns, y * n_experts, TILE)
    also |= split | _align(*weights) | fused | {"LISTED": 1}
    counts, grid = (slots, b.ne[1]), (x, y, n_experts)
    return [*forms, _kernel("mul_mat_experts_q8", [*mine, *read], (*counts, *numbers), grid, **also)]


# -- many columns, by cuBLAS -----------------------------------------------------------------------


def _not_dense(target: Target, node: Tensor, d: Tensor) -> str | None:
    """Return why cuBLAS does not compute a product to `d`."""
    a, b = node.operand(0), node.operand(1)
    if not target.blas:
        return "no cuBLAS"
    if _way(target, a, b.ne[1]) is not _Way.BLAS:
        return "few columns"
    if a.dtype not in FLOATS and a.ne[0] % 8:
        return "rows of quantised weights that are no multiple of 8 elements"
    return cannot_describe(Mem.of(d))


def _by_blas(target: Target, node: Tensor, d: Mem, forms: dict[DType, Mem]) -> list[Step | PreparedOperand]:
    """Return the steps of a product by cuBLAS: conversion of operands to one type, then its calls.

    Args:
        target: The card.
        node: The product.
        d: The result.
        forms: Converted activations by type; conversions made here are added.
    """
    a, b = node.operand(0), node.operand(1)
    kind = a.dtype if a.dtype in FLOATS else DType.F16
    is_precise = node.params.get("prec") == Prec.F32
    if is_precise:
        kind = DType.F32
    steps: list[Step | PreparedOperand] = []
    mem_a, mem_b = Mem.of(a), Mem.of(b)
    if kind is not a.dtype or cannot_describe(mem_a):
        made, mem_a = _converted(target, a, kind)
        steps.append(made)
    if kind in forms:
        mem_b = forms[kind]
    elif kind is not b.dtype or cannot_describe(mem_b):
        made, mem_b = _converted(target, b, kind)
        forms[kind] = mem_b
        steps.append(PreparedOperand(b, kind.name, [made], (mem_b,)))
    may_round = target.tf32 and not is_precise and node.params.get("prec_src1") != Prec.F32
    return [*steps, *gemms(mem_a, mem_b, d, tf32=may_round and kind is DType.F32)]


def _converted(target: Target, t: Tensor, kind: DType) -> tuple[Launch, Mem]:
    """Return the launch that makes a contiguous copy of a tensor as another type, and the copy."""
    whole = Scratch(t.n_elements * kind.type_size).mem(kind, t.ne)
    if t.dtype.is_quantized and kind is DType.F16:
        one = t.is_contiguous() and t.n_elements < 1 << 31
        ne = (t.n_elements, 1, 1, 1) if one else t.ne
        grid = min(-(-ne[0] // 8 // 256), 1 << 20), min(ne[1] * ne[2] * ne[3], 1 << 15), 1
        mems = [m.window(ne) for m in (Mem.of(t), whole)]
        return launch(kernels(PACKAGE)["dequantize"], mems, grid, 256, ONE_ROW=int(one)), whole
    return copy(target, Mem.of(t), whole), whole


def _many_columns(node: Tensor, target: Target) -> str | None:
    if node.nb[0] != DType.F32.type_size:
        return "the result is not in rows of f32"
    return _not_dense(target, node, node)


@RULES.rule(Op.MUL_MAT, *PRODUCT, keeps_operand, on=_many_columns)
def _dense(node: Tensor, target: Target) -> list[Step | PreparedOperand]:
    return _by_blas(target, node, Mem.of(node), {})


def _two_with_sums(group: Group, target: Target) -> str | None:
    """Condition of two cuBLAS products in the memory of their sums, and one kernel for biases and GLU."""
    if not {"gate_add", "up_add"} <= set(group.parts):
        return "not both products have a bias"
    read = [t for part in ("gate", "gate_add", "up", "up_add") for t in group.outside[part]]
    if any(overlap(group[part], t) for part in ("gate_add", "up_add") for t in read):
        return "a sum overlaps an operand"
    for part in ("gate", "up"):
        why = _not_dense(target, group[part], group[f"{part}_add"])
        if why is not None:
            return why
    return None


@RULES.rule("glu", on=_two_with_sums)
def _dense_glu(group: Group, target: Target) -> list[Step | PreparedOperand]:
    steps: list[Step | PreparedOperand] = []
    mems: list[Mem] = []
    forms: dict[DType, Mem] = {}  # both products read the same activations
    for part in ("gate", "up"):
        added, added_to = group[f"{part}_add"], group.other(f"{part}_add")
        steps += _by_blas(target, group[part], Mem.of(added), forms)
        mems += [Mem.of(added), Mem.of(added_to).tiled_to(added.ne)]
    p, d = group["glu"].params, Mem.of(group.result)
    numbers = p.get("alpha", 0.0), p.get("limit", 0.0)
    name = f"glu_{p['op'].name.lower()}"
    kernel = kernels(PACKAGE)["glu_added"]
    return [*steps, mapped(target, kernel, flattened(target, [*mems, d]), *numbers, FN=name)]
