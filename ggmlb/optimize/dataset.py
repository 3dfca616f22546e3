"""Dataset: arrays of data and labels, read in batches, optionally shuffled."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ggmlb.core.arguments import checked_methods, named, real_numbers
from ggmlb.core.errors import ArgumentError

Array = npt.NDArray[Any]


@named("a Dataset, as Dataset(data, labels=labels)")
@checked_methods
class Dataset:
    """Data points, and the labels of each (ggml_opt_dataset).

    Args:
        data: Arrays whose first dimension counts data points; one for each input of the graph.
        labels: Labels of each data point, if the loss needs them.
        n_shard: Neighbouring data points that stay together in a shuffle; a last, smaller shard stays last.

    Raises:
        ArgumentError: There are no arrays, or they have different numbers of data points.
        DTypeError: An array holds no numbers.
    """

    def __init__(self, *data: npt.ArrayLike, labels: npt.ArrayLike | None = None, n_shard: int = 1) -> None:
        self.data: tuple[Array, ...] = tuple(real_numbers(array, "Dataset") for array in data)
        self.labels: Array | None = None
        if labels is not None:
            self.labels = real_numbers(labels, "Dataset")
        arrays = [*self.data, *([] if self.labels is None else [self.labels])]
        counts = {array.shape[0] if array.ndim else 0 for array in arrays}
        if not self.data or len(counts) != 1 or 0 in counts:
            shapes = ", ".join(str(list(array.shape)) for array in arrays)
            raise ArgumentError(
                f"Dataset: arrays of shapes {shapes or '(none)'}; the first dimension of each counts the "
                "data points, which must be the same number, 1 or more"
            )
        if n_shard < 1:
            raise ArgumentError(f"Dataset: n_shard is {n_shard}; give 1 or more")
        self._n_shard = n_shard
        self._order = np.arange(counts.pop())

    def __len__(self) -> int:
        """Number of data points (ggml_opt_dataset_ndata)."""
        return len(self._order)

    def shuffle(self, rng: np.random.Generator, n: int | None = None) -> None:
        """Put the first `n` data points (all by default) in a random order (ggml_opt_dataset_shuffle).

        The order depends on `rng` alone, not on earlier shuffles; further data points keep their order.
        """
        if not 0 <= (n_shuffled := len(self) if n is None else n) <= len(self):
            raise ArgumentError(f"shuffle: n is {n}; give 0 to {len(self)}")
        whole = n_shuffled // self._n_shard
        order = np.arange(len(self))
        shards = order[: whole * self._n_shard].reshape(whole, self._n_shard)
        order[: whole * self._n_shard] = shards[rng.permutation(whole)].reshape(-1)
        self._order = order

    def get_batch(self, i: int, n: int) -> tuple[tuple[Array, ...], Array | None]:
        """Return batch number `i`, from 0, of `n` data points: data and labels (ggml_opt_dataset_get_batch).

        Raises:
            ArgumentError: There are fewer batches.
        """
        n_batches = len(self) // n if n > 0 else 0
        if not 0 <= i < n_batches:
            raise ArgumentError(f"get_batch: batch {i} of {n}; there are {n_batches} of that size")
        chosen = self._order[i * n : (i + 1) * n]
        labels = None if self.labels is None else self.labels[chosen]
        return tuple(array[chosen] for array in self.data), labels

    def __repr__(self) -> str:
        return f"<Dataset of {len(self)}>"
