"""Serialisation of messages between driver and node, and of graphs.

A message, or a reply, is one `bytes` object (each object costs Ray a tenth of a millisecond): pickled
commands or results, then raw data. A graph is a tuple of tensor records in topological order, and the indices
of its nodes. It has no addresses and no functions: buffers are identified by handles. The node checks that
each tensor is within its buffer; operands and parameters were checked by the driver.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, TensorFlag
from ggmlb.core.errors import BackendError, Error, one_line
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Ne, Tensor
from ggmlb.interface import Buffer

Bytes = npt.NDArray[np.uint8]

NONE: Final = -1
"""Index of an absent tensor, and handle of no buffer."""

MAX_EXTENT: Final = 1 << 62
"""Upper bound of sizes and offsets (exclusive) [bytes]."""

_FLAGS: Final = TensorFlag.INPUT | TensorFlag.OUTPUT | TensorFlag.PARAM | TensorFlag.LOSS | TensorFlag.COMPUTE


class TensorRecord(NamedTuple):
    """A tensor serialised for another process; hashable.

    Attributes:
        dtype, ne, nb: Type, extents and strides [bytes].
        op: The op; `Op.NONE` for a leaf, and for a tensor that another graph computes.
        src: Indices of the operands' records; `NONE` for an absent one.
        params: Names and values of the op's parameters.
        flags: Or-ed `TensorFlag`.
        name: Name of the tensor.
        viewed: Index of the record of `view_src`; `NONE` if it is no view.
        handle: Handle of the buffer; `NONE` if not allocated, or a view.
        offset: Offset in the buffer, or in `view_src` [bytes].
    """

    dtype: DType
    ne: Ne
    nb: Ne
    op: Op
    src: tuple[int, ...]
    params: tuple[tuple[str, Any], ...]
    flags: int
    name: str
    viewed: int
    handle: int
    offset: int


Records = tuple[TensorRecord, ...]
"""Records in topological order; the last is the tensor itself."""


class RefusedError(BackendError):
    """A message has an unknown handle or a range out of bounds; the command had no effect."""


def refuse(what: str) -> NoReturn:
    """Raise a `RefusedError`; `what` is the reason."""
    raise RefusedError(f"the node rejected a command: {what}; it had no effect")


def number_below(number: Any, end: int, what: str) -> int:
    """Return `number` if it is an integer from 0 to `end - 1`, else refuse it; `what`: its name."""
    if type(number) is not int or not 0 <= number < end:
        refuse(f"{what}: {number!r} is not a whole number from 0 to {end - 1}")
    return number


# -- messages --------------------------------------------------------------------------------------------


def packed(head: bytes, data: Iterable[Bytes]) -> bytes:
    """Concatenate a pickled list `head` (no bytes: an empty list) and arrays to a message."""
    return b"".join((len(head).to_bytes(4, "little"), head, *(part.data for part in data)))


def unpacked(message: bytes) -> tuple[Any, Bytes]:
    """Split a message into its unpickled list and its data: the inverse of `packed`."""
    end = 4 + int.from_bytes(message[:4], "little")
    values = pickle.loads(message[4:end]) if end > 4 else []
    return values, np.frombuffer(message, np.uint8)[end:]


# -- writing ---------------------------------------------------------------------------------------------


def unsendable(node: Tensor) -> str | None:
    """Return why a node cannot be sent to another process, or `None` if it can."""
    for name, value in node.params.items():
        if callable(value):
            return f"its parameter {name!r} is a function, and functions are not sent to other machines"
    return None


def graph_record(
    nodes: Iterable[Tensor], uses: Mapping[Tensor, int], handle_of: Callable[[Buffer], int]
) -> tuple[Records, list[int]]:
    """Serialise graph nodes (`uses`: number of reads of each); return tensor records and nodes' indices.

    Args:
        nodes: Allocated nodes in topological order.
        uses: Number of reads of each in the whole graph; nodes with readers elsewhere become outputs.
        handle_of: Returns the handle of a buffer.
    """
    nodes = tuple(nodes)
    inside = Counter(s for node in nodes for s in node.src if s is not None)
    writer = _Writer(handle_of)
    numbers = [writer.add(node, is_read_elsewhere=uses.get(node, 0) > inside[node]) for node in nodes]
    return tuple(writer.records), numbers


def node_record(node: Tensor, handle_of: Callable[[Buffer], int] | None = None) -> Records:
    """Serialise a tensor and its operands; `handle_of`: handles of buffers (default: omitted).

    Args:
        node: The tensor, or node.
        handle_of: Returns the handle of a buffer, or `NONE` to omit it.
    """
    writer = _Writer(handle_of, is_nameless=True)
    writer.add(node)
    return tuple(writer.records)


class _Writer:
    """Collects records."""

    def __init__(self, handle_of: Callable[[Buffer], int] | None, is_nameless: bool = False) -> None:
        self.records: list[TensorRecord] = []
        self._handle_of = handle_of
        self._is_nameless = is_nameless
        self._numbers: dict[Tensor, int] = {}

    def add(self, node: Tensor, is_read_elsewhere: bool = False) -> int:
        """Add the record of a node or leaf, after its operands; return its index."""
        src = tuple(NONE if s is None else self._number(s) for s in node.src)
        flags = node.flags | (TensorFlag.OUTPUT if is_read_elsewhere else 0)
        return self._append(node, node.op, src, tuple(node.params.items()), flags)

    def _number(self, tensor: Tensor) -> int:
        """Return the index of an operand; one that another graph computes becomes a leaf."""
        known = self._numbers.get(tensor)
        return self._append(tensor, Op.NONE, (), (), tensor.flags) if known is None else known

    def _append(
        self, t: Tensor, op: Op, src: tuple[int, ...], params: tuple[tuple[str, Any], ...], flags: int
    ) -> int:
        viewed, handle, offset = NONE, NONE, 0
        if t.view_src is not None:
            viewed, offset = self._number(t.view_src), t.view_offs
        elif t.buffer is not None and self._handle_of is not None:
            handle = self._handle_of(t.buffer)
            offset = 0 if handle == NONE else t.offset
        self._numbers[t] = number = len(self.records)
        name = "" if self._is_nameless else t.name
        self.records.append(
            TensorRecord(t.dtype, t.ne, t.nb, op, src, params, flags & _FLAGS, name, viewed, handle, offset)
        )
        return number


# -- reading ---------------------------------------------------------------------------------------------


def read_node(records: Records, buffer_of: Callable[[int], Buffer]) -> Tensor:
    """Deserialise the records of `node_record`, with buffers from `buffer_of`; return the tensor.

    Tensors may have no buffer.

    Raises:
        RefusedError: As `read_graph`.
    """
    return _read(records, lambda handle: None if handle == NONE else buffer_of(handle))[-1]


def read_graph(record: tuple[Records, list[int]], buffer_of: Callable[[int], Buffer]) -> Graph:
    """Deserialise the result of `graph_record`, with buffers from `buffer_of`; return the graph.

    Args:
        record: Result of `graph_record`.
        buffer_of: Returns the buffer of a handle, or raises.

    Raises:
        RefusedError: A tensor has no buffer or exceeds it, or the record is malformed.
    """
    tensors = _read(record[0], buffer_of)
    return Graph([tensors[i] for i in record[1]], [t for t in tensors if t.op is Op.NONE])


def _read(records: Records, buffer_of: Callable[[int], Buffer | None]) -> list[Tensor]:
    tensors: list[Tensor] = []
    try:
        for r in records:
            viewed = None if r.viewed == NONE else tensors[r.viewed]
            start = number_below(r.offset, MAX_EXTENT, "an offset")
            src = tuple(None if i == NONE else tensors[i] for i in r.src)
            tensor = Tensor(
                r.dtype, r.ne, r.nb, op=r.op, src=src, params=dict(r.params), view_src=viewed,
                view_offs=0 if viewed is None else start, name=r.name,
            )  # fmt: skip
            tensor.flags = r.flags
            if viewed is None:
                tensor.buffer, tensor.offset = buffer_of(r.handle), start
            if tensor.buffer is not None:
                _check_place(tensor, tensor.buffer)
            tensors.append(tensor)
    except Error:
        raise
    except Exception as error:
        refuse(f"a graph is a tuple of records, each after its operands: {one_line(error)}")
    return tensors


def _check_place(tensor: Tensor, buffer: Buffer) -> None:
    is_view, offset = tensor.view_src is not None, tensor.offset
    nbytes = tensor.nbytes if is_view else buffer.alloc_size(tensor)
    if nbytes and offset + nbytes > buffer.size:  # an empty tensor may have any offset
        refuse(f"bytes {offset} to {offset + nbytes} of a buffer of {buffer.size}, for {tensor.describe()}")
    if not is_view and offset % buffer.alignment:
        refuse(f"offset {offset} of {tensor.describe()} is not a multiple of {buffer.alignment}")
    if buffer.prepares_tensors:
        buffer.init_tensor(tensor)
