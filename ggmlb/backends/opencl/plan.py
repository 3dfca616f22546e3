"""Plans: for each launch of a graph a kernel object of its own, with its arguments set."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from ggmlb.backends.common.fusion import Group, fuse
from ggmlb.backends.gpu import BadIndex, Launch, Mem, lower, lower_group, packed_args
from ggmlb.backends.gpu.bad_index import PlanSlots
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, GraphPlan
from ggmlb.parallel.row_split import RowSplitProduct, is_split

if TYPE_CHECKING:
    import pyopencl as cl

    from ggmlb.backends.opencl.backend import OpenClBackend
    from ggmlb.backends.opencl.buffer import OpenClBuffer

Step = tuple["cl.Kernel", tuple[int, int, int], tuple[int, int, int]]


class Stage(NamedTuple):
    """Steps, and the product over several devices that comes after them, if any."""

    steps: list[Step]
    product: RowSplitProduct | None


class OpenClPlan(GraphPlan):
    """The steps of a graph, ready to be queued.

    Attributes:
        stages: The steps, cut where other devices help.
        steps: Kernel, global size and local size of each launch.
        results: The node that each step computes, or helps to; the last of those that it fuses.
        buffers: The buffers that the steps use; OpenCL kernels do not keep them alive.
        slots: Where steps that read indices note bad ones.
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
        buffers: dict[int, Any] = {id(b): b for _, product in products for b in product.buffers}
        for launch, (_, kernel) in zip(launches, loans, strict=True):
            for buffer in _set_args(kernel, launch, self.slots):
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
        """Return what a step does, for a timeline."""
        return f"{self.steps[step][0].function_name}: {self.results[step].describe()}"

    def release(self) -> None:
        """Give the kernel objects back."""
        self.stages = []
        self.steps = []
        self.results = []
        self.buffers = []
        self._give_back()


def _set_args(kernel: cl.Kernel, launch: Launch, slots: PlanSlots) -> list[Buffer]:
    """Set a launch's arguments as the kernel's text declares them: first buffers, which are returned.

    By number and as bytes: PyOpenCL's way by types makes Python code for each kernel object, in milliseconds.
    """
    buffers: list[Buffer] = []
    rest: list[float] = []
    for arg in launch.args:
        if not isinstance(arg, Mem):
            rest.append(arg)
            continue
        buffer, offset = arg.buffer, arg.offset
        if isinstance(buffer, BadIndex):
            slot = slots.places[buffer]
            buffer, offset = slot.block.buffer, slot.offset
        assert isinstance(buffer, Buffer)
        kernel.set_arg(len(buffers), buffer.base)
        buffers.append(buffer)
        rest += (offset, *arg.ne, *arg.nb)
    kernel.set_arg(len(buffers), packed_args(launch.kernel).pack(*rest))
    return buffers
