"""Recurrent layers: state space models, RWKV, gated linear attention, delta nets; triangular systems."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.gpu.launch import BadIndex, Mem, elementwise, launch
from ggmlb.backends.gpu.lowering.base import Rule, not_f32, not_floats
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.gpu.launch import Launch, Target


def _floats(node: Tensor) -> str | None:
    return not_floats(*node.src, node)


def _ssm_conv(node: Tensor, target: Target) -> list[Launch]:
    return [elementwise(target, "ssm_conv", [*(Mem.of(t) for t in node.src if t is not None), Mem.of(node)])]


def _scan_declines(node: Tensor) -> str | None:
    ids = node.sources[6]
    return not_f32(*node.src[:6], node) or (None if ids.dtype is DType.I32 else "ids are not i32")


def lines(target: Target, n: int) -> tuple[int, int, int]:
    """Return the groups for `n` lines of states, or other things that one work-item goes through alone."""
    return (min(n, 8 * target.n_units) if target.on_cpu else -(-n // target.wg), 1, 1)


def _ssm_scan(node: Tensor, target: Target) -> list[Launch]:
    state, x = node.sources[:2]
    mems = [*map(Mem.of, node.sources), BadIndex(node, state.ne[3]).mem, Mem.of(node)]
    groups = lines(target, x.ne[0] * x.ne[1] * x.ne[3])
    return [launch("ssm_scan", [*mems, node.params["k"]], groups, target.wg)]


def _heads_declines(node: Tensor) -> str | None:
    for t in node.src:
        if t is not None and not t.is_contiguous():
            return f"{t.describe()} is not contiguous: apply cont"
    return not_f32(*node.src, node)


def _heads(node: Tensor, target: Target) -> list[Launch]:
    first, state = node.sources[0], node.sources[-1]
    mems = [Mem.of(t) for t in (*node.src, node) if t is not None]
    n_sequences = state.ne[1]
    numbers = [n_sequences, *([node.params["scale"]] if node.op is Op.GATED_LINEAR_ATTN else [])]
    groups = lines(target, first.ne[0] * first.ne[1] * n_sequences)
    return [launch(node.op.lower(), [*mems, *numbers], groups, target.wg)]


def _f32(node: Tensor) -> str | None:
    return not_f32(*node.src, node)


def _delta_net(node: Tensor, target: Target) -> list[Launch]:
    v = node.sources[2]
    mems = [*map(Mem.of, node.sources), Mem.of(node)]
    groups = lines(target, v.ne[0] * v.ne[1] * v.ne[3])
    return [launch("gated_delta_net", [*mems, node.params["k"]], groups, target.wg)]


def _solve_tri(node: Tensor, target: Target) -> list[Launch]:
    mems = [*map(Mem.of, node.sources), Mem.of(node)]
    groups = lines(target, node.ne[0] * node.ne[2] * node.ne[3])
    return [launch("solve_tri", mems, groups, target.wg)]


RULES = {
    Op.SSM_CONV: Rule(_floats, _ssm_conv),
    Op.SSM_SCAN: Rule(_scan_declines, _ssm_scan),
    **dict.fromkeys((Op.RWKV_WKV6, Op.RWKV_WKV7, Op.GATED_LINEAR_ATTN), Rule(_heads_declines, _heads)),
    Op.GATED_DELTA_NET: Rule(_f32, _delta_net),
    Op.SOLVE_TRI: Rule(_f32, _solve_tri),
}
