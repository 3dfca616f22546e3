"""Steps of optimisers: weights and moments change in place, by numbers that lie in a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ggmlb.backends.common.rules import F32, FLOATS, operands
from ggmlb.backends.cpu.rules import RULES
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.lowering import CpuLowering


def _numbers(lw: CpuLowering, t: Tensor) -> list[Array]:
    """Each number as an array of one element, read when the steps run."""
    flat = lw.array(t).reshape(-1)
    return [flat[i : i + 1] for i in range(t.n_elements)]


@RULES.rule(Op.OPT_STEP_SGD, operands(F32, FLOATS, F32, out=F32))
def opt_step_sgd(lw: CpuLowering, t: Tensor) -> None:
    """`w (1 - alpha decay) - alpha g`."""
    (w, g, numbers) = t.sources
    alpha, decay = _numbers(lw, numbers)

    def kernel(y: Array, w: Array, g: Array, tmp: Array) -> None:
        np.multiply(g, alpha, out=tmp)
        np.multiply(w, 1 - alpha * decay, out=y)
        np.subtract(y, tmp, out=y)

    lw.elementwise(kernel, t, w, g, scratch=1, work=3)


@RULES.rule(Op.OPT_STEP_ADAMW, operands(F32, FLOATS, F32, F32, F32, out=F32))
def opt_step_adamw(lw: CpuLowering, t: Tensor) -> None:
    """`w (1 - alpha decay) - alpha m h1 / (sqrt(v h2) + eps)`, after the moments' own steps.

    `m` becomes `m beta1 + g (1 - beta1)`, and `v` `v beta2 + g^2 (1 - beta2)`.
    """
    (w, g, m, v, numbers) = t.sources
    alpha, beta1, beta2, eps, decay, correct1, correct2 = _numbers(lw, numbers)

    def first_moment(y: Array, m: Array, g: Array, tmp: Array) -> None:
        np.multiply(g, 1 - beta1, out=tmp)
        np.multiply(m, beta1, out=y)
        np.add(y, tmp, out=y)

    def second_moment(y: Array, v: Array, g: Array, tmp: Array) -> None:
        np.multiply(g, g, out=tmp)
        np.multiply(tmp, 1 - beta2, out=tmp)
        np.multiply(v, beta2, out=y)
        np.add(y, tmp, out=y)

    def weights(y: Array, w: Array, m: Array, v: Array, tmp: Array, root: Array) -> None:
        np.multiply(v, correct2, out=root)
        np.sqrt(root, out=root)
        np.add(root, eps, out=root)
        np.multiply(m, alpha * correct1, out=tmp)
        np.divide(tmp, root, out=tmp)
        np.multiply(w, 1 - alpha * decay, out=y)
        np.subtract(y, tmp, out=y)

    lw.elementwise(first_moment, m, m, g, scratch=1, work=3)
    lw.elementwise(second_moment, v, v, g, scratch=1, work=4)
    lw.elementwise(weights, t, w, m, v, scratch=2, work=10)
