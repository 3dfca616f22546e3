"""Optimizers: hyperparameters, and the nodes that update a parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ggmlb import Context, Tensor
from ggmlb.core.arguments import alias, checked_methods, named
from ggmlb.core.errors import ArgumentError


@named("AdamW(...)")
@checked_methods
@dataclass(frozen=True, slots=True)
class AdamW:
    """The optimizer AdamW (Loshchilov & Hutter), as in PyTorch; the default values are ggml's.

    Attributes:
        alpha: Learning rate.
        beta1: Decay of the first moments.
        beta2: Decay of the second moments.
        eps: Added to the root of the second moments.
        wd: Weight decay; 0: none.

    Raises:
        ArgumentError: A number is out of range.
    """

    alpha: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    wd: float = 0.0

    n_moments: ClassVar[int] = 2
    n_numbers: ClassVar[int] = 7

    def __post_init__(self) -> None:
        _check(self, alpha=self.alpha, eps=self.eps, wd=self.wd)
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise ArgumentError(f"AdamW: {name} is {beta}; give a number from 0 to below 1")

    def numbers(self, iteration: int) -> list[float]:
        """Return the hyperparameters for `opt_step_adamw` at the step `iteration`, which counts from 1.

        Raises:
            ArgumentError: The step is below 1.
        """
        if iteration < 1:
            raise ArgumentError(f"AdamW: iteration is {iteration}; steps are counted from 1")
        corrections = [1 / (1 - beta**iteration) for beta in (self.beta1, self.beta2)]
        return [self.alpha, self.beta1, self.beta2, self.eps, self.wd, *corrections]

    def step(
        self, ctx: Context, param: Tensor, grad: Tensor, moments: Sequence[Tensor], numbers: Tensor
    ) -> Tensor:
        """Return the node that updates `param` and `moments` from `grad` and hyperparameters `numbers`."""
        if len(moments) != 2:
            raise ArgumentError(f"AdamW: {len(moments)} moments; give 2")
        first, second = moments
        return ctx.opt_step_adamw(param, grad, first, second, numbers)


@named("SGD(...)")
@checked_methods
@dataclass(frozen=True, slots=True)
class SGD:
    """Gradient descent with weight decay.

    Attributes:
        alpha: Learning rate.
        wd: Weight decay; 0: none.

    Raises:
        ArgumentError: A number is out of range.
    """

    alpha: float = 1e-3
    wd: float = 0.0

    n_moments: ClassVar[int] = 0
    n_numbers: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _check(self, alpha=self.alpha, wd=self.wd)

    def numbers(self, iteration: int) -> list[float]:
        """Return the hyperparameters for `opt_step_sgd`, the same at each step."""
        return [self.alpha, self.wd]

    def step(
        self, ctx: Context, param: Tensor, grad: Tensor, moments: Sequence[Tensor], numbers: Tensor
    ) -> Tensor:
        """Return the node that updates `param` from `grad` and the hyperparameters `numbers`."""
        return ctx.opt_step_sgd(param, grad, numbers)


Optimizer = AdamW | SGD
alias("Optimizer", "AdamW | SGD")


def _check(of: object, **numbers: float) -> None:
    for name, number in numbers.items():
        if not 0 <= number < math.inf:
            raise ArgumentError(f"{type(of).__name__}: {name} is {number}; give a number of 0 or more")
