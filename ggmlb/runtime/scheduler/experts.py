"""Copying only those experts of a weight that the tokens at hand use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ggmlb.core.errors import BackendError
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.runtime.scheduler.split import Split, SplitInput


class ExpertCopies:
    """Copies experts during one computation; ids that several weights are read by are looked at once.

    Args:
        splits: The splits that are computed.
        c: Which copies of their inputs they read.

    Source: the copies of ggml_backend_sched_compute_splits for GGML_OP_MUL_MAT_ID.
    """

    def __init__(self, splits: Sequence[Split], c: int) -> None:
        self._splits = splits
        self._c = c
        self._used: dict[Tensor, npt.NDArray[np.intp]] = {}

    def copy(self, item: SplitInput, split: Split) -> bool:
        """Queue copies of the experts in use, those that lie side by side in one.

        The other experts of the copy keep whatever lies there: no id leads to them.

        Returns:
            Whether it was done; not if an expert's bytes are not side by side.

        Raises:
            BackendError: An id is not that of an expert.
        """
        src, node = item.src, item.experts
        assert node is not None
        ids = node.operand(2)
        n_experts, size = src.ne[2], src.nb[2]
        if src.ne[3] != 1 or size * n_experts != src.nbytes or src.buffer is None:
            return False
        used = self._used.get(ids)
        if used is None:
            used = self._used[ids] = self._find_used(ids, n_experts, node, split)
        data = src.buffer.base[src.offset : src.offset + src.nbytes]
        for first, last in _runs(used):
            start, end = first * size, (last + 1) * size
            split.backend.set_tensor_async(item.copy, data[start:end], start)
        return True

    def _find_used(self, ids: Tensor, n_experts: int, node: Tensor, split: Split) -> npt.NDArray[np.intp]:
        """Return the numbers of the experts in use, in order; waits for what computes the ids."""
        where, backend, is_staged = ids, split.backend, False
        for other in self._splits:
            for item in other.inputs:
                if ids not in item.copies:
                    continue
                if item.is_staged or other is split:  # it may not have been copied yet
                    where, backend, is_staged = item.src, item.backend, item.is_staged
                elif len(item.copies) > 1:
                    where = item.copies[self._c]
        if not is_staged:
            backend.synchronize()
        used: npt.NDArray[np.intp] = np.unique(where.to_numpy())
        if used.size and not 0 <= used[0] <= used[-1] < n_experts:
            bad = used[-1] if used[0] >= 0 else used[0]
            raise BackendError(
                f"{node.describe()}: {ids.describe()} holds {bad}, but there are {n_experts} experts; ids "
                f"must be 0 to {n_experts - 1}"
            )
        return used


def _runs(numbers: npt.NDArray[np.intp]) -> Iterator[tuple[int, int]]:
    """Yield first and last of each run of consecutive numbers."""
    if numbers.size:
        breaks = np.flatnonzero(np.diff(numbers) > 1)
        firsts = (numbers[0], *numbers[breaks + 1])
        lasts = (*numbers[breaks], numbers[-1])
        for first, last in zip(firsts, lasts, strict=True):
            yield int(first), int(last)
