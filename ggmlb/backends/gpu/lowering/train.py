"""Cross entropy, its gradient, and steps of optimisers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.common.rules import F32, FLOATS, has_elements, operands
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu.launch import elementwise, flattened, in_registers
from ggmlb.backends.gpu.lowering.base import RULES
from ggmlb.backends.gpu.lowering.reduce import in_two_passes
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.gpu.launch import Launch, Target


@RULES.rule(Op.CROSS_ENTROPY_LOSS, operands(FLOATS, FLOATS), has_elements)
def _loss(node: Tensor, target: Target) -> list[Launch]:
    *mems, d = Mem.all_of(node)
    return in_two_passes(target, "cross_entropy_loss", mems, d)


@RULES.rule(Op.CROSS_ENTROPY_LOSS_BACK, operands(FLOATS, FLOATS, FLOATS))
def _loss_back(node: Tensor, target: Target) -> list[Launch]:
    gradient, logits, shares = map(Mem.of, node.sources)
    return [in_registers(target, "cross_entropy_loss_back", [logits, shares, gradient, Mem.of(node)])]


@RULES.rule((Op.OPT_STEP_SGD, Op.OPT_STEP_ADAMW), operands(F32, FLOATS, F32, F32, F32, out=F32))
def _step(node: Tensor, target: Target) -> list[Launch]:
    *sources, numbers = map(Mem.of, node.sources)
    *mems, d = flattened(target, [*sources, Mem.of(node)])
    (row,) = flattened(target, [numbers])
    return [elementwise(target, node.op.lower(), [*mems, row, d])]
