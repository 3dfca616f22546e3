"""Fused parts of DeepSeek V3.2 and V4: the lightning indexer and the hyper-connections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.common.rules import F32, FLOATS, all_operands, operands
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu.launch import elementwise, launch
from ggmlb.backends.gpu.lowering.base import RULES
from ggmlb.backends.gpu.lowering.matmul import READ_IN_EIGHTS
from ggmlb.backends.gpu.lowering.recurrent import lines
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.gpu.launch import Launch, Target


@RULES.rule(Op.LIGHTNING_INDEXER, operands(F32, READ_IN_EIGHTS, F32, FLOATS, out=F32))
def _indexer(node: Tensor, target: Target) -> list[Launch]:
    flags = {"EIGHTS": 1} if node.sources[1].dtype.is_quantized else {}
    return [elementwise(target, "lightning_indexer", Mem.all_of(node), **flags)]


@RULES.rule((Op.DSV4_HC_PRE, Op.DSV4_HC_POST), all_operands(F32))
def _streams(node: Tensor, target: Target) -> list[Launch]:
    return [elementwise(target, node.op.lower(), Mem.all_of(node))]


@RULES.rule(Op.DSV4_HC_COMB, all_operands(F32))
def _matrices(node: Tensor, target: Target) -> list[Launch]:
    groups = lines(target, node.ne[2])
    return [
        launch(
            "dsv4_hc_comb", [*Mem.all_of(node), node.params["eps"], node.params["n_iter"]], groups, target.wg
        )
    ]
