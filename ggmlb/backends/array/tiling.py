"""Tiling: a kernel's steps over the tiles of its operands, with conversions at the tiles' edges.

Kernels that follow each other over the same tiles are grouped: all of them run over the first tile, then
over the second, so that what one writes the next finds in the cache.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ggmlb.backends.array.views import View, tiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ggmlb.backends.array.casts import Cast
    from ggmlb.backends.array.lowering import Kernel, Lowering
    from ggmlb.backends.array.workspace import Array

    Step = Callable[[], Any]


class Span(NamedTuple):
    """The memory of an operand: its range, and the sizes of its tiles if each of them is packed."""

    start: int
    end: int
    sizes: tuple[int, ...] | None

    def conflicts(self, other: Span) -> bool:
        """Whether they share memory other than tile by tile."""
        if self.end <= other.start or other.end <= self.start:
            return False
        return self.start != other.start or self.sizes is None or self.sizes != other.sizes


class Stage:
    """A kernel, with its operands cut alike; the first of them is the result.

    Args:
        lw: Makes arrays and scratch.
        kernel: What to run on each tile.
        views: Result and sources, equal in all extents but those of the last `inner` dimensions.
        inner: How many dimensions are never cut.
        unit: Where single elements are cut apart, it is at multiples of this: the length of a row, so that
            stages over rows and stages over elements are cut alike.
        n_scratch: How many scratch arrays the kernel wants; they are like the first source.
        work: What the kernel does to all elements, in additions.
        convert: Whether the kernel sees float32; else it sees the memory as it is.
    """

    def __init__(
        self,
        lw: Lowering,
        kernel: Kernel,
        views: Sequence[View],
        inner: int,
        unit: int,
        n_scratch: int,
        work: int,
        convert: bool,
    ) -> None:
        self.lw = lw
        self.kernel = kernel
        self.pieces = tiles(views, inner, lw.tile, unit)
        self.n_scratch = n_scratch
        self.work = work
        self.like = 1 if len(views) > 1 else 0
        self.casts: list[Cast | None] = [None] * len(views)
        if convert:
            self.casts = [lw.casts.load(v.type) for v in views]
            self.casts[0] = lw.casts.store(views[0].type)
        self.n_slots = n_scratch + sum(cast is not None for cast in self.casts)
        self.largest = max(prod(value_shape(v)) for piece in self.pieces for v in piece)

    def spans(self) -> list[Span]:
        """The memory of each operand."""
        first, last = self.pieces[0], self.pieces[-1]
        return [self._span(i, first[i], last[i]) for i in range(len(first))]

    def _span(self, i: int, first: View, last: View) -> Span:
        start = self.lw.address(first)
        end = start - first.offset + last.offset + last.extent()
        packed = all(piece[i].is_packed() for piece in self.pieces)
        sizes = tuple(prod(p[i].shape) * p[i].item.itemsize for p in self.pieces) if packed else None
        return Span(start, end, sizes)

    def add_steps(self, steps: list[Step], piece: list[View], slots: Sequence[Array]) -> None:
        """Append the loads, the kernel and the store of a tile."""
        free = iter(slots)
        arrays = [self.lw.bind(view) for view in piece]
        args = list(arrays)
        for i, cast in enumerate(self.casts):
            if cast is not None:
                args[i] = _shaped(next(free), value_shape(piece[i]))
                if i:
                    steps.append(partial(cast, args[i], arrays[i]))
        if self.n_scratch:
            shape = value_shape(piece[self.like])
            args += [_shaped(next(free), shape) for _ in range(self.n_scratch)]
        steps.append(partial(self.kernel, *args))
        store = self.casts[0]
        if store is not None:
            steps.append(partial(store, arrays[0], args[0]))


class Group:
    """Stages that run one after another on each tile, with scratch that they share."""

    def __init__(self, stage: Stage) -> None:
        self.stages = [stage]
        self._spans: list[list[Span]] | None = None

    def accepts(self, stage: Stage) -> bool:
        """Whether the stage can run on a tile as soon as all before it have: it touches no other tile."""
        n = len(stage.pieces)
        if n == 1 or n != len(self.stages[0].pieces):
            return False
        if self._spans is None:
            self._spans = [s.spans() for s in self.stages]
        out, *_src = spans = stage.spans()
        for written, *read in self._spans:
            if any(s.conflicts(written) for s in spans) or any(out.conflicts(s) for s in read):
                return False
        self._spans.append(spans)
        return True

    def lists(self, lw: Lowering) -> list[list[Step]]:
        """Return the steps of each worker; tiles go round."""
        n_tiles = len(self.stages[0].pieces)
        n = min(n_tiles, lw.workers(sum(s.work for s in self.stages)))
        n_slots, largest = max(s.n_slots for s in self.stages), max(s.largest for s in self.stages)
        slots = [[lw.scratch((largest,)) for _ in range(n_slots)] for _ in range(n)]
        lists: list[list[Step]] = [[] for _ in range(n)]
        for i in range(n_tiles):
            for stage in self.stages:
                stage.add_steps(lists[i % n], stage.pieces[i], slots[i % n])
        return lists


def _shaped(flat: Array, shape: tuple[int, ...]) -> Array:
    return flat[: prod(shape)].reshape(shape)


def value_shape(view: View) -> tuple[int, ...]:
    """The shape in elements; a view of blocks counts bytes in its last dimension."""
    if not view.type.is_quantized:
        return view.shape
    return (*view.shape[:-1], view.shape[-1] // view.type.type_size * view.type.block_size)
