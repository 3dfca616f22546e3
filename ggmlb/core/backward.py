"""Gradients: the nodes that compute them, appended to a graph by the rules in each op's `OpSpec`.

All gradients are f32 and contiguous, of the shape of their tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.errors import ArgumentError, Error, GraphError, kind_of
from ggmlb.core.ops import SPECS
from ggmlb.core.ops.spec import zero_gradient
from ggmlb.core.ops.views import view_base
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.core.context import Context

_FLOATS = (DType.F32, DType.F16, DType.BF16)
_INTO_ANOTHER = (Op.CPY, Op.VIEW, Op.RESHAPE, Op.PERMUTE, Op.TRANSPOSE, Op.NONE)
"""Ops that write into another tensor's memory, and have a gradient nevertheless."""


def tensors_needing_gradients(
    nodes: Iterable[Tensor], losses: Collection[Tensor], params: Collection[Tensor]
) -> set[Tensor]:
    """Return the tensors that need a gradient: losses, parameters, and nodes computed from them."""
    found: set[Tensor] = {*losses, *params}
    for node in nodes:
        if node.dtype in _FLOATS and not found.isdisjoint(node.sources):
            rules = SPECS[node.op].backward
            if any(s in found and rules.get(i) is not zero_gradient for i, s in enumerate(node.src)):
                found.add(node)
    return found


def append_gradients(
    ctx: Context,
    nodes: list[Tensor],
    grads: dict[Tensor, Tensor],
    accs: Mapping[Tensor, Tensor],
    needed: Collection[Tensor],
) -> None:
    """Create the gradients of tensors in `needed`, last node first; add to `grads`, or in place to `accs`.

    Args:
        ctx: Makes the nodes.
        nodes: Of the forward graph, in topological order.
        grads: The gradients by tensor, begun with those of the losses and the accumulators; added to.
        accs: Accumulators by tensor; their gradients are added in place.
        needed: As `tensors_needing_gradients` returns them.

    Raises:
        GraphError: An op has no gradient for an operand that needs one; the message names op and node.
    """
    for node in reversed(nodes):
        grad = grads.get(node)
        if grad is None or node.op is Op.NONE or node not in needed:
            continue
        if node.view_src is not None and node.op not in _INTO_ANOTHER:
            raise GraphError(
                f"build_backward_expand: {node.describe()} overwrites its operand, which the gradient "
                f"needs; use {node.op.value.lower()} instead of its in-place form"
            )
        for i, source in enumerate(node.src):
            if source in needed:
                assert source is not None
                part = _gradient(ctx, node, i, grad)
                if part is not None:
                    _add(ctx, grads, accs, view_base(node) if node.op is Op.VIEW else source, part)


def _gradient(ctx: Context, node: Tensor, i: int, grad: Tensor) -> Tensor | None:
    rule = SPECS[node.op].backward.get(i)
    if rule is None:
        raise GraphError(
            f"build_backward_expand: {node.op.value} has no gradient for operand {i} of {node.describe()}, "
            "which depends on a parameter; use another op, or unmark the parameter"
        )
    try:
        return rule(ctx, node, grad)
    except Error as error:
        raise GraphError(
            f"build_backward_expand: no gradient of {node.op.value} for operand {i} of {node.describe()}: "
            f"{error}"
        ) from error


def _add(
    ctx: Context, grads: dict[Tensor, Tensor], accs: Mapping[Tensor, Tensor], tensor: Tensor, part: Tensor
) -> None:
    """Add a term to a tensor's gradient: in place if it has an accumulator, else as a new node."""
    have = grads.get(tensor)
    if have is None:
        grads[tensor] = part
    elif tensor in accs:
        grads[tensor] = ctx.add_inplace(have, part)
    else:
        grads[tensor] = ctx.add(have, part)
    if tensor.name and not grads[tensor].name:
        grads[tensor].name = f"grad for {tensor.name}"


def check_accumulator(tensor: Tensor, acc: Tensor) -> None:
    """Raise an ArgumentError unless `acc` can hold the gradient of `tensor`."""
    if not isinstance(acc, Tensor):
        raise ArgumentError(f"build_backward_expand: the accumulator is {kind_of(acc)}; give a tensor")
    if acc.dtype is not DType.F32 or acc.ne != tensor.ne or not acc.is_contiguous():
        raise ArgumentError(
            f"build_backward_expand: {acc.describe()} cannot accumulate the gradient of "
            f"{tensor.describe()}; give a contiguous f32 tensor of ne {list(tensor.ne)}"
        )
