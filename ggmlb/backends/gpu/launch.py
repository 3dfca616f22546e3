"""Launch: a kernel with its arguments and work split. No device is needed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ggmlb.backends.common.strided import Mem, merged
from ggmlb.backends.gpu.source import Kernel, Language, kernels, layout
from ggmlb.core.dtypes import DType
from ggmlb.core.tensor import contiguous_nb

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ggmlb.core.tensor import Ne, Tensor

Defines = tuple[tuple[str, str], ...]

MIN_GROUP_WORK = 4096
"""Fewest elements per core before another core is used."""

IN_VECTORS = frozenset({DType.F32, DType.F16, DType.BF16, DType.I32})
"""Types that kernels read and write as vectors."""

MAX_PER = 32
"""Most elements of a row in the registers of a work-item."""

MAX_WG = 512
"""Most work-items of a group, limited by registers."""

_PER = {
    1: (1, 2, 3, 4, 6, 8, 12, 16, 24, MAX_PER),
    4: (4, 8, 12, 16, 20, 24, 28, MAX_PER),
    8: (8, 16, 24, MAX_PER),
}
"""Allowed elements of a row per work-item, by vector width; few, as each is a compilation."""


@dataclass(frozen=True, slots=True)
class Target:
    """Properties of a device that decide how kernels divide work among its cores and work-items.

    Attributes:
        on_cpu: Whether a group is one work-item that computes whole rows, in vectorised loops.
        n_units: Number of cores or multiprocessors.
        wg: Work-items of a group, unless a kernel fixes it; 1 with `on_cpu`.
        max_wg: Most work-items of a group, for long rows.
        max_groups: Most groups in the second and third dimensions.
        blas: Whether a library computes dense products.
        tf32: Whether it may round factors of f32 to TF32.
        capability: CUDA's compute capability times ten: 90 for 9.0; 0 for other devices.
        shared: Shared memory of a multiprocessor [bytes]; a block may have all of it but 1 KB.
    """

    on_cpu: bool
    n_units: int
    wg: int
    max_wg: int = MAX_WG
    max_groups: int = 2**31 - 1
    blas: bool = False
    tf32: bool = False
    capability: int = 0
    shared: int = 0

    def groups_for(self, n_rows: int, row_size: int) -> int:
        """Return the number of work-groups for `n_rows` rows: one each; on a CPU, at most eight per core."""
        if not self.on_cpu:
            return n_rows
        return max(1, min(n_rows, n_rows * row_size // MIN_GROUP_WORK, 8 * self.n_units))


@dataclass(slots=True, eq=False)
class Scratch:
    """A piece of a plan's scratch memory, for results that one launch passes to another.

    It is written before it is read in every run, and starts at a multiple of 256 bytes.

    Attributes:
        nbytes: Its size [bytes].
    """

    nbytes: int

    def mem(self, dtype: DType, ne: Ne, offset: int = 0) -> Mem:
        """Return a part of the scratch piece, from byte `offset` on, as a contiguous tensor argument."""
        return Mem(self, offset, dtype, ne, contiguous_nb(dtype, ne))


@dataclass(slots=True, eq=False)
class BadIndex:
    """Placeholder for the kernel argument `bad`, to which a bounds check of indices writes (`bad_index`).

    Attributes:
        node: The node that the launches compute.
        n: Exclusive upper bound of its indices.
    """

    node: Tensor
    n: int

    @property
    def mem(self) -> Mem:
        """Return the tensor argument `bad`: the bad-index record, whose byte offset is the step's number."""
        return Mem(self, 0, DType.I64, (3, 1, 1, 1), contiguous_nb(DType.I64, (3, 1, 1, 1)))


@dataclass(slots=True, eq=False)
class PreparedOperand:
    """An operand converted into scratch (such as activations in 8 bits), which later nodes reuse.

    Attributes:
        source: The operand.
        name: Name of the form, such as `q8`.
        made_by: The launches that convert it.
        mems: Its pieces of scratch memory.
    """

    source: Tensor
    name: str
    made_by: list[Launch]
    mems: tuple[Mem, ...]


@dataclass(slots=True)
class Launch:
    """A kernel launch.

    Attributes:
        kernel: The kernel.
        defines: Its macros, sorted.
        args: A `Mem` for each tensor parameter, a number for each other.
        groups: Work-groups in three dimensions.
        wg: Work-items of a group.
        shared: Shared memory of a group, beside what its text declares [bytes]; only on CUDA.
        persistent: Whether the kernel has a grid-stride loop over the first dimension, so that a grid of
            only the resident blocks suffices; only on CUDA.
    """

    kernel: Kernel
    defines: Defines
    args: tuple[Mem | int | float, ...]
    groups: tuple[int, int, int]
    wg: int
    shared: int = 0
    persistent: bool = False


