"""Cases, samples and timings: losses and optimiser steps."""

from __future__ import annotations

import numpy as np

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor
from ggmlb.testing.draw import F32, Program
from ggmlb.testing.ops.record import ROW, cases, f32, main

# -- train ---


@cases(Op.CROSS_ENTROPY_LOSS, lambda c, t: c.cross_entropy_loss(main(c, t), f32(c, ROW, 4)))
def cross_entropy_loss(p: Program) -> None:
    ne = tuple(max(n, 1) for n in p.ne(30, 5, 3, 2))  # the mean over no rows is NaN
    p.nmse = 1e-6
    p.out("cross_entropy_loss", p.leaf(F32, ne, low=-4, high=4), p.step("soft_max", p.leaf(F32, ne)))


@cases(
    Op.CROSS_ENTROPY_LOSS_BACK, lambda c, t: c.cross_entropy_loss_back(f32(c, 1), main(c, t), f32(c, ROW, 4))
)
def cross_entropy_loss_back(p: Program) -> None:
    ne = p.ne(30, 5, 3, 2)
    p.nmse = 1e-6
    logits = p.leaf(F32, ne, low=-4, high=4)
    p.out("cross_entropy_loss_back", p.leaf(F32, (1,)), logits, p.step("soft_max", p.leaf(F32, ne)))


def _sample_opt_step_adamw(c: Context, t: DType) -> Tensor:
    a = c.set_param(main(c, t))
    return c.opt_step_adamw(a, f32(c, ROW, 4), f32(c, ROW, 4), f32(c, ROW, 4), f32(c, 7))


@cases(Op.OPT_STEP_ADAMW, _sample_opt_step_adamw)
def opt_step_adamw(p: Program) -> None:
    ne = p.ne()
    w, g, m = (p.leaf(F32, ne) for _ in range(3))
    v = p.leaf(F32, ne, low=0.01, high=1)
    numbers = [p.float(1e-4, 0.1), 0.9, 0.99, 1e-6, p.float(0, 0.1), p.float(1, 10), p.float(1, 20)]
    p.void("set_param", w)
    p.out("opt_step_adamw", w, g, m, v, p.leaf(F32, (7,), np.array(numbers, np.float32)))
    p.compare(m, v)


@cases(Op.OPT_STEP_SGD, lambda c, t: c.opt_step_sgd(c.set_param(main(c, t)), f32(c, ROW, 4), f32(c, 2)))
def opt_step_sgd(p: Program) -> None:
    ne = p.ne()
    w, g = (p.leaf(F32, ne) for _ in range(2))
    p.void("set_param", w)
    p.out(
        "opt_step_sgd", w, g, p.leaf(F32, (2,), np.array([p.float(1e-4, 0.5), p.float(0, 0.5)], np.float32))
    )
