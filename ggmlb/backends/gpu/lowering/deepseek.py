"""Fused parts of DeepSeek V3.2 and V4: the lightning indexer and the hyper-connections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.gpu.launch import Mem, elementwise, launch
from ggmlb.backends.gpu.lowering.base import Rule, not_f32, not_floats, not_in_rows
from ggmlb.backends.gpu.lowering.matmul import READ_IN_EIGHTS
from ggmlb.backends.gpu.lowering.recurrent import lines
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.gpu.launch import Launch, Target


def _mems(node: Tensor) -> list[Mem]:
    return [*map(Mem.of, node.sources), Mem.of(node)]


def _indexer_declines(node: Tensor) -> str | None:
    q, k, weights, mask = node.sources
    if k.dtype not in READ_IN_EIGHTS:
        return f"no kernel reads {k.dtype.name.lower()} rows"
    why = not_f32(q, weights, node) or not_floats(mask)
    return why or (not_in_rows(k) if k.dtype.is_quantized else None)


def _indexer(node: Tensor, target: Target) -> list[Launch]:
    flags = {"EIGHTS": 1} if node.sources[1].dtype.is_quantized else {}
    return [elementwise(target, "lightning_indexer", _mems(node), **flags)]


def _f32(node: Tensor) -> str | None:
    return not_f32(*node.src, node)


def _streams(node: Tensor, target: Target) -> list[Launch]:
    return [elementwise(target, node.op.lower(), _mems(node))]


def _matrices(node: Tensor, target: Target) -> list[Launch]:
    groups = lines(target, node.ne[2])
    return [
        launch("dsv4_hc_comb", [*_mems(node), node.params["eps"], node.params["n_iter"]], groups, target.wg)
    ]


RULES = {
    Op.LIGHTNING_INDEXER: Rule(_indexer_declines, _indexer),
    **dict.fromkeys((Op.DSV4_HC_PRE, Op.DSV4_HC_POST), Rule(_f32, _streams)),
    Op.DSV4_HC_COMB: Rule(_f32, _matrices),
}