def argument_block(launch: Launch, language: Language, base: Callable[[Mem], int] = lambda _: 0) -> bytes:
    """Pack a launch's arguments as its kernel expects them; `base` returns a tensor's buffer address."""
    flat: list[int | float] = []
    for arg in launch.args:
        if isinstance(arg, Mem):
            flat += (
                (arg.offset, *arg.ne, *arg.nb)
                if language == "opencl"
                else (base(arg), arg.offset, *arg.ne, *arg.nb)
            )
        else:
            flat.append(arg)
    return layout(launch.kernel, language).pack(*flat)


def _defines(mem: Mem, name: str) -> Defines:
    """Return the macros of the tensor `name`: its type, and the stride of dimension 0.

    The stride is a constant for rows without gaps and for repeated elements.
    """
    size, nb0 = mem.dtype.type_size, mem.nb[0]
    if mem.ne[0] == 1 and nb0:
        nb0 = size
    step = str(nb0) if nb0 in (0, size) else f"{name}_nb0"
    return (f"{name}_T", mem.dtype.name.lower() + mem.packing), (f"{name}_STEP", step)


def launch(
    name: str | Kernel,
    args: Sequence[Mem | int | float],
    groups: tuple[int, int, int],
    wg: int,
    **defines: str | int,
) -> Launch:
    """Return a launch of the kernel `name` (a portable one, if a string), with macros `defines`.

    The macros of its tensors' types and strides are added.
    """
    kernel = kernels()[name] if isinstance(name, str) else name
    macros = {key: str(value) for key, value in defines.items()}
    for param, arg in zip(kernel.params, args, strict=True):
        if isinstance(arg, Mem):
            macros.update(_defines(arg, param.name))
    return Launch(kernel, tuple(sorted(macros.items())), tuple(args), groups, wg)


