"""Lowering of matrix products: choice of the kernel, quantised activations, and fused epilogues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ggmlb.backends.common.fusion import Group, Product
from ggmlb.backends.common.rules import F32, FLOATS, RESULT, in_rows, keeps_operand, operands
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.llvm import prefetching
from ggmlb.backends.llvm.codegen.emit import Level
from ggmlb.backends.llvm.codegen.library import library
from ggmlb.backends.llvm.kernels import (
    activations,
    byte_tiles,
    convert,
    float_bands,
    float_tiles,
    interleaved,
    interleaved_products,
    matvec,
    out_prod,
    tiles,
)
from ggmlb.backends.llvm.kernels.blocks import FORMATS
from ggmlb.backends.llvm.kernels.driver import CHUNK_BITS
from ggmlb.backends.llvm.lowering.context import READ, RULES, LoweringContext, name
from ggmlb.backends.llvm.lowering.elementwise import PARAMS, plain_function
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import GluOp, Op
from ggmlb.core.tensor import Tensor

_FLOAT_ROWS = {1: 4, 2: 4, 3: 4, 4: 2, 5: 2, 6: 2, 7: 2, 8: 2}
_BLOCK_ROWS = 8
"""Rows of a weight multiplied together: of floats, by the rows of activations; and of quantised blocks."""

CACHED_NBYTES = 1 << 24
"""Largest float weight that stays in caches [bytes]; of those, one row at a time is fastest."""

FEW, FEW_FLOATS = 4, 8
"""Largest number of rows of activations for which a weight is read in place: of blocks, and of floats."""

FEW_STRIPS, FEW_PACKED = 8, 5
"""The same in strips: of blocks, if a vector has 16 rows (but whole bytes are tiles already, and types with
many sums lack registers); and of floats, as AVX2 has no registers for more."""

LEAST_PAIRED = 4
"""Least number of rows of activations of which pairs of bfloat16 are multiplied."""

PANEL_NBYTES = 1 << 19
"""Size of a panel of quantised activations, multiplied by the whole weight before the next one [bytes]."""

PANEL_ROWS = 32
"""Least rows of activations of a panel, as the weight is packed again for each."""

MAX_MATRICES = 1 << CHUNK_BITS - 1
"""Largest number of matrices of a product: each is at least one chunk of a step."""

NO_EPILOGUE = tiles.Epilogue()

Kernel = Callable[..., None]


# -- products --------------------------------------------------------------------------------------


def _keeps_operand(node: Tensor) -> str | None:
    return keeps_operand(node) if node.operand(0).dtype.is_quantized else None  # floats are not converted


_PRODUCT = operands(READ, FLOATS, out=F32), in_rows(0, 1, RESULT), _keeps_operand


def _countable(node: Tensor) -> str | None:
    n = node.ne[2] * node.ne[3]
    return None if n <= MAX_MATRICES else f"a product of {n} matrices: at most {MAX_MATRICES}"


def _three_dimensions(node: Tensor) -> str | None:
    if node.operand(0).ne[3] != 1:
        return "src0 has more than three dimensions"
    return None


@RULES.rule(Op.MUL_MAT, *_PRODUCT, _countable)
def _mul_mat(node: Tensor, ctx: LoweringContext) -> None:
    product(node, ctx)


def product(
    node: Tensor,
    ctx: LoweringContext,
    result: Tensor | None = None,
    tail: tiles.Epilogue = NO_EPILOGUE,
    added: Tensor | None = None,
) -> None:
    """Emit the steps of a matrix product to `result`; its epilogue `tail` may add the tensor `added`.

    Args:
        node: The product.
        ctx: The context to emit to.
        result: The epilogue's result; default: the product's.
        tail: The epilogue; only if `can_have_epilogue(node)`.
        added: The bias or residual that the epilogue adds.
    """
    a, b = node.operand(0), node.operand(1)
    quantized, packed, level = a.dtype.is_quantized, is_interleaved(a), ctx.level
    k, m, n = *a.ne[:2], b.ne[1]
    pairs = n >= LEAST_PAIRED and _in_pairs(a, b, level)
    x = _activations(a, b, ctx, not is_many(node), pairs)
    types, x_nb = (name(a), x.dtype), x.nb
    ahead = (
        prefetching.Ahead(0, 0) if is_many(node) or pairs else prefetching.ahead(ctx.library, name(a), packed)
    )
    to = node if result is None else result
    y, y_nb = ctx.address(to), to.nb
    matrices, panels, extents = b.ne[2] * b.ne[3], 1, b.ne[2:]

    def launch(kernel: Kernel, params: Sequence[Any], first: int, count: int, parts: int, *more: int) -> None:
        args = (
            ctx.address(a), *a.nb[1:], x.address + first * x_nb[1], *x_nb[1:], y + first * y_nb[1], *y_nb[1:],
            k, m, count, *extents, b.ne[2] // a.ne[2] * panels, b.ne[3] // a.ne[3], parts,
            ahead.nbytes, *more,
        )  # fmt: skip
        ctx.launch(kernel, params, args, parts * matrices)

    if not quantized and not packed and float_bands.suits(level, k, m, n, pairs):
        parts = _parts(ctx, matrices, k * m * n / 25, -(-m // float_bands.rows_at_once(level, n)))
        nbytes = float_bands.scratch_nbytes(level, n)
        scratch = ctx.scratch(nbytes * ctx.n_threads)
        launch(float_bands.floats, (*types, float_bands.columns_at_once(n)), 0, n, parts, scratch, nbytes)
    elif is_many(node) or pairs:
        if quantized and matrices == 1 and (added is None or added.ne[1] == 1):
            panels = matrices = _panels(n, x_nb[1], byte_tiles.rows_together(level, name(a)))
        if panels > 1:  # panels are matrices that share the weight
            n //= panels
            x_nb, y_nb = (1, x_nb[1], n * x_nb[1], 0), (4, y_nb[1], n * y_nb[1], 0)
            extents = (panels, 1)
        kernels = byte_tiles if quantized else float_tiles
        nbytes = _whole_lines(kernels.scratch_nbytes(level, name(a), k))
        scratch = ctx.scratch(nbytes * ctx.n_threads)
        work = k * m * n / (60 if quantized else 25)
        parts = _parts(ctx, matrices, work, -(-m // kernels.tile_rows(level, name(a))))
        params = (*types, packed, kernels.columns(level, name(a), n), tail)
        more = () if added is None else (ctx.address(added), added.nb[1] if added.ne[1] > 1 else 0)
        launch(kernels.many, params, 0, n, parts, scratch, nbytes, *more)
    else:
        for first in range(0, n, 8):
            count = min(8, n - first)
            rows = rows_at_once(a, count)
            rows = rows if packed or m >= rows else 1
            parts = _parts(ctx, matrices, k * m * (count + 1) / 40, -(-m // rows))
            if packed:
                launch(interleaved_products.few, (name(a), count, x.dtype, ahead.hint), first, count, parts)
            else:
                launch(matvec.few, (name(a), rows, count, x.dtype, ahead.hint), first, count, parts)


def is_many(node: Tensor) -> bool:
    """Whether a product has enough rows of activations to pack the weight (GEMM, not GEMV)."""
    a, b = node.operand(0), node.operand(1)
    few = FEW if a.dtype.is_quantized else FEW_PACKED if is_interleaved(a) else FEW_FLOATS
    if a.dtype.is_quantized and is_interleaved(a) and library().target.level.lanes == interleaved.ROWS:
        form = FORMATS[name(a)]
        few = FEW_STRIPS if form.together <= 4 and not form.wide else few
    return b.ne[1] > few


def can_have_epilogue(node: Tensor) -> bool:
    """Whether a product can have an epilogue: it must be a GEMM (`is_many`) that writes each element once."""
    a = node.operand(0)
    if not is_many(node) or RULES.declines(node) is not None:
        return False
    return a.dtype.is_quantized or a.ne[0] <= float_tiles.depth(is_interleaved(a))


def is_interleaved(weight: Tensor) -> bool:
    """Whether a weight is stored in strips of 16 interleaved rows (`LLVM_Repacked`)."""
    return weight.buffer is not None and bool(weight.buffer.packing(weight))


def rows_at_once(weight: Tensor, n: int) -> int:
    """Return the number of weight rows that a kernel multiplies together, for `n` rows of activations."""
    if is_interleaved(weight):
        return interleaved.ROWS
    if weight.dtype.is_quantized:
        return _BLOCK_ROWS
    return 1 if n == 1 and weight.nbytes <= CACHED_NBYTES else _FLOAT_ROWS[n]


def _panels(n: int, row_nbytes: int, together: int) -> int:
    """Return the number of panels to divide `n` rows of activations into, so that each fits the cache."""
    fits = max(PANEL_NBYTES // row_nbytes, together)
    return next((p for p in range(-(-n // fits), n // PANEL_ROWS + 1) if n % p == 0), 1)


def _parts(ctx: LoweringContext, matrices: int, work: float, most: int) -> int:
    """Return the number of chunks per matrix, at most `most`; `work`: time of one matrix [ns]."""
    chunks = ctx.chunks(work * matrices, most * matrices)
    return max(1, -(-chunks // matrices))


class _Activations(NamedTuple):
    """The activations of a product as its kernels read them: address, byte strides and type."""

    address: int
    nb: tuple[int, int, int, int]
    dtype: str


def _activations(a: Tensor, b: Tensor, ctx: LoweringContext, few: bool, pairs: bool = False) -> _Activations:
    """Return the activations `b` as kernels for weight `a` read them; quantise them first if necessary.

    Args:
        a: The weight.
        b: The activations.
        ctx: The context to emit to.
        few: Whether the weight is read in place.
        pairs: Whether pairs of bfloat16 are multiplied, to which the activations are rounded, as in ggml.
    """
    dtype = tiles.PAIRS if pairs else activations.QUANTIZED if a.dtype.is_quantized else name(b)
    if dtype == name(b) or (pairs and b.dtype is DType.BF16):
        return _Activations(ctx.address(b), b.nb, dtype)
    if pairs:
        layout = activations.ActivationLayout(bf16=True)
    elif not few:
        layout = activations.layout_for_tiles(name(a))
    elif is_interleaved(a):
        layout = activations.layout_for_strips(name(a))
    else:
        layout = activations.layout_for_rows(name(a), ctx.level)
    row = layout.row_nbytes(b.ne[0])
    address, are_there = ctx.activations(b, row * b.ne[1] * b.ne[2] * b.ne[3], layout)
    nb = (2 if pairs else 1, row, row * b.ne[1], row * b.ne[1] * b.ne[2])
    if not are_there and pairs:
        to = Mem(None, address, DType.BF16, b.ne, nb)
        ctx.launch_rows(convert.copy, ("bf16", name(b)), (), b.ne, [to, b], 0.1, join=True, cut=True)
    elif not are_there:
        args = (ctx.address(b), *b.nb[1:], *b.ne, address)
        chunks = ctx.chunks(b.n_elements * 0.6, b.n_elements // 32)
        ctx.launch(activations.quantize, (name(b), layout), args, chunks)
    return _Activations(address, nb, dtype)


def _in_pairs(a: Tensor, b: Tensor, level: Level) -> bool:
    """Whether a product can multiply pairs of bfloat16."""
    return level.bf16 and a.dtype is DType.BF16 and a.ne[0] % 2 == 0 and b.nb[1] % 2 == 0


def _whole_lines(nbytes: int) -> int:
    """Round up to whole cache lines [bytes]."""
    return -(-nbytes // 64) * 64


@RULES.rule(Op.MUL_MAT_ID, *_PRODUCT, _three_dimensions)
def _mul_mat_id(node: Tensor, ctx: LoweringContext) -> None:
    """Products with the experts of each token; (token, expert) pairs are first sorted by expert."""
    a, b, ids = node.operand(0), node.operand(1), node.operand(2)
    quantized, packed = a.dtype.is_quantized, is_interleaved(a)
    (k, m, n_matrices), (n_used, n_tokens) = a.ne[:3], ids.ne[:2]
    n = n_used * n_tokens
    few = n <= (FEW if quantized else FEW_FLOATS) * n_matrices
    x = _activations(a, b, ctx, few)
    starts, order = ctx.scratch(8 * (n_matrices + 2)), ctx.scratch(8 * n)
    ctx.launch(
        matvec.sort_experts, (),
        (ctx.address(ids), *ids.nb[:2], n_used, n_tokens, n_matrices, starts, order, *ctx.report),
    )  # fmt: skip
    kernels = byte_tiles if quantized else float_tiles
    rows = rows_at_once(a, 1) if few else kernels.tile_rows(ctx.level, name(a), True)
    rows = rows if packed or m >= rows else 1
    parts = _parts(ctx, n_matrices, k * m * n / n_matrices / 20, -(-m // rows))
    ahead = prefetching.ahead(ctx.library, name(a), packed) if few else prefetching.Ahead(0, 0)
    args: tuple[int, ...] = (
        ctx.address(a), *a.nb[1:3], x.address, *x.nb[1:3], b.ne[1], ctx.address(node), *node.nb[1:3],
        k, m, n_used, parts, starts, order, ahead.nbytes,
    )  # fmt: skip
    if few and packed:
        ctx.launch(interleaved_products.few_experts, (name(a), x.dtype, ahead.hint), args, parts * n_matrices)
    elif few:
        ctx.launch(matvec.few_experts, (name(a), rows, x.dtype, ahead.hint), args, parts * n_matrices)
    else:
        nbytes = _whole_lines(kernels.scratch_nbytes(ctx.level, name(a), k, True))
        args = (*args, ctx.scratch(nbytes * ctx.n_threads), nbytes)
        ctx.launch(kernels.many_experts, (name(a), x.dtype, packed), args, parts * n_matrices)


# -- products with an epilogue ---------------------------------------------------------------------


def _has_epilogue(group: Group) -> str | None:
    """Return why no kernel fuses the group, or `None`; for few rows, `rows_at_once` must divide `m`."""
    products = group.products
    if "unary" in group and plain_function(group["unary"]) is None:
        return f"no fused kernel for {group['unary'].op_desc()}"
    if group.pattern != "glu" and is_many(products[0].node):
        fits = can_have_epilogue(products[0].node)
    else:
        fits = all(_is_few(p, group.result.ne) for p in products)
    fits = fits and _in_rows(group.result) and all(_is_simple(p) for p in products)
    return None if fits else "no fused kernel for these shapes and types"


def _is_simple(product: Product) -> bool:
    node, added, _ = product
    if node.ne[2] * node.ne[3] != 1:
        return False
    return added is None or (_in_rows(added) and added.ne[0] == node.ne[0])


def _is_few(product: Product, ne: tuple[int, ...]) -> bool:
    node = product.node
    weight = node.operand(0)
    if is_many(node) or RULES.declines(node) is not None:
        return False
    return ne[0] % rows_at_once(weight, ne[1]) == 0


def _in_rows(t: Tensor) -> bool:
    return t.dtype is DType.F32 and t.is_contiguous_rows()


@RULES.rule(("mul_mat_add", "mul_mat_unary", "glu"), _has_epilogue)
def _product_group(group: Group, ctx: LoweringContext) -> None:
    result, products = group.result, group.products
    function = plain_function(group["unary"]) if "unary" in group else None
    node, added, _ = products[0]
    if group.pattern != "glu" and is_many(node):
        product(node, ctx, result, tiles.Epilogue(added is not None, function), added)
        return
    weight, x = node.operand(0), node.operand(1)
    k, (m, n) = weight.ne[0], result.ne[:2]
    packed, rows = is_interleaved(weight), rows_at_once(weight, n)
    ahead = prefetching.ahead(ctx.library, name(weight), packed)
    acts = _activations(weight, x, ctx, few=True)
    parts = ctx.chunks(len(products) * k * m * (n + 1) / 40, m // rows)
    args: list[int | float] = []
    operands: list[int] = []
    for node, added, first in products:
        weight = node.operand(0)
        at = ctx.scratch(4 * m * n)
        nb = weight.nb
        args += (
            ctx.address(weight) + first * nb[1], *nb[1:], acts.address, *acts.nb[1:], at, 4 * m, 0, 0,
            k, m, n, 1, 1, 1, 1, parts, ahead.nbytes,
        )  # fmt: skip
        operands.append(at)
        if added is not None:
            operands += (ctx.address(added) + 4 * first, added.nb[1] if added.ne[1] > 1 else 0)
    gate = function
    if group.pattern == "glu":
        p = group["glu"].params
        gate = GluOp(p["op"]).name.lower()
        args += tuple(float(p[name]) for name in PARAMS.get(gate, ()))
    args += (m, parts, ctx.address(result), result.nb[1], *operands)
    adds = tuple(p.added is not None for p in products)
    ctx.launch(
        interleaved_products.with_epilogue,
        (name(weight), packed, rows, n, acts.dtype, ahead.hint, adds, gate),
        args,
        parts,
    )


# -- outer products --------------------------------------------------------------------------------

SHARED_NBYTES = 1 << 18
"""Size of the second operand's columns above which chunks are few and large [bytes]."""


