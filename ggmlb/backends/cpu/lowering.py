"""CpuLowering: reading of operands, scratch, and emission of steps (NumPy calls) for rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import ggmlb.backends.cpu.ops  # noqa: F401 (fills the table of rules)
from ggmlb.backends.cpu import casts, recipes
from ggmlb.backends.cpu.products import product
from ggmlb.backends.cpu.rules import RULES
from ggmlb.backends.cpu.tiling import TiledGroup, TileStage
from ggmlb.backends.cpu.views import View, aligned
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import NO_OPS
from ggmlb.core.errors import BackendError, UnsupportedOpError
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array, Workspace
    from ggmlb.backends.cpu.threads import Threads
    from ggmlb.backends.cpu.views import ViewSource

Step = Callable[[], Any]
"""A call with everything bound."""

Kernel = Callable[..., Any]
"""`kernel(y, *x, *scratch)`: fills `y` from the operands, all float32, `y` perhaps the memory of an `x`."""

_UNKNOWN: Final = recipes.Recipe([], [])


class CpuLowering:
    """Lowers nodes to steps over arrays, in tiles that fit in the L2 cache.

    Args:
        workspace: Scratch memory.
        threads: Run the tiles of big nodes.

    Attributes:
        tile: Items of the largest operand per tile, so that a tile and its scratch stay in the cache.
        weight_tile: Values of a weight, or of keys and values, that are held as float32 at a time.
        parallel_work: Additions below which waking a thread does not pay: about 0.1 ms.
        parallel_call: Additions of a call over all threads, below which threading does not pay.
    """

    keeps_no_memory = True
    tile = 1 << 17
    weight_tile = 1 << 19
    parallel_work = 1 << 19
    parallel_call = 1 << 17

    def __init__(self, workspace: Workspace, threads: Threads) -> None:
        self._workspace = workspace
        self._threads = threads
        self._steps: list[Step] = []
        self._counts: list[int] = []
        self._group: TiledGroup | None = None
        self._group_node = 0
        self._addresses: dict[ViewSource, int] = {}
        self._recipes: dict[recipes.Key, recipes.Recipe | None] = {}
        self._taken: list[Array] = []

    def lower(self, nodes: Iterable[Tensor]) -> tuple[list[Step], list[int]]:
        """Return the steps that compute the nodes, and how many of them each node has.

        Raises:
            UnsupportedOpError: The rules decline a node.
        """
        self._steps, self._counts = [], []
        try:
            for node in nodes:
                self._counts.append(0)
                if node.op not in NO_OPS and not node.is_empty:
                    if self._group is None:
                        self._workspace.restart()
                    self._lower(node)
            self._flush()
        finally:
            self._recipes.clear()  # their functions keep this lowering
        steps, self._steps = self._steps, []  # which may call this lowering: a cycle would hold the memory
        return steps, self._counts

    def _lower(self, node: Tensor) -> None:
        """Lower a node by the recipe of a similar one, or by its rule, recording a recipe."""
        recipe = None
        if self._group is None and node.buffer is not None:
            try:
                key = recipes.key_of(node)
                recipe = self._recipes.get(key, _UNKNOWN)
            except (TypeError, ValueError):  # a parameter that cannot be compared
                pass
        if recipe is None:
            self._follow_rule(node)
        elif recipe is not _UNKNOWN:
            steps = recipes.follow(recipe, node, [self._workspace.reserve(n) for n in recipe.scratch])
            self._steps += steps
            self._counts[-1] += len(steps)
        else:
            n_steps, self._taken = len(self._steps), []
            self._follow_rule(node)
            is_done = self._group is None
            self._recipes[key] = recipes.write(node, self._steps[n_steps:], self._taken) if is_done else None

    def _follow_rule(self, node: Tensor) -> None:
        why = RULES.declines(node)
        if why is not None:
            raise UnsupportedOpError(f"cannot lower {node.describe()}: {why}")
        RULES[node.op](self, node)

    # -- steps -------------------------------------------------------------------------------------

    def emit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Append a call to the plan."""
        self._flush()
        self._steps.append(partial(fn, *args, **kwargs) if args or kwargs else fn)
        self._counts[-1] += 1

    def emit_parallel(self, lists: Sequence[Sequence[Step]]) -> None:
        """Append lists of steps that may run at the same time."""
        self._flush()
        self._append(lists, len(self._counts) - 1)

    def _append(self, lists: Sequence[Sequence[Step]], node: int) -> None:
        steps = lists[0] if len(lists) == 1 else [partial(self.run_parallel, lists)]
        self._steps += steps
        self._counts[node] += len(steps)

    def _emit_stage(self, stage: TileStage) -> None:
        """Add a stage to the current group, or begin a new group."""
        if self._group is None or not self._group.accepts(stage):
            self._flush()
            self._group = TiledGroup(self, stage)
        self._group_node = len(self._counts) - 1
        if self._group.is_closed:
            self._flush()

    def _flush(self) -> None:
        """Append the steps of the pending group, counted for the node of its last stage."""
        group, self._group = self._group, None
        if group is not None:
            self._append(group.lists(), self._group_node)

    def scratch(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """Return a C-contiguous scratch array, valid for the steps of this node."""
        array = self._workspace.take(shape, dtype)
        self._taken.append(array)
        return array

    def product(self, y: View, a: View, b: View) -> None:
        """Emit `y = b @ a.T` for each matrix of a batch.

        Args:
            y: Float32, `[n3 r3, n2 r2, n, m]`.
            a: Of any type, `[n3, n2, m, k]`; repeats over the batch. If it is not float32, or not in a layout
                that BLAS takes, it goes through scratch, some rows at a time.
            b: Float32 in a layout that BLAS takes, `[n3 r3, n2 r2, n, k]`.
        """
        if 0 not in y.shape:
            product(self, y, a, b)

    # -- operands ----------------------------------------------------------------------------------

    def bind(self, view: View) -> Array:
        """Return the array of a view."""
        memory, _, item, offset, shape, strides = view
        return np.ndarray(shape, item, memory.base, offset, strides)

    def address(self, view: View) -> int:
        """Return the address of a view's first item, to compare views."""
        memory = view.buffer
        if memory not in self._addresses:
            self._addresses[memory] = memory.base.ctypes.data
        return self._addresses[memory] + view.offset

    def view(self, array: Array, dtype: DType = DType.F32) -> View:
        """View a C-contiguous array, scratch or constant, as an operand of type `dtype`."""
        return View(_Held(array), dtype, array.dtype, 0, array.shape, array.strides)

    def array(self, t: Tensor) -> Array:
        """Return the tensor's memory in four dimensions, `ne` reversed; BF16 as `uint16`, blocks as bytes."""
        return self.bind(View.of(t))

    def packed(self, t: Tensor) -> View:
        """Return a packed view of the values: the memory, or float32 scratch filled by a step."""
        view = View.of(t)
        if view.is_packed():
            return view
        values = self.view(self.scratch(t.ne[::-1]))
        self.copy(values, view)
        return values

    def f32(self, t: Tensor) -> Array:
        """Return the values as float32, `ne` reversed: the memory, or scratch filled by a step."""
        load = casts.loader(t.dtype)
        x = self.array(t)
        if load is None:
            return x
        values = self.scratch(t.ne[::-1])
        self.emit(load, values, x)
        return values

    def out_f32(self, t: Tensor) -> Array:
        """Return a float32 array for the result, `ne` reversed: its memory, or scratch; see `store`."""
        return self.array(t) if t.dtype == DType.F32 else self.scratch(t.ne[::-1])

    def store(self, t: Tensor, y: Array) -> None:
        """Emit the conversion of `y`, from `out_f32(t)`, into the tensor's memory, if one is needed."""
        store = casts.storer(t.dtype)
        if store is not None:
            self.emit(store, self.array(t), y)

    # -- rows by index: steps ----------------------------------------------------------------------

    def check_index(self, index: Array, n: int) -> None:
        """Raise BackendError for a row number that is not in `range(n)`."""
        if index.size and not (index.min() >= 0 and index.max() < n):
            raise BackendError(f"row numbers from {index.min()} to {index.max()} for a tensor of {n} rows")

    def take(self, y: Array, x: Array, index: Array, axis: int) -> None:
        """`y[.., i, ..] = x[.., index[i], ..]` along one axis, by an index that is known to fit."""
        np.take(x, index, axis=axis, out=y, mode="clip")  # without a temporary

    def take_rows(self, y: Array, x: Array, index: Array) -> None:
        """`y[.., i] = x[.., index[.., i]]` in each matrix of a batch."""
        self.check_index(index, x.shape[2])
        if x.shape[:2] != (1, 1):
            y[...] = x[(*_batch(*x.shape[:2]), index)]
        elif x.flags.c_contiguous and y.flags.c_contiguous:
            np.take(x[0, 0], index[0, 0], axis=0, out=y[0, 0], mode="clip")
        else:
            y[0, 0] = x[0, 0][index[0, 0]]

    def put_rows(self, y: Array, x: Array, index: Array) -> None:
        """`y[.., index[.., i]] = x[.., i]`; `index` repeats over the batch."""
        self.check_index(index, y.shape[2])
        if x.shape[:2] == (1, 1):
            y[0, 0][index[0, 0]] = x[0, 0]
        else:
            i3, i2 = _batch(*x.shape[:2])
            index = index[i3[..., 0] % index.shape[0], i2[..., 0] % index.shape[1]]
            y[i3, i2, index] = x

    def add_rows(self, y: Array, x: Array, index: Array) -> None:
        """`y[index[i]] += x[i]` for matrices, and rows that may repeat.

        Adds the first of each repeated row, then the second, ...: `add.at` takes ten times as long.
        """
        self.check_index(index, len(y))
        order = index.argsort(kind="stable")
        rows = index[order]
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        counts = np.diff(starts, append=rows.size)
        for i in range(counts.max(initial=0)):
            here = starts[counts > i] + i
            y[rows[here]] += x[order[here]]

    # -- tiles -------------------------------------------------------------------------------------

    def elementwise(self, kernel: Kernel, out: Tensor, *src: Tensor, scratch: int = 0, work: int = 1) -> None:
        """Emit `kernel(y, *x, *scratch)` over all elements; sources repeat over the result's shape.

        Args:
            kernel: Fills `y` from float32 arrays of one shape; may use `scratch` arrays of that shape.
            out: The result, of any type that can be stored.
            src: Operands, of any type that can be loaded.
            scratch: Number of scratch arrays of the kernel.
            work: Cost of the kernel per element, in additions, to decide on threads.
        """
        inner = int(out.dtype.is_quantized or any(s.dtype.is_quantized for s in src))
        views = [View.of(s) for s in src]
        self.tiled(kernel, View.of(out), *views, inner=inner, scratch=scratch, work=work)

    def rowwise(self, kernel: Kernel, out: Tensor, *src: Tensor, scratch: int = 0, work: int = 1) -> None:
        """Emit `kernel(y, *x, *scratch)` over rows: as `elementwise`, but rows (axis -1) stay whole.

        Sources and result have the same number of rows; the lengths of their rows may differ. Scratch
        arrays are like the first source.
        """
        self.tiled(kernel, View.of(out), *(View.of(s) for s in src), inner=1, scratch=scratch, work=work)

    def tiled(
        self,
        kernel: Kernel,
        out: View,
        *src: View,
        whole: Sequence[View] = (),
        inner: int = 0,
        scratch: int = 0,
        work: int = 1,
        least: int = 1,
        one_call: bool = False,
        convert: bool = True,
    ) -> None:
        """Cut views into tiles and emit, for each, its loads, the kernel and its store.

        Args:
            kernel: Called as `kernel(y, *x, *whole, *scratch)`.
            out: The result.
            src: Operands, cut like the result and broadcast to it, except in the last `inner` dimensions.
            whole: Operands that every tile reads whole, unconverted.
            inner: Number of last dimensions that are never cut.
            scratch: Number of scratch arrays of the kernel, of the first source's shape.
            work: As for `elementwise`.
            least: The least extent of a tile in the first dimension.
            one_call: Whether the kernel is one call of NumPy, however long.
            convert: Whether the kernel sees float32, with loads and a store where needed; else it sees the
                memory as it is.
        """
        if 0 in out.shape:
            return
        views = aligned([out, *src], inner)
        self._emit_stage(
            TileStage(self, kernel, views, whole, inner, scratch, work, least, one_call, convert)
        )

    def copy(self, dst: View, src: View) -> None:
        """Emit a copy between views of equal extents, converting from one type to the other."""
        inner = int(dst.type.is_quantized or src.type.is_quantized)
        if dst.type == src.type or casts.is_plain(dst.type, src.type):
            self.tiled(casts.copy, dst, src, convert=False)
        elif dst.type == DType.F32 and dst.is_packed():
            load = casts.loader(src.type) or casts.copy
            self.tiled(load, dst, src, inner=inner, work=casts.CAST, convert=False)
        else:
            self.tiled(casts.copy, dst, src, inner=inner, work=casts.CAST)

    def workers(self, work: int, call: int | None = None) -> int:
        """Return the number of threads for so many additions, of which one call does `call` (default all).

        All threads only if calls are long, because a thread waits for the GIL after each call.
        """
        is_long = call is None or call >= self.parallel_call
        return self._threads.n if is_long and work >= self.parallel_work else 1

    def run_parallel(self, lists: Sequence[Sequence[Step]]) -> None:
        """Run lists of steps at the same time, one per thread."""
        self._threads.run(lists)


def _batch(n3: int, n2: int) -> tuple[Array, Array]:
    """Return indices of all matrices of a batch, to combine with row indices."""
    return np.arange(n3)[:, None, None], np.arange(n2)[None, :, None]


class _Held:
    """Memory of a view outside of buffers."""

    def __init__(self, array: Array) -> None:
        self.base = array.reshape(-1).view(np.uint8)
