"""MultiBuffer: several buffers as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ggmlb.errors import ArgumentError
from ggmlb.interface.buffer import Buffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ggmlb.enums import BufferUsage
    from ggmlb.interface.data import Bytes
    from ggmlb.tensor import Tensor


class MultiBuffer(Buffer):
    """Several buffers that are cleared and freed, and given a usage, as one.

    Tensors lie in the parts, never in the whole. Source: ggml_backend_multi_buffer_alloc_buffer.

    Raises:
        ArgumentError: No parts were given.
    """

    def __init__(self, parts: Sequence[Buffer]) -> None:
        if not parts:
            raise ArgumentError("a MultiBuffer needs at least one buffer")
        self.parts = tuple(parts)
        super().__init__(parts[0].buft, sum(p.size for p in parts))

    @property
    def usage(self) -> BufferUsage:
        """What the parts hold (ggml_backend_multi_buffer_set_usage)."""
        return self._usage

    @usage.setter
    def usage(self, usage: BufferUsage) -> None:
        self._usage = usage
        for part in self.parts:
            part.usage = usage

    @property
    def base(self) -> Any:
        """The base of the first part."""
        return self.parts[0].base

    def _no_tensors(self, tensor: Tensor) -> ArgumentError:
        return ArgumentError(f"{tensor.describe()} lies in no MultiBuffer; use the part that is its `buffer`")

    def _set_tensor(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        raise self._no_tensors(tensor)

    def _get_tensor(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        raise self._no_tensors(tensor)

    def _memset_tensor(self, tensor: Tensor, value: int, offset: int, size: int) -> None:
        raise self._no_tensors(tensor)

    def _clear(self, value: int) -> None:
        for part in self.parts:
            part.clear(value)

    def _reset(self) -> None:
        for part in self.parts:
            part.reset()

    def _free(self) -> None:
        for part in self.parts:
            if not part.is_freed:
                part.free()
