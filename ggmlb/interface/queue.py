"""Queue: work that a device does in the order in which it was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ggmlb.core.errors import BackendError, GraphError
from ggmlb.core.lifetime import Freeable
from ggmlb.core.tensor import Tensor
from ggmlb.interface.data import Pieces, as_bytes, first_bytes, writable_bytes
from ggmlb.interface.observe import QUIET, Action, observers, reading, writing

if TYPE_CHECKING:
    from ggmlb.interface.backend import Backend
    from ggmlb.interface.buffer import Buffer
    from ggmlb.interface.data import Bytes, Source
    from ggmlb.interface.device import Device
    from ggmlb.interface.event import Event
    from ggmlb.interface.timing import Command


class Queue(Freeable):
    """What a `Backend` is besides computing: transfers and events on a device, in order.

    Work runs in the order of the calls. `*_async` calls may return before it is done; `synchronize` waits
    for all of it.

    Attributes:
        device: The device it runs on.
        commands: What was done since `start_timing`; `None` if it is not being timed.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.commands: list[Command] | None = None

    @property
    def name(self) -> str:
        """The device's name (ggml_backend_name)."""
        return self.device.name

    # -- transfers -----------------------------------------------------------------------------

    def set_tensor_async(
        self,
        tensor: Tensor,
        data: Source,
        offset: int = 0,
        size: int | None = None,
    ) -> None:
        """Queue a write of raw bytes into a tensor.

        `data` is kept alive by the backend, but must not be changed before `synchronize`.

        Raises:
            BoundsError: The bytes end beyond the tensor, or `data` is shorter than `size`.
            NotAllocatedError: The tensor is in no buffer.

        Source: ggml_backend_tensor_set_async.
        """
        buffer = self._transfer_buffer(tensor, "set_tensor_async")
        raw = first_bytes("set_tensor_async", tensor, data, size)
        offset, n = buffer.check_range(tensor, "set_tensor_async", offset, raw.size)
        if n:
            buffer.check_writable("set_tensor_async", tensor)
            written = [writing(tensor, offset, n)] if observers else []
            with Action("set_tensor_async", self, written, data=raw) if observers else QUIET:
                self._set_tensor_async(tensor, raw, offset)

    def get_tensor_async(self, tensor: Tensor, data: npt.NDArray[Any], offset: int = 0) -> None:
        """Queue a read of raw bytes of a tensor, from `offset` on, that fills the array `data`.

        `data` is kept alive by the backend, and holds the bytes after `synchronize`.

        Raises:
            ArgumentError: `data` is not a writable contiguous array.
            BoundsError: The bytes end beyond the tensor.
            NotAllocatedError: The tensor is in no buffer.

        Source: ggml_backend_tensor_get_async.
        """
        buffer = self._transfer_buffer(tensor, "get_tensor_async")
        raw = writable_bytes("get_tensor_async", data)
        offset, n = buffer.check_range(tensor, "get_tensor_async", offset, raw.size)
        if n:
            read = [reading(tensor, offset, n)] if observers else []
            with Action("get_tensor_async", self, read, data=raw) if observers else QUIET:
                self._get_tensor_async(tensor, raw, offset)

    def set_tensor_2d_async(
        self,
        tensor: Tensor,
        data: Source,
        offset: int,
        size: int,
        n_copies: int,
        stride_tensor: int,
        stride_data: int,
    ) -> None:
        """Queue a strided write; see `Buffer.set_tensor_2d` (ggml_backend_tensor_set_2d_async)."""
        buffer = self._transfer_buffer(tensor, "set_tensor_2d_async")
        pieces = Pieces(offset, size, n_copies, stride_tensor, stride_data)
        hook = self._set_tensor_2d_async
        buffer.move_pieces("set_tensor_2d_async", writing, tensor, as_bytes(data), pieces, hook, self)

    def get_tensor_2d_async(
        self,
        tensor: Tensor,
        data: Bytes,
        offset: int,
        size: int,
        n_copies: int,
        stride_tensor: int,
        stride_data: int,
    ) -> None:
        """Queue a strided read; see `Buffer.get_tensor_2d` (ggml_backend_tensor_get_2d_async)."""
        buffer = self._transfer_buffer(tensor, "get_tensor_2d_async")
        raw = writable_bytes("get_tensor_2d_async", data)
        pieces = Pieces(offset, size, n_copies, stride_tensor, stride_data)
        hook = self._get_tensor_2d_async
        buffer.move_pieces("get_tensor_2d_async", reading, tensor, raw, pieces, hook, self)

    def cpy_tensor_async(self, backend_src: Backend, src: Tensor, dst: Tensor) -> bool:
        """Queue a copy from another backend to this one, ordered after the work queued on both.

        Later work on either side must wait for it: this backend's may read `dst`, the source's may
        overwrite `src`.

        Returns:
            Whether it was queued; if not, `tensor_copy_async` synchronizes and copies.

        Source: cpy_tensor_async of ggml_backend_i.
        """
        self._transfer_buffer(dst, "cpy_tensor_async").check_writable("cpy_tensor_async", dst)
        if not observers:
            return self._cpy_tensor_async(backend_src, src, dst)
        moved = [reading(src), writing(dst)]
        with Action("cpy_tensor_async", self, moved, source=backend_src) as action:
            action.done = self._cpy_tensor_async(backend_src, src, dst)
        return action.done

    def copy_on_stream(self, src: Tensor, dst: Tensor) -> bool:
        """Queue a copy in the order of this backend's work alone, whatever others do with the tensors.

        For a caller who orders it against the work of others by events: a scheduler lets a device send a
        result to a copy that the other has done with, while that one still computes.

        Returns:
            Whether it was queued; if not, use `tensor_copy_async`.

        Source: the copy that ggml's backends queue on the source's stream in cpy_tensor_async.
        """
        self._transfer_buffer(dst, "copy_on_stream").check_writable("copy_on_stream", dst)
        if not observers:
            return self._copy_on_stream(src, dst)
        with Action("copy_on_stream", self, [reading(src), writing(dst)]) as action:
            action.done = self._copy_on_stream(src, dst)
        return action.done

    def synchronize(self) -> None:
        """Block until all queued work is done (ggml_backend_synchronize).

        Raises:
            BackendError: Queued work failed.
        """
        self.check_alive("synchronize")
        if not observers:
            return self._synchronize()
        with Action("synchronize", self):
            return self._synchronize()

    # -- events --------------------------------------------------------------------------------

    def event_record(self, event: Event) -> None:
        """Move the event to the end of the work queued so far (ggml_backend_event_record).

        Raises:
            BackendError: The event belongs to another device.
            FreedError: The event was freed.
        """
        self.check_alive("event_record")
        event.check_alive("event_record")
        if event.device is not self.device:
            raise BackendError(
                f"event_record: the event belongs to {event.device.name}, the backend runs on "
                f"{self.device.name}; make the event with the backend's own device"
            )
        event.is_recorded = True
        if not observers:
            return self._event_record(event)
        with Action("event_record", self, event=event):
            return self._event_record(event)

    def event_wait(self, event: Event) -> None:
        """Let work queued from now on wait for the event, of any device (ggml_backend_event_wait).

        Raises:
            FreedError: The event was freed.
        """
        self.check_alive("event_wait")
        event.check_alive("event_wait")
        if not observers:
            return self._event_wait(event)
        with Action("event_wait", self, event=event):
            return self._event_wait(event)

    # -- timing --------------------------------------------------------------------------------

    def start_timing(self) -> bool:
        """Wait for the queued work, and keep from now on when each piece of work runs.

        Returns:
            Whether the backend can tell; if not, nothing is kept.

        Raises:
            GraphError: It keeps that already.
        """
        if self.commands is not None:
            raise GraphError(
                f"start_timing: this {self.name} backend is being timed already; stop that first"
            )
        self.synchronize()
        self.commands = []
        if not self._start_timing():
            self.commands = None
        return self.commands is not None

    def stop_timing(self) -> list[Command]:
        """Wait for the queued work, and return all that was done since `start_timing`, in order.

        Raises:
            GraphError: Nothing is being kept.
        """
        commands = self.commands
        if commands is None:
            raise GraphError(f"stop_timing: this {self.name} backend is not being timed; call start_timing")
        self.synchronize()
        self._stop_timing()
        self.commands = None
        return commands

    # -- checks --------------------------------------------------------------------------------

    @property
    def _title(self) -> str:
        return f"this {self.name} backend"

    def _transfer_buffer(self, tensor: Tensor, call: str) -> Buffer:
        self.check_alive(call)
        return tensor.placed(call)

    # -- hooks ---------------------------------------------------------------------------------

    def _set_tensor_async(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        self._synchronize()  # a synchronous write must not overtake work that is queued
        assert tensor.buffer is not None
        tensor.buffer._set_tensor(tensor, data, offset)

    def _get_tensor_async(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        self._synchronize()
        assert tensor.buffer is not None
        tensor.buffer._get_tensor(tensor, out, offset)

    def _set_tensor_2d_async(self, tensor: Tensor, data: Bytes, pieces: Pieces) -> None:
        for piece, start in pieces.cut(data):
            self._set_tensor_async(tensor, piece, start)

    def _get_tensor_2d_async(self, tensor: Tensor, out: Bytes, pieces: Pieces) -> None:
        for piece, start in pieces.cut(out):
            self._get_tensor_async(tensor, piece, start)

    def _cpy_tensor_async(self, backend_src: Backend, src: Tensor, dst: Tensor) -> bool:
        return False

    def _copy_on_stream(self, src: Tensor, dst: Tensor) -> bool:
        return False

    def _synchronize(self) -> None:
        """Wait for queued work."""

    def _event_record(self, event: Event) -> None:
        raise BackendError(f"{self.name} has no events")

    def _event_wait(self, event: Event) -> None:
        event.synchronize()

    def _start_timing(self) -> bool:
        """Append a `Command` to `commands` for each piece of work from now on; `False` if it cannot."""
        return False

    def _stop_timing(self) -> None:
        """Fill in the times of `commands` that are not known yet; the stream is idle."""
