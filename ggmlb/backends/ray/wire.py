"""Messages between driver and node, and graphs as data.

A message, or an answer, is one run of bytes, as each object costs Ray a tenth of a millisecond: pickled
commands or results, then data. A graph is a tuple of records, each after those it refers to, and the numbers
of its nodes. It holds no address and no function: buffers are named by their handles, which the node looks
up. Each tensor must be within its buffer; operands and parameters were checked by the driver's `Context`, of
the same version.
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
"""Number of an absent tensor, and handle of no buffer."""

MAX_EXTENT: Final = 1 << 62
"""Least size and offset that nothing can have [bytes]."""

_FLAGS: Final = TensorFlag.INPUT | TensorFlag.OUTPUT | TensorFlag.PARAM | TensorFlag.LOSS | TensorFlag.COMPUTE


class TensorRecord(NamedTuple):
    """A tensor as data; hashable.

    Attributes:
        dtype, ne, nb: Type, extents and strides [bytes].
        op: `Op.NONE` for a leaf, and for a tensor that another graph computes.
        src: Numbers of the operands; `NONE` for an absent one.
        params: Names and values of the op's parameters.
        flags: Or-ed `TensorFlag`.
        name: Its name.
        viewed: Number of the tensor that it is a view of; `NONE` for none.
        handle: Handle of the buffer; `NONE` if unplaced, or a view.
        offset: In the buffer, or in the viewed tensor [bytes].
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
"""A tensor, the last, after its operands."""


class RefusedError(BackendError):
    """A message names a handle or a range that the node does not have; nothing was done."""


def refuse(what: str) -> NoReturn:
    """Raise a RefusedError."""
    raise RefusedError(f"refused: {what}; nothing was done")


def number_below(number: Any, end: int, what: str) -> int:
    """Return a whole number from 0 to `end - 1`."""
    if type(number) is not int or not 0 <= number < end:
        refuse(f"{what}: {number!r} is not a whole number from 0 to {end - 1}")
    return number


# -- messages --------------------------------------------------------------------------------------------


def packed(head: bytes, data: Iterable[Bytes]) -> bytes:
    """Return pickled values (nothing for an empty list) and arrays as one run of bytes."""
    return b"".join((len(head).to_bytes(4, "little"), head, *(part.data for part in data)))


def unpacked(message: bytes) -> tuple[Any, Bytes]:
    """Return the values of a run of bytes, and the rest of it; an empty list for none."""
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
    """Return nodes as data: records, and the numbers of the nodes.

    Args:
        nodes: In topological order, each placed.
        uses: How often each is read in the whole graph; those read elsewhere too are marked as outputs.
        handle_of: Returns the handle of a buffer.
    """
    nodes = tuple(nodes)
    inside = Counter(s for node in nodes for s in node.src if s is not None)
    writer = _Writer(handle_of)
    numbers = [writer.add(node, is_read_elsewhere=uses.get(node, 0) > inside[node]) for node in nodes]
    return tuple(writer.records), numbers


def node_record(node: Tensor, handle_of: Callable[[Buffer], int] | None = None) -> Records:
    """Return a tensor and its operands, without places, except in buffers that have a handle here.

    Args:
        node: The tensor, or node.
        handle_of: Returns the handle of a buffer, or `NONE` where the place does not matter.
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
        """Add the record of a node or leaf, after its operands; return its number."""
        src = tuple(NONE if s is None else self._number(s) for s in node.src)
        flags = node.flags | (TensorFlag.OUTPUT if is_read_elsewhere else 0)
        return self._append(node, node.op, src, tuple(node.params.items()), flags)

    def _number(self, tensor: Tensor) -> int:
        """Return the number of an operand; one that another graph computes becomes a leaf."""
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
    """Create the tensor of `node_record`; some or all of its tensors may be in no buffer.

    Raises:
        RefusedError: As `read_graph`.
    """
    return _read(records, lambda handle: None if handle == NONE else buffer_of(handle))[-1]


def read_graph(record: tuple[Records, list[int]], buffer_of: Callable[[int], Buffer]) -> Graph:
    """Create the graph of a message.

    Args:
        record: As `graph_record` returns it.
        buffer_of: Returns the buffer of a handle, or raises.

    Raises:
        RefusedError: A tensor is in no buffer of the node, or ends beyond it; or this is no graph.
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
    if nbytes and offset + nbytes > buffer.size:  # an empty one may begin anywhere
        refuse(f"bytes {offset} to {offset + nbytes} of a buffer of {buffer.size}, for {tensor.describe()}")
    if not is_view and offset % buffer.alignment:
        refuse(f"offset {offset} of {tensor.describe()} is not a multiple of {buffer.alignment}")
    if buffer.prepares_tensors:
        buffer.init_tensor(tensor)
