"""Result: losses and predictions over batches; Progress: the argument of callbacks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb.core.arguments import alias, checked, named
from ggmlb.core.errors import ArgumentError
from ggmlb.system.progress import in_notebook

if TYPE_CHECKING:
    from ggmlb.optimize.context import OptContext
    from ggmlb.optimize.dataset import Dataset


@named("a Result()")
class Result:
    """Losses and predictions that `OptContext.eval` collects, batch by batch (ggml_opt_result).

    Attributes:
        losses: Loss of each batch.
        n_data: Data points of all batches.
        n_correct: Number of correct predictions; -1: not counted.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.n_data = 0
        self.n_correct = -1
        self._n_rows = 0
        self._pred: list[npt.NDArray[np.int32]] = []

    def add(
        self, loss: float, n_data: int, pred: npt.NDArray[np.int32] | None = None, n_correct: int = 0
    ) -> None:
        """Add a batch of `n_data` points: its loss, predicted classes, and number of correct ones."""
        self.losses.append(loss)
        self.n_data += n_data
        if pred is not None:
            self._pred.append(pred)
            self._n_rows += pred.size
            self.n_correct = max(self.n_correct, 0) + n_correct

    @property
    def loss(self) -> float:
        """Mean loss of the batches; NaN if there are none (ggml_opt_result_loss)."""
        return float(np.mean(self.losses)) if self.losses else math.nan

    @property
    def loss_uncertainty(self) -> float:
        """Standard error of the loss; NaN with fewer than two batches."""
        n = len(self.losses)
        return float(np.std(self.losses, ddof=1) / math.sqrt(n)) if n > 1 else math.nan

    @property
    def accuracy(self) -> float:
        """Fraction of correct predictions; NaN if there are no predictions (ggml_opt_result_accuracy)."""
        return self.n_correct / self._n_rows if self._n_rows else math.nan

    @property
    def accuracy_uncertainty(self) -> float:
        """Standard error of the accuracy; NaN with fewer than two predictions."""
        n, share = self._n_rows, self.accuracy
        return math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else math.nan

    @property
    def pred(self) -> npt.NDArray[np.int32]:
        """The predicted class of each row of outputs, batch by batch (ggml_opt_result_pred)."""
        return np.concatenate(self._pred) if self._pred else np.zeros(0, np.int32)

    def __repr__(self) -> str:
        if not self.losses:
            return "<Result of no batch>"
        accuracy = f", accuracy {self.accuracy:.2%}" if self._n_rows else ""
        return f"<Result of {self.n_data:,}: loss {self.loss:.4g}{accuracy}>"


class Epoch(NamedTuple):
    """Results of an epoch, of its training and of its validation.

    Attributes:
        train: Results of training.
        eval: Results of the validation data, after training.
    """

    train: Result
    eval: Result


@named("a Progress, as callbacks are given one")
@dataclass(frozen=True, slots=True)
class Progress:
    """The state of an epoch after a batch, which callbacks get.

    Attributes:
        is_training: Whether this is training; else evaluation.
        opt: The optimizer context.
        dataset: The data set.
        result: Results so far.
        n_done: Finished batches.
        n_batches: Batches of this part of the epoch.
        start: Start time by `time.perf_counter` [s].
    """

    is_training: bool
    opt: OptContext
    dataset: Dataset
    result: Result
    n_done: int
    n_batches: int
    start: float

    @property
    def seconds(self) -> float:
        """Time since the start of this part (training or evaluation) of the epoch [s]."""
        return perf_counter() - self.start

    @property
    def remaining(self) -> float:
        """Estimated remaining time of this part (training or evaluation) of the epoch [s]."""
        return self.seconds / self.n_done * (self.n_batches - self.n_done)


Callback = Callable[[Progress], Any]
"""Called after each batch; `False` ends the training."""
alias("Callback", "Callable")


MOST_WIDTH = 1000
"""Largest width of a bar [characters]."""


@checked
def progress_bar(progress: Progress, width: int = 24) -> None:
    """Print a bar in one line, overwritten after each batch (ggml_opt_epoch_callback_progress_bar).

    To standard error, or to the output of a notebook.
    """
    if not 1 <= width <= MOST_WIDTH:
        raise ArgumentError(f"progress_bar: width is {width}; give 1 to {MOST_WIDTH}")
    p, result = progress, progress.result
    filled = width * p.n_done // p.n_batches
    accuracy = f"  accuracy {result.accuracy:.2%}" if result.n_correct >= 0 else ""
    print(
        f"\r{'train' if p.is_training else 'eval '} |{'=' * filled:{width}}| {p.n_done}/{p.n_batches}"
        f"  loss {result.loss:.4f}{accuracy}  {p.seconds:.0f} s, {p.remaining:.0f} s left ",
        end="\n" if p.n_done == p.n_batches else "",
        file=sys.stdout if in_notebook() else sys.stderr,
        flush=True,
    )
