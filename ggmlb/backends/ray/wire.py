"""What goes between driver and node: messages, and graphs as typed data, which the node checks.

A message, or an answer, is one run of bytes (each object costs Ray a tenth of a millisecond): JSON, and data.

A graph is a list of records, each after those it refers to, and the numbers of its nodes. A tensor is a
record of twelve fields: op, type, extents, strides (`None` if contiguous), numbers of the operands (-1 for an
absent one), number of the viewed tensor (-1 for none), byte offset in it, handle of the buffer (-1 if
unplaced), byte offset in the buffer, flags, parameters by name, and name.

Nothing in it is an address, a class or a function. Reading it creates tensors of this process, in buffers
that the node looks up by their handles.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from ggmlb.core import enums
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, TensorFlag
from ggmlb.core.errors import BackendError, one_line
from ggmlb.core.graph import Graph
from ggmlb.core.ops import SPECS
from ggmlb.core.tensor import Ne, Tensor
from ggmlb.interface import Buffer

Bytes = npt.NDArray[np.uint8]

Record = list[Any]
"""A tensor as data."""

NONE: Final = -1
"""Number of an absent tensor, and handle of no buffer."""

MAX_EXTENT: Final = 1 << 48
"""Least extent, stride and offset that no tensor can have."""

ENUMS: Final = {
    kind.__name__: kind
    for kind in vars(enums).values()
    if isinstance(kind, type) and issubclass(kind, IntEnum) and kind is not IntEnum
}
"""Enums whose members may be parameters."""

_FLAGS: Final = TensorFlag.INPUT | TensorFlag.OUTPUT | TensorFlag.PARAM | TensorFlag.LOSS | TensorFlag.COMPUTE


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
        src = [NONE if s is None else self._leaf(s) for s in node.src]
        flags = node.flags | (TensorFlag.OUTPUT if is_read_elsewhere else 0)
        params = {name: _plain(value) for name, value in node.params.items()}
        return self._append(node, node.op, src, flags, params)

    def _leaf(self, tensor: Tensor) -> int:
        """Return the number of an operand; one that is computed elsewhere is a leaf here."""
        known = self._numbers.get(tensor)
        return self._append(tensor, Op.NONE, [], tensor.flags, {}) if known is None else known

    def _append(self, tensor: Tensor, op: Op, src: list[int], flags: int, params: dict[str, Any]) -> int:
        viewed = NONE if tensor.view_src is None else self._leaf(tensor.view_src)
        buffer, name = tensor.buffer, "" if self._is_nameless else tensor.name
        handle = NONE if buffer is None or self._handle_of is None else self._handle_of(buffer)
        offset = 0 if handle == NONE else tensor.offset
        nb = None if tensor.layout.is_plain else list(tensor.nb)
        self._numbers[tensor] = number = len(self.records)
        self.records.append(
            [op.value, int(tensor.dtype), list(tensor.ne), nb, src, viewed, tensor.view_offs, handle, offset,
             flags & _FLAGS, params, name]
        )  # fmt: skip
        return number


def _plain(value: Any) -> Any:
    """Return a parameter as JSON has it; an enum's member is `{name of the enum: number}`."""
    if isinstance(value, IntEnum):
        return {type(value).__name__: int(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
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
        ForgedError: A field has another type or range than a driver writes, a tensor lies in no buffer or
            ends beyond its buffer, or the op has no such parameter.
    """
    if not (isinstance(data, list) and len(data) == 2 and all(isinstance(part, list) for part in data)):
        forged("a graph is a list of records and a list of numbers")
    tensors: list[Tensor] = []
    for record in data[0]:
        tensors.append(_read(record, tensors, buffer_of))
    nodes = [tensors[number_below(number, len(tensors), "a node's number")] for number in data[1]]
    return Graph(nodes, [t for t in tensors if t.op is Op.NONE])


def _read(record: Any, before: list[Tensor], buffer_of: Callable[[int], Buffer | None]) -> Tensor:
    if not (isinstance(record, list) and len(record) == 12):
        forged("a tensor is a record of twelve fields")
    op_name, type_number, extents, strides, src, viewed, view_offs, handle, offset, flags, params, name = (
        record
    )
    op = Op._value2member_map_.get(op_name) if isinstance(op_name, str) else None
    dtype = DType._value2member_map_.get(type_number) if type(type_number) is int else None
    if not isinstance(op, Op):
        forged(f"there is no op {op_name!r}")
    if not SPECS[op].of_ggml:
        forged(f"{op.value} calls a function, and none is taken from other machines")
    if not isinstance(dtype, DType):
        forged(f"there is no tensor type {type_number!r}")
    if not (isinstance(name, str) and isinstance(src, list) and isinstance(params, dict)):
        forged("a name is text, operands are a list, and parameters have names")
    ne = _four(extents, "extents")
    nb = None if strides is None else _four(strides, "strides")
    if ne[0] % dtype.block_size:
        forged(f"{ne[0]} elements of {dtype.name} are not a whole number of blocks")
    operands = tuple(None if n == NONE else before[number_below(n, len(before), "an operand")] for n in src)
    root = None if viewed == NONE else before[number_below(viewed, len(before), "a viewed tensor")]
    values = {key: _value(op, key, value) for key, value in params.items()}
    if missing := set(SPECS[op].params) - values.keys():
        forged(f"{op.value} lacks the parameters {sorted(missing)}")
    tensor = Tensor(dtype, ne, nb, op=op, src=operands, params=values, name=name[:200])
    tensor.flags = number_below(flags, _FLAGS + 1, "flags") & _FLAGS
    if root is not None:
        tensor.view_src, tensor.view_offs = root, number_below(view_offs, MAX_EXTENT, "an offset")
    buffer = buffer_of(handle)
    if buffer is not None:
        _place(tensor, buffer, number_below(offset, MAX_EXTENT, "an offset"))
    return tensor


def _place(tensor: Tensor, buffer: Buffer, offset: int) -> None:
    nbytes = buffer.alloc_size(tensor) if tensor.view_src is None else tensor.nbytes
    if nbytes == 0:
        offset = min(offset, buffer.size)  # an empty view may begin anywhere
    if offset + nbytes > buffer.size:
        forged(f"bytes {offset} to {offset + nbytes} of a buffer of {buffer.size}, for {tensor.describe()}")
    if tensor.view_src is None and offset % buffer.alignment:
        forged(f"offset {offset} of {tensor.describe()} is not a multiple of {buffer.alignment}")
    tensor.buffer, tensor.offset = buffer, offset
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


def _value(op: Op, name: str, value: Any) -> Any:
    """Return a parameter of an op."""
    spec = SPECS[op]
    if name not in spec.params and name not in spec.more_params:
        forged(f"{op.value} has no parameter {name!r}")
    if isinstance(value, list):
        if len(value) > 4 or not all(type(v) is int and abs(v) < MAX_EXTENT for v in value):
            forged(f"{op.value}: {name} is {value!r}; a list holds at most four whole numbers")
        return tuple(value)
    if isinstance(value, dict):
        kind_name, number = next(iter(value.items()), ("", 0))
        kind = ENUMS.get(kind_name)
        try:
            if kind is None or len(value) != 1 or type(number) is not int:
                raise ValueError(f"{value!r} is no member of an enum")
            return kind(number)
        except ValueError as error:
            forged(f"{op.value}: {name}: {one_line(error)}")
    if type(value) not in (bool, int, float):
        forged(f"{op.value}: {name} is {value!r}; a parameter is a number, or numbers")
    return value
