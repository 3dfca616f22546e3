"""Optimiser steps: SGD and AdamW, in place, with hyper-parameters in a tensor."""

from __future__ import annotations

import numpy as np

from ggmlb.backends.common.rules import F32, FLOATS, operands
from ggmlb.backends.common.workspace import Array
from ggmlb.backends.cpu.lowering import RULES, NodeLowering
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor


@RULES.rule(Op.OPT_STEP_SGD, operands(F32, FLOATS, F32, out=F32))
def opt_step_sgd(lw: NodeLowering, t: Tensor) -> None:
    """Update weights by gradients `g`: `w (1 - alpha decay) - alpha g`."""
    y, w, g, numbers = (lw.view(x) for x in (t, *t.sources))

    def kernel(y: Array, w: Array, g: Array, numbers: Array, tmp: Array) -> None:
        alpha, decay = numbers[:, None]
        np.multiply(g, alpha, out=tmp)
        np.multiply(w, 1 - alpha * decay, out=y)
        np.subtract(y, tmp, out=y)

    lw.tiled(kernel, y, w, g, whole=[numbers.reshape(-1)], scratch=1, work=3)


@RULES.rule(Op.OPT_STEP_ADAMW, operands(F32, FLOATS, F32, F32, F32, out=F32))
def opt_step_adamw(lw: NodeLowering, t: Tensor) -> None:
    """Update `m`, `v`, then `w (1 - alpha decay) - alpha m h1 / (sqrt(v h2) + eps)`; `h1`, `h2` correct bias.

    `m = m beta1 + g (1 - beta1)`, and `v = v beta2 + g^2 (1 - beta2)`.
    """
    y, w, g, m, v, numbers = (lw.view(x) for x in (t, *t.sources))
    whole = [numbers.reshape(-1)]

    def first_moment(y: Array, m: Array, g: Array, numbers: Array, tmp: Array) -> None:
        beta1 = numbers[1:2]
        np.multiply(g, 1 - beta1, out=tmp)
        np.multiply(m, beta1, out=y)
        np.add(y, tmp, out=y)

    def second_moment(y: Array, v: Array, g: Array, numbers: Array, tmp: Array) -> None:
        beta2 = numbers[2:3]
        np.multiply(g, g, out=tmp)
        np.multiply(tmp, 1 - beta2, out=tmp)
        np.multiply(v, beta2, out=y)
        np.add(y, tmp, out=y)

    def weights(y: Array, w: Array, m: Array, v: Array, numbers: Array, tmp: Array, root: Array) -> None:
        alpha, _, _, eps, decay, correct1, correct2 = numbers[:, None]
        np.multiply(v, correct2, out=root)
        np.sqrt(root, out=root)
        np.add(root, eps, out=root)
        np.multiply(m, alpha * correct1, out=tmp)
        np.divide(tmp, root, out=tmp)
        np.multiply(w, 1 - alpha * decay, out=y)
        np.subtract(y, tmp, out=y)

    lw.tiled(first_moment, m, m, g, whole=whole, scratch=1, work=3)
    lw.tiled(second_moment, v, v, g, whole=whole, scratch=1, work=4)
    lw.tiled(weights, y, w, m, v, whole=whole, scratch=2, work=10)
