"""Fused attention on tensor cores."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ggmlb.backends.cuda.kernels.lowering import Lowering, Step
    from ggmlb.tensor import Tensor


def flash_attn(lw: Lowering, node: Tensor) -> list[Step] | None:
    """Return the steps of an attention, or None where the portable kernel is to be used."""
    return None
