"""OpenClPlan: a kernel object with arguments for each launch of a graph."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu import Launch, PreparedOperand, argument_block, lower
from ggmlb.backends.gpu.kinds import BoundItems
from ggmlb.backends.gpu.plan import GpuPlan
from ggmlb.backends.gpu.source import tensor_words
from ggmlb.backends.opencl.program import ProgramKey
from ggmlb.backends.opencl.runtime import cl_errors
from ggmlb.core.graph import Graph
from ggmlb.parallel.row_split import RowSplitProduct

if TYPE_CHECKING:
    import pyopencl as cl

    from ggmlb.backends.common.fusion import Item
    from ggmlb.backends.gpu import Target
    from ggmlb.backends.opencl.backend import OpenClBackend

Step = tuple["cl.Kernel", tuple[int, int, int], tuple[int, int, int]]


class LaunchKind(NamedTuple):
    """What equal launches have in common: program, grid, and the operand slots of their buffers.

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
    """Lowering of nodes and groups to launches (see `gpu.kinds.KindLowering`)."""

    target: Target

    def lower(self, item: Item) -> list[Launch | PreparedOperand]:
        """Return the launches that compute a node or group."""
        return lower(item, self.target)

    def step(self, request: Launch, slots: tuple[int, ...]) -> LaunchKind:
        """Return a launch's program key, grid and slot numbers of its buffers, for the cache."""
        (x, y, z), wg = request.groups, request.wg
        key = request.kernel, request.defines, wg, self.target.on_cpu
        return LaunchKind(key, (x * wg, y, z), (wg, 1, 1), slots)

    def mems(self, request: Launch) -> Sequence[Mem]:
        """Return the tensor arguments of a launch."""
        return [arg for arg in request.args if isinstance(arg, Mem)]

    def block(self, request: Launch) -> bytes:
        """Return a launch's packed arguments, with offsets within slots for tensors."""
        return argument_block(request, "opencl")

    def address_words(self, request: Launch) -> Sequence[int]:
        """Return where the tensors of a launch are in its argument block, in words of 8 bytes."""
        return tensor_words(request.kernel, "opencl")


class Stage(NamedTuple):
    """Consecutive launches of a plan, and the row-split product that runs after them, if any."""

    steps: list[Step]
    product: RowSplitProduct | None


class OpenClPlan(GpuPlan["Step | RowSplitProduct"]):
    """The launches of a graph as kernel objects with all arguments, ready to be queued.

    Attributes:
        stages: The steps, divided at row-split products.
        steps: Kernel, global size and local size of each launch.
        results: The node that each launch computes, or the last node of its group.
    """

    if TYPE_CHECKING:

        @property
        def backend(self) -> OpenClBackend:
            """The OpenCL stream that runs the plan."""

    def __init__(self, backend: OpenClBackend, graph: Graph) -> None:
        super().__init__(backend, graph, OpenClLowering(backend.target))
        self.stages = [Stage([], None)]
        for part in self.parts:
            for step in part.steps:
                if isinstance(step, RowSplitProduct):
                    self.stages[-1:] = [Stage(self.stages[-1].steps, step), Stage([], None)]
                else:
                    self.stages[-1].steps.append(step)

    def _bind(self, bound: BoundItems[LaunchKind]) -> list[Step]:
        self.results = bound.results
        programs = self.backend.device.programs
        loans = programs.borrow([step.key for step in bound.steps])
        self._give_back = weakref.finalize(self, programs.give_back, loans)
        with cl_errors("set the arguments of kernels", device=self.backend.name):
            self.steps = _with_arguments(bound, [kernel for _, kernel in loans])
        return self.steps

    def _split_step(self, product: RowSplitProduct) -> RowSplitProduct:
        return product

    def name_of(self, step: int) -> str:
        """Return the name of a step on a timeline: its kernel, and the node that it computes."""
        return f"{self.steps[step][0].function_name}: {self.results[step].describe()}"

    def release(self) -> None:
        """Return the plan's kernel objects for reuse by other plans, and release its steps and buffers."""
        super().release()
        self.stages = []
        self.steps = []
        self.results = []
        self._give_back()


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
