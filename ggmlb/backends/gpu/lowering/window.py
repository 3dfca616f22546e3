"""Windows and relative positions of image encoders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.gpu.launch import Mem, elementwise
from ggmlb.backends.gpu.lowering.base import Rule, not_f32, not_floats
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.gpu.launch import Launch, Target


def _f32(node: Tensor) -> str | None:
    return not_f32(*node.src, node)


def _floats(node: Tensor) -> str | None:
    return not_floats(*node.src, node)


def _mems(node: Tensor) -> list[Mem]:
    return [*map(Mem.of, node.sources), Mem.of(node)]


def _windows(node: Tensor, target: Target) -> list[Launch]:
    image = node.sources[0] if node.op is Op.WIN_PART else node
    n_wide = -(-image.ne[1] // node.params["w"])
    return [elementwise(target, node.op.lower(), _mems(node), n_wide)]


def _get_rel_pos(node: Tensor, target: Target) -> list[Launch]:
    return [elementwise(target, "get_rel_pos", _mems(node))]


def _add_rel_pos(node: Tensor, target: Target) -> list[Launch]:
    """In `a`, an image's places are one dimension; `pw` and `ph` are contiguous, so theirs become one."""
    a, *positions = map(Mem.of, node.sources)
    along, down = (
        m.window((m.ne[0], m.ne[1] * m.ne[2], m.ne[3], 1), (m.nb[0], m.nb[1], m.nb[3], 0)) for m in positions
    )
    return [elementwise(target, "add_rel_pos", [a, along, down, Mem.of(node)])]


RULES = {
    **dict.fromkeys((Op.WIN_PART, Op.WIN_UNPART), Rule(_f32, _windows)),
    Op.GET_REL_POS: Rule(_floats, _get_rel_pos),
    Op.ADD_REL_POS: Rule(_f32, _add_rel_pos),
}
