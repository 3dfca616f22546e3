"""Norms of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.enums import Op
from ggmlb.kernels.launch import Mem, rowwise
from ggmlb.kernels.lowering.base import Rule, not_floats

if TYPE_CHECKING:
    from ggmlb.kernels.launch import Launch, Target
    from ggmlb.tensor import Tensor


def _declines(node: Tensor) -> str | None:
    return not_floats(node.src[0], node)


def _norm(node: Tensor, target: Target) -> list[Launch]:
    mems = [Mem.of(node.src[0]), Mem.of(node)]  # type: ignore[arg-type]
    return [rowwise(target, node.op.lower(), mems, node.params["eps"])]


RULES = dict.fromkeys((Op.NORM, Op.RMS_NORM, Op.L2_NORM), Rule(_declines, _norm))
