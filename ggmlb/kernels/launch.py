"""Launches: a kernel, the tensors and numbers it takes, and how its work is split. No device is needed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ggmlb.kernels.source import Kernel, kernels
from ggmlb.tensor import contiguous_nb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ggmlb.dtypes import DType
    from ggmlb.interface import Buffer
    from ggmlb.tensor import Ne, Tensor

Defines = tuple[tuple[str, str], ...]

MIN_GROUP_WORK = 4096
"""Elements that a core should have before the work is dealt out to another."""


@dataclass(frozen=True, slots=True)
class Target:
    """How the work of kernels is split on a device.

    Attributes:
        on_cpu: A group is one work-item that has rows to itself, and the compiler vectorises its loops.
        n_units: Cores, or multiprocessors.
        wg: Work-items of a group, where a kernel does not fix it; 1 with `on_cpu`.
    """

    on_cpu: bool
    n_units: int
    wg: int

    def groups_for(self, n_rows: int, row_size: int) -> int:
        """Return how many groups share `n_rows` rows: one each, or few where a core has rows to itself."""
        if not self.on_cpu:
            return n_rows
        return max(1, min(n_rows, n_rows * row_size // MIN_GROUP_WORK, 8 * self.n_units))


@dataclass(slots=True, eq=False)
class Scratch:
    """Device memory that launches of a plan hand over to later ones; the plan that runs them provides it.

    It is written before it is read in every run, and starts at a multiple of 256 bytes.

    Attributes:
        nbytes: Its size [bytes].
    """

    nbytes: int

    def mem(self, dtype: DType, ne: Ne, offset: int = 0) -> Mem:
        """Return a part of it as a contiguous tensor, from `offset` bytes on."""
        return Mem(self, offset, dtype, ne, contiguous_nb(dtype, ne))


@dataclass(slots=True)
class Mem:
    """A tensor as a kernel sees it: where it lies and how it is walked; a view of it needs no Tensor.

    Attributes:
        buffer: The buffer, or the plan's memory, that it lies in.
        offset: Of its first element [bytes].
        dtype: Its type.
        ne: Extents, innermost first.
        nb: Strides in the same order [bytes]; 0 where one element stands for all.
        packing: What its memory's order of bytes adds to the type's name (`Buffer.packing`).
    """

    buffer: Buffer | Scratch | None
    offset: int
    dtype: DType
    ne: Ne
    nb: Ne
    packing: str = ""

    @classmethod
    def of(cls, tensor: Tensor) -> Mem:
        """Describe a tensor as it lies."""
        packing = "" if tensor.buffer is None else tensor.buffer.packing(tensor)
        return cls(tensor.buffer, tensor.offset, tensor.dtype, tensor.ne, tensor.nb, packing)

    def window(self, ne: Ne, nb: Ne | None = None, offset: int = 0, dtype: DType | None = None) -> Mem:
        """Return the same memory under other extents, strides or type, from `offset` bytes on."""
        return Mem(
            self.buffer,
            self.offset + offset,
            self.dtype if dtype is None else dtype,
            ne,
            self.nb if nb is None else nb,
            self.packing if dtype is None else "",
        )

    def tiled_to(self, ne: Ne) -> Mem:
        """Return itself as a loop over `ne` sees it: strides of 0 in dimensions where it has one element."""
        nb = tuple(0 if n == 1 else b for n, b in zip(self.ne, self.nb, strict=True))
        return self.window(ne, nb)  # type: ignore[arg-type]

    def defines(self, name: str) -> Defines:
        """Return what a kernel is told of its tensor `name`: its type, and the stride of dimension 0.

        That is a number where it is of a row without gaps, or of one element repeated.
        """
        size, nb0 = self.dtype.type_size, self.nb[0]
        if self.ne[0] == 1 and nb0:
            nb0 = size
        step = str(nb0) if nb0 in (0, size) else f"{name}_nb0"
        return (f"{name}_T", self.dtype.name.lower() + self.packing), (f"{name}_STEP", step)


@dataclass(slots=True)
class Launch:
    """A kernel to run.

    Attributes:
        kernel: What it runs.
        defines: Macros to build it with, sorted.
        args: A `Mem` for each tensor parameter, a number for each other.
        groups: Work-groups in three dimensions.
        wg: Work-items of a group.
    """

    kernel: Kernel
    defines: Defines
    args: tuple[Mem | int | float, ...]
    groups: tuple[int, int, int]
    wg: int


def launch(
    name: str | Kernel,
    args: Sequence[Mem | int | float],
    groups: tuple[int, int, int],
    wg: int,
    **defines: str | int,
) -> Launch:
    """Return a launch of a kernel, or of the portable one of that name.

    The types and steps of its tensors become defines by themselves.
    """
    kernel = kernels()[name] if isinstance(name, str) else name
    macros = {key: str(value) for key, value in defines.items()}
    for param, arg in zip(kernel.params, args, strict=True):
        if isinstance(arg, Mem):
            macros.update(arg.defines(param.name))
    return Launch(kernel, tuple(sorted(macros.items())), tuple(args), groups, wg)


def elementwise(
    target: Target,
    name: str | Kernel,
    mems: Sequence[Mem],
    *numbers: float,
    over: int = -1,
    **defines: str | int,
) -> Launch:
    """Return a launch with a step for each element of `mems[over]`."""
    ne = mems[over].ne
    n_rows = ne[1] * ne[2] * ne[3]
    if target.on_cpu:
        groups = target.groups_for(n_rows, ne[0])
    else:
        groups = min(-(-ne[0] * n_rows // target.wg), 1 << 20)
    return launch(name, (*mems, *numbers), (groups, 1, 1), target.wg, **defines)


def mapped(
    target: Target, name: str | Kernel, mems: Sequence[Mem], *numbers: float, **defines: str | int
) -> Launch:
    """Return a launch of a kernel that maps to the elements of its last mem (`MAP_ELEMENTS` in tensors.h).

    On a GPU, a group has a stretch of a row: a long one, where that leaves work for all multiprocessors.
    """
    ne = mems[-1].ne
    n_rows = ne[1] * ne[2] * ne[3]
    for per in () if target.on_cpu else (4, 1):
        stretch = per * target.wg
        groups = -(-ne[0] // stretch) * n_rows
        is_full = ne[0] * n_rows * 4 >= groups * stretch * 3
        if is_full and (per == 1 or groups >= 2 * target.n_units):
            grid = min(groups, 1 << 20), 1, 1
            return launch(name, (*mems, *numbers), grid, target.wg, PER=per, **defines)
    return elementwise(target, name, mems, *numbers, over=-1, **defines)


def rowwise(
    target: Target, name: str, mems: Sequence[Mem], *numbers: float, over: int = -1, **defines: str | int
) -> Launch:
    """Return a launch with a group for each row of `mems[over]`, or for several on a CPU."""
    ne = mems[over].ne
    n_rows = ne[1] * ne[2] * ne[3]
    groups = target.groups_for(n_rows, max(m.ne[0] for m in mems))
    return launch(name, (*mems, *numbers), (groups, 1, 1), target.wg, **defines)


def flattened(target: Target, mems: Sequence[Mem]) -> list[Mem]:
    """Return mems of equal extents with as few, and as long, dimensions as their strides allow.

    Where a core has rows to itself, one long row is cut into several.
    """
    ne: list[int] = []
    nbs: list[list[int]] = [[] for _ in mems]
    for i, n in enumerate(mems[0].ne):
        if n == 1:
            continue
        if ne and all(m.nb[i] == nb[-1] * ne[-1] for m, nb in zip(mems, nbs, strict=True)):
            ne[-1] *= n
            continue
        ne.append(n)
        for m, nb in zip(mems, nbs, strict=True):
            nb.append(m.nb[i])
    if not ne:
        ne = [1]
        for m, nb in zip(mems, nbs, strict=True):
            nb.append(m.dtype.type_size)
    if target.on_cpu and len(ne) == 1:
        row = row_length(ne[0])
        ne = [row, ne[0] // row if row else 1]
        for nb in nbs:
            nb.append(nb[0] * row)
    return [m.window(_four(ne, 1), _four(nb, 0)) for m, nb in zip(mems, nbs, strict=True)]


def _four(values: list[int], rest: int) -> Ne:
    return tuple((*values, rest, rest, rest)[:4])  # type: ignore[return-value]


@lru_cache(maxsize=1024)
def row_length(n: int) -> int:
    """Return the length of equal rows to cut `n` elements into: the largest divisor in 256..4096, or `n`."""
    if n <= MIN_GROUP_WORK:
        return n
    for length in range(MIN_GROUP_WORK, 255, -1):
        if n % length == 0:
            return length
    return n
