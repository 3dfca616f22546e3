"""Lowering onto NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import ggmlb.backends.array.ops  # noqa: F401 (registers the reference rules)
from ggmlb.backends.array.casts import Casts
from ggmlb.backends.array.lowering import Lowering, Step
from ggmlb.backends.array.rules import RuleTable, reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ggmlb.backends.array.views import View
    from ggmlb.backends.array.workspace import Array, Workspace
    from ggmlb.backends.cpu.threads import Threads

TABLE = RuleTable(Casts(np), reference)
"""What the CPU can compute."""


class CpuLowering(Lowering):
    """Binds views of host memory; cuts work into tiles that stay in the L2 cache.

    Args:
        workspace: Scratch memory.
        threads: Run the tiles of big nodes.
    """

    xp = np
    tile = 1 << 15

    def __init__(self, workspace: Workspace, threads: Threads) -> None:
        super().__init__(TABLE, workspace)
        self._threads = threads

    def bind(self, view: View) -> Array:
        """A NumPy array over the host buffer's memory."""
        return np.ndarray(view.shape, view.item, view.buffer.base, view.offset, view.strides)

    def workers(self, n_items: int, n_tiles: int) -> int:
        """All threads for work worth waking them."""
        return min(self._threads.n, n_tiles) if n_items >= self.parallel_least else 1

    parallel_least = 1 << 18
    """Items below which waking threads costs more than it saves."""

    def run_parallel(self, lists: Sequence[Sequence[Step]]) -> None:
        """One list per thread."""
        self._threads.run(lists)
