"""Lowering onto NumPy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import ggmlb.backends.cpu.array.ops  # noqa: F401 (registers the reference rules)
from ggmlb.backends.cpu import recipes
from ggmlb.backends.cpu.array.lowering import Lowering, Step
from ggmlb.backends.cpu.array.rules import RuleTable, reference
from ggmlb.backends.cpu.casts import CpuCasts
from ggmlb.backends.cpu.products import product
from ggmlb.core.errors import BackendError
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array, Workspace
    from ggmlb.backends.cpu.array.views import Memory, View
    from ggmlb.backends.cpu.threads import Threads

TABLE = RuleTable(CpuCasts(np), reference)
"""What the CPU can compute."""


_UNKNOWN: Final = recipes.Recipe([], [])


class CpuLowering(Lowering):
    """Binds views of host memory; cuts work into tiles that stay in the L2 cache.

    Args:
        workspace: Scratch memory.
        threads: Run the tiles of big nodes.
        table: The rules.
    """

    xp = np
    tile = 1 << 17
    weight_tile = 1 << 19
    parallel_work = 1 << 19
    """Additions below which waking a thread costs more than it saves: about 0.1 ms."""
    parallel_call = 1 << 17
    """Additions in a call, over all threads, below which they hinder each other more than they help."""

    def __init__(self, workspace: Workspace, threads: Threads, table: RuleTable = TABLE) -> None:
        super().__init__(table, workspace)
        self._threads = threads
        self._addresses: dict[Memory, int] = {}
        self._recipes: dict[recipes.Key, recipes.Recipe | None] = {}
        self._taken: list[Array] = []

    def lower(self, nodes: Iterable[Tensor]) -> tuple[list[Step], list[int]]:
        """Lower as any library; recipes last as long as the call: their functions keep this lowering."""
        try:
            return super().lower(nodes)
        finally:
            self._recipes.clear()

    def _lower(self, node: Tensor) -> None:
        """Follow the recipe of a node like this one, or lower it, and write down how."""
        if self._group is not None or node.buffer is None:
            super()._lower(node)
            return
        try:
            key = recipes.key_of(node)
            recipe = self._recipes.get(key, _UNKNOWN)
        except (TypeError, ValueError):  # a parameter that cannot be compared
            recipe = None
        if recipe is None:
            super()._lower(node)
        elif recipe is not _UNKNOWN:
            steps = recipes.follow(recipe, node, [self._workspace.reserve(n) for n in recipe.scratch])
            self._steps += steps
            self._counts[-1] += len(steps)
        else:
            n_steps, self._taken = len(self._steps), []
            super()._lower(node)
            is_done = self._group is None
            self._recipes[key] = recipes.write(node, self._steps[n_steps:], self._taken) if is_done else None

    def scratch(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """Take scratch, as any library, and note it for a recipe."""
        array = super().scratch(shape, dtype)
        self._taken.append(array)
        return array

    def bind(self, view: View) -> Array:
        """A NumPy array over the host buffer's memory."""
        memory, _, item, offset, shape, strides = view
        return np.ndarray(shape, item, memory.base, offset, strides)

    def address(self, view: View) -> int:
        """The address of the first item of a view."""
        memory = view.buffer
        if memory not in self._addresses:
            self._addresses[memory] = memory.base.ctypes.data
        return self._addresses[memory] + view.offset

    def workers(self, work: int, call: int | None = None) -> int:
        """All threads, if calls are long: after each, a thread waits for the interpreter's lock."""
        is_long = call is None or call >= self.parallel_call
        return self._threads.n if is_long and work >= self.parallel_work else 1

    def row_sum(self, x: Array) -> Array:
        """As products with ones, by BLAS: half the time of a reduction where rows are short."""
        return _dot(x, _ones(x.shape[-1]))

    def row_dot(self, x: Array, y: Array, tmp: Array) -> Array:
        """In one pass, by BLAS."""
        return _dot(x, y)

    def product(self, y: View, a: View, b: View) -> None:
        """Over threads."""
        if 0 not in y.shape:
            product(self, y, a, b)

    def check_index(self, index: Array, n: int) -> None:
        """Raise BackendError for a row number that is not in `range(n)`."""
        if index.size and not (index.min() >= 0 and index.max() < n):
            raise BackendError(f"row numbers from {index.min()} to {index.max()} for a tensor of {n} rows")

    def take(self, y: Array, x: Array, index: Array, axis: int) -> None:
        """Take elements without a temporary; a step."""
        np.take(x, index, axis=axis, out=y, mode="clip")

    def take_rows(self, y: Array, x: Array, index: Array) -> None:
        """Copy rows without a temporary where they lie packed; a step."""
        self.check_index(index, x.shape[2])
        if x.shape[:2] == (1, 1) and x.flags.c_contiguous and y.flags.c_contiguous:
            np.take(x[0, 0], index[0, 0], axis=0, out=y[0, 0], mode="clip")
        else:
            super().take_rows(y, x, index)

    def put_rows(self, y: Array, x: Array, index: Array) -> None:
        """Copy rows to their places; a step."""
        self.check_index(index, y.shape[2])
        super().put_rows(y, x, index)

    def add_rows(self, y: Array, x: Array, index: Array) -> None:
        """Add the first of each repeated row, then the second, ...: `add.at` takes ten times as long."""
        self.check_index(index, len(y))
        order = index.argsort(kind="stable")
        rows = index[order]
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        counts = np.diff(starts, append=rows.size)
        for i in range(counts.max(initial=0)):
            here = starts[counts > i] + i
            y[rows[here]] += x[order[here]]

    def run_parallel(self, lists: Sequence[Sequence[Step]]) -> None:
        """One list per thread."""
        self._threads.run(lists)


def _dot(x: Array, y: Array) -> Array:
    return np.vecdot(x, y)[..., np.newaxis]


@cache
def _ones(n: int) -> Array:
    return np.ones(n, np.float32)
