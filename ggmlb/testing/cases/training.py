"""Losses and steps of optimisers."""

from __future__ import annotations

import numpy as np

from ggmlb.testing.cases.draw import F32, Program, family


@family("cross_entropy_loss")
def cross_entropy_loss(p: Program) -> None:
    ne = tuple(max(n, 1) for n in p.ne(30, 5, 3, 2))  # the mean over no rows is not a number
    p.nmse = 1e-6
    p.out("cross_entropy_loss", p.leaf(F32, ne, low=-4, high=4), p.step("soft_max", p.leaf(F32, ne)))


@family("cross_entropy_loss_back")
def cross_entropy_loss_back(p: Program) -> None:
    ne = p.ne(30, 5, 3, 2)
    p.nmse = 1e-6
    logits = p.leaf(F32, ne, low=-4, high=4)
    p.out("cross_entropy_loss_back", p.leaf(F32, (1,)), logits, p.step("soft_max", p.leaf(F32, ne)))


@family("opt_step_adamw")
def opt_step_adamw(p: Program) -> None:
    ne = p.ne()
    w, g, m = (p.leaf(F32, ne) for _ in range(3))
    v = p.leaf(F32, ne, low=0.01, high=1)
    numbers = [p.float(1e-4, 0.1), 0.9, 0.99, 1e-6, p.float(0, 0.1), p.float(1, 10), p.float(1, 20)]
    p.void("set_param", w)
    p.out("opt_step_adamw", w, g, m, v, p.leaf(F32, (7,), np.array(numbers, np.float32)))
    p.compare(m, v)


@family("opt_step_sgd")
def opt_step_sgd(p: Program) -> None:
    ne = p.ne()
    w, g = (p.leaf(F32, ne) for _ in range(2))
    p.void("set_param", w)
    p.out(
        "opt_step_sgd", w, g, p.leaf(F32, (2,), np.array([p.float(1e-4, 0.5), p.float(0, 0.5)], np.float32))
    )
