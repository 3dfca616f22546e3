"""Copies between types and layouts; rows taken and put by number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ggmlb.backends.common.rules import ANY, INDEX, RESULT, converts, in_rows, operands, same_shape_of_blocks
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.llvm.kernels import convert
from ggmlb.backends.llvm.kernels.blocks import FORMS
from ggmlb.backends.llvm.kernels.convert import can_convert
from ggmlb.backends.llvm.lowering.rules import RULES, name
from ggmlb.backends.llvm.lowering.walks import walk
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Ne, Tensor

if TYPE_CHECKING:
    from ggmlb.backends.llvm.lowering.steps import Steps

_WORK, _TURNED, _STRIDED, _BLOCKS = 0.1, 0.3, 1.0, 0.3
"""Work of an element on one thread [ns]."""

VECTOR_WORDS = 16
"""Words of 32 bits of the widest vectors."""


def _work(src: Tensor, out: Tensor) -> float:
    return _BLOCKS if src.dtype.is_quantized or out.dtype.is_quantized else _WORK


_converts = converts(lambda src, out: can_convert(src.name.lower(), out.name.lower()))
_ROWS = _converts, in_rows(0, RESULT), operands(ANY, INDEX, out=ANY)


def _one_walk(node: Tensor) -> str | None:
    a = node.operand(0)
    if a.ne != node.ne and not (a.is_contiguous() and node.is_contiguous()):
        return "the shapes differ, and one side is not contiguous"
    return None


@RULES.rule((Op.DUP, Op.CPY, Op.CONT), _converts, same_shape_of_blocks, _one_walk)
def _copy(node: Tensor, steps: Steps) -> None:
    a = node.operand(0)
    blocks = a.dtype.is_quantized or node.dtype.is_quantized
    x, y, ne = steps.mem(a), steps.mem(node), node.ne
    if a.ne != node.ne:
        ne = (node.n_elements, 1, 1, 1)
        x, y = (m.window(ne, (m.dtype.type_size, 0, 0, 0)) for m in (x, y))
    params = (name(node), name(a))
    if a.is_contiguous_rows() and node.is_contiguous_rows():
        args, n = walk(ne, [y, x], steps, _work(a, node), join=not blocks, cut=not blocks)
        steps.emit(convert.copy, params, args, n)
        return
    across = _across(node, a)
    if across is not None and a.ne == ne:
        others = [d for d in (1, 2, 3) if d != across]
        args = [
            steps.address(y), *(y.nb[d] for d in (across, *others)),
            steps.address(x), *(x.nb[d] for d in (0, *others)), ne[0], *(ne[d] for d in (across, *others)),
        ]  # fmt: skip
        most = -(-ne[across] // VECTOR_WORDS) * ne[others[0]] * ne[others[1]]
        steps.emit(convert.copy_turned, (), args, steps.chunks(node.n_elements * _TURNED, most))
        return
    ne, y, x = _turned(ne, y, x)
    args, n = walk(ne, [y, x], steps, _STRIDED, join=False)
    sizes = (node.dtype.type_size, a.dtype.type_size)
    steps.emit(convert.copy_strided, (*params, sizes), (y.nb[0], x.nb[0], *args), n)


def _across(node: Tensor, a: Tensor) -> int | None:
    """The dimension along which elements of 32 bits lie side by side in `a`, where they do not in rows."""
    if node.dtype != a.dtype or a.dtype.is_quantized or a.dtype.type_size != 4 or node.nb[0] != 4:
        return None
    return next((d for d in (1, 2, 3) if a.nb[d] == 4 and a.ne[d] > 1 and a.ne[0] > 1), None)


def _turned(ne: Ne, y: Mem, x: Mem) -> tuple[Ne, Mem, Mem]:
    """Put a long dimension first where rows are short: the loop over it has the least overhead."""
    if ne[0] >= 16 or max(ne) == ne[0]:
        return ne, y, x
    i = max(range(4), key=lambda d: ne[d])
    order = [i, *(d for d in range(4) if d != i)]
    turned: list[Any] = [tuple(v[d] for d in order) for v in (ne, y.nb, x.nb)]
    return turned[0], y.window(turned[0], turned[1]), x.window(turned[0], turned[2])


@RULES.rule(Op.GET_ROWS, *_ROWS)
def _get_rows(node: Tensor, steps: Steps) -> None:
    a, ids = node.operand(0), node.operand(1)
    cut = name(a) not in FORMS
    args, n = walk(node.ne, [node], steps, _work(a, node), join=False, cut=cut)
    front = (steps.address(a), *a.nb[1:], steps.address(ids), *ids.nb[:3], a.ne[1], *steps.report)
    steps.emit(convert.get_rows, (name(node), name(a), name(ids)), (*front, *args), n)


@RULES.rule(Op.SET_ROWS, *_ROWS)
def _set_rows(node: Tensor, steps: Steps) -> None:
    a, ids = node.operand(0), node.operand(1)
    if a.is_empty:
        return
    args, n = walk(a.ne, [a], steps, _work(a, node), join=False, cut=not node.dtype.is_quantized)
    front = (
        steps.address(node), *node.nb[1:], steps.address(ids), *ids.nb[:3], ids.ne[1], ids.ne[2],
        node.ne[1], *steps.report,
    )  # fmt: skip
    steps.emit(convert.set_rows, (name(node), name(a), name(ids)), (*front, *args), n)
