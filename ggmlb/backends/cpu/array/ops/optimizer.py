"""Steps of optimisers: weights and moments change in place, by numbers that lie in a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.cpu.array.rules import F32, FLOAT, operands, rule
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.array.lowering import Lowering


def _numbers(lw: Lowering, t: Tensor) -> list[Array]:
    """Each number as an array of one element, read when the steps run."""
    flat = lw.array(t).reshape(-1)
    return [flat[i : i + 1] for i in range(t.n_elements)]


@rule(Op.OPT_STEP_SGD, operands(F32, FLOAT, F32, out=F32))
def opt_step_sgd(lw: Lowering, t: Tensor) -> None:
    """`w (1 - alpha decay) - alpha g`."""
    xp, (w, g, numbers) = lw.xp, t.sources
    alpha, decay = _numbers(lw, numbers)

    def kernel(y: Array, w: Array, g: Array, tmp: Array) -> None:
        xp.multiply(g, alpha, out=tmp)
        xp.multiply(w, 1 - alpha * decay, out=y)
        xp.subtract(y, tmp, out=y)

    lw.elementwise(kernel, t, w, g, scratch=1, work=3)


@rule(Op.OPT_STEP_ADAMW, operands(F32, FLOAT, F32, F32, F32, out=F32))
def opt_step_adamw(lw: Lowering, t: Tensor) -> None:
    """`w (1 - alpha decay) - alpha m h1 / (sqrt(v h2) + eps)`, after the moments' own steps.

    `m` becomes `m beta1 + g (1 - beta1)`, and `v` `v beta2 + g^2 (1 - beta2)`.
    """
    xp, (w, g, m, v, numbers) = lw.xp, t.sources
    alpha, beta1, beta2, eps, decay, correct1, correct2 = _numbers(lw, numbers)

    def first_moment(y: Array, m: Array, g: Array, tmp: Array) -> None:
        xp.multiply(g, 1 - beta1, out=tmp)
        xp.multiply(m, beta1, out=y)
        xp.add(y, tmp, out=y)

    def second_moment(y: Array, v: Array, g: Array, tmp: Array) -> None:
        xp.multiply(g, g, out=tmp)
        xp.multiply(tmp, 1 - beta2, out=tmp)
        xp.multiply(v, beta2, out=y)
        xp.add(y, tmp, out=y)

    def weights(y: Array, w: Array, m: Array, v: Array, tmp: Array, root: Array) -> None:
        xp.multiply(v, correct2, out=root)
        xp.sqrt(root, out=root)
        xp.add(root, eps, out=root)
        xp.multiply(m, alpha * correct1, out=tmp)
        xp.divide(tmp, root, out=tmp)
        xp.multiply(w, 1 - alpha * decay, out=y)
        xp.subtract(y, tmp, out=y)

    lw.elementwise(first_moment, m, m, g, scratch=1, work=3)
    lw.elementwise(second_moment, v, v, g, scratch=1, work=4)
    lw.elementwise(weights, t, w, m, v, scratch=2, work=10)
