"""Weights: from a model's file into the memory of the devices that will use them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import BufferUsage
from ggmlb.core.errors import ModelError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, Buffer, BufferType, tensor_alloc
from ggmlb.runtime.alloc import alloc_ctx_tensors, override_for

if TYPE_CHECKING:
    from ggmlb.models.tensor_file import TensorFile


class Source(NamedTuple):
    """Where a weight comes from.

    Attributes:
        names: Tensors of the file; several are stacked, one below the other.
        shape: Of each of them, NumPy order.
        is_matrix: Whether it may be stored in another type than float32.
        is_multiplied: Whether products read it, and nothing else.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    is_matrix: bool
    is_multiplied: bool = False


class Weights:
    """The weights of a model, in the memory of one or more devices; frees that memory with `free`.

    Args:
        file: The model's file.
        matrix_type: Type in which matrices are stored; that of the file if `None`.
        overrides: Memory for some weights, by regular expression; see `alloc_ctx_tensors`.
    """

    def __init__(
        self,
        file: TensorFile,
        matrix_type: DType | None = None,
        overrides: Mapping[str, BufferType] | None = None,
    ) -> None:
        self._file = file
        self._overrides = dict(overrides or {})
        self._matrix_type = matrix_type
        self._buffers = ExitStack()
        self._is_mapped = False
        self._placed: list[str] = []

    def place(self, sources: Mapping[str, Source], backend: Backend) -> dict[str, Tensor]:
        """Place weights in a device's memory; what can be used as it lies in the file is not copied.

        Operands of products go into the first extra buffer type that the device has for weights, memory in
        which its products are faster; where a type was asked for, if they take no more there than elsewhere.

        Args:
            sources: What to place, by the names that the tensors get.
            backend: A stream on the device.

        Raises:
            AllocationError: A device lacks room; nothing stays placed.
            ArgumentError: An override is no regular expression.
            ModelError: The file lacks a tensor, has it in another shape or not in floating point, or was
                changed since it was opened.
        """
        fast = next(iter(backend.device.extra_bufts), None)
        ctx, matrices, moved = Context(), Context(), Context()
        tensors: dict[str, Tensor] = {}
        for name, source in sources.items():
            for part in source.names:
                self._file.entry(part, source.shape)
            rows = source.shape[0] * len(source.names)
            is_moved = override_for(name, self._overrides) is not None
            home = moved if is_moved else matrices if source.is_multiplied else ctx
            tensors[name] = home.new_tensor(self._type(source), (*source.shape[:0:-1], rows), name)
        if fast is not None and self._matrix_type is not None:
            grown = any(fast.alloc_size(t) > t.nbytes for t in matrices.tensors)
            fast = None if grown else fast
        with ExitStack() as buffers:
            self._keep(buffers, alloc_ctx_tensors(moved, backend, self._overrides))
            if fast is not None:
                self._keep(buffers, alloc_ctx_tensors(matrices, fast))
            mapped = self._map(sources, tensors, backend)
            if mapped is not None:
                self._keep(buffers, mapped)
            for rest in (ctx, matrices):
                self._keep(buffers, alloc_ctx_tensors(rest, backend))
            for name, tensor in tensors.items():
                if tensor.buffer is not mapped:
                    tensor.set_array(self._values(sources[name]))
            self._file.check_unchanged()
            self._buffers.push(buffers.pop_all())
        self._is_mapped |= mapped is not None
        self._placed += (name for source in sources.values() for name in source.names)
        return tensors

    def check_mapped(self) -> None:
        """Raise a ModelError if weights are used where they lie in the file, and that was changed."""
        if self._is_mapped:
            self._file.check_unchanged()

    def error_in_values(self, found: str) -> ModelError:
        """Return the error about a result that is not finite, or of no length: which weight is to blame."""
        for name in self._placed:
            if not np.isfinite(self._file.array(name)).all():
                return ModelError(
                    f"{found} is not finite: {self._file.path} has NaN or infinity in {name!r}; copy or "
                    "download it again"
                )
        kept = "the type of the file" if self._matrix_type is None else self._matrix_type.name
        return ModelError(
            f"{found} is not finite, or of length 0, though all weights in {self._file.path} are finite; "
            f"they are stored in {kept}: try weight_type='f32', and another device"
        )

    def free(self) -> None:
        """Free the memory."""
        self._buffers.close()

    @staticmethod
    def _keep(buffers: ExitStack, buffer: Buffer) -> None:
        buffer.usage = BufferUsage.WEIGHTS
        buffers.enter_context(buffer)

    def _type(self, source: Source) -> DType:
        if not source.is_matrix:
            return DType.F32
        if self._matrix_type is not None:
            return self._matrix_type
        kept = self._file.dtype(source.names[0])
        return DType.F32 if kept is DType.F64 else kept  # which products do not take

    def _values(self, source: Source) -> npt.NDArray[Any]:
        parts = [self._file.array(name) for name in source.names]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _map(
        self, sources: Mapping[str, Source], tensors: Mapping[str, Tensor], backend: Backend
    ) -> Buffer | None:
        """Place what the device can use inside the mapped file; `None` if that is nothing."""
        caps = backend.device.caps
        if not (caps.buffer_from_host_ptr and caps.mmap_support):
            return None
        inside = list(self._usable_in_place(sources, tensors, backend.alignment))
        if not inside:
            return None
        buffer = backend.device.buffer_from_host_ptr(self._file.data, max(t.nbytes for t, _ in inside))
        for tensor, offset in inside:
            tensor_alloc(buffer, tensor, offset)
        return buffer

    def _usable_in_place(
        self, sources: Mapping[str, Source], tensors: Mapping[str, Tensor], alignment: int
    ) -> Iterable[tuple[Tensor, int]]:
        for name, source in sources.items():
            entry = self._file[source.names[0]]
            if tensors[name].buffer is not None:
                continue
            same_bytes = len(source.names) == 1 and self._file.dtype(source.names[0]) == tensors[name].dtype
            if same_bytes and entry.offset % alignment == 0:
                yield tensors[name], entry.offset
