"""Plans: for each launch of a graph a kernel object of its own, with its arguments set."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ggmlb.errors import FreedError
from ggmlb.interface import Buffer, GraphPlan
from ggmlb.kernels import Launch, Mem, lower

if TYPE_CHECKING:
    import pyopencl as cl

    from ggmlb.backends.opencl.backend import OpenClBackend
    from ggmlb.backends.opencl.buffer import OpenClBuffer
    from ggmlb.graph import Graph

Step = tuple["cl.Kernel", tuple[int, int, int], tuple[int, int, int]]


class OpenClPlan(GraphPlan):
    """The steps of a graph, ready to be queued.

    Attributes:
        steps: Kernel, global size and local size of each launch.
        buffers: The buffers that the steps use; OpenCL kernels do not keep them alive.
    """

    def __init__(self, backend: OpenClBackend, graph: Graph) -> None:
        super().__init__(backend, graph)
        self.steps: list[Step] = []
        self.buffers: list[OpenClBuffer] = []
        programs = backend.device.programs
        loans: list[Any] = []
        self._give_back = weakref.finalize(self, programs.give_back, loans)
        buffers: dict[int, Any] = {}
        for node in self.nodes:
            for launch in lower(node, backend.target):
                loan = programs.borrow(launch, backend.target.on_cpu)
                loans.append(loan)
                kernel = loan[1]
                kernel.set_args(*_flat_args(launch))
                local = (launch.wg, 1, 1)
                x, y, z = launch.groups
                self.steps.append((kernel, (x * launch.wg, y, z), local))
                for arg in launch.args:
                    if isinstance(arg, Mem):
                        buffers[id(arg.buffer)] = arg.buffer
        self.buffers.extend(buffers.values())

    def check_buffers(self) -> None:
        """Raise a FreedError if a buffer that the steps use was freed."""
        for buffer in self.buffers:
            if buffer.is_freed:
                raise FreedError(f"graph_plan_compute: a {buffer.name} buffer of the plan was freed")

    def release(self) -> None:
        """Give the kernel objects back."""
        self.steps = []
        self.buffers = []
        self._give_back()


def _flat_args(launch: Launch) -> list[Any]:
    """Return a launch's arguments as the kernel's text declares them (TENSOR_ in tensors.h)."""
    flat: list[Any] = []
    for arg in launch.args:
        if isinstance(arg, Mem):
            assert isinstance(arg.buffer, Buffer)
            flat += (arg.buffer.base, arg.offset, *arg.ne, *arg.nb)
        else:
            flat.append(arg)
    return flat
