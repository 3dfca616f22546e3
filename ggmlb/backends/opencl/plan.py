"""OpenClPlan: a kernel object with arguments for each launch of a graph."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from ggmlb.backends.common.fusion import Group, fuse
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu import BadIndex, Launch, Scratch, lower, lower_group, packed_args, place
from ggmlb.backends.opencl.runtime import cl_errors
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, GraphPlan
from ggmlb.parallel.row_split import RowSplitProduct, is_split

if TYPE_CHECKING:
    import pyopencl as cl

    from ggmlb.backends.opencl.backend import OpenClBackend
    from ggmlb.backends.opencl.buffer import OpenClBuffer

Step = tuple["cl.Kernel", tuple[int, int, int], tuple[int, int, int]]

Memory = dict[BadIndex | Scratch, tuple[Buffer, int]]
"""Buffer and offset of what a plan provides for its launches."""


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
        slots: Slots for bad indices of its steps.
    """

    def __init__(self, backend: OpenClBackend, graph: Graph) -> None:
        super().__init__(backend, graph)
        self.stages: list[Stage] = []
        self.steps: list[Step] = []
        self.results: list[Tensor] = []
        self.buffers: list[OpenClBuffer] = []
        programs, target = backend.device.programs, backend.target
        launches: list[Launch] = []
        products: list[tuple[int, RowSplitProduct]] = []
        for item in fuse(graph, backend.can_fuse):
            if isinstance(item, Tensor) and is_split(item) and not item.is_empty:
                products.append((len(launches), RowSplitProduct(item, backend, backend.helpers)))
                continue
            made = lower_group(item, target) if isinstance(item, Group) else lower(item, target)
            launches += made
            self.results += [item.result if isinstance(item, Group) else item] * len(made)
        loans = programs.borrow(launches, target.on_cpu)
        self._give_back = weakref.finalize(self, programs.give_back, loans)
        self.slots = backend.bad_indices.take(launches, backend)
        memory: Memory = {bad: (slot.block.buffer, slot.offset) for bad, slot in self.slots.places.items()}
        nbytes, offsets = place([launch.args for launch in launches])
        if nbytes:
            scratch = backend.alloc_buffer(nbytes)
            memory |= {piece: (scratch, offset) for piece, offset in offsets.items()}
        buffers: dict[int, Any] = {id(b): b for _, product in products for b in product.buffers}
        for launch, (_, kernel) in zip(launches, loans, strict=True):
            with cl_errors(f"set the arguments of kernel {launch.kernel.name}", device=backend.name):
                for buffer in _set_args(kernel, launch, memory):
                    buffers[id(buffer)] = buffer
            x, y, z = launch.groups
            self.steps.append((kernel, (x * launch.wg, y, z), (launch.wg, 1, 1)))
        self.buffers.extend(buffers.values())
        start = 0
        for end, product in products:
            self.stages.append(Stage(self.steps[start:end], product))
            start = end
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


def _set_args(kernel: cl.Kernel, launch: Launch, memory: Memory) -> list[Buffer]:
    """Set a launch's arguments in the order of the kernel's declaration; return the buffers.

    Arguments are set by index as bytes: PyOpenCL's typed setter generates Python code per kernel object,
    which takes milliseconds.

    Args:
        kernel: Its kernel object.
        launch: The launch.
        memory: The memory that the plan provides.
    """
    buffers: list[Buffer] = []
    rest: list[float] = []
    for arg in launch.args:
        if not isinstance(arg, Mem):
            rest.append(arg)
            continue
        buffer, offset = arg.buffer, arg.offset
        if isinstance(buffer, (BadIndex, Scratch)):
            buffer, start = memory[buffer]
            offset += start
        assert isinstance(buffer, Buffer)
        kernel.set_arg(len(buffers), buffer.base)
        buffers.append(buffer)
        rest += (offset, *arg.ne, *arg.nb)
    kernel.set_arg(len(buffers), packed_args(launch.kernel).pack(*rest))
    return buffers
