"""OpenClPlan: a kernel object with arguments for each launch of a graph."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from ggmlb.backends.common.fusion import Group, fuse
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu import Launch, lower, lower_group, packed_args
from ggmlb.backends.gpu.kinds import BoundItems, Prepared
from ggmlb.backends.gpu.scratch import place_pieces
from ggmlb.backends.gpu.source import offset_words
from ggmlb.backends.opencl.program import ProgramKey
from ggmlb.backends.opencl.runtime import cl_errors
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import GraphPlan
from ggmlb.parallel.row_split import RowSplitProduct, is_split

if TYPE_CHECKING:
    import pyopencl as cl

    from ggmlb.backends.common.kinds import Item
    from ggmlb.backends.gpu import Target
    from ggmlb.backends.opencl.backend import OpenClBackend
    from ggmlb.backends.opencl.buffer import OpenClBuffer

Step = tuple["cl.Kernel", tuple[int, int, int], tuple[int, int, int]]


class LaunchKind(NamedTuple):
    """A launch without the values of its arguments.

    Attributes:
        key: Its program.
        global_size, local_size: Work-items in all, and of a group.
        buffers: The operand slots of its buffers, in the order of the kernel's declaration.
    """

    key: ProgramKey
    global_size: tuple[int, int, int]
    local_size: tuple[int, int, int]
    buffers: tuple[int, ...]


class OpenClLowering(NamedTuple):
    """Lowers items for a work split; a kernel's last argument holds all but its buffers."""

    target: Target

    def lower(self, item: Item, ready: Collection[tuple[Tensor, str]]) -> tuple[list[Launch], Prepared]:
        """As `KindLowering.lower`."""
        target = self.target
        return lower_group(item, target) if isinstance(item, Group) else lower(item, target), {}

    def step(self, request: Launch, slots: tuple[int, ...]) -> LaunchKind:
        """As `KindLowering.step`."""
        (x, y, z), wg = request.groups, request.wg
        key = request.kernel, request.defines, wg, self.target.on_cpu
        return LaunchKind(key, (x * wg, y, z), (wg, 1, 1), slots)

    def mems(self, request: Launch) -> Sequence[Mem]:
        """As `KindLowering.mems`."""
        return [arg for arg in request.args if isinstance(arg, Mem)]

    def block(self, request: Launch) -> bytes:
        """As `KindLowering.block`."""
        rest: list[float] = []
        for arg in request.args:
            rest += (arg.offset, *arg.ne, *arg.nb) if isinstance(arg, Mem) else (arg,)
        return packed_args(request.kernel).pack(*rest)

    def address_words(self, request: Launch) -> Sequence[int]:
        """As `KindLowering.address_words`."""
        return offset_words(request.kernel)


class Stage(NamedTuple):
    """Steps, and the split product after them, if any."""

    steps: list[Step]
    product: RowSplitProduct | None


class OpenClPlan(GraphPlan):
    """The steps of a graph, ready to be queued.

    Attributes:
        stages: The steps, divided at split products.
        steps: Kernel, global size and local size of each launch.
        results: The node that each step computes, or the last node of its group.
        buffers: The buffers that the steps use; OpenCL kernels do not keep them alive.
        has_indices: Whether its steps read indices, so that a wait must read the record of bad ones.
    """

    def __init__(self, backend: OpenClBackend, graph: Graph) -> None:
        super().__init__(backend, graph)
        items = fuse(graph, backend.can_fuse)
        products = {
            i: RowSplitProduct(item, backend, backend.helpers)
            for i, item in enumerate(items)
            if _is_apart(item)
        }
        target, programs = backend.target, backend.device.programs
        bound = BoundItems(items, backend.device.kinds, OpenClLowering(target), target, _is_apart)
        self.results = bound.results
        loans = programs.borrow([step.key for step in bound.steps])
        self._give_back = weakref.finalize(self, programs.give_back, loans)
        self.has_indices = bool(bound.records)
        nbytes, offsets = place_pieces(bound.pieces)
        bound.give(
            backend.alloc_buffer(nbytes) if nbytes else None,
            offsets,
            backend.bad_indices.bind(self, bound.records, backend),
        )
        with cl_errors("set the arguments of kernels", device=backend.name):
            self.steps = _with_arguments(bound, [kernel for _, kernel in loans])
        buffers: dict[int, Any] = {id(b): b for product in products.values() for b in product.buffers}
        buffers.update((id(b), b) for b in bound.memory if b is not None)
        self.buffers: list[OpenClBuffer] = list(buffers.values())
        ends = [0, *accumulate(bound.n_steps)]
        self.stages: list[Stage] = []
        start = 0
        for number, product in products.items():
            self.stages.append(Stage(self.steps[start : ends[number]], product))
            start = ends[number]
        self.stages.append(Stage(self.steps[start:], None))

    def name_of(self, step: int) -> str:
        """Return the name of a step for a timeline."""
        return f"{self.steps[step][0].function_name}: {self.results[step].describe()}"

    def release(self) -> None:
        """Return the kernel objects for reuse."""
        self.stages = []
        self.steps = []
        self.results = []
        self.buffers = []
        self._give_back()


def _is_apart(item: Item) -> TypeGuard[Tensor]:
    """Whether a node is a product with a split weight, which several devices compute."""
    return isinstance(item, Tensor) and is_split(item) and not item.is_empty


def _with_arguments(bound: BoundItems[LaunchKind], kernels: Sequence[cl.Kernel]) -> list[Step]:
    """Set the arguments of kernel objects; return the steps.

    Arguments are set by index as bytes: PyOpenCL's typed setter generates Python code per kernel object,
    which takes milliseconds.
    """
    values, starts = bound.blocks()
    block = values.data.cast("B")
    memory, firsts = bound.slot_memory()
    bases = [None if buffer is None else buffer.base for buffer in memory]
    steps: list[Step] = []
    ends = starts[1:]
    for kernel, step, first, start, end in zip(kernels, bound.steps, firsts, starts, ends, strict=False):
        for i, slot in enumerate(step.buffers):
            kernel.set_arg(i, bases[first + slot])
        kernel.set_arg(len(step.buffers), block[start:end])
        steps.append((kernel, step.global_size, step.local_size))
    return steps
