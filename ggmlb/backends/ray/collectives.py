"""All-reduce of tensors over machines.

Each machine sends its part to all others through Ray's object store, and adds all parts in the order of the
machines. This needs no extra actor calls: from the second time on, the call of the preceding computation also
reads the part ahead, and the sum is batched with the following computation. Ray's own collectives need
PyTorch or NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ggmlb.core.dtypes import DType
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend

if TYPE_CHECKING:
    from ggmlb.backends.ray.backend import RayBackend


class RayCommunicator:
    """A group of streams on different machines, for all-reduce."""

    def __init__(self, backends: Sequence[RayBackend]) -> None:
        self.links = tuple(backend.device.link for backend in backends)


def comm_init(backends: Sequence[Backend]) -> RayCommunicator | None:
    """Create a communicator of streams; `None` if one is not a Ray stream, or two are on one machine.

    Source: ggml_backend_comm_init.
    """
    from ggmlb.backends.ray.backend import RayBackend

    own = [b for b in backends if isinstance(b, RayBackend)]
    machines = {id(b.device.link) for b in own}
    return RayCommunicator(own) if len(machines) == len(own) == len(backends) > 0 else None


def comm_free(comm: RayCommunicator) -> None:
    """Free a communicator (ggml_backend_comm_free)."""
    comm.links = ()


def comm_allreduce_tensor(comm: RayCommunicator, tensors: Sequence[Tensor]) -> bool:
    """Queue an in-place all-reduce (sum): each machine's tensor becomes the sum of all.

    Args:
        comm: From `comm_init`.
        tensors: One per stream, in that order, of one shape, on the stream's machine.

    Returns:
        Whether it was queued; `False` for types other than f32 and for tensors that are not contiguous.

    Raises:
        DeviceLostError: A machine is lost.

    Source: ggml_backend_comm_allreduce_tensor.
    """
    from ggmlb.backends.ray.buffer import RayBuffer

    spans = []
    for link, t in zip(comm.links, tensors, strict=True):
        if not (isinstance(t.buffer, RayBuffer) and t.buffer.link is link and t.buffer.buft.is_plain):
            return False
        if t.dtype is not DType.F32 or not t.is_contiguous() or t.ne != tensors[0].ne:
            return False
        spans.append(t.buffer.span(t))
    if tensors[0].is_empty:
        return True
    parts = [link.read_apart(span) for link, span in zip(comm.links, spans, strict=True)]
    for i, (link, span) in enumerate(zip(comm.links, spans, strict=True)):
        link.add_from(span, parts[:i], parts[i + 1 :])
    return True
