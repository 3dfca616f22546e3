"""Small programs whose order can be wrong, and the errors that the sanitizer gives for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest

from ggmlb import Context, DType, Graph, SanitizerError, alloc_ctx_tensors
from ggmlb.core.tensor import Tensor
from ggmlb.interface import BufferType, Event
from ggmlb.testing.fake import FakeBackend, FakeDevice

F32 = DType.F32


class Deaf(FakeBackend):
    """A stream that others forget to wait for, while a scheduler computes."""

    computes = False

    def synchronize(self) -> None:
        if not self.computes:
            super().synchronize()


class Eager(FakeBackend):
    """A stream that does not wait for events, while a scheduler computes."""

    computes = False

    def event_wait(self, event: Event) -> None:
        if not self.computes:
            super().event_wait(event)


class OnHostMemory(FakeDevice):
    """A device that computes in the host's memory."""

    def supports_buft(self, buft: BufferType) -> bool:
        return buft.is_host


def placed(backend: FakeBackend, *names: str, n: int = 8) -> list[Tensor]:
    ctx = Context()
    tensors = [ctx.new_tensor(F32, (n,), name=name) for name in names]
    buffer = alloc_ctx_tensors(ctx, backend)
    buffer.clear()
    return tensors


def doubled(x: Tensor, name: str = "y") -> tuple[Graph, Tensor]:
    """A graph of one node, in memory of its own beside `x`."""
    ctx = Context()
    y = ctx.set_name(ctx.scale(x, 2.0), name)
    assert x.buffer is not None
    alloc_ctx_tensors(ctx, x.buffer.buft)
    return Graph().build_forward_expand(y), y


@contextmanager
def forgotten(stream: Deaf | Eager) -> Iterator[None]:
    """Let nobody wait for the stream, if it is one that can be forgotten."""
    stream.computes = True
    try:
        yield
    finally:
        stream.computes = False


right = nullcontext


def found(kind: str, *words: str) -> AbstractContextManager[pytest.ExceptionInfo[SanitizerError]]:
    """Expect an error of that kind whose message has the words in this order."""
    return pytest.raises(SanitizerError, check=lambda e: e.kind == kind, match=".*".join(words))
