"""Tiling, joining, padding, rolling, diagonals, numbers that follow from indices, interpolation."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from ggmlb.backends.gpu.launch import BadIndex, Mem, elementwise, flattened
from ggmlb.backends.gpu.lowering.base import FLOATS, Rule, no_elements, not_f32, not_floats
from ggmlb.backends.gpu.lowering.copy import copy
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, ScaleMode, TriType
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.gpu.launch import Launch, Target

_MOVED = FLOATS | {DType.I8, DType.I16, DType.I32, DType.I64}


def _moves(node: Tensor) -> str | None:
    for t in (*node.src, node):
        if t is not None and t.dtype not in _MOVED:
            return f"no kernel moves {t.dtype.name.lower()} elements"
        if t is not None and t.dtype is not node.dtype:
            return f"{t.dtype.name.lower()} elements do not go into a {node.dtype.name.lower()} tensor"
    return None


def _floats(node: Tensor) -> str | None:
    return not_floats(*node.src, node)


def _pad_declines(node: Tensor) -> str | None:
    return _moves(node) or (no_elements(node) if node.params["circular"] else None)


def _upscale_declines(node: Tensor) -> str | None:
    return _floats(node) or no_elements(node)


def _first_mem(node: Tensor) -> Mem:
    return Mem.of(node.sources[0])


def _repeat(node: Tensor, target: Target) -> list[Launch]:
    a, d = _first_mem(node), Mem.of(node)
    if all(n in (1, m) for n, m in zip(a.ne, d.ne, strict=True)):
        return [copy(target, a.tiled_to(d.ne), d)]
    return [elementwise(target, "repeat", [a, d])]


def _repeat_back(node: Tensor, target: Target) -> list[Launch]:
    return [elementwise(target, "repeat_back", [_first_mem(node), Mem.of(node)])]


def _concat(node: Tensor, target: Target) -> list[Launch]:
    d, dim, launches, start = Mem.of(node), node.params["dim"], [], 0
    for src in node.sources:
        if not src.is_empty:
            launches.append(copy(target, Mem.of(src), d.window(src.ne, offset=start * d.nb[dim])))
        start += src.ne[dim]
    return launches


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


def _triangle(node: Tensor, target: Target) -> list[Launch]:
    rest = float("-inf") if node.op is Op.DIAG_MASK_INF else 0.0
    side, last = _SIDES[node.params["type"]] if node.op is Op.TRI else (1, node.params["n_past"])
    return [elementwise(target, "triangle", [_first_mem(node), Mem.of(node)], side, last, rest)]


def _diag(node: Tensor, target: Target) -> list[Launch]:
    return [elementwise(target, "diag", [_first_mem(node), Mem.of(node)])]


def _arange(node: Tensor, target: Target) -> list[Launch]:
    return [elementwise(target, "arange", [Mem.of(node)], node.params["start"], node.params["step"])]


def _timestep_embedding(node: Tensor, target: Target) -> list[Launch]:
    p = node.params
    mems = [_first_mem(node), Mem.of(node)]
    return [elementwise(target, "timestep_embedding", mems, p["dim"], log(p["max_period"]))]


def _add_id_declines(node: Tensor) -> str | None:
    return not_floats(node.src[0], node.src[1], node)


def _add_id(node: Tensor, target: Target) -> list[Launch]:
    bad = BadIndex(node, node.sources[1].ne[1])
    return [elementwise(target, "add_id", [*map(Mem.of, node.sources), bad.mem, Mem.of(node)])]


def _get_rows_back_declines(node: Tensor) -> str | None:
    a, ids = node.sources[:2]
    return not_floats(a, node) or (None if ids.dtype is DType.I32 else "ids are not i32")


def _get_rows_back(node: Tensor, target: Target) -> list[Launch]:
    mems = [*map(Mem.of, node.sources[:2]), BadIndex(node, node.ne[1]).mem, Mem.of(node)]
    return [elementwise(target, "get_rows_back", mems)]


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


def _fill(node: Tensor, target: Target) -> list[Launch]:
    (d,) = flattened(target, [Mem.of(node)])
    return [elementwise(target, "arange", [d], node.params["value"], 0.0)]


RULES = {
    Op.REPEAT: Rule(_moves, _repeat),
    Op.REPEAT_BACK: Rule(_floats, _repeat_back),
    Op.CONCAT: Rule(_moves, _concat),
    Op.PAD: Rule(_pad_declines, _shift),
    **dict.fromkeys((Op.PAD_REFLECT_1D, Op.ROLL), Rule(_moves, _shift)),
    **dict.fromkeys((Op.TRI, Op.DIAG_MASK_INF, Op.DIAG_MASK_ZERO), Rule(_floats, _triangle)),
    Op.DIAG: Rule(_floats, _diag),
    Op.ARANGE: Rule(not_f32, _arange),
    Op.FILL: Rule(_floats, _fill),
    Op.TIMESTEP_EMBEDDING: Rule(_floats, _timestep_embedding),
    Op.ADD_ID: Rule(_add_id_declines, _add_id),
    Op.GET_ROWS_BACK: Rule(_get_rows_back_declines, _get_rows_back),
    Op.UPSCALE: Rule(_upscale_declines, _upscale),
}
