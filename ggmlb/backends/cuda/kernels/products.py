"""Products of matrices: dp4a or vector loads for few columns, cuBLAS for many."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ggmlb.backends.cuda.gemm import cannot_describe, gemms
from ggmlb.dtypes import DType
from ggmlb.enums import Prec
from ggmlb.kernels import Launch, Mem, Scratch, kernels
from ggmlb.kernels.launch import launch
from ggmlb.kernels.lowering.base import FLOATS
from ggmlb.kernels.lowering.copy import copy
from ggmlb.kernels.lowering.matmul import READ_IN_EIGHTS

if TYPE_CHECKING:
    from ggmlb.backends.cuda.kernels.lowering import Lowering, Step
    from ggmlb.tensor import Tensor

IN_PIECES = frozenset({
    DType.Q4_0, DType.Q4_1, DType.Q5_0, DType.Q5_1, DType.Q8_0, DType.Q2_K, DType.Q3_K, DType.Q4_K,
    DType.Q5_K, DType.Q6_K, DType.IQ4_NL, DType.IQ4_XS, DType.MXFP4,
})  # fmt: skip
"""Types whose numbers `integers_*` in pieces.h gives."""

FEW_COLUMNS = 8
"""Up to so many, one pass over floating-point weights does."""

FEW_COLUMNS_Q8 = 32
"""Up to so many, passes of eight over quantised weights should beat making f16 of them first: an estimate
from the instructions' throughput, to be measured."""

WG = 128
WARPS = WG // 32
GROUPS_EACH = 3
"""Groups for each multiprocessor, at least, before warps have rows to themselves: what fits at once."""
TILE = 1024
"""Elements of a row that a warp takes at once."""


def _kernel(
    name: str, mems: list[Mem], numbers: tuple[int, ...], groups: tuple[int, int, int], **flags: int
) -> Launch:
    package = __package__ or ""
    return launch(kernels(package)[name], [*mems, *numbers], groups, WG, **flags)


def _shape(lw: Lowering, a: Tensor, n: int, n_matrices: int, tile: int) -> tuple[int, int, dict[str, int]]:
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


def _align(a: Tensor) -> dict[str, int]:
    """Return the power of two, up to 16, that all rows begin at a multiple of."""
    return {"ALIGN": math.gcd(16, a.offset, *a.nb[1:])}


def _in_vectors(a: Tensor, b: Tensor) -> bool:
    """Whether rows of both are whole numbers of aligned vectors of 16 bytes, and b is f32."""
    if a.dtype not in FLOATS or b.dtype is not DType.F32 or a.ne[0] * a.dtype.type_size % 16:
        return False
    return not any(x % 16 for t in (a, b) for x in (t.offset, *t.nb[1:]))


def mul_mat(lw: Lowering, node: Tensor) -> list[Step] | None:
    """Return the steps of a product, or None where the portable kernel is to be used."""
    a, b = node.src
    assert a is not None and b is not None
    n, n_matrices = b.ne[1], b.ne[2] * b.ne[3]
    ratios = b.ne[2] // a.ne[2], b.ne[3] // a.ne[3]
    if not a.is_contiguous_rows() or b.dtype not in FLOATS or node.nb[0] != 4:
        return None
    if a.dtype in IN_PIECES and n <= FEW_COLUMNS_Q8:
        steps, (numbers, facts) = _q8(lw, b)
        x, y, flags = _shape(lw, a, n, n_matrices, TILE)
        mems = [Mem.of(a), numbers, facts, Mem.of(node)]
        return [*steps, _kernel("mul_mat_q8", mems, ratios, (x, y, n_matrices), **flags, **_align(a))]
    if n <= FEW_COLUMNS:
        if not _in_vectors(a, b):
            return None
        x, y, flags = _shape(lw, a, n, n_matrices, 512 // a.dtype.type_size)
        mems = [Mem.of(a), Mem.of(b), Mem.of(node)]
        return [_kernel("mul_mat_vec16", mems, ratios, (x, y, n_matrices), **flags)]
    return _by_blas(lw, a, b, node) if lw.blas else None


def _by_blas(lw: Lowering, a: Tensor, b: Tensor, node: Tensor) -> list[Step] | None:
    """Return the steps of a dense product: operands in one type, then cuBLAS."""
    if a.dtype not in READ_IN_EIGHTS or (a.ne[0] % 8 and a.dtype not in FLOATS):
        return None
    kind = a.dtype if a.dtype in FLOATS else DType.F16
    if node.params.get("prec") == Prec.F32:
        kind = DType.F32
    steps: list[Step] = []
    mem_a, mem_b, mem_d = Mem.of(a), Mem.of(b), Mem.of(node)
    if kind is not a.dtype or cannot_describe(mem_a):
        made, mem_a = _converted(lw, a, kind)
        steps += made
    if kind is not b.dtype or cannot_describe(mem_b):
        made, (mem_b,) = lw.prepared(b, kind.name, lambda: _one(_converted(lw, b, kind)))
        steps += made
    if cannot_describe(mem_d):
        return None
    return [*steps, *gemms(mem_a, mem_b, mem_d)]


def _one(found: tuple[list[Step], Mem]) -> tuple[list[Step], tuple[Mem, ...]]:
    return found[0], (found[1],)


def _converted(lw: Lowering, t: Tensor, kind: DType) -> tuple[list[Step], Mem]:
    """Return a contiguous copy of a tensor as another type, and the step that makes it."""
    whole = Scratch(t.n_elements * kind.type_size).mem(kind, t.ne)
    if t.dtype.is_quantized and kind is DType.F16:
        groups = min(-(-t.n_elements // 8 // 256), 1 << 20)
        package = __package__ or ""
        return [launch(kernels(package)["dequantize"], [Mem.of(t), whole], (groups, 1, 1), 256)], whole
    return [copy(lw.target, Mem.of(t), whole)], whole


def mul_mat_id(lw: Lowering, node: Tensor) -> list[Step] | None:
    """Return the steps of a product with matrices chosen by row, or None for the portable kernel."""
    a, b, ids = node.src
    assert a is not None and b is not None and ids is not None
    if not a.is_contiguous_rows() or b.dtype not in FLOATS:
        return None
    slots, tokens = ids.ne[0], ids.ne[1]
    if a.dtype in IN_PIECES:
        steps, (numbers, facts) = _q8(lw, b)
        x, _, flags = _shape(lw, a, 1, slots * tokens, TILE)
        mems = [Mem.of(a), numbers, facts, Mem.of(ids), Mem.of(node)]
        found = _kernel("mul_mat_id_q8", mems, (b.ne[1],), (x, slots, tokens), **flags, **_align(a))
        return [*steps, found]
    if not _in_vectors(a, b):
        return None
    x, _, flags = _shape(lw, a, 1, slots * tokens, 512 // a.dtype.type_size)
    mems = [Mem.of(a), Mem.of(b), Mem.of(ids), Mem.of(node)]
    return [_kernel("mul_mat_id_vec16", mems, (), (x, slots, tokens), **flags)]
