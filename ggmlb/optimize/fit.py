"""fit: training in one call."""

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
        scheduler: As for `OptContext`, like the arguments that are not listed below.
        inputs: Leafs for a batch of data.
        outputs: The operand of the loss, such as logits.
        dataset: Data and labels.
        loss_type: A `LossType`, or its name.
        optimizer: Hyperparameters, or a function that returns those of each step.
        n_epochs: Number of passes over the data.
        n_batch_logical: Data points per optimizer step, a multiple of a batch; a batch by default.
        val_split: Fraction of the data points, the last ones, for validation; from 0 to below 1.
        class_labels: Whether labels are class indices.
        n_batch: Data points per batch.
        callback: Called after each batch; `False` ends the training.
        seed: Seed of the order of the data.

    Returns:
        Results of each epoch.

    Raises:
        ArgumentError: An argument is out of range.
        Error: As `OptContext`.
    """
    n_batch = batch_size(inputs, n_batch)
    logical = n_batch if n_batch_logical is None else n_batch_logical
    if logical < n_batch or logical % n_batch:
        raise ArgumentError(f"fit: n_batch_logical is {logical}; give a multiple of n_batch, {n_batch}")
    with OptContext(
        scheduler, inputs, outputs, loss_type, optimizer,
        opt_period=logical // n_batch, class_labels=class_labels, n_batch=n_batch, seed=seed,
    ) as opt:  # fmt: skip
        return opt.fit(dataset, n_epochs, val_split, callback)
