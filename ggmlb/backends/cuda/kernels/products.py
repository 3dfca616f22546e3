"""Products of matrices: dp4a or vector loads for few columns, cuBLAS for many."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ggmlb.backends.common.fusion import Group
from ggmlb.backends.common.rules import FLOATS
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.cuda.gemm import cannot_describe, gemms
from ggmlb.backends.gpu import BadIndex, Launch, Scratch
from ggmlb.backends.gpu.launch import flattened, launch, mapped
from ggmlb.backends.gpu.lowering.copy import copy
from ggmlb.backends.gpu.lowering.matmul import READ_IN_EIGHTS, Glu, gated
from ggmlb.backends.gpu.source import kernels, types_with
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Prec
from ggmlb.core.placement import overlap
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.cuda.kernels.lowering import Lowering, Step

IN_PIECES = types_with("INTEGERS", "pieces.h", package=__package__ or "")
"""Types that the kernels multiply as integers."""

FEW_COLUMNS = 8
"""Most columns for one pass over floating-point weights."""

FEW_COLUMNS_Q8 = 32
"""Up to so many, passes of eight over quantised weights should beat making f16 of them first: an estimate
from the instructions' throughput, to be measured."""

GLU_COLUMNS = 2
"""Most columns for which one kernel computes both products of a gated unit; beyond, sums spill."""

WG = 128
WARPS = WG // 32
GROUPS_EACH = 3
"""Groups for each multiprocessor, at least, before warps have rows to themselves: what fits at once."""
TILE = 1024
"""Elements of a row per warp and iteration."""
FUSED = 8192
"""Up to so many activations, a group makes 8 bits of a row by itself: more leave little shared memory."""


def _kernel(
    name: str,
    mems: list[Mem],
    numbers: tuple[int | float, ...],
    groups: tuple[int, int, int],
    **flags: str | int,
) -> Launch:
    package = __package__ or ""
    return launch(kernels(package)[name], [*mems, *numbers], groups, WG, **flags)


