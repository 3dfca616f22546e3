"""Transposed convolution: each element of the data spreads the kernel over the result."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from ggmlb.backends.common.rules import F32, FLOATS, operands
from ggmlb.backends.cpu.ops.patches import Axis, fold, packed_f32, without_first
from ggmlb.backends.cpu.rules import RULES
from ggmlb.backends.cpu.views import View
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.cpu.lowering import CpuLowering


@RULES.rule(Op.CONV_TRANSPOSE_1D, operands(FLOATS, FLOATS, out=F32))
def conv_transpose_1d(lw: CpuLowering, t: Tensor) -> None:
    """`y[o, i] = sum a[c, o, tap] b[c, place]` over all that have `i = place s + tap`."""
    y, kernel, data = (without_first(View.of(x)) for x in (t, *t.sources))
    _spread(lw, y, data, kernel, [t.params["s0"]])


@RULES.rule(Op.CONV_TRANSPOSE_2D, operands(FLOATS, FLOATS, out=F32))
def conv_transpose_2d(lw: CpuLowering, t: Tensor) -> None:
    """As `conv_transpose_1d`, in two dimensions, for each image of a batch."""
    y, kernel, data = (View.of(x) for x in (t, *t.sources))
    _spread(lw, y, data, kernel, [t.params["stride"]] * 2)


def _spread(lw: CpuLowering, y: View, data: View, kernel: View, strides: Sequence[int]) -> None:
    """Emit `y`, `[N, OC, ..]`, of data `[N, IC, places..]` and a kernel `[IC, OC, taps..]`."""
    n_in, n_out, *taps = kernel.shape
    n, _, *places = data.shape
    rank = len(taps)
    weight = packed_f32(lw, kernel).reshape(n_in, n_out * prod(taps))
    patches = lw.scratch((n, n_out, *taps, *places))
    lw.emit(
        np.matmul,
        weight.T,
        packed_f32(lw, data).reshape(n, n_in, prod(places)),
        out=patches.reshape(n, weight.shape[1], prod(places)),
    )
    axes = [Axis(m, k, p, s) for m, k, p, s in zip(y.shape[2:], taps, places, strides, strict=True)]
    order = (0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank))
    fold(lw, y, lw.view(patches).transposed(*order), axes)
