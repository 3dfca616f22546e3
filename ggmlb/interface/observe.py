"""Observers, notified of every call that moves data, computes, or orders such work.

The public methods of `Backend`, `Buffer`, `BufferType` and `Event` report actions, so that backends need no
code for it. Without observers, a call costs one test of an empty list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy.typing as npt

from ggmlb.core.enums import NO_OPS
from ggmlb.core.ops import SPECS
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.interface.backend import Backend
    from ggmlb.interface.buffer import Buffer
    from ggmlb.interface.event import Event
    from ggmlb.interface.plan import GraphPlan

    Result = TypeVar("Result")


class Access(NamedTuple):
    """Bytes `start` to `stop` (exclusive) of a buffer that an action reads or writes."""

    buffer: Buffer
    start: int
    stop: int
    is_write: bool
    tensor: Tensor | None


@dataclass(slots=True, eq=False)
class Action:
    """A transfer, computation, event or allocation, of which observers are notified.

    Attributes:
        name: The method: `set_tensor_async`, `graph_plan_compute`, `event_wait`, ...
        stream: The backend that the work is queued on; `None` for synchronous work.
        transfers: Accesses of a transfer; `accesses` adds those of a plan.
        data: The host memory that a queued transfer uses.
        source: The stream of a copy's source, whose work is ordered with the copy too.
        plan: The computed plan.
        event: The event recorded or waited for.
        buffer: The buffer allocated or freed.
        done: Whether the call had an effect; `False` for a copy that the backend declined.
        failed: Whether the call raised.
    """

    name: str
    stream: Backend | None = None
    transfers: Sequence[Access] = ()
    data: npt.NDArray[Any] | None = None
    source: Backend | None = None
    plan: GraphPlan | None = None
    event: Event | None = None
    buffer: Buffer | None = None
    done: bool = True
    failed: bool = False

    def accesses(self) -> Iterator[Access]:
        """Yield all accesses, in order; the range of a strided tensor includes its gaps."""
        yield from self.transfers
        if self.plan is not None:
            for node in self.plan.nodes:
                if node.op not in NO_OPS:
                    yield from _accesses_of(node)

    def run(self, hook: Callable[..., Result], *args: Any) -> Result:
        """Notify observers, call `hook(*args)`, notify them again; return the hook's result."""
        with self:
            result = hook(*args)
            self.done = result is not False
        return result

    def __enter__(self) -> Action:
        for observer in observers:
            observer.begin(self)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.failed = kind is not None
        for observer in observers:
            observer.end(self)


class Observer:
    """Base class of observers; from `start` to `stop`, called in the thread of each action."""

    def begin(self, action: Action) -> None:
        """Called before an action; an error raised here prevents it."""

    def end(self, action: Action) -> None:
        """Called after an action, also if it failed."""


observers: Final[list[Observer]] = []
"""The active observers. Change it only by `start` and `stop`, because it is read without a copy."""


def start(observer: Observer) -> None:
    """Notify the observer of all actions from now on."""
    observers.append(observer)


def stop(observer: Observer) -> None:
    """Stop notifying the observer; without effect if it is not active."""
    if observer in observers:
        observers.remove(observer)


def reading(tensor: Tensor) -> Access:
    """Return the `Access` (buffer and byte range) that reads a whole placed tensor."""
    return Access(tensor.placed("read"), tensor.offset, tensor.offset + tensor.nbytes, False, tensor)


def writing(tensor: Tensor) -> Access:
    """Return the `Access` (buffer and byte range) that writes a whole placed tensor."""
    return Access(tensor.placed("write"), tensor.offset, tensor.offset + tensor.nbytes, True, tensor)


def _accesses_of(node: Tensor) -> Iterator[Access]:
    also = SPECS[node.op].also_written
    for i, src in enumerate(node.src):
        if src is not None and src.nbytes and src.buffer is not None:
            yield reading(src)
            if i in also:
                yield writing(src)
    if node.nbytes and node.buffer is not None:
        yield writing(node)
