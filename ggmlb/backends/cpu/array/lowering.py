"""Lowering: what a rule uses to read operands, take scratch and emit steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ggmlb.backends.cpu.array.casts import CAST
from ggmlb.backends.cpu.array.products import product
from ggmlb.backends.cpu.array.tiling import Group, Stage
from ggmlb.backends.cpu.array.views import View, aligned
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import NO_OPS
from ggmlb.core.errors import UnsupportedOpError
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array, Workspace
    from ggmlb.backends.cpu.array.rules import Rule, RuleTable

Step = Callable[[], Any]
"""A call with everything bound."""

Kernel = Callable[..., Any]
"""`kernel(y, *x, *scratch)`: fills `y` from the operands, all float32, `y` perhaps the memory of an `x`."""


class Lowering(ABC):
    """Turns nodes into steps over the arrays of one library.

    Attributes:
        xp: NumPy.
        table: The rules, and the conversions of types.
        tile: Items of the largest operand per tile, so that a tile and its scratch stay in the cache;
            `None` where the library has no use for tiles.
        weight_tile: Values of a weight, or of keys and values, that are held as float32 at a time.
    """

    xp: Any
    keeps_no_memory = True
    tile: int | None = None
    weight_tile: int | None = None

    def __init__(self, table: RuleTable, workspace: Workspace) -> None:
        self.table = table
        self.casts = table.casts
        self._workspace = workspace
        self._steps: list[Step] = []
        self._counts: list[int] = []
        self._group: Group | None = None
        self._group_node = 0

    def lower(self, nodes: Iterable[Tensor]) -> tuple[list[Step], list[int]]:
        """Return the steps that compute the nodes, and how many of them each node has.

        Raises:
            UnsupportedOpError: No rule takes a node.
        """
        self._steps, self._counts = [], []
        for node in nodes:
            self._counts.append(0)
            if node.op not in NO_OPS and not node.is_empty:
                if self._group is None:
                    self._workspace.restart()
                self._lower(node)
        self._flush()
        steps, self._steps = self._steps, []  # which may call this lowering: a cycle would hold the memory
        return steps, self._counts

    def _lower(self, node: Tensor) -> None:
        self._rule(node).lower(self, node)

    def _rule(self, node: Tensor) -> Rule:
        found = self.table.find(node)
        if isinstance(found, str):
            raise UnsupportedOpError(f"cannot lower {node.describe()}: {found}")
        return found

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

    def _emit_stage(self, stage: Stage) -> None:
        """Let a stage join those before it, or begin a group with it."""
        if self._group is None or not self._group.accepts(stage):
            self._flush()
            self._group = Group(self, stage)
        self._group_node = len(self._counts) - 1
        if self._group.is_closed:
            self._flush()

    def _flush(self) -> None:
        """Append the steps of the stages that wait for others; they count as those of the last one's node."""
        group, self._group = self._group, None
        if group is not None:
            self._append(group.lists(), self._group_node)

    def scratch(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        """Return a C-contiguous array that is this node's own while its steps run."""
        return self._workspace.take(shape, dtype)

    # -- arithmetic that a library may do better ---------------------------------------------------

    def row_sum(self, x: Array) -> Array:
        """The sums along the last axis, which stays, with extent 1."""
        return self.xp.add.reduce(x, axis=-1, keepdims=True)

    def row_dot(self, x: Array, y: Array, tmp: Array) -> Array:
        """The sums of `x y` along the last axis, which stays; `tmp` is like `x`."""
        self.xp.multiply(x, y, out=tmp)
        return self.row_sum(tmp)

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

    @abstractmethod
    def bind(self, view: View) -> Array:
        """Make the array of a view on a buffer that this library can reach."""

    @abstractmethod
    def address(self, view: View) -> int:
        """The address of the first item of a view: tells whether views share memory."""

    def view(self, array: Array, dtype: DType = DType.F32) -> View:
        """View a C-contiguous array of this library, scratch or constant, as an operand of type `dtype`."""
        return View(_Held(array), dtype, array.dtype, 0, array.shape, array.strides)

    def array(self, t: Tensor) -> Array:
        """The tensor's memory in four dimensions, `ne` reversed; BF16 as `uint16`, blocks as bytes."""
        return self.bind(View.of(t))

    def packed(self, t: Tensor) -> View:
        """View the values without gaps: the memory, or scratch that a step fills, float32 then."""
        view = View.of(t)
        if view.is_packed():
            return view
        values = self.view(self.scratch(t.ne[::-1]))
        self.copy(values, view)
        return values

    def f32(self, t: Tensor) -> Array:
        """The tensor's values as float32, `ne` reversed: its memory, or scratch that a step fills."""
        load = self.casts.load(t.dtype)
        x = self.array(t)
        if load is None:
            return x
        values = self.scratch(t.ne[::-1])
        self.emit(load, values, x)
        return values

    def out_f32(self, t: Tensor) -> Array:
        """A float32 array for the result, `ne` reversed: its memory, or scratch; see `store`."""
        return self.array(t) if t.dtype == DType.F32 else self.scratch(t.ne[::-1])

    def store(self, t: Tensor, y: Array) -> None:
        """Emit the conversion of `y`, from `out_f32(t)`, into the tensor's memory, if one is needed."""
        store = self.casts.store(t.dtype)
        if store is not None:
            self.emit(store, self.array(t), y)

    def to_host(self, array: Array) -> npt.NDArray[Any]:
        """The values as a NumPy array, for steps that must look at them."""
        return np.asarray(array)

    def take(self, y: Array, x: Array, index: Array, axis: int) -> None:
        """`y[.., i, ..] = x[.., index[i], ..]` along one axis, by an index that is known to fit; a step."""
        y[...] = x.take(index, axis)

    # -- rows --------------------------------------------------------------------------------------

    def take_rows(self, y: Array, x: Array, index: Array) -> None:
        """`y[.., i] = x[.., index[.., i]]`: rows by index, in each matrix of a batch; a step."""
        n3, n2 = x.shape[:2]
        if n3 == n2 == 1:
            y[0, 0] = x[0, 0][index[0, 0]]
        else:
            where = (*_batch(self.xp, n3, n2), index)
            y[...] = x[where]

    def check_index(self, index: Array, n: int) -> None:  # noqa: B027 (an optional hook)
        """Raise where a row number is not in `range(n)`, if the library can tell without waiting."""

    def put_rows(self, y: Array, x: Array, index: Array) -> None:
        """`y[.., index[.., i]] = x[.., i]`; `index` repeats over the batch; a step."""
        n3, n2 = x.shape[:2]
        if n3 == n2 == 1:
            y[0, 0][index[0, 0]] = x[0, 0]
        else:
            i3, i2 = _batch(self.xp, n3, n2)
            index = index[i3[..., 0] % index.shape[0], i2[..., 0] % index.shape[1]]
            y[i3, i2, index] = x

    def add_rows(self, y: Array, x: Array, index: Array) -> None:
        """`y[index[i]] += x[i]` for matrices, and rows that may repeat; a step."""
        self.xp.add.at(y, index, x)

    # -- tiles -------------------------------------------------------------------------------------

    def elementwise(self, kernel: Kernel, out: Tensor, *src: Tensor, scratch: int = 0, work: int = 1) -> None:
        """Emit `kernel(y, *x, *scratch)` over all elements; sources repeat over the result's shape.

        Args:
            kernel: Fills `y` from float32 arrays of one shape; may use `scratch` arrays of that shape.
            out: The result, of any type that can be stored.
            src: Operands, of any type that can be loaded.
            scratch: How many scratch arrays the kernel wants.
            work: What the kernel does to an element, in additions: tells whether threads pay.
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
            src: Operands that are cut like the result, and repeat over it where they are smaller, but for
                the last `inner` dimensions, which are the kernel's business.
            whole: Operands that every tile reads whole, as they are.
            inner: How many dimensions are never cut.
            scratch: How many scratch arrays the kernel wants, of the shape of the first source.
            work: As for `elementwise`.
            least: The least extent of a tile in the first dimension.
            one_call: Whether the kernel is one call of the library, however long.
            convert: Whether the kernel sees float32, with loads and a store where needed; else it sees the
                memory as it is.
        """
        if 0 in out.shape:
            return
        views = aligned([out, *src], inner)
        self._emit_stage(Stage(self, kernel, views, whole, inner, scratch, work, least, one_call, convert))

    def copy(self, dst: View, src: View) -> None:
        """Emit a copy between views of equal extents, converting from one type to the other."""
        casts, inner = self.casts, int(dst.type.is_quantized or src.type.is_quantized)
        if dst.type == src.type or casts.is_plain(dst.type, src.type):
            self.tiled(casts.copy, dst, src, convert=False)
        elif dst.type == DType.F32 and dst.is_packed():
            self.tiled(casts.load(src.type) or casts.copy, dst, src, inner=inner, work=CAST, convert=False)
        else:
            self.tiled(casts.copy, dst, src, inner=inner, work=CAST)

    def workers(self, work: int, call: int | None = None) -> int:
        """Return over how many threads to spread so many additions, of which one call does `call`, or all."""
        return 1

    def run_parallel(self, lists: Sequence[Sequence[Step]]) -> None:
        """Run lists of steps at the same time, where the library has threads."""
        for steps in lists:
            for step in steps:
                step()


def _batch(xp: Any, n3: int, n2: int) -> tuple[Array, Array]:
    """Indices of all matrices of a batch, to go with one of rows."""
    return xp.arange(n3)[:, None, None], xp.arange(n2)[None, :, None]


class _Held:
    """Memory behind a view that is not a buffer's."""

    def __init__(self, array: Array) -> None:
        self.base = array.reshape(-1).view(np.uint8)
