"""repeat, concat, pad, roll, diag, tri, arange, timestep embeddings, upscale, and image windows."""

from __future__ import annotations

from math import log

from ggmlb.backends.common.rules import F32, FLOATS, I32, all_operands, has_elements, operands, same_types
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu.launch import BadIndex, Launch, Target, elementwise, flattened
from ggmlb.backends.gpu.lowering.base import RULES
from ggmlb.backends.gpu.lowering.copy import copy
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, ScaleMode, TriType
from ggmlb.core.tensor import Tensor

_MOVED = FLOATS | {DType.I8, DType.I16, DType.I32, DType.I64}
_MOVES = all_operands(_MOVED), same_types


def _around_has_elements(node: Tensor) -> str | None:
    return has_elements(node) if node.params.get("circular") else None


def _first_mem(node: Tensor) -> Mem:
    return Mem.of(node.sources[0])


@RULES.rule(Op.REPEAT, *_MOVES)
def _repeat(node: Tensor, target: Target) -> list[Launch]:
    a, d = _first_mem(node), Mem.of(node)
    if all(n in (1, m) for n, m in zip(a.ne, d.ne, strict=True)):
        return [copy(target, a.tiled_to(d.ne), d)]
    return [elementwise(target, "repeat", [a, d])]


@RULES.rule(Op.REPEAT_BACK, operands(FLOATS))
def _repeat_back(node: Tensor, target: Target) -> list[Launch]:
    return [elementwise(target, "repeat_back", [_first_mem(node), Mem.of(node)])]


@RULES.rule(Op.CONCAT, *_MOVES)
def _concat(node: Tensor, target: Target) -> list[Launch]:
    d, dim, launches, start = Mem.of(node), node.params["dim"], [], 0
    for src in node.sources:
        if not src.is_empty:
            launches.append(copy(target, Mem.of(src), d.window(src.ne, offset=start * d.nb[dim])))
        start += src.ne[dim]
    return launches


@RULES.rule((Op.PAD, Op.PAD_REFLECT_1D, Op.ROLL), *_MOVES, _around_has_elements)
def _shift(node: Tensor, target: Target) -> list[Launch]:
    p = node.params
    if node.op is Op.ROLL:
        starts, place = p["shifts"], "AROUND"
    elif node.op is Op.PAD:
        starts, place = p["left"], "AROUND" if p["circular"] else "INSIDE"
    else:
        starts, place = (p["left"], 0, 0, 0), "MIRROR"
    return [elementwise(target, "shift", [_first_mem(node), Mem.of(node)], *starts, PLACE=place)]


_SIDES = {
    TriType.LOWER: (1, -1), TriType.LOWER_DIAG: (1, 0), TriType.UPPER: (-1, -1), TriType.UPPER_DIAG: (-1, 0),
}  # fmt: skip


@RULES.rule((Op.TRI, Op.DIAG_MASK_INF, Op.DIAG_MASK_ZERO), operands(FLOATS))
def _triangle(node: Tensor, target: Target) -> list[Launch]:
    rest = float("-inf") if node.op is Op.DIAG_MASK_INF else 0.0
    side, last = _SIDES[node.params["type"]] if node.op is Op.TRI else (1, node.params["n_past"])
    return [elementwise(target, "triangle", [_first_mem(node), Mem.of(node)], side, last, rest)]


@RULES.rule(Op.DIAG, operands(FLOATS))
def _diag(node: Tensor, target: Target) -> list[Launch]:
    return [elementwise(target, "diag", [_first_mem(node), Mem.of(node)])]


@RULES.rule(Op.ARANGE, operands(out=F32))
def _arange(node: Tensor, target: Target) -> list[Launch]:
    return [elementwise(target, "arange", [Mem.of(node)], node.params["start"], node.params["step"])]


@RULES.rule(Op.TIMESTEP_EMBEDDING, operands(FLOATS))
def _timestep_embedding(node: Tensor, target: Target) -> list[Launch]:
    p = node.params
    mems = [_first_mem(node), Mem.of(node)]
    return [elementwise(target, "timestep_embedding", mems, p["dim"], log(p["max_period"]))]


@RULES.rule(Op.ADD_ID, operands(FLOATS, FLOATS, I32))
def _add_id(node: Tensor, target: Target) -> list[Launch]:
    bad = BadIndex(node, node.sources[1].ne[1])
    return [elementwise(target, "add_id", [*map(Mem.of, node.sources), bad.mem, Mem.of(node)])]


@RULES.rule(Op.GET_ROWS_BACK, operands(FLOATS, I32))
def _get_rows_back(node: Tensor, target: Target) -> list[Launch]:
    mems = [*map(Mem.of, node.sources[:2]), BadIndex(node, node.ne[1]).mem, Mem.of(node)]
    return [elementwise(target, "get_rows_back", mems)]


@RULES.rule(Op.UPSCALE, operands(FLOATS), has_elements)
def _upscale(node: Tensor, target: Target) -> list[Launch]:
    p, a, d = node.params, _first_mem(node), Mem.of(node)
    method = "antialias" if p["antialias"] else ScaleMode(p["mode"]).name.lower()
    aligned = p["align_corners"] and p["mode"] != ScaleMode.NEAREST
    scales = [m / n for n, m in zip(a.ne, d.ne, strict=True)]
    if p["align_corners"]:
        scales[:2] = [
            (m - 1) / (n - 1) if n > 1 and m > 1 else m / n for n, m in zip(a.ne[:2], d.ne[:2], strict=True)
        ]
    return [elementwise(target, "upscale", [a, d], *scales, 0.0 if aligned else 0.5, METHOD=method)]


@RULES.rule(Op.FILL, operands(FLOATS))
def _fill(node: Tensor, target: Target) -> list[Launch]:
    (d,) = flattened(target, [Mem.of(node)])
    return [elementwise(target, "arange", [d], node.params["value"], 0.0)]


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
    """`a` has an image's positions in one dimension; `pw` and `ph` are reshaped to match."""
    a, *positions = map(Mem.of, node.sources)
    along, down = (
        m.window((m.ne[0], m.ne[1] * m.ne[2], m.ne[3], 1), (m.nb[0], m.nb[1], m.nb[3], 0)) for m in positions
    )
    return [elementwise(target, "add_rel_pos", [a, along, down, Mem.of(node)])]
