"""Placing tensors in buffers, moving their bytes, and copying them between buffers and backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ggmlb.core.arguments import checked
from ggmlb.core.errors import ArgumentError, BoundsError, NotAllocatedError, ShapeError
from ggmlb.core.placement import placement_clock
from ggmlb.core.tensor import Tensor, same_layout
from ggmlb.interface.data import NEW, Bytes, Pieces, Source, as_bytes, host_bytes, new_bytes
from ggmlb.interface.observe import Access, Action, observers, reading, writing

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
        raise ArgumentError(
            f"tensor_alloc: {tensor.describe()} is a view; place its source, then call view_init"
        )
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


def move(
    call: str,
    is_write: bool,
    buffer: Buffer,
    tensor: Tensor,
    data: Source,
    at: int | Pieces,
    hook: Callable[[Tensor, Bytes, Any], None],
    stream: Backend | None = None,
    size: int | None = None,
) -> Bytes:
    """Check a transfer of host memory `data` to or from (`is_write`) a tensor at `at`, and let `hook` do it.

    Observers are notified.

    Args:
        call: The public method.
        is_write: Whether the tensor is written.
        buffer: The buffer that the tensor must be in.
        tensor: The tensor.
        data: The host memory; `NEW` to read into a new array.
        at: Where in the tensor: an offset [bytes], or pieces.
        hook: Called with the tensor, the data and `at`, unless no byte is moved.
        stream: The backend that queues the transfer; `None` if the hook waits for it.
        size: Bytes to move from the offset on; by default the size of the data.

    Returns:
        The data as flat bytes.

    Raises:
        ArgumentError: `data` is unsuitable host memory, or the tensor is in another buffer.
        BackendError: The buffer is read-only.
        BoundsError: The bytes end beyond the tensor or the data.
        FreedError: The buffer was freed.
    """
    raw = as_bytes(data) if is_write else None if data is NEW else host_bytes(data, call, is_written=True)
    starts: Iterable[int]
    if isinstance(at, Pieces):
        assert raw is not None
        at = at.checked(call, tensor, raw)
        buffer.check_range(tensor, call, at.offset if at.n else 0, at.extent(at.stride_tensor))
        n, starts = at.n and at.size, at.starts()
    else:
        if size is None:
            size = None if raw is None else raw.size
        elif raw is not None and size != raw.size:
            if not is_write or not 0 <= size <= raw.size:
                raise BoundsError(
                    f"{call} on {tensor.describe()}: {size} bytes asked for, the data has {raw.size}"
                )
            raw = raw[:size]
        at, n = buffer.check_range(tensor, call, at, size)
        starts = (at,)
        if raw is None:
            raw = new_bytes(call, tensor, n)
    if not n:
        return raw
    if is_write and buffer.is_read_only:
        buffer.check_writable(call, tensor)
    if observers:
        moved = []
        for start in starts:
            start += tensor.offset
            moved.append(Access(buffer, start, start + n, is_write, tensor))
        with Action(call, stream, moved, None if stream is None else raw):
            hook(tensor, raw, at)
    else:
        hook(tensor, raw, at)
    return raw


@checked
def tensor_copy(src: Tensor, dst: Tensor) -> None:
    """Copy the data of a tensor to one of the same layout, in any buffers (ggml_backend_tensor_copy).

    Raises:
        ArgumentError: An argument is not a tensor.
        ShapeError: The layouts differ.
        NotAllocatedError: One of them is in no buffer.
        FreedError: The buffer of one of them was freed.
    """
    if _is_copy("tensor_copy", src, dst):
        if observers:
            Action("tensor_copy", None, [reading(src), writing(dst)]).run(_copy, src, dst)
        else:
            _copy(src, dst)


@checked
def tensor_copy_async(backend_src: Backend, backend_dst: Backend, src: Tensor, dst: Tensor) -> None:
    """Copy after all work queued so far on both backends, and before any later work on either.

    Raises:
        ShapeError: The layouts differ.
        NotAllocatedError: One of them is in no buffer.
        FreedError: The buffer of one of them was freed.

    Source: ggml_backend_tensor_copy_async.
    """
    if _is_copy("tensor_copy_async", src, dst) and not backend_dst.cpy_tensor_async(backend_src, src, dst):
        backend_src.synchronize()
        if backend_dst is not backend_src:
            backend_dst.synchronize()
        tensor_copy(src, dst)


def _is_copy(call: str, src: Tensor, dst: Tensor) -> bool:
    """Check a copy; return whether there are bytes to copy."""
    if src is dst:
        return False
    if not same_layout(src, dst):
        raise ShapeError(
            f"cannot copy {src.describe()} with strides {src.nb} to {dst.describe()} with strides {dst.nb}: "
            "type, ne and nb must be equal; use Context.cpy to convert"
        )
    src.placed(call).check_holds(src, call)
    buffer = dst.placed(call)
    buffer.check_holds(dst, call)
    if not src.nbytes:
        return False
    buffer.check_writable(call, dst)
    return True


def _copy(src: Tensor, dst: Tensor) -> None:
    """Copy a checked tensor, directly if possible, else through host memory."""
    source, target = src.placed("tensor_copy"), dst.placed("tensor_copy")
    if source.is_host:
        target._set_tensor(dst, source.base[src.offset : src.offset + src.nbytes], 0)
    elif target.is_host:
        source._get_tensor(src, target.base[dst.offset : dst.offset + dst.nbytes], 0)
    elif not target._cpy_tensor(src, dst):
        data = new_bytes("tensor_copy", src, src.nbytes)
        source._get_tensor(src, data, 0)
        target._set_tensor(dst, data, 0)
