"""Products with a split weight: each device computes its rows of the result."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from ggmlb.core.context import Context
from ggmlb.core.enums import Op
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Ne, Tensor
from ggmlb.interface import Backend, Buffer, Device, GraphPlan, tensor_alloc, tensor_copy_async
from ggmlb.parallel.row_split.memory import SplitBuffer, any_created

if TYPE_CHECKING:
    from ggmlb.parallel.row_split.memory import Piece


def declines(node: Tensor) -> str | None:
    """Return why a node cannot be computed with operands in split memory; `None` if it can."""
    if not any_created():
        return None
    for i, source in enumerate(node.src):
        # A view is in the buffer of its source, placed or not.
        buffer = None if source is None else (source.view_src or source).buffer
        if source is not None and isinstance(buffer, SplitBuffer):
            if node.op is not Op.MUL_MAT or i:
                return f"src{i} is in {buffer.name}, which holds the weights of mul_mat only"
            if source.view_src is not None:
                return f"src{i} is a view of a tensor in {buffer.name}"
            if node.src[1] is not None and not node.src[1].is_contiguous():
                return "src1 is not contiguous, but its columns are copied to several devices"
    return None


def is_split(node: Tensor) -> bool:
    """Whether the node is a product whose weight has its rows on several devices (split memory)."""
    return node.op is Op.MUL_MAT and node.src[0] is not None and isinstance(node.src[0].buffer, SplitBuffer)


class Helpers:
    """Streams and memory on other devices, which compute their rows of a stream's products.

    A stream's products run in order, on the helpers too, and therefore share the memory. Memory that is
    too small is replaced; products bound to it keep it.
    """

    def __init__(self) -> None:
        self._streams: dict[Device, Backend] = {}
        self._memory: dict[Device, Buffer] = {}

    @property
    def streams(self) -> tuple[Backend, ...]:
        """The streams opened on the other (helper) devices so far."""
        return tuple(self._streams.values())

    def on(self, device: Device, main: Backend) -> Backend:
        """Return the stream for `device` (`main` if on that device, else a helper, opened if new)."""
        if device is main.device:
            return main
        if device not in self._streams:
            self._streams[device] = device.init_backend()
        return self._streams[device]

    def place(self, device: Device, tensors: Sequence[Tensor]) -> None:
        """Place tensors in sequence in memory of the device, with undefined contents."""
        buft = device.buffer_type
        sizes = [-(-buft.alloc_size(t) // buft.alignment) * buft.alignment for t in tensors]
        memory = self._memory.get(device)
        if memory is None or memory.size < sum(sizes):
            memory = self._memory[device] = buft.alloc_buffer(sum(sizes))
        for tensor, size, end in zip(tensors, sizes, accumulate(sizes), strict=True):
            tensor_alloc(memory, tensor, end - size)

    def free(self) -> None:
        """Close the streams; the memory is freed with the last product that uses it."""
        for stream in self._streams.values():
            stream.free()
        self._streams = {}
        self._memory = {}


class _Share(NamedTuple):
    """Another device's share of a product: its rows times all columns, in its own memory.

    Attributes:
        stream: The helper stream.
        plan: The plan of the product.
        columns: Destination of the columns.
        result: Its rows of the result.
        landed: Destination of the result's rows, on the main device.
    """

    stream: Backend
    plan: GraphPlan
    columns: Tensor
    result: Tensor
    landed: Tensor


class RowSplitProduct:
    """A prepared product with rows of its weight on several devices: copies inputs there, and results back.

    Args:
        node: The product; its result and its columns are in memory of the main device.
        main: The main device's stream.
        helpers: The helpers of that stream.

    Attributes:
        buffers: Buffers of the main device that it reads and writes.
    """

    def __init__(self, node: Tensor, main: Backend, helpers: Helpers) -> None:
        a, b = node.operand(0), node.operand(1)
        assert isinstance(a.buffer, SplitBuffer)
        self.buffers = node.placed("a product"), b.placed("a product")
        pieces = a.buffer.pieces[a.offset]
        self._main, self._b = weakref.ref(main), b  # weak: its plans refer to this
        self._shares: list[_Share] = []
        self._own: GraphPlan | None = None
        # A device's rows of several columns are not contiguous in the result: copy to `landed`, then spread.
        is_run = node.ne[0] == node.n_elements or len(pieces) == 1
        landed = [_result(node, piece, node.buffer if is_run else None) for piece in pieces]
        if not is_run:
            helpers.place(main.device, landed)
        for piece, there in zip(pieces, landed, strict=True):
            stream = helpers.on(piece.device, main)
            if stream is main:
                self._own = main._plan_part(_product(node, piece.rows, _at(b, b.ne), there))
                continue
            columns, result = Tensor(b.dtype, b.ne), _result(node, piece, None)
            helpers.place(piece.device, [columns, result])
            plan = stream.graph_plan_create(_product(node, piece.rows, columns, result))
            self._shares.append(_Share(stream, plan, columns, result, there))
        self._spread = None if is_run else main._plan_part(_spread(node, pieces, landed))

    def run(self) -> None:
        """Queue each device's part of the product, and the copies of columns to it and of its rows back."""
        main = self._main()
        assert main is not None
        abort, main.abort_callback = main.abort_callback, None  # called between products only
        try:
            for share in self._shares:
                tensor_copy_async(main, share.stream, self._b, share.columns)
                share.stream.graph_plan_compute(share.plan)
            if self._own is not None:
                main._compute_part(self._own)
            for share in self._shares:
                tensor_copy_async(share.stream, main, share.result, share.landed)
            if self._spread is not None:
                main._compute_part(self._spread)
        finally:
            main.abort_callback = abort


def _at(tensor: Tensor, ne: Ne, offset: int = 0) -> Tensor:
    """Return a contiguous leaf in the memory of another tensor."""
    leaf = Tensor(tensor.dtype, ne)
    leaf.buffer, leaf.offset = tensor.buffer, tensor.offset + offset
    return leaf


def _result(node: Tensor, piece: Piece, buffer: Buffer | None) -> Tensor:
    """Return a piece's rows of the result; in place, if those are contiguous."""
    rows = _at(node, (piece.rows.ne[1], *node.ne[1:]), piece.first * node.nb[0])
    rows.buffer = buffer
    return rows


def _product(node: Tensor, weight: Tensor, columns: Tensor, result: Tensor) -> Graph:
    """Return a graph that computes rows of the node into `result`."""
    own = result.reading((weight, columns), None)
    own.op, own.params, own.name = node.op, node.params, node.name
    return Graph([own], [weight, columns])


def _spread(node: Tensor, pieces: Sequence[Piece], landed: Sequence[Tensor]) -> Graph:
    """Return a graph that copies the rows of all devices to their places."""
    ctx, graph = Context(), Graph()
    whole = _at(node, node.ne)
    for piece, rows in zip(pieces, landed, strict=True):
        place = ctx.view_4d(whole, *rows.ne, *node.nb[1:], piece.first * node.nb[0])
        graph.build_forward_expand(ctx.cpy(rows, place))
    return graph
