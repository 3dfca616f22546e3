"""Tiling: a kernel's steps over the tiles of its operands, with conversions at the tiles' edges."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from ggmlb.backends.array.views import View, tiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ggmlb.backends.array.casts import Cast
    from ggmlb.backends.array.lowering import Kernel, Lowering
    from ggmlb.backends.array.workspace import Array

    Step = Callable[[], Any]


class Tiling:
    """Operands cut alike, the first of them the result.

    Args:
        lw: Makes arrays and scratch.
        views: Result and sources, equal in all extents but those of the last `inner` dimensions.
        inner: How many dimensions are never cut.
        n_scratch: How many scratch arrays the kernel wants; they are like the first source.
        convert: Whether the kernel sees float32; else it sees the memory as it is.
    """

    def __init__(
        self, lw: Lowering, views: Sequence[View], inner: int, n_scratch: int, convert: bool = True
    ) -> None:
        self.lw = lw
        self.pieces = tiles(views, inner, lw.tile)
        self.n_scratch = n_scratch
        self.like = 1 if len(views) > 1 else 0
        self.casts: list[Cast | None] = [None] * len(views)
        if convert:
            self.casts = [lw.casts.load(v.type) for v in views]
            self.casts[0] = lw.casts.store(views[0].type)

    def lists(self, kernel: Kernel, n_workers: int) -> list[list[Step]]:
        """Return the steps of each worker; tiles go round."""
        n = min(n_workers, len(self.pieces))
        workers = [_Worker(self, kernel) for _ in range(n)]
        for i, piece in enumerate(self.pieces):
            workers[i % n].add(piece)
        return [worker.steps for worker in workers]

    def scratch(self, i: int) -> Array:
        """Return scratch for the values of operand `i` of the largest tile."""
        return self.lw.scratch((max(prod(_value_shape(piece[i])) for piece in self.pieces),))


class _Worker:
    """The steps of one thread, with scratch of its own."""

    def __init__(self, tiling: Tiling, kernel: Kernel) -> None:
        self.tiling = tiling
        self.kernel = kernel
        self.steps: list[Step] = []
        self.values = [tiling.scratch(i) if cast else None for i, cast in enumerate(tiling.casts)]
        self.scratch = [tiling.scratch(tiling.like) for _ in range(tiling.n_scratch)]

    def add(self, piece: list[View]) -> None:
        """Append the loads, the kernel and the store of a tile."""
        tiling, bind = self.tiling, self.tiling.lw.bind
        arrays = [bind(view) for view in piece]
        args = list(arrays)
        for i, cast in enumerate(tiling.casts):
            if cast is not None:
                args[i] = _shaped(self.values[i], _value_shape(piece[i]))
                if i:
                    self.steps.append(partial(cast, args[i], arrays[i]))
        if self.scratch:
            shape = _value_shape(piece[tiling.like])
            args += [_shaped(s, shape) for s in self.scratch]
        self.steps.append(partial(self.kernel, *args))
        store = tiling.casts[0]
        if store is not None:
            self.steps.append(partial(store, arrays[0], args[0]))


def _shaped(flat: Array, shape: tuple[int, ...]) -> Array:
    return flat[: prod(shape)].reshape(shape)


def _value_shape(view: View) -> tuple[int, ...]:
    """The shape in elements; a view of blocks counts bytes in its last dimension."""
    if not view.type.is_quantized:
        return view.shape
    return (*view.shape[:-1], view.shape[-1] // view.type.type_size * view.type.block_size)
