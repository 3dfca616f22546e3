"""The buffer type of matrices with rows on several devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import inf
from typing import Final

from ggmlb.core.arguments import checked
from ggmlb.core.errors import ArgumentError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import BackendReg, Buffer, BufferType, Device, PartedBuffer, tensor_alloc
from ggmlb.interface.data import Bytes

ROUNDING: Final = 64
"""Granularity of the rows of a device (except the last): a tile of products."""


@checked
def split_buffer_type(
    reg: BackendReg, main_device: int, tensor_split: Sequence[float] | None = None
) -> SplitBufferType:
    """Return a buffer type that splits matrix rows over `reg`'s devices, for products on `main_device`.

    Args:
        reg: The registration; `get_proc_address` binds it.
        main_device: Index of the device whose backend computes with it.
        tensor_split: The share of each device, in any unit; by default in proportion to memory, over
            devices of the main device's type.

    Raises:
        ArgumentError: There is no such device, or the shares are not one for each device, or none is above 0.

    Source: ggml_backend_cuda_split_buffer_type.
    """
    devices = tuple(reg.devices)
    if not 0 <= main_device < len(devices):
        raise ArgumentError(
            f"split_buffer_type: there is no {reg.name}{main_device}; there are {len(devices)} devices"
        )
    kind = devices[main_device].type
    shares = tuple(tensor_split or ((d.memory[1] if d.type is kind else 0) for d in devices))
    shares += (0.0,) * (len(devices) - len(shares))
    if len(shares) > len(devices) or not all(0 <= s < inf for s in shares) or not sum(shares):
        raise ArgumentError(
            f"split_buffer_type: tensor_split is {list(shares)}; give a share, 0 or more, for each of the "
            f"{len(devices)} devices, and more than 0 for one"
        )
    return _split_buffer_type(devices, main_device, shares)


@cache
def _split_buffer_type(devices: tuple[Device, ...], main: int, shares: tuple[float, ...]) -> SplitBufferType:
    return SplitBufferType(devices, main, shares)


def any_created() -> bool:
    """Whether any split buffer type was created."""
    return _split_buffer_type.cache_info().currsize > 0


class SplitBufferType(BufferType):
    """Memory on several devices, only for matrices that are weights of `mul_mat`."""

    def __init__(self, devices: Sequence[Device], main: int, shares: Sequence[float]) -> None:
        home = devices[main]
        super().__init__(home, f"{home.name}_Split", home.buffer_type.alignment)
        having = [(d, s) for d, s in zip(devices, shares, strict=True) if s > 0]
        self.devices = tuple(d for d, _ in having)
        total = sum(shares)
        self._bounds = [x / total for x in accumulate(s for _, s in having)]

    def suits(self, tensor: Tensor) -> bool:
        """Whether the tensor is a contiguous matrix; other tensors cannot be placed here."""
        return tensor.view_src is None and tensor.is_contiguous() and tensor.ne[2] * tensor.ne[3] == 1

    def _alloc_buffer(self, nbytes: int) -> SplitBuffer:
        return SplitBuffer(self, nbytes)

    def _planned_buffer(self, nbytes: int) -> SplitBuffer:
        return self._alloc_buffer(nbytes)

    def rows(self, n_rows: int) -> list[tuple[Device, int, int]]:
        """Return the devices that have rows of a matrix, each with its first and last (exclusive) row."""
        step = ROUNDING if n_rows >= ROUNDING * len(self.devices) else 1
        cuts = [0, *(round(n_rows * x / step) * step for x in self._bounds[:-1]), n_rows]
        return [(d, a, b) for d, (a, b) in zip(self.devices, pairwise(cuts), strict=True) if a < b]


@dataclass(slots=True)
class Piece:
    """Consecutive rows of a matrix on one device: a tensor there, and its byte range in the whole matrix."""

    rows: Tensor
    device: Device
    first: int
    start: int
    stop: int


class SplitBuffer(PartedBuffer):
    """A buffer of matrices in pieces, each allocated when its matrix is placed.

    Attributes:
        pieces: The pieces of each matrix, by its offset.
    """

    buft: SplitBufferType

    def __init__(self, buft: SplitBufferType, nbytes: int) -> None:
        super().__init__(buft, (), nbytes)
        self.pieces: dict[int, list[Piece]] = {}

    def _init_tensor(self, tensor: Tensor) -> None:
        if not self.buft.suits(tensor):
            raise ArgumentError(
                f"{self.name} holds contiguous matrices only, not {tensor.describe()}: place it in the "
                "memory of one device"
            )
        pieces: list[Piece] = []
        with ExitStack() as made:
            parts: list[Buffer] = []
            for device, first, last in self.buft.rows(tensor.ne[1]):
                rows = Tensor(tensor.dtype, (tensor.ne[0], last - first, 1, 1))
                rows.name = f"{tensor.name} {first}:{last}"
                buft = device.buffer_type
                parts.append(made.enter_context(buft.alloc_buffer(buft.alloc_size(rows))))
                parts[-1].usage = self.usage
                tensor_alloc(parts[-1], rows, 0)
                pieces.append(Piece(rows, device, first, first * tensor.nb[1], last * tensor.nb[1]))
            made.pop_all()
        self.parts += tuple(parts)
        self.pieces[tensor.offset] = pieces

    def slices(self, root: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors that hold a matrix's rows, one for each device that has any."""
        return tuple(piece.rows for piece in self.pieces[root.offset])

    def _within(self, tensor: Tensor, offset: int, nbytes: int) -> Iterator[tuple[Piece, int, int, int]]:
        """Yield the pieces that overlap a byte range: piece, offset in it, start and stop in the range."""
        root = tensor.view_src or tensor
        begin = tensor.offset - root.offset + offset
        for piece in self.pieces[root.offset]:
            start, stop = max(begin, piece.start), min(begin + nbytes, piece.stop)
            if start < stop:
                yield piece, start - piece.start, start - begin, stop - begin

    def _set_tensor(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        for piece, at, start, stop in self._within(tensor, offset, data.size):
            piece.rows.set(data[start:stop], at)

    def _get_tensor(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        for piece, at, start, stop in self._within(tensor, offset, out.size):
            out[start:stop] = piece.rows.get(at, stop - start)

    def _memset_tensor(self, tensor: Tensor, value: int, offset: int, size: int) -> None:
        for piece, at, start, stop in self._within(tensor, offset, size):
            piece.rows.memset(value, at, stop - start)

    def _reset(self) -> None:
        self._free()
        self.parts = ()

    def _free(self) -> None:
        super()._free()
        self.pieces = {}
