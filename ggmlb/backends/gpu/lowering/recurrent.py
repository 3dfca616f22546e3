"""Recurrent layers: state space models, RWKV, gated linear attention, delta nets; parts of DeepSeek."""

from __future__ import annotations

from ggmlb.backends.common.rules import F32, FLOATS, I32, all_operands, operands
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu.launch import BadIndex, Launch, Target, elementwise, launch
from ggmlb.backends.gpu.lowering.base import RULES
from ggmlb.backends.gpu.lowering.matmul import READ_IN_EIGHTS
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor


@RULES.rule(Op.SSM_CONV, operands(FLOATS, FLOATS))
def _ssm_conv(node: Tensor, target: Target) -> list[Launch]:
    return [elementwise(target, "ssm_conv", Mem.all_of(node))]


def lines(target: Target, n: int) -> tuple[int, int, int]:
    """Return the grid for `n` rows of recurrent states, one row per work-item."""
    return (min(n, 8 * target.n_units) if target.on_cpu else -(-n // target.wg), 1, 1)


@RULES.rule(Op.SSM_SCAN, operands(*[F32] * 6, I32, out=F32))
def _ssm_scan(node: Tensor, target: Target) -> list[Launch]:
    state, x = node.sources[:2]
    mems = [*map(Mem.of, node.sources), BadIndex(node, state.ne[3]).mem, Mem.of(node)]
    groups = lines(target, x.ne[0] * x.ne[1] * x.ne[3])
    return [launch("ssm_scan", [*mems, node.params["k"]], groups, target.wg)]


@RULES.rule((Op.RWKV_WKV6, Op.RWKV_WKV7, Op.GATED_LINEAR_ATTN), all_operands(F32))
def _heads(node: Tensor, target: Target) -> list[Launch]:
    first, state = node.sources[0], node.sources[-1]
    mems = [Mem.of(t) for t in (*node.src, node) if t is not None]
    n_sequences = state.ne[1]
    numbers = [n_sequences, *([node.params["scale"]] if node.op is Op.GATED_LINEAR_ATTN else [])]
    groups = lines(target, first.ne[0] * first.ne[1] * n_sequences)
    return [launch(node.op.lower(), [*mems, *numbers], groups, target.wg)]


@RULES.rule(Op.GATED_DELTA_NET, all_operands(F32))
def _delta_net(node: Tensor, target: Target) -> list[Launch]:
    v = node.sources[2]
    mems = Mem.all_of(node)
    groups = lines(target, v.ne[0] * v.ne[1] * v.ne[3])
    return [launch("gated_delta_net", [*mems, node.params["k"]], groups, target.wg)]


@RULES.rule(Op.SOLVE_TRI, all_operands(F32))
def _solve_tri(node: Tensor, target: Target) -> list[Launch]:
    mems = Mem.all_of(node)
    groups = lines(target, node.ne[0] * node.ne[2] * node.ne[3])
    return [launch("solve_tri", mems, groups, target.wg)]


@RULES.rule(Op.LIGHTNING_INDEXER, operands(F32, READ_IN_EIGHTS, F32, FLOATS, out=F32))
def _indexer(node: Tensor, target: Target) -> list[Launch]:
    flags = {"EIGHTS": 1} if node.sources[1].dtype.is_quantized else {}
    return [elementwise(target, "lightning_indexer", Mem.all_of(node), **flags)]


@RULES.rule(Op.DSV4_HC_PRE, all_operands(F32))
def _streams_in(node: Tensor, target: Target) -> list[Launch]:
    if not node.params["gated"]:
        return [elementwise(target, "dsv4_hc_pre", Mem.all_of(node))]
    return [elementwise(target, "dsv4_hc_pre_gated", Mem.all_of(node), node.params["scale"])]


@RULES.rule(Op.DSV4_HC_POST, all_operands(F32))
def _streams_out(node: Tensor, target: Target) -> list[Launch]:
    kernel = "dsv4_hc_post" if node.optional(3) is not None else "dsv4_hc_post_plain"
    return [elementwise(target, kernel, Mem.all_of(node))]


@RULES.rule(Op.DSV4_HC_COMB, all_operands(F32))
def _matrices(node: Tensor, target: Target) -> list[Launch]:
    groups = lines(target, node.ne[2])
    return [
        launch(
            "dsv4_hc_comb", [*Mem.all_of(node), node.params["eps"], node.params["n_iter"]], groups, target.wg
        )
    ]
