"""Tensors placed one after another: in a buffer, and in buffers made for all tensors of a context."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ggmlb.core.arguments import checked, checked_methods
from ggmlb.core.context import Context
from ggmlb.core.errors import AllocationError, ArgumentError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, Buffer, BufferType, MultiBuffer, tensor_alloc, view_init


def padded(nbytes: int, alignment: int) -> int:
    """Return `nbytes` rounded up to a multiple of `alignment` [bytes]."""
    return nbytes + -nbytes % alignment


@checked_methods
class TensorAllocator:
    """Places tensors in a buffer one after another; none can be freed by itself (ggml_tallocr).

    Attributes:
        buffer: The buffer.
        used: Bytes allocated so far, alignment included.
    """

    __slots__ = ("buffer", "used")

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.used = 0

    def alloc(self, tensor: Tensor) -> None:
        """Place a tensor in the buffer, directly after the tensors already placed there.

        Args:
            tensor: Neither a view nor placed before.

        Raises:
            AllocationError: The rest of the buffer is too small; carries `asked`, `free`, `total` [bytes].
            ArgumentError: The tensor is a view, or placed already.
            FreedError: The buffer was freed.

        Source: ggml_tallocr_alloc.
        """
        buffer = self.buffer
        size = padded(buffer.alloc_size(tensor), buffer.alignment)
        if self.used + size > buffer.size:
            free = buffer.size - self.used
            raise AllocationError(
                f"no room for {tensor.describe()} in a {buffer.name} buffer: it takes {size:,} bytes, "
                f"{free:,} of {buffer.size:,} are left; allocate a larger buffer "
                "(alloc_ctx_tensors_size says how large)",
                asked=size,
                free=free,
                total=buffer.size,
            )
        tensor_alloc(buffer, tensor, self.used)
        self.used += size


Home = TypeVar("Home")


@checked
def alloc_ctx_tensors(
    ctx: Context | Sequence[Tensor],
    where: Backend | BufferType,
    overrides: Mapping[str, Backend | BufferType] | None = None,
) -> Buffer:
    """Place all tensors of a context in a new buffer of type `where`; `overrides` by name take precedence.

    Placed tensors are skipped, unless their buffer was freed; views follow their sources. On failure, no
    tensor is placed and nothing stays allocated.

    Args:
        ctx: The context of the tensors, or a list of tensors.
        where: A buffer type, or a backend for its default buffer type.
        overrides: Buffer types for some tensors, by regular expression: the first match in a tensor's
            name decides (--override-tensor of llama.cpp). `{r"ffn_.*_exps": cpu}` keeps experts in host
            memory; a `Scheduler` runs their ops there, or copies what it needs (`op_offload`).

    Returns:
        The buffer, a context manager that frees it: a `MultiBuffer` if the tensors need more than
        `max_size` or several kinds of memory, and one of no bytes if no tensor needs any.

    Raises:
        ArgumentError: An override is not a regular expression.
        AllocationError: The device lacks room, or one tensor is larger than the largest buffer.
        NotAllocatedError: A view's source, in another context, is in no buffer yet.

    Source: ggml_backend_alloc_ctx_tensors, ggml_backend_alloc_ctx_tensors_from_buft,
    ggml_backend_buft_alloc_buffer_n.
    """
    if not overrides:
        return alloc_tensors(_tensors(ctx), _buffer_type(where))
    roots, views = _unplaced(_tensors(ctx))
    with _all_or_nothing([*roots, *views]) as buffers:
        for buft, tensors in _by_memory(roots, where, overrides).items():
            buffers.append(alloc_tensors(tensors, buft))
        for tensor in views:
            view_init(tensor)
    return buffers[0] if len(buffers) == 1 else MultiBuffer(buffers)


def alloc_tensors(tensors: Sequence[Tensor], buft: BufferType) -> Buffer:
    """Place a list of tensors in a new buffer, like `alloc_ctx_tensors`."""
    roots, views = _unplaced(tensors)
    with _all_or_nothing([*roots, *views]) as buffers:
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


def _unplaced(tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors without memory: those that own theirs, and the views."""
    unplaced = [t for t in tensors if t.buffer is None or t.buffer.is_freed]
    return [t for t in unplaced if t.view_src is None], [t for t in unplaced if t.view_src is not None]


@contextmanager
def _all_or_nothing(tensors: Sequence[Tensor]) -> Iterator[list[Buffer]]:
    """Yield a list for new buffers; on failure, free them and leave the tensors unplaced."""
    buffers: list[Buffer] = []
    try:
        yield buffers
    except BaseException:
        for tensor in tensors:
            tensor.buffer = None
        for buffer in buffers:
            buffer.free()
        raise


@checked
def alloc_ctx_tensors_size(
    ctx: Context | Sequence[Tensor],
    where: Backend | BufferType,
    overrides: Mapping[str, Backend | BufferType] | None = None,
) -> int:
    """Return the bytes that `alloc_ctx_tensors` would allocate now with these arguments, over all types.

    Raises:
        ArgumentError: An override is not a regular expression.
        AllocationError: One tensor is larger than the largest buffer.

    Source: ggml_backend_alloc_ctx_tensors_from_buft_size, ggml_backend_buft_get_alloc_size_n.
    """
    roots, _ = _unplaced(_tensors(ctx))
    homes = _by_memory(roots, where, overrides)
    return sum(size for buft, tensors in homes.items() for size, _ in _groups(tensors, buft))


def _tensors(ctx: Context | Sequence[Tensor]) -> Sequence[Tensor]:
    return ctx.tensors if isinstance(ctx, Context) else ctx


def _by_memory(
    tensors: Iterable[Tensor],
    where: Backend | BufferType,
    overrides: Mapping[str, Backend | BufferType] | None = None,
) -> dict[BufferType, list[Tensor]]:
    """Group tensors by buffer type; arguments and errors as `alloc_ctx_tensors`."""
    homes: dict[BufferType, list[Tensor]] = {}
    for tensor in tensors:
        home = override_for(tensor.name, overrides) or where
        homes.setdefault(_buffer_type(home), []).append(tensor)
    return homes or {_buffer_type(where): []}


@checked
def override_for(name: str, overrides: Mapping[str, Home] | None) -> Home | None:
    """Return the value (backend, buffer type, device name) of the first regex found in `name`, or `None`.

    Raises:
        ArgumentError: A pattern is not a regular expression.
    """
    for pattern, home in (overrides or {}).items():
        try:
            if re.search(pattern, name):
                return home
        except re.error as error:
            raise ArgumentError(f"the override {pattern!r} is not a regular expression: {error}") from None
    return None


def _buffer_type(where: Backend | BufferType) -> BufferType:
    if isinstance(where, Backend):
        return where.default_buffer_type
    return where


def _groups(tensors: list[Tensor], buft: BufferType) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield the size of each buffer with its tensors, in their order; at least one buffer.

    All sizes are checked before the first allocation.
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
