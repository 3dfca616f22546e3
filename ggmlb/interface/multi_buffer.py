"""Several buffers as one: PartedBuffer and MultiBuffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ggmlb.core.enums import BufferUsage
from ggmlb.core.errors import ArgumentError
from ggmlb.core.tensor import Tensor
from ggmlb.interface.buffer import Buffer

if TYPE_CHECKING:
    from ggmlb.interface.buffer_type import BufferType
    from ggmlb.interface.data import Bytes


class PartedBuffer(Buffer):
    """A buffer made of other buffers, which it clears, frees and gives a usage together.

    Attributes:
        parts: The buffers it consists of.
    """

    def __init__(self, buft: BufferType, parts: Sequence[Buffer], size: int) -> None:
        self.parts = tuple(parts)
        super().__init__(buft, size)

    @property
    def base(self) -> Any:
        """The bases of the parts."""
        return tuple(part.base for part in self.parts)

    def _set_usage(self, usage: BufferUsage) -> None:
        for part in self.parts:
            part.usage = usage

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


class MultiBuffer(PartedBuffer):
    """Buffers of one type for tensors that exceed the largest buffer; each tensor is in one part.

    Raises:
        ArgumentError: No parts were given.

    Source: ggml_backend_multi_buffer_alloc_buffer, ggml_backend_multi_buffer_set_usage.
    """

    def __init__(self, parts: Sequence[Buffer]) -> None:
        if not parts:
            raise ArgumentError("a MultiBuffer needs at least one buffer")
        super().__init__(parts[0].buft, parts, sum(p.size for p in parts))

    @property
    def base(self) -> Any:
        """The base of the first part."""
        return self.parts[0].base

    def _no_tensors(self, tensor: Tensor) -> ArgumentError:
        return ArgumentError(
            f"{tensor.describe()} is not in the MultiBuffer but in one of its parts; use its `buffer`"
        )

    def _set_tensor(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        raise self._no_tensors(tensor)

    def _get_tensor(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        raise self._no_tensors(tensor)

    def _memset_tensor(self, tensor: Tensor, value: int, offset: int, size: int) -> None:
        raise self._no_tensors(tensor)
