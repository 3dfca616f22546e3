"""OnnxFile: an ONNX file, read and checked before a graph is built from it."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from ggmlb.core.errors import Error, MissingModelError, ModelError, UnsupportedOpError
from ggmlb.models.mapped_file import MappedFile

Array = npt.NDArray[Any]

DTYPES: dict[int, np.dtype[Any]] = {
    kind: helper.tensor_dtype_to_np_dtype(kind)
    for kind in (
        TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BOOL,
        TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
        TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
    )
}  # fmt: skip
"""NumPy's types of ONNX's; constants may have all of them."""


FAULTS: Final = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError)
"""Errors of Python, NumPy and ONNX's reference for values that do not fit."""


def not_supported(op: str, reason: str) -> UnsupportedOpError:
    """Return (not raise) the error of an op that is not supported, in this form or at all."""
    return UnsupportedOpError(f"ONNX op {op} is not supported here: {reason}", reasons={op: reason}, op=op)


class Input(NamedTuple):
    """A declared input.

    Attributes:
        dtype: NumPy's type.
        shape: Extents; `None` where the file fixes none. `None` as a whole: any rank.
    """

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...] | None


@dataclass
class OnnxNode:
    """A node: its op, the names of its operands and results, and its attributes as Python values.

    Attributes:
        op: ONNX op; with its domain if that is not ONNX's own.
        label: The op and the node's name, for messages.
        version: Version of ONNX's operator set.
    """

    op: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    attrs: dict[str, Any]
    label: str
    version: int

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or its default."""
        return self.attrs.get(name, default)


class Body(NamedTuple):
    """A graph or subgraph.

    Attributes:
        constants: Values of initializers by name.
        nodes: In topological order.
        inputs: Names of the graph's inputs.
        outputs: Names of its outputs.
    """

    constants: dict[str, Array]
    nodes: list[OnnxNode]
    inputs: list[str]
    outputs: list[str]


class OnnxFile:
    """An ONNX file: its graph, with constants as arrays, in the file's own memory where possible.

    Attributes:
        path: The file; a model that was given as a message has `<model>`.
        inputs: Declared inputs without initializers, by name.
        body: The main graph.
        opset: Version of ONNX's operator set.
        n_nodes: Nodes, those of subgraphs included.

    Args:
        model: A path, or a parsed model.

    Raises:
        ModelError: The file is missing or not an ONNX model, or breaks the format's rules.
        UnsupportedOpError: It has types of data that are not supported.
    """

    def __init__(self, model: str | Path | onnx.ModelProto) -> None:
        self._mapped: dict[Path, MappedFile] = {}
        self._arrays: list[Array] = []
        self.n_nodes = 0
        if isinstance(model, onnx.ModelProto):
            self.path, self._folder, proto = Path("<model>"), None, model
        else:
            self.path = Path(model)
            self._folder = self.path.resolve().parent
            proto = self._parsed()
        try:
            self._read(proto)
        except Error:
            raise
        except FAULTS as error:
            raise self._bad(f"is not valid: {error}") from error

    def _bad(self, why: str) -> ModelError:
        return ModelError(f"{self.path} {why}; copy, download or export it again")

    def _parsed(self) -> onnx.ModelProto:
        if not self.path.is_file():
            raise MissingModelError(f"there is no file {self.path}; give the path of an ONNX model")
        try:
            return onnx.load_model_from_string(self.path.read_bytes())
        except Exception as error:  # DecodeError of protobuf, whose module is not ours to name
            raise self._bad(f"is not an ONNX file: {error}") from None

    def _read(self, proto: onnx.ModelProto) -> None:
        versions = {entry.domain: entry.version for entry in proto.opset_import}
        self.opset = int(versions.get("", versions.get("ai.onnx", 0)))
        if not proto.HasField("graph") or not proto.graph.output:
            raise self._bad("has no graph with an output")
        if not self.opset and versions:
            raise not_supported("model", f"it has operator sets of {', '.join(versions)}, and not ONNX's own")
        if not 1 <= self.opset <= onnx.defs.onnx_opset_version():
            raise self._bad(
                f"has operator set {self.opset}; 1 to {onnx.defs.onnx_opset_version()} can be read"
            )
        self.body = self.read_body(proto.graph, frozenset())
        self.inputs = {
            entry.name: self._input(entry)
            for entry in proto.graph.input
            if entry.name not in self.body.constants
        }

    def _input(self, entry: onnx.ValueInfoProto) -> Input:
        if not entry.type.HasField("tensor_type"):
            kind = entry.type.WhichOneof("value") or "no type"
            raise not_supported("input", f"{entry.name!r} is a {kind}, not a tensor")
        told = entry.type.tensor_type
        if told.elem_type not in DTYPES:
            raise not_supported("input", f"{entry.name!r} has ONNX's type {told.elem_type}")
        shape = None
        if told.HasField("shape"):
            extents = [d.dim_value if d.HasField("dim_value") else -1 for d in told.shape.dim]
            shape = tuple(None if n < 0 else n for n in extents)
        return Input(DTYPES[told.elem_type], shape)

    # -- graphs --------------------------------------------------------------------------------

    def read_body(self, graph: onnx.GraphProto, outer: Set[str]) -> Body:
        """Read a graph whose nodes may also use the names `outer`."""
        if graph.sparse_initializer:
            raise not_supported("sparse_initializer", "weights must be dense")
        constants = {tensor.name: self.array(tensor) for tensor in graph.initializer}
        inputs = [entry.name for entry in graph.input]
        if len(constants) < len(graph.initializer) or len(set(inputs)) < len(inputs):
            raise self._bad("has two inputs or initializers of one name")
        own = {*constants, *inputs}
        nodes = []
        for proto in graph.node:
            for name in filter(None, proto.input):
                if name not in own and name not in outer:
                    raise self._bad(
                        f"has the node {_label(proto)} whose input {name!r} no node before it computes (a "
                        "name that does not exist, or a cycle)"
                    )
            nodes.append(self._node(proto, own | outer))
            for name in filter(None, proto.output):
                if name in own:
                    raise self._bad(f"computes {name!r} twice")
                own.add(name)
        self.n_nodes += len(nodes)
        outputs = [entry.name for entry in graph.output]
        for name in outputs:
            if name not in own and name not in outer:
                raise self._bad(f"has the output {name!r}, which no node computes")
        return Body(constants, nodes, inputs, outputs)

    def _node(self, proto: onnx.NodeProto, known: Set[str]) -> OnnxNode:
        names = [proto.op_type, proto.domain, *proto.input, *proto.output, *(a.name for a in proto.attribute)]
        if not all(isinstance(name, str) for name in names):  # protobuf gives bytes for invalid UTF-8
            raise self._bad("has a node with a name that is not UTF-8")
        op = proto.op_type if proto.domain in ("", "ai.onnx") else f"{proto.domain}.{proto.op_type}"
        attrs = {a.name: self._attribute(helper.get_attribute_value(a), known) for a in proto.attribute}
        return OnnxNode(op, [*proto.input], [*proto.output], attrs, _label(proto), self.opset)

    def _attribute(self, value: Any, known: Set[str]) -> Any:
        if isinstance(value, TensorProto):
            return self.array(value)
        if isinstance(value, onnx.GraphProto):
            return self.read_body(value, known)
        if isinstance(value, list):
            return [self._attribute(each, known) for each in value]
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

    # -- constants -----------------------------------------------------------------------------

    def array(self, tensor: TensorProto) -> Array:
        """Return a constant as an array: a view of the message or of the mapped file, where it is raw."""
        return self.keep(self._values(tensor))

    def keep(self, array: Array) -> Array:
        """Count an array among the model's constants; return it."""
        self._arrays.append(array)
        return array

    def _values(self, tensor: TensorProto) -> Array:
        name = tensor.name or "a constant"
        dtype = DTYPES.get(tensor.data_type)
        if dtype is None:
            raise not_supported("constant", f"{name!r} has ONNX's type {tensor.data_type}")
        shape = tuple(tensor.dims)
        if min(shape, default=0) < 0:
            raise self._bad(f"has {name!r} with a negative extent, {list(shape)}")
        if tensor.data_location != TensorProto.EXTERNAL:
            return np.asarray(numpy_helper.to_array(tensor))
        nbytes = math.prod(shape) * dtype.itemsize
        data = self._external(tensor, nbytes)
        if len(data) != nbytes:
            raise self._bad(f"has {name!r} of {list(shape)} with {len(data)} bytes, not {nbytes}")
        return np.frombuffer(data, dtype.newbyteorder("<")).reshape(shape)

    def _external(self, tensor: TensorProto, nbytes: int) -> Array:
        told = {entry.key: entry.value for entry in tensor.external_data}
        location, offset = told.get("location", ""), int(told.get("offset", "0"))
        length = int(told.get("length", nbytes))
        if self._folder is None:
            raise self._bad(f"keeps {tensor.name!r} in the file {location!r}; give the model's path")
        path = (self._folder / location).resolve()
        if not location or self._folder not in path.parents:
            raise self._bad(f"keeps {tensor.name!r} in {location!r}, outside the model's folder")
        file = self._mapped.get(path)
        if file is None:
            file = self._mapped[path] = MappedFile(path)
        if offset < 0 or length < 0 or offset + length > file.data.size:
            raise self._bad(
                f"keeps {tensor.name!r} at byte {offset} to {offset + length} of {location!r}, which has "
                f"{file.data.size}"
            )
        return file.data[offset : offset + length]

    def check_unchanged(self) -> None:
        """Raise a ModelError if a mapped file of weights was changed."""
        for file in self._mapped.values():
            file.check_unchanged()

    def places(self) -> list[tuple[int, int]]:
        """Return the memory of all constants in the file's own memory, as address and end, sorted."""
        starts = ((a.__array_interface__["data"][0], a.nbytes) for a in self._arrays if a.size)
        return sorted((start, start + nbytes) for start, nbytes in starts)


def _label(proto: onnx.NodeProto) -> str:
    return f"{proto.op_type} {proto.name!r}" if proto.name else f"{proto.op_type} of {list(proto.output)}"
