"""Convolution, im2col, pooling, and their gradients."""

from __future__ import annotations

from ggmlb.backends.common.rules import ANY, F32, FLOATS, all_operands, operands
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu.launch import Launch, Target, elementwise
from ggmlb.backends.gpu.lowering.base import RULES
from ggmlb.core.enums import Op, OpPool
from ggmlb.core.tensor import Tensor

_GEOMETRY_2D = ("s0", "s1", "p0", "p1", "d0", "d1")
_GEOMETRY_3D = ("s0", "s1", "s2", "p0", "p1", "p2", "d0", "d1", "d2")


def _numbers(node: Tensor, *names: str) -> list[int]:
    return [node.params[name] for name in names]


_NUMBERS = {
    Op.CONV_2D: _GEOMETRY_2D,
    Op.CONV_2D_DW: _GEOMETRY_2D,
    Op.CONV_3D: (*_GEOMETRY_3D, "c", "oc"),
    Op.CONV_TRANSPOSE_1D: ("s0",),
    Op.CONV_TRANSPOSE_2D: ("stride",),
}


@RULES.rule(_NUMBERS, all_operands(FLOATS))
def _convolve(node: Tensor, target: Target) -> list[Launch]:
    return [elementwise(target, node.op.lower(), Mem.all_of(node), *_numbers(node, *_NUMBERS[node.op]))]


@RULES.rule(Op.IM2COL, operands(ANY, FLOATS))
def _im2col(node: Tensor, target: Target) -> list[Launch]:
    kernel, data = node.sources
    a, d = Mem.of(data), Mem.of(node)
    numbers = [kernel.ne[0], kernel.ne[1], *_numbers(node, *_GEOMETRY_2D)]
    if not node.params["is_2d"]:  # [width, channels, batch]: a height of 1 between
        a = a.window((a.ne[0], 1, a.ne[1], a.ne[2]), (a.nb[0], 0, a.nb[1], a.nb[2]))
        d = d.window((d.ne[0], d.ne[1], 1, d.ne[2]), (d.nb[0], d.nb[1], 0, d.nb[2]))
        numbers = [kernel.ne[0], 1, node.params["s0"], 1, node.params["p0"], 0, node.params["d0"], 1]
    return [elementwise(target, "im2col", [a, d], *numbers)]


@RULES.rule(Op.IM2COL_3D, operands(ANY, FLOATS))
def _im2col_3d(node: Tensor, target: Target) -> list[Launch]:
    kernel, data = node.sources
    n_in = node.params["ic"]
    depth = node.ne[3] // (data.ne[3] // n_in)
    numbers = [*kernel.ne[:3], *_numbers(node, *_GEOMETRY_3D), n_in, depth]
    return [elementwise(target, "im2col_3d", [Mem.of(data), Mem.of(node)], *numbers)]


@RULES.rule((Op.POOL_1D, Op.POOL_2D), operands(FLOATS))
def _pool(node: Tensor, target: Target) -> list[Launch]:
    p = node.params
    if node.op is Op.POOL_2D:
        numbers = [*_numbers(node, "k0", "k1", "s0", "s1", "p0", "p1")]
        divisor = p["k0"] * p["k1"]
    else:
        numbers = [p["k0"], 1, p["s0"], 1, p["p0"], 0]
        divisor = 0
    return [elementwise(target, "pool", Mem.all_of(node), *numbers, int(p["op"] is OpPool.AVG), divisor)]


@RULES.rule(Op.IM2COL_BACK, operands(F32, ANY, out=F32))
def _im2col_back(node: Tensor, target: Target) -> list[Launch]:
    patches, kernel = node.sources
    a, d = Mem.of(patches), Mem.of(node)
    numbers = [kernel.ne[0], kernel.ne[1], *_numbers(node, *_GEOMETRY_2D)]
    if not node.params["is_2d"]:
        a = a.window((a.ne[0], a.ne[1], 1, a.ne[2]), (a.nb[0], a.nb[1], 0, a.nb[2]))
        d = d.window((d.ne[0], 1, d.ne[1], d.ne[2]), (d.nb[0], 0, d.nb[1], d.nb[2]))
        numbers = [kernel.ne[0], 1, node.params["s0"], 1, node.params["p0"], 0, node.params["d0"], 1]
    return [elementwise(target, "im2col_back", [a, d], *numbers)]


@RULES.rule(Op.COL2IM_1D, operands(FLOATS))
def _col2im_1d(node: Tensor, target: Target) -> list[Launch]:
    n_taps = node.sources[0].ne[0] // node.params["oc"]
    return [elementwise(target, "col2im_1d", Mem.all_of(node), n_taps, *_numbers(node, "s0", "p0"))]


@RULES.rule(Op.POOL_2D_BACK, operands(FLOATS, FLOATS))
def _pool_back(node: Tensor, target: Target) -> list[Launch]:
    numbers = _numbers(node, "k0", "k1", "s0", "s1", "p0", "p1")
    return [
        elementwise(target, "pool_back", Mem.all_of(node), *numbers, int(node.params["op"] is OpPool.AVG))
    ]
