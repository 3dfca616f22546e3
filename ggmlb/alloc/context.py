"""alloc_ctx_tensors: buffers for all tensors of a context."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.alloc.linear import TensorAllocator, padded
from ggmlb.interface import Backend, Buffer, BufferType, MultiBuffer, view_init

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ggmlb.context import Context
    from ggmlb.tensor import Tensor


def alloc_ctx_tensors(ctx: Context, where: Backend | BufferType) -> Buffer:
    """Place all tensors of a context, in a buffer made for them.

    Tensors that lie in a buffer already are left alone; views follow their sources. If anything fails,
    the tensors are as they were before, and nothing stays allocated.

    Args:
        ctx: Holds the tensors.
        where: The kind of memory, or the backend whose default kind is meant.

    Returns:
        The buffer, a context manager that frees it: a `MultiBuffer` if the tensors need more than
        `max_size`, and one of no bytes if no tensor needs any.

    Raises:
        AllocationError: The device lacks room, or one tensor is larger than the largest buffer.
        NotAllocatedError: A view's source, in another context, lies in no buffer yet.

    Source: ggml_backend_alloc_ctx_tensors, ggml_backend_alloc_ctx_tensors_from_buft.
    """
    return alloc_tensors(ctx.tensors, where.default_buffer_type if isinstance(where, Backend) else where)


def alloc_tensors(tensors: Sequence[Tensor], buft: BufferType) -> Buffer:
    """Place tensors in a buffer made for them; as `alloc_ctx_tensors`, for any list."""
    roots = [t for t in tensors if t.buffer is None and t.view_src is None]
    views = [t for t in tensors if t.buffer is None and t.view_src is not None]
    buffers: list[Buffer] = []
    try:
        whole = buft.place_tensors(roots)
        if whole is not None:
            buffers.append(whole)
        for size, group in _groups(roots, buft) if whole is None else ():
            buffers.append(buft.alloc_buffer(size))
            allocator = TensorAllocator(buffers[-1])
            for tensor in group:
                allocator.alloc(tensor)
        for tensor in views:
            view_init(tensor)
        return buffers[0] if len(buffers) == 1 else MultiBuffer(buffers)
    except BaseException:
        for tensor in (*roots, *views):
            tensor.buffer = None
        for buffer in buffers:
            buffer.free()
        raise


def alloc_ctx_tensors_size(ctx: Context, where: Backend | BufferType) -> int:
    """Return the bytes that `alloc_ctx_tensors` would allocate now.

    Raises:
        AllocationError: One tensor is larger than the largest buffer.

    Source: ggml_backend_alloc_ctx_tensors_from_buft_size.
    """
    buft = where.default_buffer_type if isinstance(where, Backend) else where
    roots = [t for t in ctx.tensors if t.buffer is None and t.view_src is None]
    return sum(size for size, _ in _groups(roots, buft))


def _groups(tensors: list[Tensor], buft: BufferType) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield the size of each buffer with its tensors, in their order; at least one buffer.

    The sizes of all are known, and found possible, before the first is allocated.
    """
    alignment, limit = buft.alignment, buft.max_size
    groups: list[tuple[int, list[Tensor]]] = []
    total = 0
    group: list[Tensor] = []
    for tensor in tensors:
        size = padded(buft.alloc_size(tensor), alignment)
        if size > limit:
            raise buft.out_of_memory(size, f"{tensor.describe()} alone exceeds a buffer's {limit:,} bytes")
        if total + size > limit:
            groups.append((total, group))
            total, group = 0, []
        total += size
        group.append(tensor)
    return iter([*groups, (total, group)])
