"""Tiling: a kernel's steps over the tiles of its operands, with conversions at the tiles' edges.

Consecutive kernels that can be tiled alike are grouped: all of them run over the first tile, then over
the second, so that intermediate results stay in cache and threads need no synchronization in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from ggmlb.backends.cpu import casts
from ggmlb.backends.cpu.views import View, piece, tiles
from ggmlb.core.dtypes import DType

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.casts import Cast
    from ggmlb.backends.cpu.lowering import CpuLowering, Kernel

    Step = Callable[[], Any]

Range = tuple[int, int]
"""First address, and end address."""

_F32 = DType.F32  # looked up once

LEAST_ITEMS = 1 << 14
"""Items per tile below which a stage is not worth cutting."""


class TileStage:
    """An uncut kernel with its operands, the result first.

    Args:
        lw: Makes arrays and scratch.
        kernel: What to run on each tile.
        views: Result and sources, equal in all extents but those of the last `inner` dimensions.
        whole: Operands that every tile reads whole.
        inner: How many dimensions are never cut.
        n_scratch: How many scratch arrays the kernel wants; they are like the first source.
        work: What the kernel does to an element, in additions.
        least: The least extent of a tile in the first dimension.
        one_call: Whether the kernel is one call of the library, however long.
        convert: Whether the kernel sees float32; else it sees the memory as it is.
    """

    def __init__(
        self,
        lw: CpuLowering,
        kernel: Kernel,
        views: Sequence[View],
        whole: Sequence[View],
        inner: int,
        n_scratch: int,
        work: int,
        least: int,
        one_call: bool,
        convert: bool,
    ) -> None:
        self.lw = lw
        self.kernel = kernel
        self.views = views
        self.whole = whole
        self.inner = inner
        self.n_scratch = n_scratch
        self.n_items = max([prod(v.shape) for v in views])
        self.work = work * self.n_items
        self.least = least
        self.one_call = one_call
        self.n = views[0].shape[0]
        self.like = 1 if len(views) > 1 else 0
        self.casts: list[Cast | None] = [None] * len(views)
        if convert:
            self.casts = [None if v.type is _F32 else casts.loader(v.type) for v in views]
            self.casts[0] = casts.storer(views[0].type)
        self.n_slots = n_scratch + len(self.casts) - self.casts.count(None)

    def n_workers(self) -> int:
        """Over how many threads to spread it, if it is by itself."""
        return self.lw.workers(self.work, None if self.one_call else self.n_items)

    def cut(self, bounds: Sequence[int]) -> list[list[View]]:
        """Cut the first dimension at the bounds."""
        parts = [((a, b - a),) for a, b in itertools.pairwise(bounds)]
        return [[piece(v, part) for v in self.views] for part in parts]

    def add_steps(self, steps: list[Step], tile: list[View], slots: Sequence[Array]) -> None:
        """Append the loads, the kernel and the store of a tile."""
        free = iter(slots)
        arrays = [self.lw.bind(view) for view in tile]
        args = list(arrays)
        for i, cast in enumerate(self.casts):
            if cast is not None:
                args[i] = shaped(next(free), value_shape(tile[i]))
                if i:
                    steps.append(partial(cast, args[i], arrays[i]))
        args += [self.lw.bind(view) for view in self.whole]
        if self.n_scratch:
            shape = value_shape(tile[self.like])
            args += [shaped(next(free), shape) for _ in range(self.n_scratch)]
        steps.append(partial(self.kernel, *args))
        store = self.casts[0]
        if store is not None:
            steps.append(partial(store, arrays[0], args[0]))


class TiledGroup:
    """Stages that run in order on each tile, with shared scratch.

    The first stage decides how all are cut: where its first dimension is. Another can join if its own first
    dimension can be cut at the same fractions, and if no tile of it touches memory of another tile.
    """

    def __init__(self, lw: CpuLowering, stage: TileStage) -> None:
        self.lw = lw
        self.stages = [stage]
        self._bounds: list[int] | None = None
        n_tiles = self._n_tiles(stage)
        if n_tiles == 1:
            self._tiles = [[list(stage.views)]]
        elif n_tiles <= stage.n:
            self._bounds = [i * stage.n // n_tiles for i in range(n_tiles + 1)]
            self._tiles = [stage.cut(self._bounds)]
        else:  # the first dimension is too short
            self._tiles = [tiles(stage.views, stage.inner, lw.tile)]
        self._ranges: list[list[list[Range]]] | None = None

    def _n_tiles(self, stage: TileStage) -> int:
        """Enough to keep within the limit, and the same number for each worker."""
        limit, workers = self.lw.tile, stage.n_workers()
        n = 1 if limit is None else -(-stage.n_items // limit)
        n = -(-n // workers) * workers
        if stage.least == 1:
            return n
        most = max(1, stage.n // stage.least)
        return n if n <= most else max(most // workers * workers, 1)

    @property
    def is_closed(self) -> bool:
        """Whether no other stage can join."""
        return self._bounds is None

    def accepts(self, stage: TileStage) -> bool:
        """Add the stage, if it can run on a tile directly after the earlier stages."""
        bounds, limit = self._bounds, self.lw.tile
        if bounds is None or limit is None:
            return False
        n_tiles, own = len(bounds) - 1, self.stages[0].n
        if not LEAST_ITEMS * n_tiles <= stage.n_items <= 4 * limit * n_tiles:
            return False
        if stage.n // n_tiles < stage.least or any(b * stage.n % own for b in bounds):
            return False
        cut = stage.cut([b * stage.n // own for b in bounds])
        if self._ranges is None:
            self._ranges = [self._ranges_of(self.stages[0], self._tiles[0])]
        out, *_src = ranges = self._ranges_of(stage, cut)
        for written, *read in self._ranges:
            if any(_meet(r, written) for r in ranges) or any(_meet(out, r) for r in read):
                return False
        self._ranges.append(ranges)
        self._tiles.append(cut)
        self.stages.append(stage)
        return True

    def _ranges_of(self, stage: TileStage, cut: list[list[View]]) -> list[list[Range]]:
        """By operand and tile, the addresses that the tile touches."""
        address = self.lw.address
        by_tile = [[_range(v, address(v)) for v in tile] for tile in cut]
        whole = [[_range(v, address(v))] * len(cut) for v in stage.whole]
        return [list(ranges) for ranges in zip(*by_tile, strict=True)] + whole

    def lists(self) -> list[list[Step]]:
        """Return the steps of each worker; tiles go round."""
        n_tiles = len(self._tiles[0])
        n = 1 if n_tiles == 1 else min(n_tiles, max(stage.n_workers() for stage in self.stages))
        slots = self._slots(n)
        lists: list[list[Step]] = [[] for _ in range(n)]
        for i in range(n_tiles):
            for stage, cut in zip(self.stages, self._tiles, strict=True):
                stage.add_steps(lists[i % n], cut[i], slots[i % n])
        return lists

    def _slots(self, n: int) -> list[list[Array]]:
        """Scratch for each of `n` workers: as many arrays, as large, as any stage wants."""
        n_slots = max(s.n_slots for s in self.stages)
        if not n_slots:
            return [[]] * n
        largest = max(prod(value_shape(v)) for cut in self._tiles for tile in cut for v in tile)
        return [[self.lw.scratch((largest,)) for _ in range(n_slots)] for _ in range(n)]


def _range(view: View, address: int) -> Range:
    return address, address + view.extent()


def _meet(a: list[Range], b: list[Range]) -> bool:
    """Whether a tile of one operand shares memory with another tile of the other.

    Tiles follow each other in memory, so that neighbours tell for all.
    """
    if a[-1][1] <= b[0][0] or b[-1][1] <= a[0][0]:
        return False
    return any(a[i][1] > b[i + 1][0] or b[i][1] > a[i + 1][0] for i in range(len(a) - 1))


def shaped(flat: Array, shape: tuple[int, ...]) -> Array:
    """The first elements of flat scratch, in that shape."""
    return flat[: prod(shape)].reshape(shape)


def value_shape(view: View) -> tuple[int, ...]:
    """The shape in elements; a view of blocks counts bytes in its last dimension."""
    if not view.type.is_quantized:
        return view.shape
    return (*view.shape[:-1], view.shape[-1] // view.type.type_size * view.type.block_size)
