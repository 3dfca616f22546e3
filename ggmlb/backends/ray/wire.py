"""What goes between driver and node: messages, and graphs as typed data, which the node checks.

A message, or an answer, is one run of bytes (each object costs Ray a tenth of a millisecond): JSON, and data.

A graph is a list of records, each after those it refers to, and the numbers of its nodes. A leaf is its
type, extents and place; a node has the calls of `Context` that build it besides (`Record`). The methods check
operands and parameters, as they do for any caller; the place is checked here.

Nothing in it is an address, a class or a function. Reading it creates tensors of this process, in buffers
that the node looks up by their handles.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from ggmlb.backends.ray.calls import VIEW, calls_of
from ggmlb.core.context import Context
from ggmlb.core.enums import Op, TensorFlag
from ggmlb.core.errors import BackendError, Error, one_line
from ggmlb.core.graph import Graph
from ggmlb.core.ops.base import OpBase
from ggmlb.core.ops.custom import CustomOps
from ggmlb.core.tensor import Ne, Tensor
from ggmlb.interface import Buffer

Bytes = npt.NDArray[np.uint8]

NONE: Final = -1
"""Number of an absent tensor, and handle of no buffer."""

MAX_EXTENT: Final = 1 << 62
"""Least extent, stride and offset that no tensor can have."""

_FLAGS: Final = TensorFlag.INPUT | TensorFlag.OUTPUT | TensorFlag.PARAM | TensorFlag.LOSS | TensorFlag.COMPUTE


class Record(NamedTuple):
    """A tensor as data.

    Attributes:
        calls: Those of `calls_of`: names, numbers of the tensors, other arguments; none for a leaf.
        dtype, ne, nb: Type, extents and strides, which calls must give.
        flags: Or-ed `TensorFlag`.
        name: Its name.
        viewed: Number of the tensor that a leaf is a view of; `NONE` for none.
        handle: Handle of the buffer; `NONE` if unplaced, or a view.
        offset: In the buffer, or in the viewed tensor [bytes].
    """

    calls: list[tuple[str, list[int], list[Any]]]
    dtype: str
    ne: Ne
    nb: Ne
    flags: int
    name: str
    viewed: int
    handle: int
    offset: int


class ForgedError(BackendError):
    """A message that no driver of this version sends: a wrong handle, range, type or parameter."""


def forged(what: str) -> NoReturn:
    """Raise a ForgedError."""
    raise ForgedError(f"refused: {what}; nothing was done")


# -- messages --------------------------------------------------------------------------------------------


def packed(text: bytes, data: Iterable[Bytes]) -> bytes:
    """Return JSON (nothing for an empty list) and arrays as one run of bytes."""
    return b"".join((len(text).to_bytes(4, "little"), text, *(part.data for part in data)))


def unpacked(message: Any) -> tuple[Any, Bytes]:
    """Return what the JSON of a run of bytes says, and the rest of it; empty lists for none."""
    if not isinstance(message, bytes):
        forged("a message is bytes")
    end = 4 + int.from_bytes(message[:4], "little")
    try:
        told = json.loads(message[4:end]) if end > 4 else []
    except (ValueError, RecursionError) as error:
        forged(f"a message begins with JSON: {one_line(error)}")
    return told, np.frombuffer(message, np.uint8)[end:]


# -- writing ---------------------------------------------------------------------------------------------


def unsendable(node: Tensor) -> str | None:
    """Return why a node cannot be sent to another process, or `None` if it can."""
    for name, value in node.params.items():
        if callable(value):
            return f"its parameter {name!r} is a function, and functions are not sent to other machines"
    return None


def graph_record(
    nodes: Iterable[Tensor], uses: Mapping[Tensor, int], handle_of: Callable[[Buffer], int]
) -> list[Any]:
    """Return nodes as data: `[records, numbers of the nodes]`.

    Args:
        nodes: In topological order, each placed.
        uses: How often each is read in the whole graph; those read elsewhere too are marked as outputs.
        handle_of: Returns the handle of a buffer.
    """
    nodes = tuple(nodes)
    inside = Counter(s for node in nodes for s in node.src if s is not None)
    writer = _Writer(handle_of)
    numbers = [writer.add_node(node, is_read_elsewhere=uses.get(node, 0) > inside[node]) for node in nodes]
    return [writer.records, numbers]


def node_record(node: Tensor, handle_of: Callable[[Buffer], int] | None = None) -> str:
    """Return a tensor and its operands as JSON, without places, except in buffers that have a handle here.

    Args:
        node: The tensor, or node.
        handle_of: Returns the handle of a buffer, or `NONE` where the place does not matter.
    """
    writer = _Writer(handle_of, is_nameless=True)
    writer.add_node(node)
    return json.dumps([writer.records, [len(writer.records) - 1]], separators=(",", ":"))


class _Writer:
    """Collects records."""

    def __init__(self, handle_of: Callable[[Buffer], int] | None, is_nameless: bool = False) -> None:
        self.records: list[Record] = []
        self._handle_of = handle_of
        self._is_nameless = is_nameless
        self._numbers: dict[Tensor, int] = {}

    def add_node(self, node: Tensor, is_read_elsewhere: bool = False) -> int:
        """Write a tensor, a node or a leaf, with what it reads; return its number."""
        calls = [
            (name, [self._number(t) for t in tensors], [_plain(arg) for arg in args])
            for name, tensors, args in (() if node.op is Op.NONE else calls_of(node))
        ]
        return self._append(node, calls, node.flags | (TensorFlag.OUTPUT if is_read_elsewhere else 0))

    def _number(self, tensor: Tensor | None) -> int:
        """Return the number of an operand; one that is computed elsewhere is a leaf here."""
        if tensor is None:
            return NONE
        known = self._numbers.get(tensor)
        return self._append(tensor, [], tensor.flags) if known is None else known

    def _append(self, t: Tensor, calls: list[tuple[str, list[int], list[Any]]], flags: int) -> int:
        viewed = NONE if calls else self._number(t.view_src)
        handle, offset = NONE, 0 if t.view_src is None else t.view_offs
        if t.view_src is None and t.buffer is not None and self._handle_of is not None:
            handle = self._handle_of(t.buffer)
            offset = 0 if handle == NONE else t.offset
        self._numbers[t] = number = len(self.records)
        name = "" if self._is_nameless else t.name
        self.records.append(
            Record(calls, t.dtype.name, t.ne, t.nb, flags & _FLAGS, name, viewed, handle, offset)
        )
        return number


def _plain(value: Any) -> Any:
    """Return an argument as JSON has it."""
    return value.item() if isinstance(value, np.generic) else value


# -- reading ---------------------------------------------------------------------------------------------


def read_node(text: Any, buffer_of: Callable[[int], Buffer]) -> Tensor:
    """Create the tensor that `node_record` wrote; some or all of its tensors may be in no buffer.

    Raises:
        ForgedError: As `read_graph`.
    """
    try:
        data = json.loads(text)
    except (TypeError, ValueError):
        forged("a node is JSON")
    nodes = read_graph(data, lambda handle: None if handle == NONE else buffer_of(handle)).nodes
    return nodes[-1] if nodes else forged("a node is the last of its records")


def read_graph(data: Any, buffer_of: Callable[[int], Buffer | None]) -> Graph:
    """Create the graph of a message.

    Args:
        data: As `graph_record` returns it.
        buffer_of: Returns the buffer of a handle, or raises; `None` for a tensor in no buffer.

    Raises:
        ForgedError: A field has another type or range than a driver writes, a tensor is in no buffer or ends
            beyond its buffer, or the method of an op refuses its arguments.
    """
    reader = _Reader(buffer_of)
    try:
        records, numbers = data
        for record in records:
            reader.add(record)
        nodes = [reader.tensor(number) for number in numbers]
    except Error:  # a place that memory refuses
        raise
    except (TypeError, ValueError) as error:
        forged(f"a graph is a list of records, and a list of numbers: {one_line(error)}")
    return Graph(nodes, [t for t in reader.tensors if t.op is Op.NONE])


_METHODS: Final[dict[str, Callable[..., Any]]] = {
    name: method
    for family in Context.__mro__
    if issubclass(family, OpBase) and family not in (Context, OpBase, CustomOps)
    for name, method in vars(family).items()
    if inspect.isfunction(method) and not name.startswith("_")
}
"""Methods that build or change nodes: all but those that take a function."""


class _Reader:
    """Creates the tensors of records.

    Attributes:
        tensors: Those so far.
    """

    def __init__(self, buffer_of: Callable[[int], Buffer | None]) -> None:
        self.tensors: list[Tensor] = []
        self._buffer_of = buffer_of
        self._ctx = Context()

    def tensor(self, number: Any) -> Tensor:
        """Return a tensor by its number."""
        return self.tensors[number_below(number, len(self.tensors), "a tensor's number")]

    def add(self, record: Any) -> None:
        """Create a tensor."""
        r = Record(*record)
        ne, nb = _four(r.ne, "extents"), _four(r.nb, "strides")
        start = number_below(r.offset, MAX_EXTENT, "an offset")
        root = None if r.viewed == NONE else self.tensor(r.viewed)
        try:
            tensor = self._ctx.new_tensor(r.dtype, ne)
            if r.calls:
                tensor = self._called(r.calls)
            elif root is not None or nb != tensor.nb:
                tensor = Tensor(tensor.dtype, ne, nb, view_src=root, view_offs=start)
        except ForgedError:
            raise
        except Error as error:
            forged(one_line(error))
        if (tensor.dtype.name, tensor.ne, tensor.nb) != (r.dtype, ne, nb):
            forged(f"{tensor.describe()} was to be {r.dtype}, with extents {ne} and strides {nb}")
        tensor.name = str(r.name)[:200]
        tensor.flags |= number_below(r.flags, _FLAGS + 1, "flags") & _FLAGS
        if tensor.view_src is None:
            tensor.buffer, tensor.offset = self._buffer_of(r.handle), start
        if tensor.buffer is not None:
            _check_place(tensor, tensor.buffer)
        self.tensors.append(tensor)

    def _called(self, calls: Any) -> Tensor:
        made: list[Tensor] = []
        for name, numbers, args in calls:
            method = _view if name == VIEW else _METHODS.get(name)
            if method is None:
                forged(f"there is no op {name!r} that builds a node without a function")
            operands = [None if number == NONE else self.tensor(number) for number in numbers]
            made = [method(self._ctx, *made, *operands, *args)]
        return made[0] if isinstance(made[0], Tensor) else forged(f"{calls} build no node")


def _view(ctx: Context, a: Tensor, ne: Any, nb: Any, offset: Any) -> Tensor:
    start = number_below(offset, MAX_EXTENT, "an offset")
    return ctx._window(VIEW, a, _four(ne, "extents"), _four(nb, "strides"), start)


def _check_place(tensor: Tensor, buffer: Buffer) -> None:
    is_view, offset = tensor.view_src is not None, tensor.offset
    nbytes = tensor.nbytes if is_view else buffer.alloc_size(tensor)
    if nbytes and offset + nbytes > buffer.size:  # an empty one may begin anywhere
        forged(f"bytes {offset} to {offset + nbytes} of a buffer of {buffer.size}, for {tensor.describe()}")
    if not is_view and offset % buffer.alignment:
        forged(f"offset {offset} of {tensor.describe()} is not a multiple of {buffer.alignment}")
    if buffer.prepares_tensors:
        buffer.init_tensor(tensor)


def _four(numbers: Any, what: str) -> Ne:
    if not (isinstance(numbers, list) and len(numbers) == 4):
        forged(f"{what} are {numbers!r}; there are four")
    a, b, c, d = (number_below(n, MAX_EXTENT, what) for n in numbers)
    return a, b, c, d


def number_below(number: Any, end: int, what: str) -> int:
    """Return a whole number from 0 to `end - 1`."""
    if type(number) is not int or not 0 <= number < end:
        forged(f"{what}: {number!r} is not a whole number from 0 to {end - 1}")
    return number
