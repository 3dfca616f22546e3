"""All-reduce sums over devices, bitwise equal on each device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ggmlb.core.enums import Op
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, Buffer, tensor_copy_async


class MetaCommunicator:
    """All-reduce over streams, by the backend's own functions if it has them (`comm_*`, for example NCCL)."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.backends = tuple(backends)
        self._arrivals: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()
        self._comm: Any = None
        reg = backends[0].device.reg
        init = reg.get_proc_address("comm_init")
        if init is not None and len(backends) > 1 and all(b.device.reg is reg for b in backends):
            self._comm = init(list(backends))
        self._allreduce = reg.get_proc_address("comm_allreduce_tensor") if self._comm is not None else None

    def sum_of(self, parts: Sequence[Tensor], has_part: Sequence[bool]) -> AllReduce:
        """Prepare an in-place sum of one tensor per device; those without `has_part` only receive the sum.

        Args:
            parts: Each device's part, overwritten by the sum.
            has_part: Whether each device has a part; the others only receive the sum.
        """
        return AllReduce(self, parts, has_part)

    def allreduce(self, parts: Sequence[Tensor]) -> bool:
        """Sum the devices' `parts` in place by the backend's own all-reduce; `False` if it cannot."""
        return self._allreduce is not None and bool(self._allreduce(self._comm, list(parts)))

    def receive_buffer(self, j: int, nbytes: int) -> Buffer:
        """Return device `j`'s buffer for tensors that it receives in a sum, of at least `nbytes` bytes.

        Sums share it, because they run in order; it is freed with the last of them.
        """
        made = self._arrivals.get(j)
        if made is None or made.size < nbytes:
            made = self._arrivals[j] = self.backends[j].alloc_buffer(nbytes)
        return made

    def free(self) -> None:
        """Release the backend's communicator."""
        if self._comm is not None:
            self.backends[0].device.reg.get_proc_address("comm_free")(self._comm)  # type: ignore[misc]
            self._comm = None


class AllReduce:
    """A prepared all-reduce sum over the devices; calling it queues the sum.

    Without the backend's functions it is a butterfly: in each of log2(n) steps, pairs of devices exchange
    their sums and add. Devices beyond a power of two add their parts before and receive the sum
    afterwards (as in ggml).
    """

    def __init__(
        self, communicator: MetaCommunicator, parts: Sequence[Tensor], has_part: Sequence[bool]
    ) -> None:
        self._communicator = communicator
        self._parts = tuple(parts)
        self._all_have = all(has_part)
        self._steps: list[Callable[[], Any]] = []
        self._prepare([j for j, has in enumerate(has_part) if has])

    def __call__(self) -> None:
        """Queue the sum."""
        if self._all_have and self._communicator.allreduce(self._parts):
            return
        for step in self._steps:
            step()

    def _prepare(self, having: list[int]) -> None:
        n = 1 << (len(having).bit_length() - 1)
        core, beyond = having[:n], having[n:]
        arrivals = {j: self._arrival(j) for j in (core if len(having) > 1 else ())}
        adds = {j: self._add(j, arrival) for j, arrival in arrivals.items()}
        for source, target in zip(beyond, core, strict=False):
            self._steps += [self._copy(source, target, arrivals[target]), adds[target]]
        distance = 1
        while distance < n:
            pairs = [(core[i ^ distance], core[i]) for i in range(n)]
            # All copies are queued before the first addition changes what they read.
            self._steps += [self._copy(source, target, arrivals[target]) for source, target in pairs]
            self._steps += [adds[j] for j in core]
            distance *= 2
        rest = [j for j in range(len(self._parts)) if j not in core]
        for i, target in enumerate(rest):
            self._steps.append(self._copy(core[i % n], target, self._parts[target]))

    def _arrival(self, j: int) -> Tensor:
        part = self._parts[j]
        arrival = Tensor(part.dtype, part.ne)
        arrival.buffer = self._communicator.receive_buffer(j, part.nbytes)
        return arrival

    def _copy(self, source: int, target: int, into: Tensor) -> Callable[[], None]:
        backends = self._communicator.backends
        return partial(tensor_copy_async, backends[source], backends[target], self._parts[source], into)

    def _add(self, j: int, arrival: Tensor) -> Callable[[], Any]:
        part, backend = self._parts[j], self._communicator.backends[j]
        total = Tensor(part.dtype, part.ne, op=Op.ADD, src=(part, arrival), view_src=part)
        return partial(backend.graph_plan_compute, backend.graph_plan_create(Graph([total], [part, arrival])))
