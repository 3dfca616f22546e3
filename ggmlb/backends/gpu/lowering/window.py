"""Windows and relative positions of image encoders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.common.rules import F32, FLOATS, all_operands, operands
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu.launch import elementwise
from ggmlb.backends.gpu.lowering.base import RULES
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.gpu.launch import Launch, Target


@RULES.rule((Op.WIN_PART, Op.WIN_UNPART), operands(F32, out=F32))
def _windows(node: Tensor, target: Target) -> list[Launch]:
    image = node.sources[0] if node.op is Op.WIN_PART else node
    n_wide = -(-image.ne[1] // node.params["w"])
    return [elementwise(target, node.op.lower(), Mem.all_of(node), n_wide)]


@RULES.rule(Op.GET_REL_POS, operands(FLOATS))
def _get_rel_pos(node: Tensor, target: Target) -> list[Launch]:
    return [elementwise(target, "get_rel_pos", Mem.all_of(node))]


@RULES.rule(Op.ADD_REL_POS, all_operands(F32))
def _add_rel_pos(node: Tensor, target: Target) -> list[Launch]:
    """In `a`, an image's places are one dimension; `pw` and `ph` are contiguous, so theirs become one."""
    a, *positions = map(Mem.of, node.sources)
    along, down = (
        m.window((m.ne[0], m.ne[1] * m.ne[2], m.ne[3], 1), (m.nb[0], m.nb[1], m.nb[3], 0)) for m in positions
    )
    return [elementwise(target, "add_rel_pos", [a, along, down, Mem.of(node)])]
