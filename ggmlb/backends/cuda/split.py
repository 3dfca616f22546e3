"""Weights whose rows lie on several cards, and the products that are computed where the rows are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from ggmlb.backends.cuda.buffer import ALIGNMENT, CudaBuffer, queue_copy
from ggmlb.backends.cuda.driver import Way
from ggmlb.context import Context
from ggmlb.dtypes import DType
from ggmlb.enums import Op
from ggmlb.errors import ArgumentError
from ggmlb.graph import Graph
from ggmlb.interface import Buffer, BufferType, tensor_alloc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ggmlb.backends.cuda import CudaReg
    from ggmlb.backends.cuda.backend import CudaBackend
    from ggmlb.backends.cuda.device import CudaDevice
    from ggmlb.backends.cuda.plan import CudaPlan
    from ggmlb.backends.cuda.work import Binder, Outside
    from ggmlb.interface.data import Bytes
    from ggmlb.tensor import Tensor

ROUNDING = 64
"""Rows of a card are a multiple of this, but the last one's, where there are enough: a tile of products."""


def split_buffer_type(
    reg: CudaReg, main_device: int, tensor_split: Sequence[float] | None = None
) -> SplitBufferType:
    """Return memory that spreads the rows of matrices over all cards.

    Args:
        reg: Whose cards; `get_proc_address` has given it already.
        main_device: The number of the card whose backend computes with it.
        tensor_split: The share of each card, in any unit; by default as they have memory.

    Raises:
        ArgumentError: There is no such card, or the shares are not one for each, of which one is above 0.

    Source: ggml_backend_cuda_split_buffer_type.
    """
    devices = tuple(reg.devices)
    if not 0 <= main_device < len(devices):
        raise ArgumentError(
            f"split_buffer_type: there is no CUDA{main_device}; there are {len(devices)} devices"
        )
    shares = tuple(tensor_split) if tensor_split else tuple(float(d.memory[1]) for d in devices)
    shares += (0.0,) * (len(devices) - len(shares))
    if len(shares) > len(devices) or min(shares) < 0 or not sum(shares):
        raise ArgumentError(
            f"split_buffer_type: tensor_split is {list(shares)}; give a share, 0 or more, for each of the "
            f"{len(devices)} devices, and more than 0 for one"
        )
    return _split_buffer_type(devices, main_device, shares)


@cache
def _split_buffer_type(
    devices: tuple[CudaDevice, ...], main: int, shares: tuple[float, ...]
) -> SplitBufferType:
    return SplitBufferType(devices, main, shares)


class SplitBufferType(BufferType):
    """The memory of several cards. Tensors in it are matrices, and the weights of `mul_mat`, nothing else."""

    device: CudaDevice

    def __init__(self, devices: Sequence[CudaDevice], main: int, shares: Sequence[float]) -> None:
        super().__init__(devices[main], f"{devices[main].name}_Split", ALIGNMENT)
        self.devices = tuple(devices)
        total = sum(shares)
        self._bounds = [0.0, *(x / total for x in accumulate(shares))]

    def _alloc_buffer(self, nbytes: int) -> SplitBuffer:
        return SplitBuffer(self, nbytes)  # the cards' memory is taken when a tensor is placed

    def rows(self, n_rows: int) -> list[tuple[CudaDevice, int, int]]:
        """Return the devices that have rows of a matrix, and which: from, up to."""
        step = ROUNDING if n_rows >= ROUNDING * len(self.devices) else 1
        cuts = [min(n_rows, round(n_rows * x / step) * step) for x in self._bounds[:-1]] + [n_rows]
        return [
            (d, start, end)
            for d, (start, end) in zip(self.devices, pairwise(cuts), strict=True)
            if start < end
        ]


@dataclass(slots=True)
class Piece:
    """Rows of a matrix on one card: a tensor there, and its byte range in the whole."""

    rows: Tensor
    buffer: CudaBuffer
    start: int
    stop: int


