"""Lowering of one kind of node: a rule views operands, takes scratch, and emits calls on these views.

A view names its memory by number, so that the calls serve all nodes of a kind (`common.kinds`); a plan binds
them to the memory of each (`CpuPlan`). So functions that a rule emits get arrays as arguments, and must not
capture views, nor constant arrays, whose size `emit` adds up to decide what is cached.

A kernel that is emitted as `tiled` runs over tiles of its operands, with conversions at the tiles' edges.
Consecutive kernels that can be tiled alike are grouped: all of them run over the first tile, then over
the second, so that intermediate results stay in cache and threads need no synchronization in between.
Grouping depends on addresses, so the plan does it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, TypeAlias

import numpy as np

from ggmlb.backends.common.rules import ANY, BLOCKS, FLOATS, Rules
from ggmlb.backends.common.workspace import Array
from ggmlb.backends.cpu import kernels
from ggmlb.backends.cpu.views import CONSTANT, Place, View, broadcast, merged, piece, tiles
from ggmlb.core import dtypes
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor
from ggmlb.interface import BufferType

Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments: views, which become arrays, and constants."""

PlacedCall: TypeAlias = tuple[Callable[..., Any], list[Place]]
"""A function, and the memory and layout of its arguments."""

Step: TypeAlias = PlacedCall | list[list[PlacedCall]]
"""A call, or lists of calls that may run in parallel."""

Kernel = Callable[..., Any]
"""`kernel(y, *x, *scratch)`: fills `y` from the operands, all float32; `y` may alias an `x`."""

Scratch = Callable[[tuple[int, ...]], View]
"""Allocates scratch of a shape."""

Range = tuple[int, int]
"""Start and end address."""

PLAIN: Final = ANY - BLOCKS
"""Types that are not quantised."""

STORED: Final = frozenset(filter(dtypes.can_quantize, ANY))
"""Types of results: all but the quantised ones that need an importance matrix."""

VALUES: Final = FLOATS | BLOCKS
"""Types of weights: floats and quantised."""

CALLBACKS: Final = frozenset({Op.MAP_CUSTOM1, Op.MAP_CUSTOM2, Op.MAP_CUSTOM3, Op.CUSTOM})
"""Ops that are not cached: the cache must not keep the user's function and its data alive."""

MAX_CONSTANTS: Final = 1 << 20
"""Largest size of constant arrays of a node whose calls are cached [bytes]."""

LEAST_ITEMS = 1 << 14
"""Fewest items per tile."""

_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class LoweredCalls:
    """The NumPy calls for a kind of node (op, parameters, layouts), without the memory they work on.

    Attributes:
        steps: Calls in order; kernels that may join a tiled group are stages.
        scratch: Sizes of the pieces of scratch [bytes]; their memory is numbered from `len(node.src) + 1` on.
        is_kept: Whether they may be cached.
    """

    steps: list[Step | TileStage]
    scratch: list[int]
    is_kept: bool


def lower(node: Tensor, n_threads: int) -> LoweredCalls:
    """Return the NumPy calls for a node, found by the first lowering rule that applies to it.

    Raises:
        UnsupportedOpError: The rules decline it.
    """
    lw = NodeLowering(node, n_threads)
    RULES.to_lower(node)(lw, node)
    is_kept = node.op not in CALLBACKS and lw.constants_nbytes <= MAX_CONSTANTS
    return LoweredCalls(lw.steps, lw.scratch_nbytes, is_kept)


def steps_of(lists: Sequence[list[Call]]) -> list[Step]:
    """Turn lists of calls, one per worker, into steps: a single list as it is, several as one step."""
    placed = [[_placed(*call) for call in calls] for calls in lists]
    return [*placed[0]] if len(placed) == 1 else [placed]


def _placed(fn: Callable[..., Any], args: tuple[Any, ...]) -> PlacedCall:
    return fn, [arg.place() if isinstance(arg, View) else (CONSTANT, arg, 0, (), ()) for arg in args]