@RULES.rule(Op.OUT_PROD, operands(READ, FLOATS, out=F32), in_rows(0, RESULT), _countable)
def _out_prod(node: Tensor, ctx: LoweringContext) -> None:
    a, b = node.operand(0), node.operand(1)
    (n, m), depth, matrices = node.ne[:2], a.ne[1], node.ne[2] * node.ne[3]
    level = ctx.level
    unit = out_prod.unit(level, name(a), n)
    units, most_bands = -(-n // unit), -(-m // float_tiles.columns_at_once(level))
    chunks = ctx.chunks(n * m * depth * matrices / 25, units * most_bands * matrices)
    if m * tiles.DEPTH * 4 > SHARED_NBYTES:
        chunks = min(chunks, 3 * ctx.n_threads * matrices)
    parts = -(-units // max(1, units * matrices // chunks))
    bands = min(most_bands, -(-chunks // (matrices * parts)))
    nbytes = _whole_lines(out_prod.scratch_nbytes(unit))
    args = (
        ctx.address(a), *a.nb[1:], ctx.address(b), *b.nb, ctx.address(node), *node.nb[1:],
        n, m, depth, *node.ne[2:], node.ne[2] // a.ne[2], node.ne[3] // a.ne[3], parts, bands,
        ctx.scratch(nbytes * ctx.n_threads), nbytes,
    )  # fmt: skip
    b_steps = tuple(nb if nb == b.dtype.type_size else 0 for nb in b.nb[:2])
    params = (name(a), name(b), is_interleaved(a), unit, b_steps)
    ctx.launch(out_prod.out_prod, params, args, matrices * parts * bands)
