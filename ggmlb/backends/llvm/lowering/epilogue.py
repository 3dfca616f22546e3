"""Lowering of products fused with an epilogue: a sum, a function, or a gated unit of two products."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.common.fusion import Group, Product
from ggmlb.backends.llvm.kernels.epilogue import with_epilogue
from ggmlb.backends.llvm.kernels.tiles import Epilogue
from ggmlb.backends.llvm.lowering.elementwise import plain_function
from ggmlb.backends.llvm.lowering.matmul import (
    can_have_epilogue,
    is_interleaved,
    is_many,
    product,
    quantized_activations,
    rows_at_once,
)
from ggmlb.backends.llvm.lowering.rules import RULES, name
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import GluOp
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.llvm.lowering.steps import Steps


def can_fuse(group: Group) -> bool:
    """Whether one kernel does it: of few rows, if groups of rows fit the weights; of many, a epilogue."""
    products = group.products
    if "unary" in group and plain_function(group["unary"]) is None:
        return False
    if group.pattern != "glu" and is_many(products[0].node):
        fits = can_have_epilogue(products[0].node)
    else:
        fits = all(_is_few(p, group.result.ne) for p in products)
    return fits and _in_rows(group.result) and all(_is_simple(p) for p in products)


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


def lower(group: Group, steps: Steps) -> None:
    """Append the steps that compute the group."""
    result, products = group.result, group.products
    function = plain_function(group["unary"]) if "unary" in group else None
    node, added, _ = products[0]
    if group.pattern != "glu" and is_many(node):
        product(node, steps, result, Epilogue(added is not None, function), added)
        return
    weight, x = node.operand(0), node.operand(1)
    k, (m, n) = weight.ne[0], result.ne[:2]
    packed, rows = is_interleaved(weight), rows_at_once(weight, n)
    x_at, x_nb = (
        quantized_activations(weight, x, steps, few=True)
        if weight.dtype.is_quantized
        else (steps.address(x), x.nb)
    )
    parts = steps.chunks(len(products) * k * m * (n + 1) / 40, m // rows)
    args: list[int | float] = []
    operands: list[int] = []
    for node, added, first in products:
        weight = node.operand(0)
        at = steps.scratch(4 * m * n)
        nb = weight.nb
        args += (
            steps.address(weight) + first * nb[1], *nb[1:], x_at, *x_nb[1:], at, 4 * m, 0, 0,
            k, m, n, 1, 1, 1, 1, parts,
        )  # fmt: skip
        operands.append(at)
        if added is not None:
            operands += (steps.address(added) + 4 * first, added.nb[1] if added.ne[1] > 1 else 0)
    gate = function
    if group.pattern == "glu":
        p = group["glu"].params
        gate = GluOp(p["op"]).name.lower()
        if gate == "swiglu_oai":
            args += (float(p["alpha"]), float(p["limit"]))
    args += (m, parts, steps.address(result), result.nb[1], *operands)
    adds = tuple(p.added is not None for p in products)
    steps.emit(with_epilogue, (name(weight), packed, rows, n, name(x), adds, gate), args, parts)
