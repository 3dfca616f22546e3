"""Weights of a model, loaded from its file into devices' memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import BufferUsage
from ggmlb.core.errors import ModelError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, Buffer, BufferType
from ggmlb.models.filling import fill, map_tensors, slices, values_of
from ggmlb.runtime.alloc import alloc_ctx_tensors, override_for

if TYPE_CHECKING:
    from ggmlb.models.gguf import GgufFile
    from ggmlb.models.mapped_file import Extent
    from ggmlb.models.tensor_file import TensorFile


class Source(NamedTuple):
    """The tensor of the file that a weight is read from, or several that are stacked along rows.

    Attributes:
        names: Tensors of the file; several are stacked along the rows.
        shape: Shape of each of them, NumPy order.
        is_matrix: Whether it may have another type than float32, such as Q4_0.
        is_multiplied: Whether only matrix products read it.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    is_matrix: bool
    is_multiplied: bool = False


class Weights:
    """The weights of a model in the memory of one or more devices; freed by `free`.

    Args:
        file: The model's file.
        matrix_type: Type in which matrices are stored; `None`: the file's type, quantised blocks unchanged.
        overrides: Buffer types of single weights by regular expression; the first match counts.

    Attributes:
        spaces: Bytes of weights by buffer type; in the mapped file, each weight counts once.
    """

    def __init__(
        self,
        file: GgufFile | TensorFile,
        matrix_type: DType | None = None,
        overrides: Mapping[str, BufferType | None] | None = None,
    ) -> None:
        self._file = file
        self._overrides = dict(overrides or {})
        self._matrix_type = matrix_type
        self._buffers = ExitStack()
        self.spaces: list[tuple[BufferType, int]] = []
        self._mapped: set[tuple[int, int]] = set()  # files and offsets
        self._placed: dict[str, Extent] = {}

    def place(self, sources: Mapping[str, Source], backend: Backend) -> dict[str, Tensor]:
        """Place weights in a device's memory; the mapped file is used in place where possible.

        Weights of products go into the first extra buffer type of the device that makes the product faster
        (`BufferType.suits`); if quantised, or of a requested type, only where they take no more memory there.
        Other weights are read in place where the device can use a mapped file. Copies are made in slices,
        whose pages in the mapped file are then released, so that little more memory than the weights is used.

        Args:
            sources: Sources of the weights, by tensor names.
            backend: A stream on the device.

        Raises:
            AllocationError: A device lacks room; no weight is placed.
            ArgumentError: An override is not a regular expression.
            ModelError: The file lacks a tensor, has it in another shape or a type that no weight has, or was
                changed since it was opened; or a weight is stacked of tensors of several quantised types.
        """
        ctx, moved = Context(), Context()
        packed = {memory: Context() for memory in backend.device.extra_bufts}
        tensors: dict[str, Tensor] = {}
        extents: dict[str, list[Extent]] = {}
        for name, source in sources.items():
            parts = extents[name] = [self._file.weight(part, source.shape) for part in source.names]
            rows = source.shape[0] * len(parts)
            dtype = self._type(name, source, parts)
            tensor = tensors[name] = Context().new_tensor(dtype, (*source.shape[:0:-1], rows), name)
            home = ctx
            if override_for(name, self._overrides) is not None:
                home = moved
            elif source.is_multiplied:
                faster = (into for memory, into in packed.items() if self._is_faster(tensor, memory))
                home = next(faster, ctx)
            home.tensors.append(tensor)
        own_memory = {pattern: found for pattern, found in self._overrides.items() if found is not None}
        with ExitStack() as buffers:
            allocated = [alloc_ctx_tensors(moved, backend, own_memory)]
            self._keep(buffers, allocated[0])
            for memory, weights in packed.items():
                allocated.append(alloc_ctx_tensors(weights, memory))
                self._keep(buffers, allocated[-1])
            whole = ((tensor, extents[tensor.name]) for tensor in ctx.tensors)
            mapped = map_tensors(backend.device, [(t, parts[0]) for t, parts in whole if len(parts) == 1])
            for buffer in mapped:
                self._keep(buffers, buffer)
            allocated.append(alloc_ctx_tensors(ctx, backend))
            self._keep(buffers, allocated[-1])
            copied = [
                (tensor, extents[name])
                for name, tensor in tensors.items()
                if not any(tensor.buffer is buffer for buffer in mapped)
                and not tensor.placed("fill").is_planned
            ]
            fill(copied)
            self._file.check_unchanged()
            self._buffers.push(buffers.pop_all())
        self.spaces += [(inner.buft, inner.size) for buffer in allocated for inner in buffer.allocations]
        for buffer in mapped:
            inside = {
                (id(extents[tensor.name][0].memory), tensor.offset): buffer.alloc_size(tensor)
                for tensor in ctx.tensors
                if tensor.buffer is buffer
            }
            self.spaces.append((buffer.buft, sum(inside[at] for at in inside.keys() - self._mapped)))
            self._mapped |= inside.keys()
        for name, source in sources.items():
            self._placed |= zip(source.names, extents[name], strict=True)
        return tensors

    def check_mapped(self) -> None:
        """Raise a ModelError if weights are used inside the mapped file and the file was changed."""
        if self._mapped:
            self._file.check_unchanged()

    def error_in_values(self, found: str) -> ModelError:
        """Return (not raise) the ModelError that `found` (a result's name) is bad; names a NaN weight."""
        if (name := self.not_finite()) is not None:
            return ModelError(
                f"{found} is not finite: {self._file.path} has NaN or infinity in {name!r}; copy or "
                "download it again"
            )
        stored = "the type of the file" if self._matrix_type is None else self._matrix_type.name
        return ModelError(
            f"{found} is not finite, or of length 0, though all weights in {self._file.path} are finite; "
            f"they are stored in {stored}: try weight_type='f32', and another device"
        )

    def not_finite(self, prefix: str = "") -> str | None:
        """Return the first placed weight with NaN or infinity whose name begins with `prefix`, or `None`."""
        for name, extent in self._placed.items():
            if name.startswith(prefix) and not all(
                np.isfinite(values_of(rows, extent.dtype)).all() for rows in slices(extent)
            ):
                return name
        return None

    def free(self) -> None:
        """Free the memory of all placed weights."""
        self._buffers.close()

    @staticmethod
    def _keep(buffers: ExitStack, buffer: Buffer) -> None:
        buffer.usage = BufferUsage.WEIGHTS
        buffers.enter_context(buffer)

    def _type(self, name: str, source: Source, parts: list[Extent]) -> DType:
        if not source.is_matrix:
            return DType.F32
        if self._matrix_type is not None:
            return self._matrix_type
        kinds = list(dict.fromkeys(part.dtype for part in parts))
        if len(kinds) > 1 and any(kind.is_quantized for kind in kinds):
            raise ModelError(
                f"{self._file.path}: {name} stacks {', '.join(source.names)}, which have different types, "
                f"{', '.join(kind.name for kind in kinds)}; load them separately, or with one matrix type"
            )
        return DType.F32 if kinds[0] is DType.F64 else kinds[0]  # products do not support F64

    def _is_faster(self, tensor: Tensor, fast: BufferType) -> bool:
        may_grow = self._matrix_type is None and not tensor.dtype.is_quantized
        return fast.suits(tensor) and (may_grow or fast.alloc_size(tensor) <= tensor.nbytes)