def _shape(
    lw: Lowering, a: Tensor | Mem, n: int, n_matrices: int, tile: int
) -> tuple[int, int, dict[str, int]]:
    """Return groups over rows and columns, and how a group's warps share the work.

    Where rows are too few to keep all multiprocessors busy, the warps of a group share rows.
    """
    columns = 1 << (min(n, 8) - 1).bit_length()
    rows = 4
    n_groups = -(-n // columns)
    split = 1
    while split < WARPS and split * tile < a.ne[0]:
        if -(-a.ne[1] * split // (rows * WARPS)) * n_groups * n_matrices >= GROUPS_EACH * lw.target.n_units:
            break
        split *= 2
    return -(-a.ne[1] * split // (rows * WARPS)), n_groups, {
        "ROWS": rows, "COLUMNS": columns, "SPLIT": split, "ONE_MATRIX": int(n_matrices == 1),
    }  # fmt: skip


def _at_once(lw: Lowering, columns: int, x: int, others: int) -> int:
    """Return how many of x groups, for each of the others, are launched: no more than run at once.

    With many columns, that hangs on the registers that the compiler takes; then each has its rows.
    """
    return min(x, max(1, -(-4 * lw.target.n_units // others))) if columns <= 2 else x


def _activations(lw: Lowering, b: Tensor, n: int) -> tuple[list[Step], tuple[Mem, Mem], dict[str, int]]:
    """Return the steps before a product, its activations, and what it is told of them."""
    if n == 1 and b.ne[0] <= FUSED and _in_vectors(b):
        return [], (Mem.of(b), Mem.of(b)), {"FUSED": FUSED}
    steps, (numbers, facts) = _q8(lw, b)
    return steps, (numbers, facts), {"FUSED": 0}


def _q8(lw: Lowering, b: Tensor) -> tuple[list[Step], tuple[Mem, ...]]:
    """Return activations in 8 bits: the numbers, and the pieces' steps and sums (activations_q8.h)."""

    def make() -> tuple[list[Step], tuple[Mem, ...]]:
        n_rows, padded = b.ne[1] * b.ne[2] * b.ne[3], -(-b.ne[0] // 256) * 256
        numbers = Scratch(n_rows * padded).mem(DType.I8, (padded, n_rows, 1, 1))
        facts = Scratch(n_rows * padded // 4).mem(DType.I32, (padded // 16, n_rows, 1, 1))
        groups = min(-(-n_rows * b.ne[0] // 32 // (WG // 8)), 1 << 16)
        step = _kernel("quantize_q8", [Mem.of(b), numbers, facts], (), (max(groups, 1), 1, 1))
        return [step], (numbers, facts)

    return lw.prepared(b, "q8", make)


def _align(*weights: Tensor | Mem) -> dict[str, int]:
    """Return the power of two, up to 16, that all rows begin at a multiple of."""
    return {"ALIGN": math.gcd(16, *(x for a in weights for x in (a.offset, *a.nb[1:])))}


def _in_vectors(b: Tensor, *weights: Tensor | Mem) -> bool:
    """Whether rows of all are whole numbers of aligned vectors of 16 bytes, and b is f32."""
    if b.dtype is not DType.F32 or not b.is_contiguous_rows():
        return False
    if any(a.dtype not in FLOATS or a.ne[0] * a.dtype.type_size % 16 for a in weights):
        return False
    return not any(x % 16 for t in (b, *weights) for x in (t.offset, *t.nb[1:]))


def mul_mat(lw: Lowering, node: Tensor) -> list[Step] | None:
    """Return the steps of a product, or None where the portable kernel is to be used."""
    a, b = node.operand(0), node.operand(1)
    if not a.is_contiguous_rows() or b.dtype not in FLOATS or node.nb[0] != 4:
        return None
    if _is_small(a, b):
        return _small(lw, Mem.of(a), b, Mem.of(node))
    return _by_blas(lw, a, b, Mem.of(node), node.params.get("prec")) if lw.blas else None


def _is_small(a: Tensor | Mem, b: Tensor) -> bool:
    """Whether a product has too few columns for cuBLAS."""
    return b.ne[1] <= (FEW_COLUMNS_Q8 if a.dtype in IN_PIECES else FEW_COLUMNS)


def _small(
    lw: Lowering, a: Mem, b: Tensor, d: Mem, bias: Mem | None = None, glu: Glu | None = None
) -> list[Step] | None:
    """Return the steps of a product of few columns, plus a bias, or of a gated unit of that and another."""
    n, n_matrices = b.ne[1], b.ne[2] * b.ne[3]
    weights = [a] if glu is None else [a, glu.a]
    others = [bias or d, *([a, d] if glu is None else [glu.a, glu.bias or d]), d]
    numbers = b.ne[2] // a.ne[2], b.ne[3] // a.ne[3], *((0.0, 0.0) if glu is None else (glu.alpha, glu.limit))
    also: dict[str, str | int] = {"ADDED": 1} if bias is not None else {}
    if glu is not None:
        also["GLU"] = f"glu_{glu.op.name.lower()}"
    if a.dtype in IN_PIECES:
        steps, (q, facts), fused = _activations(lw, b, n)
        x, y, flags = _shape(lw, a, n, n_matrices, TILE)
        x = _at_once(lw, flags["COLUMNS"], x, y * n_matrices)
        flags |= _align(*weights) | fused
        mems = [a, q, facts, *others]
        return [*steps, _kernel("mul_mat_q8", mems, numbers, (x, y, n_matrices), **flags, **also)]
    if not _in_vectors(b, *weights):
        return None
    x, y, flags = _shape(lw, a, n, n_matrices, 512 // a.dtype.type_size)
    mems = [a, Mem.of(b), *others]
    return [_kernel("mul_mat_vec16", mems, numbers, (x, y, n_matrices), **flags, **also)]


def mul_mat_add(lw: Lowering, group: Group) -> list[Step] | None:
    """Return the steps of a product and what is added to it, or None where there is no kernel for both.

    cuBLAS' products are not fused: what it adds would have to be copied to the result first.
    """
    a, b = map(group["mul_mat"].operand, (0, 1))
    if not a.is_contiguous_rows() or not _is_small(a, b):
        return None
    d = Mem.of(group.result)
    return _small(lw, Mem.of(a), b, d, Mem.of(group.other("add")).tiled_to(d.ne))


def glu(lw: Lowering, group: Group) -> list[Step] | None:
    """Return the steps of a gated unit of two products, or None where it is not worth it.

    With cuBLAS, only if both have a bias: two products, and one kernel for the rest.
    """
    a, b = map(group["gate"].operand, (0, 1))
    if not a.is_contiguous_rows():
        return None
    if _is_small(a, b):
        weights, bias, other = gated(group)
        few = b.ne[1] <= GLU_COLUMNS
        return _small(lw, weights, b, Mem.of(group.result), bias, other) if few else None
    if not lw.blas or not {"gate_add", "up_add"} <= set(group.parts):
        return None
    # The products go where the sums would, which are left out.
    read = [t for part in ("gate", "gate_add", "up", "up_add") for t in group.outside[part]]
    if any(overlap(group[part], t) for part in ("gate_add", "up_add") for t in read):
        return None
    steps: list[Step] = []
    mems: list[Mem] = []
    for part in ("gate", "up"):
        added, added_to = group[f"{part}_add"], group.other(f"{part}_add")
        a, b = map(group[part].operand, (0, 1))
        found = _by_blas(lw, a, b, Mem.of(added), group[part].params.get("prec"))
        if found is None:
            return None
        steps += found
        mems += [Mem.of(added), Mem.of(added_to).tiled_to(added.ne)]
    p, d = group["glu"].params, Mem.of(group.result)
    numbers = p.get("alpha", 0.0), p.get("limit", 0.0)
    name = f"glu_{p['op'].name.lower()}"
    kernel = kernels(__package__ or "")["glu_added"]
    return [*steps, mapped(lw.target, kernel, flattened(lw.target, [*mems, d]), *numbers, FN=name)]


def _by_blas(lw: Lowering, a: Tensor, b: Tensor, d: Mem, prec: Prec | None) -> list[Step] | None:
    """Return the steps of a dense product: operands in one type, then cuBLAS."""
    if a.dtype not in READ_IN_EIGHTS or (a.ne[0] % 8 and a.dtype not in FLOATS) or cannot_describe(d):
        return None
    kind = a.dtype if a.dtype in FLOATS else DType.F16
    if prec == Prec.F32:
        kind = DType.F32
    steps: list[Step] = []
    mem_a, mem_b = Mem.of(a), Mem.of(b)
    if kind is not a.dtype or cannot_describe(mem_a):
        made, mem_a = _converted(lw, a, kind)
        steps += made
    if kind is not b.dtype or cannot_describe(mem_b):
        made, (mem_b,) = lw.prepared(b, kind.name, lambda: _one(_converted(lw, b, kind)))
        steps += made
    return [*steps, *gemms(mem_a, mem_b, d)]


def _one(found: tuple[list[Step], Mem]) -> tuple[list[Step], tuple[Mem, ...]]:
    return found[0], (found[1],)


def _converted(lw: Lowering, t: Tensor, kind: DType) -> tuple[list[Step], Mem]:
    """Return a contiguous copy of a tensor as another type, and the step that makes it."""
    whole = Scratch(t.n_elements * kind.type_size).mem(kind, t.ne)
    if t.dtype.is_quantized and kind is DType.F16:
        one = t.is_contiguous() and t.n_elements < 1 << 31
        ne = (t.n_elements, 1, 1, 1) if one else t.ne
        grid = min(-(-ne[0] // 8 // 256), 1 << 20), min(ne[1] * ne[2] * ne[3], 1 << 15), 1
        mems = [m.window(ne) for m in (Mem.of(t), whole)]
        return [launch(kernels(__package__ or "")["dequantize"], mems, grid, 256, ONE_ROW=int(one))], whole
    return [copy(lw.target, Mem.of(t), whole)], whole


def mul_mat_id(lw: Lowering, node: Tensor) -> list[Step] | None:
    """Return the steps of a product with matrices chosen by row, or None for the portable kernel."""
    a, b, ids = node.operand(0), node.operand(1), node.operand(2)
    if not a.is_contiguous_rows() or b.dtype not in FLOATS:
        return None
    slots, tokens = ids.ne[0], ids.ne[1]
    bad = BadIndex(node, a.ne[2]).mem
    if a.dtype in IN_PIECES:
        steps, (numbers, facts), fused = _activations(lw, b, 1)
        x, _, flags = _shape(lw, a, 1, slots * tokens, TILE)
        x = _at_once(lw, 1, x, slots * tokens)
        mems = [Mem.of(a), numbers, facts, Mem.of(ids), bad, Mem.of(node)]
        found = _kernel("mul_mat_id_q8", mems, (b.ne[1],), (x, slots, tokens), **flags, **_align(a), **fused)
        return [*steps, found]
    if not _in_vectors(b, a):
        return None
    x, _, flags = _shape(lw, a, 1, slots * tokens, 512 // a.dtype.type_size)
    mems = [Mem.of(a), Mem.of(b), Mem.of(ids), bad, Mem.of(node)]
    return [_kernel("mul_mat_id_vec16", mems, (), (x, slots, tokens), **flags)]