class SplitBuffer(Buffer):
    """Matrices in pieces.

    Attributes:
        pieces: By the offset of the matrix.
    """

    buft: SplitBufferType

    def __init__(self, buft: SplitBufferType, nbytes: int) -> None:
        super().__init__(buft, nbytes)
        self.pieces: dict[int, list[Piece]] = {}

    @property
    def base(self) -> Any:
        """Nothing: it is in no one place."""
        return None

    def _init_tensor(self, tensor: Tensor) -> None:
        if tensor.view_src is not None or not tensor.is_contiguous() or tensor.ne[2] * tensor.ne[3] != 1:
            raise ArgumentError(
                f"{self.name} holds contiguous matrices, and {tensor.describe()} is none: place it in the "
                "memory of one device"
            )
        pieces: list[Piece] = []
        for device, first, last in self.buft.rows(tensor.ne[1]):
            ctx = Context()
            rows = ctx.new_tensor(tensor.dtype, (tensor.ne[0], last - first), f"{tensor.name} {first}:{last}")
            buffer = device.buffer_type.alloc_buffer(rows.nbytes)
            assert isinstance(buffer, CudaBuffer)
            tensor_alloc(buffer, rows, 0)
            pieces.append(Piece(rows, buffer, first * tensor.nb[1], last * tensor.nb[1]))
        self.pieces[tensor.offset] = pieces

    def _within(self, tensor: Tensor, offset: int, nbytes: int) -> Iterator[tuple[Piece, int, int, int]]:
        """Yield the pieces that a byte range touches: where in the piece, and from where to where in it."""
        for piece in self.pieces[tensor.offset]:
            start, stop = max(offset, piece.start), min(offset + nbytes, piece.stop)
            if start < stop:
                yield piece, start - piece.start, start - offset, stop - offset

    def _set_tensor(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        for piece, at, start, stop in self._within(tensor, offset, data.size):
            piece.buffer._set_tensor(piece.rows, data[start:stop], at)

    def _get_tensor(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        for piece, at, start, stop in self._within(tensor, offset, out.size):
            piece.buffer._get_tensor(piece.rows, out[start:stop], at)

    def _memset_tensor(self, tensor: Tensor, value: int, offset: int, size: int) -> None:
        for piece, at, start, stop in self._within(tensor, offset, size):
            piece.buffer._memset_tensor(piece.rows, value, at, stop - start)

    def _clear(self, value: int) -> None:
        for pieces in self.pieces.values():
            for piece in pieces:
                piece.buffer.clear(value)

    def _reset(self) -> None:
        self.pieces = {}

    def _free(self) -> None:
        for pieces in self.pieces.values():
            for piece in pieces:
                piece.buffer.free()
        self.pieces = {}


def declines(node: Tensor) -> str | None:
    """Return why a node cannot be computed with split operands; `None` where it can, or has none."""
    for i, source in enumerate(node.src):
        if source is not None and isinstance(source.buffer, SplitBuffer):
            if node.op is not Op.MUL_MAT or i:
                return f"src{i} lies in {source.buffer.name}, which holds the weights of mul_mat only"
            if source.view_src is not None:
                return f"src{i} is a view of a tensor in {source.buffer.name}"
            if node.src[1] is not None and not node.src[1].is_contiguous():
                return "src1 is not contiguous, and its columns go to several cards"
    return None


def is_split(node: Tensor) -> bool:
    """Whether the node is a product with a split weight."""
    return node.op is Op.MUL_MAT and node.src[0] is not None and isinstance(node.src[0].buffer, SplitBuffer)


class _Share:
    """What one card computes of a product: its rows times all columns, into memory of its own."""

    def __init__(self, node: Tensor, piece: Piece, backend: CudaBackend) -> None:
        from ggmlb.backends.cuda.plan import CudaPlan

        self.backend = backend
        b = node.src[1]
        assert b is not None
        ctx = Context()
        self.columns = ctx.new_tensor(b.dtype, b.ne)
        self.result = ctx.mul_mat(piece.rows, self.columns)
        self.result.params.update(node.params)
        at = -(-self.columns.nbytes // ALIGNMENT) * ALIGNMENT
        memory = backend.device.buffer_type.alloc_buffer(at + self.result.nbytes)
        assert isinstance(memory, CudaBuffer)
        tensor_alloc(memory, self.columns, 0)
        tensor_alloc(memory, self.result, at)
        with backend.device.on():
            self.plan: CudaPlan = CudaPlan(backend, Graph().build_forward_expand(self.result))


def step(node: Tensor, backend: CudaBackend, binder: Binder) -> Outside:
    """Return the step that computes a product: columns out to all cards, products, results back."""
    a, b = node.src[0], node.src[1]
    assert a is not None
    assert b is not None
    assert isinstance(a.buffer, SplitBuffer)
    driver, main = backend.device.driver, backend.device
    pieces = a.buffer.pieces[a.offset]
    shares = [_Share(node, piece, backend.on_card(piece.buffer.device)) for piece in pieces]
    # Results are gathered here as they come, each share's rows side by side, then put between the others'.
    ctx = Context()
    landed = [ctx.new_tensor(DType.F32, share.result.ne) for share in shares]
    for tensor in landed:
        buffer = main.buffer_type.alloc_buffer(tensor.nbytes)
        assert isinstance(buffer, CudaBuffer)
        tensor_alloc(binder.use(buffer), tensor, 0)
    for t in (node, b):
        if isinstance(t.buffer, CudaBuffer):
            binder.use(t.buffer)
    n_columns = node.ne[1] * node.ne[2] * node.ne[3]
    rows_before = [piece.start // a.nb[1] for piece in pieces]

    def run(stream: int) -> None:
        for share in shares:
            with share.backend.device.on():
                share.backend.stream.wait_for([backend.stream])
                queue_copy(b, share.columns, share.backend.stream.handle)
                share.plan.run()
        with main.on():
            for share, there, before in zip(shares, landed, rows_before, strict=True):
                backend.stream.wait_for([share.backend.stream])
                queue_copy(share.result, there, stream)
                width = 4 * there.ne[0]
                assert isinstance(node.buffer, CudaBuffer)
                assert isinstance(there.buffer, CudaBuffer)
                to = node.buffer.address + node.offset + 4 * before
                driver.copy_2d(
                    to, node.nb[1], there.buffer.address, width, width, n_columns, Way.ON_DEVICE, stream
                )

    return run
