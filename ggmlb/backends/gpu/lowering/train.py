"""Cross entropy, its gradient, and steps of optimisers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.gpu.launch import Mem, elementwise, flattened, in_registers, launch
from ggmlb.backends.gpu.lowering.base import Rule, no_elements, not_f32, not_floats
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.gpu.launch import Launch, Target


def _loss_declines(node: Tensor) -> str | None:
    return not_floats(*node.src, node) or no_elements(node)


def _loss(node: Tensor, target: Target) -> list[Launch]:
    mems = [*map(Mem.of, node.sources), Mem.of(node)]
    return [launch("cross_entropy_loss", mems, (1, 1, 1), target.wg)]


def _loss_back_declines(node: Tensor) -> str | None:
    return not_floats(*node.src, node)


def _loss_back(node: Tensor, target: Target) -> list[Launch]:
    gradient, logits, shares = map(Mem.of, node.sources)
    return [in_registers(target, "cross_entropy_loss_back", [logits, shares, gradient, Mem.of(node)])]


def _step_declines(node: Tensor) -> str | None:
    weights, gradient, *rest = node.src
    return not_f32(weights, *rest, node) or not_floats(gradient)


def _step(node: Tensor, target: Target) -> list[Launch]:
    *sources, numbers = map(Mem.of, node.sources)
    *mems, d = flattened(target, [*sources, Mem.of(node)])
    (row,) = flattened(target, [numbers])
    return [elementwise(target, node.op.lower(), [*mems, row, d])]


RULES = {
    Op.CROSS_ENTROPY_LOSS: Rule(_loss_declines, _loss),
    Op.CROSS_ENTROPY_LOSS_BACK: Rule(_loss_back_declines, _loss_back),
    **dict.fromkeys((Op.OPT_STEP_SGD, Op.OPT_STEP_ADAMW), Rule(_step_declines, _step)),
}
