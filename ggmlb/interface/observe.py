"""Observers: told of every call that moves data, computes, or orders such work.

The public methods of `Backend`, `Buffer`, `BufferType` and `Event` report what they do, so any backend is
observed without code of its own. While nobody observes, a report costs one look at an empty list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy.typing as npt

from ggmlb.core.enums import NO_OPS
from ggmlb.core.ops import SPECS
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.interface.buffer import Buffer
    from ggmlb.interface.event import Event
    from ggmlb.interface.plan import GraphPlan
    from ggmlb.interface.queue import Queue


class Access(NamedTuple):
    """Bytes of a buffer that an action reads or writes: `start` up to, not including, `stop`."""

    buffer: Buffer
    start: int
    stop: int
    is_write: bool
    tensor: Tensor | None


@dataclass(slots=True, eq=False)
class Action:
    """A call of a public method.

    Attributes:
        name: The method: `set_tensor_async`, `graph_plan_compute`, `event_wait`, ...
        stream: The backend whose queue the work goes to; `None` where it is done when the call returns.
        transfers: What a transfer reads and writes; `accesses` gives this, and what a plan does.
        source: The stream of a copy's source; the copy is ordered after and before its work too.
        plan: What is computed.
        event: What is recorded or waited for.
        buffer: What was allocated, or is freed.
        data: The host memory that a queued transfer uses.
        done: Whether the call did what it was asked; `False` for a copy that the backend declined.
        failed: Whether the call raised.
    """

    name: str
    stream: Queue | None = None
    transfers: Sequence[Access] = ()
    source: Queue | None = None
    plan: GraphPlan | None = None
    event: Event | None = None
    buffer: Buffer | None = None
    data: npt.NDArray[Any] | None = None
    done: bool = True
    failed: bool = False

    def accesses(self) -> Iterator[Access]:
        """Yield what is read and written, in order; the range of a strided tensor includes its gaps."""
        yield from self.transfers
        if self.plan is not None:
            for node in self.plan.nodes:
                if node.op not in NO_OPS:
                    yield from _accesses_of(node)

    def __enter__(self) -> Action:
        for observer in observers:
            observer.begin(self)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.failed = kind is not None
        for observer in observers:
            observer.end(self)


class Observer:
    """Is told of actions, in the thread that takes them, between `start` and `stop`."""

    def begin(self, action: Action) -> None:
        """Look at an action before it is taken; an error raised here prevents it."""

    def end(self, action: Action) -> None:
        """Look at an action after it was taken, or failed."""


class _Quiet:
    """Stands in for an action that nobody wants to hear of."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        return None


QUIET: Final = _Quiet()

observers: Final[list[Observer]] = []
"""Who is told. Change it with `start` and `stop`: the list is looked at, never copied."""


def start(observer: Observer) -> None:
    """Tell the observer of all actions from now on."""
    observers.append(observer)


def stop(observer: Observer) -> None:
    """Tell the observer nothing more; one that is not told anything is left alone."""
    if observer in observers:
        observers.remove(observer)


def reading(tensor: Tensor, offset: int = 0, size: int | None = None) -> Access:
    """Return the access of a call that reads `size` bytes of a placed tensor, by default all."""
    return _span(tensor, offset, size, is_write=False)


def writing(tensor: Tensor, offset: int = 0, size: int | None = None) -> Access:
    """Return the access of a call that writes `size` bytes of a placed tensor, by default all."""
    return _span(tensor, offset, size, is_write=True)


def _span(tensor: Tensor, offset: int, size: int | None, is_write: bool) -> Access:
    assert tensor.buffer is not None
    start = tensor.offset + offset
    return Access(tensor.buffer, start, start + (tensor.nbytes if size is None else size), is_write, tensor)


def _accesses_of(node: Tensor) -> Iterator[Access]:
    also = SPECS[node.op].also_written
    for i, src in enumerate(node.src):
        if src is not None and src.nbytes and src.buffer is not None:
            yield reading(src)
            if i in also:
                yield writing(src)
    if node.nbytes and node.buffer is not None:
        yield writing(node)
