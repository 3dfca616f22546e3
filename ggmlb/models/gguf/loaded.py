"""LoadedTensors: tensors of a GGUF file in the memory of a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from ggmlb.core.context import Context
from ggmlb.core.enums import BufferUsage
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, Buffer, BufferType, Device
from ggmlb.models.filling import fill, map_tensors
from ggmlb.models.mapped_file import Extent
from ggmlb.runtime.alloc import alloc_ctx_tensors

if TYPE_CHECKING:
    from typing_extensions import Self


class LoadedTensors(Mapping[str, Tensor]):
    """Tensors by name, as `GgufFile.load` places them; a context manager that frees their memory.

    Attributes:
        buffers: The memory of the tensors.
    """

    def __init__(
        self, places: Mapping[str, tuple[tuple[int, ...], Extent]], where: Device | Backend | BufferType
    ) -> None:
        ctx = Context()
        self._tensors = {name: ctx.new_tensor(at.dtype, ne, name) for name, (ne, at) in places.items()}
        device = where.device if isinstance(where, Backend) else where
        with ExitStack() as buffers:
            made: list[Buffer] = []
            if isinstance(device, Device):
                made += map_tensors(device, [(self._tensors[n], at) for n, (_, at) in places.items()])
                for buffer in made:
                    buffers.enter_context(buffer)
                device = device.buffer_type
            copied = [tensor for tensor in ctx.tensors if tensor.buffer is None]
            if copied or not made:
                made.append(buffers.enter_context(alloc_ctx_tensors(ctx, device)))
            for buffer in made:
                buffer.usage = BufferUsage.WEIGHTS
            fill((tensor, [places[tensor.name][1]]) for tensor in copied)
            for _, at in places.values():
                at.file.check_unchanged()
            self._buffers = buffers.pop_all()
        self.buffers = tuple(made)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def free(self) -> None:
        """Free the tensors' memory; freeing again does nothing."""
        self._buffers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()

    def __repr__(self) -> str:
        memory = ", ".join(f"{buffer.name} {buffer.size:,} bytes" for buffer in self.buffers)
        return f"<LoadedTensors {len(self)} in {memory}>"