class NodeLowering:
    """Context of a lowering rule: views of operands, scratch, and the list of emitted calls.

    Args:
        node: The node; its memory is number 0, its operands' are numbers from 1 on.
        n_threads: Threads of the backend, among which big nodes are divided.

    Attributes:
        tile: Items of the largest operand per tile, so that a tile and its scratch stay in the L2 cache.
        weight_tile: Values of a weight, or of keys and values, converted to float32 at a time.
        parallel_work: Fewest additions for which threads are used: about 0.1 ms.
        parallel_call: Fewest additions of each NumPy call (over all threads) for which threads are used.
        steps, scratch_nbytes: As in `LoweredCalls`.
        constants_nbytes: Size of the constant arrays among the arguments [bytes].
    """

    tile = 1 << 17
    weight_tile = 1 << 19
    parallel_work = 1 << 19
    parallel_call = 1 << 17

    def __init__(self, node: Tensor, n_threads: int) -> None:
        operands = (node, *node.src)
        self._n_operands = len(operands)
        self._numbers = dict(zip(reversed(operands), reversed(range(len(operands))), strict=True))
        self._n_threads = n_threads
        self.steps: list[Step | TileStage] = []
        self.scratch_nbytes: list[int] = []
        self.constants_nbytes = 0

    # -- operands ----------------------------------------------------------------------------------

    def view(self, t: Tensor) -> View:
        """View an operand or the node itself in four dimensions, `ne` reversed; quantised rows as bytes."""
        assert t.buffer is not None  # the backend checked the graph
        buft, dtype, nb = t.buffer.buft, t.dtype, t.nb
        if type(buft).stored_layout is not BufferType.stored_layout:
            dtype, nb = buft.stored_layout(t)
        return View.lay(self._numbers[t], dtype, 0, t.ne, nb)

    def scratch(
        self, shape: tuple[int, ...], item: np.dtype[Any] = _FLOAT32, dtype: DType = DType.F32
    ) -> View:
        """View new contiguous scratch with items of NumPy dtype `item`, valid until this node is done."""
        self.scratch_nbytes.append(prod(shape) * item.itemsize)
        return View.packed(self._n_operands + len(self.scratch_nbytes) - 1, shape, item, dtype)

    def constant(self, array: Array) -> View:
        """View an array of constants, computed at lowering, that all nodes of the kind share."""
        self.constants_nbytes += array.nbytes
        return View.packed(array.reshape(-1).view(np.uint8), array.shape, array.dtype)

    def f32(self, x: View) -> View:
        """Return `x` if it is float32; else emit its conversion into scratch, and return the scratch."""
        return x if x.type is DType.F32 else self._copied(x)

    def packed_f32(self, x: View) -> View:
        """Return `x` if it is contiguous float32; else emit a copy into scratch, and return the scratch."""
        return x if x.type is DType.F32 and x.is_packed() else self._copied(x)

    def blas_f32(self, x: View) -> View:
        """Return `x` if BLAS can read it (float32); else emit a copy into scratch, and return that."""
        return x if x.is_blas_matrix() else self._copied(x)

    def _copied(self, x: View) -> View:
        y = self.scratch(x.value_shape())
        self.copy(y, x)
        return y

    def out_f32(self, t: Tensor) -> View:
        """Return float32 memory to compute `t` in: its own, or scratch, which `store` later copies to `t`."""
        return self.view(t) if t.dtype is DType.F32 else self.scratch(t.ne[::-1])

    def store(self, t: Tensor, y: View) -> None:
        """Emit the conversion of `y`, from `out_f32(t)`, into the result `t`; nothing if `t` is float32."""
        if t.dtype is not DType.F32:
            self.copy(self.view(t), y)

    # -- steps -------------------------------------------------------------------------------------

    def emit(self, fn: Callable[..., Any], *args: Any) -> None:
        """Append the call `fn(*args)`; views among `args` become arrays when the call is bound to memory."""
        for arg in args:
            if isinstance(arg, np.ndarray):
                self.constants_nbytes += arg.nbytes
        self.steps.append(_placed(fn, args))

    def emit_parallel(self, lists: Sequence[list[Call]]) -> None:
        """Append calls that run in parallel: the calls of each list in order, the lists side by side."""
        self.steps += steps_of(lists)

    def elementwise(self, kernel: Kernel, out: Tensor, *src: Tensor, scratch: int = 0, work: int = 1) -> None:
        """Emit an element-wise `kernel(y, *x, *scratch)`, `x` broadcast to `out`; `work`: cost per element.

        Args:
            kernel: Fills `y` from float32 arrays of one shape; may use `scratch` arrays of that shape.
            out: The result, of any type that can be stored.
            src: Operands, of any type that can be loaded.
            scratch: Number of scratch arrays of the kernel.
            work: Cost of the kernel per element, in additions, to decide on threads.
        """
        inner = int(not BLOCKS.isdisjoint([t.dtype for t in (out, *src)]))
        self.tiled(kernel, *map(self.view, (out, *src)), inner=inner, scratch=scratch, work=work)

    def rowwise(self, kernel: Kernel, out: Tensor, *src: Tensor, scratch: int = 0, work: int = 1) -> None:
        """Emit `kernel(y, *x, *scratch)` on float32 rows, tile by tile; a row (axis -1) is never cut.

        Sources and result have the same number of rows; the lengths of their rows may differ. Scratch
        arrays are like the first source.
        """
        self.tiled(kernel, *map(self.view, (out, *src)), inner=1, scratch=scratch, work=work)

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
        """Emit a kernel tile by tile; with `convert`, in float32: operands, result are converted around it.

        Args:
            kernel: Called as `kernel(y, *x, *whole, *scratch)`.
            out: The result.
            src: Operands, cut like the result and broadcast to it, except in the last `inner` dimensions.
            whole: Operands that every tile reads whole, unconverted.
            inner: Number of last dimensions that are never cut.
            scratch: Number of scratch arrays of the kernel, of the first source's shape.
            work: As for `elementwise`.
            least: The least extent of a tile in the first dimension.
            one_call: Whether the kernel is a single call of NumPy.
            convert: Whether to convert operands and result from and to float32 around the kernel.
        """
        if 0 in out.shape:
            return
        views = merged(broadcast([out, *src], inner), inner)
        casts: list[kernels.Cast | None] = []
        n_items = 0
        for v in views:
            n_items = max(n_items, prod(v.shape))
            casts.append(kernels.loader(v.type) if convert and casts else None)
        if convert:
            casts[0] = kernels.storer(out.type)
        n_workers = self.workers(work * n_items, None if one_call else n_items)
        n_tiles = -(-n_items // self.tile)  # enough to keep within the limit
        n_tiles = -(-n_tiles // n_workers) * n_workers  # and the same number for each worker
        if least > 1:
            most = max(1, views[0].shape[0] // least)
            n_tiles = n_tiles if n_tiles <= most else max(most // n_workers * n_workers, 1)
        may_join = views[0].shape[0] > 1 and n_items >= 2 * LEAST_ITEMS
        if n_tiles == 1 and not may_join and not scratch and casts.count(None) == len(casts):
            self.emit(kernel, *views, *whole)
            return
        stage = TileStage(kernel, views, whole, casts, scratch, n_items, n_tiles, n_workers, least)
        if n_tiles == 1 or n_tiles > stage.n:  # its first dimension is too short
            cut = [views] if n_tiles == 1 else tiles(views, inner, self.tile)
            stage.alone = steps_of(spread([stage], [cut], self.scratch))
        self.steps += [stage] if may_join or stage.alone is None else stage.alone

    def copy(self, dst: View, src: View) -> None:
        """Emit a copy of `src` to `dst`, of equal extents; converts `src`'s type to `dst`'s."""
        inner = int(dst.type.is_quantized or src.type.is_quantized)
        if dst.type is src.type or kernels.is_plain(dst.type, src.type):
            self.tiled(kernels.copy, dst, src, convert=False)
        elif dst.type is DType.F32 and dst.is_packed():
            load = kernels.loader(src.type) or kernels.copy
            self.tiled(load, dst, src, inner=inner, work=kernels.CAST, convert=False)
        else:
            self.tiled(kernels.copy, dst, src, inner=inner, work=kernels.CAST)

    def workers(self, work: int, call: int | None = None) -> int:
        """Return the number of threads for `work` (a cost, in additions): all, or 1 if it is too small.

        `call` is the cost of one NumPy call (default `work`); it must be long enough, because a thread waits
        for the GIL after each.
        """
        is_long = call is None or call >= self.parallel_call
        return self._n_threads if is_long and work >= self.parallel_work else 1


RULES: Final[Rules[Callable[[NodeLowering, Tensor], Any]]] = Rules()
"""The reference rules of all ops, registered by the modules of `ops`."""


@dataclass(slots=True, eq=False)
class TileStage:
    """A kernel that is to run tile by tile, with its operands not yet cut.

    Attributes:
        kernel: The kernel.
        views: Result and sources, equal in all extents but those of the last dimensions.
        whole: Operands that every tile reads whole.
        casts: For each view, the conversion of the result from float32 or of a source to it; `None`: none.
        n_scratch: Number of scratch arrays of the kernel, of the first source's shape.
        n_items: Items of the largest view.
        n_tiles: Number of tiles, outside a group.
        n_workers: Number of threads, outside a group.
        least: The least extent of a tile in the first dimension.
        alone: The steps outside a group; `None` if it begins one.
    """

    kernel: Kernel
    views: list[View]
    whole: Sequence[View]
    casts: list[kernels.Cast | None]
    n_scratch: int
    n_items: int
    n_tiles: int
    n_workers: int
    least: int
    alone: list[Step] | None = None

    @property
    def n_slots(self) -> int:
        """Number of scratch arrays that a worker needs: the kernel's own, and one per converted operand."""
        return self.n_scratch + len(self.casts) - self.casts.count(None)

    @property
    def n(self) -> int:
        """Extent of the first dimension, along which tiles are cut."""
        return self.views[0].shape[0]

    def bound(self, bind: Callable[[View], View]) -> TileStage:
        """Return a copy of the stage with each view replaced by `bind(view)`."""
        return replace(self, views=[*map(bind, self.views)], whole=[*map(bind, self.whole)])

    def cut(self, bounds: Sequence[int]) -> list[list[View]]:
        """Return the views of each tile: tile i is `bounds[i]` to `bounds[i + 1]` of the first dimension."""
        parts = [((a, b - a),) for a, b in itertools.pairwise(bounds)]
        return [[piece(v, part) for v in self.views] for part in parts]

    def add_calls(self, calls: list[Call], tile: list[View], slots: Sequence[View]) -> None:
        """Append a tile's calls: operands to float32, kernel, result from float32; `slots`: its scratch."""
        free = iter(slots)
        args = list(tile)
        for i, cast in enumerate(self.casts):
            if cast is not None:
                args[i] = next(free).first(tile[i].value_shape())
                if i:
                    calls.append((cast, (args[i], tile[i])))
        args += self.whole
        if self.n_scratch:
            like = tile[:2][-1].value_shape()
            args += [scratch.first(like) for scratch in free][: self.n_scratch]
        calls.append((self.kernel, tuple(args)))
        store = self.casts[0]
        if store is not None:
            calls.append((store, (tile[0], args[0])))


class TiledGroup:
    """Kernels (stages) that all run on one tile before the next tile begins, with shared scratch.

    All are cut at the fractions of the first dimension at which the first stage is. A stage can join if its
    first dimension can be cut there, and if no tile of it touches memory of another tile.
    """

    def __init__(self, stage: TileStage) -> None:
        self.stages = [stage]
        self._bounds = [i * stage.n // stage.n_tiles for i in range(stage.n_tiles + 1)]
        self._tiles = [stage.cut(self._bounds)]
        self._ranges: list[list[list[Range]]] | None = None

    def accepts(self, stage: TileStage) -> bool:
        """Add a stage to the group if it can run tile by tile with the others; return whether it did."""
        n_tiles, own = len(self._bounds) - 1, self.stages[0].n
        if not LEAST_ITEMS * n_tiles <= stage.n_items <= 4 * NodeLowering.tile * n_tiles:
            return False
        if stage.n // n_tiles < stage.least or any(b * stage.n % own for b in self._bounds):
            return False
        cut = stage.cut([b * stage.n // own for b in self._bounds])
        if self._ranges is None:
            self._ranges = [_ranges(self.stages[0], self._tiles[0])]
        out, *_src = ranges = _ranges(stage, cut)
        for written, *read in self._ranges:
            if any(_meet(r, written) for r in ranges) or any(_meet(out, r) for r in read):
                return False
        self._ranges.append(ranges)
        self._tiles.append(cut)
        self.stages.append(stage)
        return True

    def lists(self, scratch: Scratch) -> list[list[Call]]:
        """Return, for each worker thread, the calls that run the group's kernels on its tiles."""
        return spread(self.stages, self._tiles, scratch)


def spread(stages: list[TileStage], cuts: list[list[list[View]]], scratch: Scratch) -> list[list[Call]]:
    """Return each worker thread's calls, all stages on its tiles; of n workers, tile i goes to `i % n`.

    Args:
        stages: Run in order on each tile.
        cuts: The tiles of each stage.
        scratch: Allocates scratch of a shape; each worker gets as much as the largest stage needs.
    """
    n_tiles = len(cuts[0])
    n = 1 if n_tiles == 1 else min(n_tiles, max([stage.n_workers for stage in stages]))
    n_slots = max([s.n_slots for s in stages])
    shape = (max([prod(v.value_shape()) for cut in cuts for tile in cut for v in tile]),)
    slots = [[scratch(shape) for _ in range(n_slots)] for _ in range(n)]
    lists: list[list[Call]] = [[] for _ in range(n)]
    for i in range(n_tiles):
        for stage, cut in zip(stages, cuts, strict=True):
            stage.add_calls(lists[i % n], cut[i], slots[i % n])
    return lists


def _ranges(stage: TileStage, cut: list[list[View]]) -> list[list[Range]]:
    """The address ranges of each operand's tiles."""
    by_tile = [[_range(v) for v in tile] for tile in cut]
    whole = [[_range(v)] * len(cut) for v in stage.whole]
    return [list(ranges) for ranges in zip(*by_tile, strict=True)] + whole


def _range(view: View) -> Range:
    start = view.memory.__array_interface__["data"][0] + view.offset
    return start, start + view.extent()


def _meet(a: list[Range], b: list[Range]) -> bool:
    """Whether a tile of one operand shares memory with another tile of the other.

    Tiles follow each other in memory, so that comparing neighbours is enough.
    """
    if a[-1][1] <= b[0][0] or b[-1][1] <= a[0][0]:
        return False
    return any(a[i][1] > b[i + 1][0] or b[i][1] > a[i + 1][0] for i in range(len(a) - 1))
