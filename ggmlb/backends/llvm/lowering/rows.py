"""Normalisation, soft max and rotary positions: rules of ops that see whole rows."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from ggmlb.backends.common.formulas import alibi_slopes, pair_angles
from ggmlb.backends.common.rules import F32, FLOATS, I32, RESULT, in_rows, operands
from ggmlb.backends.llvm.kernels import norm, rope
from ggmlb.backends.llvm.lowering.rules import RULES, name
from ggmlb.backends.llvm.lowering.walks import walk
from ggmlb.core.enums import Op, RopeType
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.llvm.lowering.steps import Steps

NORM_WORK, _SOFT_MAX, _ROPE = 0.2, 0.6, 0.4
"""Work of an element on one thread [ns]."""


@RULES.rule((Op.NORM, Op.RMS_NORM, Op.L2_NORM), operands(FLOATS), in_rows(0, RESULT))
def _norm(node: Tensor, steps: Steps) -> None:
    a = node.operand(0)
    args, n = walk(node.ne, [node, a], steps, NORM_WORK, join=False, cut=False)
    kind = node.op.value.lower()
    steps.emit(norm.normalise, (kind, (name(node), name(a)), 0), (float(node.params["eps"]), *args), n)


@RULES.rule(Op.SOFT_MAX, operands(F32, FLOATS, F32, out=F32), in_rows(0, RESULT))
def _soft_max(node: Tensor, steps: Steps) -> None:
    a = node.operand(0)
    mask, sinks = node.optional(1), node.optional(2)
    slopes = steps.constant(alibi_slopes(node.ne[2], node.params["max_bias"]))
    place = (0, 0, 0, 0, 1, 1)
    if mask is not None:
        place = (steps.address(mask), *mask.nb[1:], mask.ne[2], mask.ne[3])
    args, n = walk(node.ne, [node, a], steps, _SOFT_MAX, join=False, cut=False)
    sink = steps.address(sinks) if sinks is not None else 0
    params = (name(mask) if mask is not None else None, sinks is not None)
    steps.emit(norm.soft_max, params, (float(node.params["scale"]), slopes, sink, *place, *args), n)


def _few_dimensions(node: Tensor) -> str | None:
    if node.params["n_dims"] > rope.MOST_PAIRS:
        return f"{node.params['n_dims']} dimensions are turned: at most {rope.MOST_PAIRS}"
    return None


def rope_to(node: Tensor, put: Tensor | None, steps: Steps) -> None:
    """Emit the step that turns pairs; each token's heads become the row of `put` that it names, if given."""
    a, positions = node.operand(0), node.operand(1)
    factors = node.optional(2)
    p = node.params
    mode = p["mode"]
    n_pairs = p["n_dims"] if mode == RopeType.VISION else p["n_dims"] // 2
    magnitude = float(p["attn_factor"])
    if p["ext_factor"]:
        magnitude *= 1 + 0.1 * log(1 / p["freq_scale"])
    direction = 1.0 if node.op is Op.ROPE else -1.0
    angle, channel = pair_angles(n_pairs, p)
    width = next(w for w in (16, 8, 4, 2, 1) if n_pairs % w == 0)
    result: tuple[int, ...] = (steps.address(node), *node.nb[1:])
    places: tuple[int, ...] = ()
    index = None
    if put is not None:
        ids = put.operand(1)
        result = (steps.address(put), put.dtype.row_size(node.ne[0]), *put.nb[1:3])
        places = (steps.address(ids), *ids.nb[:2], ids.ne[1], put.ne[1], *steps.report)
        index = name(ids)
    args = (
        magnitude, direction, *result, steps.address(a), *a.nb[1:],
        node.ne[0], *node.ne[1:], steps.address(positions), steps.constant(angle), steps.constant(channel),
        steps.address(factors) if factors is not None else 0, n_pairs, p["offset"], *places,
    )  # fmt: skip
    types, multi = (name(put or node), name(a)), bool(mode & RopeType.MROPE)
    params = (types, width, mode == RopeType.NORMAL, factors is not None, multi, index)
    n_tokens = node.ne[2] * node.ne[3]
    steps.emit(rope.rope, params, args, steps.chunks(node.n_elements * _ROPE, n_tokens))


@RULES.rule((Op.ROPE, Op.ROPE_BACK), operands(FLOATS, I32, F32), in_rows(0, 1, 2, RESULT), _few_dimensions)
def _rope(node: Tensor, steps: Steps) -> None:
    rope_to(node, None, steps)
