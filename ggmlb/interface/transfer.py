"""Placing tensors in buffers, and copying them between buffers and backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.core.arguments import checked
from ggmlb.core.errors import ArgumentError, BoundsError, NotAllocatedError, ShapeError
from ggmlb.core.placement import placement_clock
from ggmlb.core.tensor import Tensor, same_layout
from ggmlb.interface.observe import QUIET, Action, observers, reading, writing

if TYPE_CHECKING:
    from ggmlb.interface.backend import Backend
    from ggmlb.interface.buffer import Buffer


@checked
def tensor_alloc(buffer: Buffer, tensor: Tensor, offset: int) -> None:
    """Place a tensor at a byte offset of a buffer.

    Args:
        buffer: Where to place it.
        tensor: Neither a view nor in a buffer, unless that was freed.
        offset: A multiple of the buffer's alignment [bytes].

    Raises:
        ArgumentError: The tensor is a view or placed already, or the offset is not aligned.
        BoundsError: It would end beyond the buffer.
        FreedError: The buffer was freed.

    Source: ggml_backend_tensor_alloc.
    """
    if tensor.view_src is not None:
        raise ArgumentError(f"tensor_alloc: {tensor.describe()} is a view; place its source, then view_init")
    if tensor.buffer is not None and not tensor.buffer.is_freed:
        raise ArgumentError(f"tensor_alloc: {tensor.describe()} is already in a {tensor.buffer.name} buffer")
    if offset % buffer.alignment:
        raise ArgumentError(
            f"tensor_alloc: offset {offset} of {tensor.describe()} is not a multiple of {buffer.alignment} "
            "bytes"
        )
    size = buffer.alloc_size(tensor)
    if offset < 0 or offset + size > buffer.size:
        raise BoundsError(
            f"tensor_alloc: {tensor.describe()} would need bytes {offset} to {offset + size} of a buffer of "
            f"{buffer.size}"
        )
    _place(tensor, buffer, offset)


@checked
def view_init(tensor: Tensor) -> None:
    """Place a view in the buffer of its source (ggml_backend_view_init).

    Raises:
        ArgumentError: The tensor is not a view, or placed already.
        NotAllocatedError: Its source is in no buffer.
    """
    if tensor.view_src is None:
        raise ArgumentError(f"view_init: {tensor.describe()} is not a view; use tensor_alloc")
    if tensor.buffer is not None and not tensor.buffer.is_freed:
        raise ArgumentError(f"view_init: {tensor.describe()} is already in a {tensor.buffer.name} buffer")
    buffer = tensor.view_src.buffer
    if buffer is None:
        raise NotAllocatedError(
            f"view_init: the source of {tensor.describe()} is in no buffer yet; place it first"
        )
    _place(tensor, buffer, tensor.view_src.offset + tensor.view_offs)


def _place(tensor: Tensor, buffer: Buffer, offset: int) -> None:
    tensor.buffer = buffer
    tensor.offset = offset
    placement_clock.tick()
    try:
        buffer.init_tensor(tensor)
    except BaseException:
        tensor.buffer = None
        raise


@checked
def tensor_copy(src: Tensor, dst: Tensor) -> None:
    """Copy the data of a tensor to one of the same layout, in any buffers (ggml_backend_tensor_copy).

    Raises:
        ArgumentError: An argument is not a tensor.
        ShapeError: The layouts differ.
        NotAllocatedError: One of them is in no buffer.
        FreedError: The buffer of one of them was freed.
    """
    if src is dst:
        return
    if not same_layout(src, dst):
        raise ShapeError(
            f"cannot copy {src.describe()} with strides {src.nb} to {dst.describe()} with strides {dst.nb}: "
            "type, ne and nb must be equal; use Context.cpy to convert"
        )
    src_buffer, dst_buffer = src.placed("tensor_copy"), dst.placed("tensor_copy")
    src_buffer.check_range(src, "tensor_copy", 0, None)
    dst_buffer.check_range(dst, "tensor_copy", 0, None)
    if not src.nbytes:
        return
    dst_buffer.check_writable("tensor_copy", dst)
    with Action("tensor_copy", None, [reading(src), writing(dst)]) if observers else QUIET:
        if src_buffer.is_host:
            dst_buffer._set_tensor(dst, src_buffer.base[src.offset : src.offset + src.nbytes], 0)
        elif dst_buffer.is_host:
            src_buffer._get_tensor(src, dst_buffer.base[dst.offset : dst.offset + dst.nbytes], 0)
        elif not dst_buffer.cpy_tensor(src, dst):
            dst_buffer.set_tensor(dst, src_buffer.get_tensor(src))


@checked
def tensor_copy_async(backend_src: Backend, backend_dst: Backend, src: Tensor, dst: Tensor) -> None:
    """Copy after all work queued so far on both backends, and before any later work on either.

    Raises:
        ShapeError: The layouts differ.
        NotAllocatedError: One of them is in no buffer.
        FreedError: The buffer of one of them was freed.

    Source: ggml_backend_tensor_copy_async.
    """
    if src is dst:
        return
    if not same_layout(src, dst):
        raise ShapeError(f"cannot copy {src.describe()} to {dst.describe()}: type, ne and nb must be equal")
    for tensor in (src, dst):
        tensor.placed("tensor_copy_async").check_range(tensor, "tensor_copy_async", 0, None)
    if not src.nbytes or backend_dst.cpy_tensor_async(backend_src, src, dst):
        return
    backend_src.synchronize()
    if backend_dst is not backend_src:
        backend_dst.synchronize()
    tensor_copy(src, dst)