def elementwise(
    target: Target,
    name: str | Kernel,
    mems: Sequence[Mem],
    *numbers: float,
    over: int = -1,
    **defines: str | int,
) -> Launch:
    """Return a launch of a kernel that has one iteration for each element of the tensor `mems[over]`."""
    ne = mems[over].ne
    n_rows = ne[1] * ne[2] * ne[3]
    if target.on_cpu:
        groups = target.groups_for(n_rows, ne[0])
    else:
        groups = min(-(-ne[0] * n_rows // target.wg), 1 << 20)
    return launch(name, (*mems, *numbers), (groups, 1, 1), target.wg, **defines)


def vector_width(mems: Sequence[Mem]) -> int:
    """Return how many elements a vector load takes: 16 bytes of the largest type, or 1.

    Vectors need aligned rows of whole vectors without gaps; an element repeated along the row is read as
    a scalar. Buffers begin at multiples of 16 bytes.
    """
    size = max(m.dtype.type_size for m in mems)
    width = 16 // size
    for m in mems:
        if m.nb[0] == 0:
            continue
        nbytes = width * m.dtype.type_size
        if m.nb[0] != m.dtype.type_size or m.ne[0] % width or any(x % nbytes for x in m.steps()):
            return 1
    return width if all(m.dtype in IN_VECTORS and not m.packing for m in mems) else 1


class RegisterSplit(NamedTuple):
    """How a work-group divides rows that its work-items hold in registers.

    Attributes:
        wg: Work-items of a group.
        lanes: Work-items that share a row.
        per_lane: Most elements of the row per work-item.
        full_iters: Fewest elements of the row per work-item, which need no bounds check.
    """

    wg: int
    lanes: int
    per_lane: int
    full_iters: int


def mapped(
    target: Target,
    name: str | Kernel,
    mems: Sequence[Mem],
    *numbers: float,
    over: int = -1,
    beside: Sequence[Mem] = (),
    **defines: str | int,
) -> Launch:
    """Return a launch of an element-wise kernel over row segments of `mems[over]`; `beside`: other tensors.

    On a GPU, each work-item has several elements of a segment (`EACH_SEGMENT` in tensors.h), as long as all
    multiprocessors have work.

    Args:
        target: Parameters of the work split.
        name: The kernel.
        mems: Tensors read and written at the same element.
        numbers: Its scalar arguments.
        over: Index of the tensor that determines the number of elements.
        beside: Tensors with another access pattern, passed before the last of `mems`.
        defines: Macros.
    """
    args = [*mems[:-1], *beside, mems[-1]]
    if target.on_cpu:
        return elementwise(target, name, args, *numbers, over=args.index(mems[over]), **defines)
    ne = mems[over].ne
    n_rows = ne[1] * ne[2] * ne[3]
    vec = vector_width(mems)
    some = max(vec, 4)
    for lanes, per in ((target.wg, 2 * some), (target.wg, some), (32, some), (8, some), (8, 1)):
        n_segments = -(-ne[0] // (lanes * per)) * n_rows
        groups = -(-n_segments * lanes // target.wg)
        is_full = ne[0] * n_rows * 4 >= n_segments * lanes * per * 3
        if is_full and (per <= some or groups >= 2 * target.n_units):
            return launch(
                name,
                (*args, *numbers),
                (min(groups, 1 << 20), 1, 1),
                target.wg,
                **defines,
                **_split_macros(RegisterSplit(target.wg, lanes, per, 0), vec if per > 1 else 1),
            )
    return elementwise(target, name, args, *numbers, over=args.index(mems[over]), **defines)


def segmented(target: Target, name: str, mems: Sequence[Mem], vec: int, **defines: str | int) -> Launch:
    """Return a launch with one work-group per segment of a row of `mems[-1]`, stored `vec` elements at once.

    Segments are as long as rows allow.
    """
    ne = mems[-1].ne
    for wg, per in ((target.wg, 16), (target.wg, 8), (min(64, target.wg), 8), (min(32, target.wg), 8)):
        n_segments = -(-ne[0] // (per * wg))
        if ne[0] * 4 >= n_segments * per * wg * 3:
            break
    groups = min(n_segments * ne[1] * ne[2] * ne[3], 1 << 20)
    return launch(name, mems, (groups, 1, 1), wg, PER_LANE=per, FULL_ITERS=0, VEC=vec, **defines)


def _split_macros(split: RegisterSplit, vec: int) -> dict[str, str | int]:
    """Return the macros of a work split."""
    lanes = {"LANES": split.lanes} if split.lanes != split.wg else {}
    return {**lanes, "PER_LANE": split.per_lane, "FULL_ITERS": split.full_iters, "VEC": vec}


def in_registers(
    target: Target, name: str, mems: Sequence[Mem], *numbers: float, over: int = -1, **defines: str | int
) -> Launch:
    """Return a launch of a row-wise kernel whose work-items keep the rows of `mems[over]` in registers.

    As few work-items as possible share a row: a part of a group (which then has several rows) or a larger
    group. With few rows, more work-items share each, to use the whole device. If a row is too long, or on
    a CPU, it is read again.
    """
    if target.on_cpu:
        return rowwise(target, name, mems, *numbers, over=over, **defines)
    n = mems[0].ne[0]
    ne = mems[over].ne
    n_rows = ne[1] * ne[2] * ne[3]
    vec = vector_width([m for m in mems if m.ne[0] == n or not m.nb[0]])
    split = _register_split(target, n, vec, 8 if n_rows <= target.n_units else MAX_PER)
    if split is None:
        return launch(name, (*mems, *numbers), (n_rows, 1, 1), max(target.wg, target.max_wg), **defines)
    groups = -(-n_rows * split.lanes // split.wg)
    return launch(name, (*mems, *numbers), (groups, 1, 1), split.wg, **defines, **_split_macros(split, vec))


def _register_split(target: Target, n: int, vec: int, most: int) -> RegisterSplit | None:
    """Return the work split of rows of `n` elements, preferably at most `most` elements per work-item."""
    lanes = [(8, 16), (32, 16), *((target.wg << i, MAX_PER) for i in range(5))]
    fits = []
    for k, limit in lanes:
        if k * limit >= n and k <= max(target.wg, target.max_wg):
            per = next(p for p in _PER[vec] if p * k >= n)
            full = max(p for p in (0, *_PER[vec]) if p * k <= n)
            fits.append(RegisterSplit(max(target.wg, k), k, per, full))
    return next((split for split in fits if split.per_lane <= max(most, vec)), fits[-1] if fits else None)


def rowwise(
    target: Target, name: str, mems: Sequence[Mem], *numbers: float, over: int = -1, **defines: str | int
) -> Launch:
    """Return a launch of a row-wise kernel, one work-group per row of `mems[over]` (on a CPU, several)."""
    ne = mems[over].ne
    n_rows = ne[1] * ne[2] * ne[3]
    groups = target.groups_for(n_rows, max(m.ne[0] for m in mems))
    return launch(name, (*mems, *numbers), (groups, 1, 1), target.wg, **defines)


def flattened(target: Target, mems: Sequence[Mem]) -> list[Mem]:
    """Merge dimensions of tensor arguments of equal extents, as far as the strides of all allow.

    With `on_cpu`, one long row is cut into several.
    """
    ne, nbs = merged(mems[0].ne, [m.nb for m in mems])
    if not ne:
        ne, nbs = [1], [[m.dtype.type_size] for m in mems]
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
    """Return the row length to cut `n` elements into equal rows: the largest divisor in 256..4096, or `n`."""
    if n <= MIN_GROUP_WORK:
        return n
    for length in range(MIN_GROUP_WORK, 255, -1):
        if n % length == 0:
            return length
    return n
