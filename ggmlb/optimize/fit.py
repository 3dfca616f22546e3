"""fit: epochs over a data set in one call."""

from __future__ import annotations

from collections.abc import Sequence

from ggmlb import Scheduler, Tensor
from ggmlb.core.arguments import checked
from ggmlb.core.errors import ArgumentError
from ggmlb.optimize.context import LossType, OptContext, Schedule, batch_size
from ggmlb.optimize.dataset import Dataset
from ggmlb.optimize.optimizers import AdamW, Optimizer
from ggmlb.optimize.result import Callback, Epoch


@checked
def fit(
    scheduler: Scheduler,
    inputs: Tensor | Sequence[Tensor],
    outputs: Tensor,
    dataset: Dataset,
    loss_type: LossType | int | str,
    optimizer: Optimizer | Schedule = AdamW(),  # noqa: B008 - frozen
    *,
    n_epochs: int = 1,
    n_batch_logical: int | None = None,
    val_split: float = 0.0,
    class_labels: bool = False,
    n_batch: int | None = None,
    callback: Callback | None = None,
    seed: int = 0,
) -> list[Epoch]:
    """Train a graph's parameters with a data set, which is shuffled before each epoch (ggml_opt_fit).

    Args:
        scheduler: As for `OptContext`; so are `inputs`, `outputs`, `loss_type`, `optimizer`, `class_labels`,
            `n_batch` and `seed`.
        inputs: Leafs for a batch of data.
        outputs: What the loss is made of.
        dataset: Data and labels.
        loss_type: What is made small.
        optimizer: Hyperparameters, or a function that returns those of each step.
        n_epochs: How often all data is used.
        n_batch_logical: Data points between steps, a multiple of those of a batch; by default a batch.
        val_split: Share of the data points, the last ones, that measure and do not train; from 0 to below 1.
        class_labels: Whether labels are numbers of classes.
        n_batch: Data points of a batch.
        callback: Called after each batch; `False` ends the training.
        seed: Of the orders of data.

    Returns:
        What each epoch measured.

    Raises:
        ArgumentError: An argument is out of range.
        Error: As `OptContext`.
    """
    n_batch = batch_size(inputs, n_batch)
    logical = n_batch if n_batch_logical is None else n_batch_logical
    if logical < n_batch or logical % n_batch:
        raise ArgumentError(f"fit: n_batch_logical is {logical}; give a multiple of {n_batch}, a batch")
    with OptContext(
        scheduler, inputs, outputs, loss_type, optimizer,
        opt_period=logical // n_batch, class_labels=class_labels, n_batch=n_batch, seed=seed,
    ) as opt:  # fmt: skip
        return opt.fit(dataset, n_epochs, val_split, callback)
