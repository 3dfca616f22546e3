"""All-reduce over cards by NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ggmlb.backends.cuda.backend import CudaBackend
from ggmlb.backends.cuda.buffer import CudaBuffer
from ggmlb.backends.cuda.driver import cuda_errors
from ggmlb.core.dtypes import DType
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend

if TYPE_CHECKING:
    from ggmlb.backends.cuda.driver import Collective

SUMMED = frozenset({DType.F32, DType.F16, DType.BF16})


class Communicator:
    """A group of streams of different cards, for sums."""

    def __init__(self, backends: Sequence[CudaBackend], collective: Collective) -> None:
        self.backends = tuple(backends)
        self.collective = collective


def comm_init(backends: Sequence[Backend]) -> Communicator | None:
    """Connect streams; `None` if NCCL is missing or two streams share a card.

    Source: ggml_backend_comm_init.
    """
    own = [b for b in backends if isinstance(b, CudaBackend)]
    cards = [b.device.index for b in own]
    if len(own) < len(backends) or not own or len(set(cards)) < len(cards):
        return None
    driver = own[0].device.driver
    # NCCL sets the device of before again: one of its own.
    with cuda_errors(driver, f"connect {', '.join(b.name for b in own)}"), own[0].device.on():
        collective = driver.collective(cards)
    return None if collective is None else Communicator(own, collective)


def comm_free(comm: Communicator) -> None:
    """End a connection (ggml_backend_comm_free)."""
    with comm.backends[0].device.on():
        comm.collective.free()


def comm_allreduce_tensor(comm: Communicator, tensors: Sequence[Tensor]) -> bool:
    """Queue on each stream the sum of all tensors, written over its own tensor.

    Args:
        comm: From `comm_init`.
        tensors: One for each stream, in that order, of one type and shape, on the stream's card.

    Returns:
        Whether it was queued; not for types other than f32, f16 and bf16, nor for tensors with gaps.

    Source: ggml_backend_comm_allreduce_tensor.
    """
    first = tensors[0]
    for backend, t in zip(comm.backends, tensors, strict=True):
        buffer = t.buffer
        if not isinstance(buffer, CudaBuffer) or buffer.device is not backend.device:
            return False
        if t.dtype not in SUMMED or not t.is_contiguous() or (t.dtype, t.ne) != (first.dtype, first.ne):
            return False
    if first.is_empty:
        return True
    places = []
    for backend, t in zip(comm.backends, tensors, strict=True):
        assert isinstance(t.buffer, CudaBuffer)
        t.buffer.streams.add(backend.stream)
        places.append((t.buffer.address + t.offset, backend.stream.handle))
    with ExitStack() as stack:
        # Only here are several streams' locks taken together: always in the order of the cards.
        for backend in sorted(comm.backends, key=lambda b: b.device.index):
            stack.enter_context(backend.stream.lock)
        device = comm.backends[0].device
        stack.enter_context(cuda_errors(device.driver, f"sum {first.describe()} over cards"))
        stack.enter_context(device.on())
        comm.collective.all_reduce(places, first.n_elements, first.dtype)
    return True
