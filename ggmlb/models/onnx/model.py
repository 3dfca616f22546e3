"""OnnxModel: an ONNX file, computed on chosen devices."""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ggmlb import (
    Backend,
    BufferType,
    BufferUsage,
    Context,
    DType,
    Graph,
    Scheduler,
    Tensor,
    alloc_ctx_tensors,
    init_by_name,
)
from ggmlb.core.arguments import checked_methods
from ggmlb.core.errors import ArgumentError, Error, FreedError
from ggmlb.interface.memory_table import MemoryReport, MemoryTable
from ggmlb.models.devices import ModelOnDevices, device_names
from ggmlb.models.onnx.convert import CONVERTERS
from ggmlb.models.onnx.file import FAULTS, Array, Body, Input, OnnxFile, OnnxNode, not_supported
from ggmlb.models.onnx.folding import FOLDED, fold
from ggmlb.models.onnx.lowering import Lowering, NeedsValues, Operand, Shaped, extents
from ggmlb.models.onnx.patterns import recognise
from ggmlb.models.runs import Runs
from ggmlb.models.summary import Summary

if TYPE_CHECKING:
    import onnx

SMALL: Final = 1024
"""Limit of elements of an input whose values (a shape, axes) a graph is built for; of floats, 8."""

INPUT_TYPES: Final = ("float32", "float16", "int64", "int32", "bool")
"""Types of inputs that are computed with."""

Scope = dict[str, Operand]


@dataclass
class OnnxGraph:
    """A graph for inputs of one set of sizes.

    Attributes:
        graph: The graph.
        inputs: Leafs by name and number of rows; see `Lowering`.
        outputs: By name: a tensor, its ONNX shape and its type; or a constant.
    """

    graph: Graph
    inputs: dict[tuple[str, int], Tensor]
    outputs: dict[str, tuple[Tensor, tuple[int, ...], np.dtype[Any]] | Array]


@checked_methods
class OnnxModel(ModelOnDevices):
    """An ONNX model on one or more devices; a context manager, which frees them on exit.

    A graph is built and planned at the first call with inputs of a set of sizes, and kept. Floats are
    computed as float32, integers exactly up to 2^24. On devices in host memory, weights stay in the file's
    memory, but for matrices of products, which go where the device multiplies them fastest.

    Args:
        model: The file's path, or a parsed `onnx.ModelProto`.
        devices: Names, highest priority first, as `["OpenCL0", "CPU"]`; or the share of the weights on each,
            as `{"OpenCL0": 0.5, "CPU": 0.5}`: the first half of the layers runs on the first device. By
            default the first GPU, accelerators in the CPU's memory (LLVM), and the CPU.
        weights: Type in which matrices are stored, as `"q8_0"` or `"f16"`; f32 by default.

    Attributes:
        inputs: Types and shapes of the inputs, by name; `None` is an extent that each call chooses.
        outputs: Names of the results.

    Raises:
        ModelError: The file is missing or not a valid ONNX model.
        UnsupportedOpError: The model has an op that is not supported; the message names them.
        RegistryError: No device has one of the names.
        ArgumentError: A device is named twice, or shares are not positive.
        DTypeError: No such type, or one that cannot be written.
    """

    def __init__(
        self,
        model: str | Path | onnx.ModelProto,
        devices: Sequence[str] | Mapping[str, float] | None = None,
        weights: DType | str | None = None,
    ) -> None:
        self._file = file = OnnxFile(model)
        self._body = recognise(_folded(file.body, file))
        self.inputs: dict[str, Input] = file.inputs
        self.outputs = tuple(file.body.outputs)
        _check_ops(self._body)
        matrix_type = DType.F32 if weights is None else DType.parse(weights)
        shares = dict(devices) if isinstance(devices, Mapping) else {}
        if any(not math.isfinite(share) or share <= 0 for share in shares.values()):
            raise ArgumentError(f"devices: the shares {shares} must be positive")
        names = device_names(list(devices) if devices is not None else None)
        if "CPU" not in names:
            names.append("CPU")
        with ExitStack() as resources:
            self._backends = tuple(resources.enter_context(init_by_name(name)) for name in names)
            self._runs: Runs[Any, OnnxGraph] = Runs(self._backends)
            resources.callback(self._runs.free)
            self._resources = resources.pop_all()
        self._store = _Weights(self._backends, list(shares.values()), matrix_type, file)
        self._resources.callback(self._store.free)
        self._by_value: set[str] = set()
        self._lock = RLock()

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler of the last call, with its splits and placement; `None` before the first."""
        return None if self._runs.last is None else self._runs.scheduler

    def summary(self) -> Summary:
        """Return the model's sizes, its inputs and results, and each device's memory.

        Raises:
            FreedError: The model was closed.
        """
        self._check("summary")
        table = MemoryTable({"weights": self._store.spaces})
        memory = MemoryReport(table, table) if self.scheduler is None else self.scheduler.memory_report()
        ops = sorted({node.op for node in self._body.nodes})
        facts = {
            "graph": f"{len(self._body.nodes)} of {self._file.n_nodes} nodes, opset {self._file.opset}",
            "ops": ", ".join(ops),
            "inputs": "; ".join(_described(name, told) for name, told in self.inputs.items()),
            "outputs": ", ".join(self.outputs),
        }
        return Summary(f"OnnxModel {self._file.path}", facts, {}, memory)

    def __repr__(self) -> str:
        return f"<OnnxModel {self._file.path}: {len(self._body.nodes)} nodes>"

    def _check(self, call: str) -> None:
        if self.is_freed:
            raise FreedError(f"{call}: this model was closed")

    def run(self, inputs: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        """Compute the model.

        Args:
            inputs: An array for each input; their sizes choose the graph.

        Returns:
            The results by name, new arrays.

        Raises:
            ArgumentError: An input is missing or unknown, or has another type or shape than the file says.
            UnsupportedOpError: An op is not supported with these sizes.
            AllocationError: A device lacks room.
            FreedError: The model was closed.
        """
        with self._lock:
            self._check("run")
            arrays = self._checked(inputs)
            self._file.check_unchanged()
            built = self._get(arrays)
            for (name, n_rows), leaf in built.inputs.items():
                leaf.set_array(_stored(name, arrays[name], n_rows).reshape(leaf.ne[::-1]))
            if built.graph.nodes:
                self._runs.start(built)
            results = {}
            for name, found in built.outputs.items():
                if isinstance(found, np.ndarray):
                    results[name] = found.copy()
                else:
                    tensor, shape, dtype = found
                    flat = self._runs.read(tensor)[0] if math.prod(shape) else np.empty(0, np.float32)
                    results[name] = np.array(flat.reshape(shape).astype(dtype))
        return results

    def _checked(self, inputs: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        if inputs.keys() != self.inputs.keys():
            raise ArgumentError(f"run: inputs are {sorted(inputs)}; give {sorted(self.inputs)}")
        arrays = {}
        for name, told in self.inputs.items():
            array = np.asarray(inputs[name])
            fits = told.shape is None or (
                len(told.shape) == array.ndim
                and all(m is None or m == n for m, n in zip(told.shape, array.shape, strict=True))
            )
            if array.dtype != told.dtype or not fits:
                raise ArgumentError(
                    f"run: input {name!r} is {array.dtype.name} of shape {array.shape}; the model takes "
                    f"{_described(name, told)}"
                )
            arrays[name] = array
        return arrays

    def _get(self, arrays: dict[str, Array]) -> OnnxGraph:
        """Return the graph for inputs, with the values of those that determine shapes as constants."""
        while True:
            try:
                key = tuple(
                    (a.shape, np.ascontiguousarray(a).tobytes() if name in self._by_value else b"")
                    for name, a in arrays.items()
                )
                return self._runs.get(key, lambda: self._build(arrays))
            except NeedsValues as needed:
                what = "a computed value determines" if needed.names <= self._by_value else ""
                for name in needed.names - self._by_value:
                    given = arrays[name]
                    if given.size > (8 if given.dtype.kind == "f" else SMALL):
                        what = f"the values of input {name!r} determine"
                if what:
                    raise not_supported(needed.op, f"{what} a shape or parameter") from None
                self._by_value |= needed.names

    def _build(self, arrays: dict[str, Array]) -> OnnxGraph:
        lowering = Lowering(self._store.leaf)
        scope: Scope = dict(self._body.constants)
        for name, array in arrays.items():
            if name in self._by_value:
                scope[name] = array
                continue
            if array.dtype.name not in INPUT_TYPES:
                raise not_supported("input", f"{name!r} is {array.dtype.name}")
            leaf = lowering.input(name, array.shape)
            scope[name] = Shaped(leaf, array.shape, array.dtype, frozenset([name]), origin=name)
        build_body(lowering, self._body, scope)
        outputs: dict[str, Any] = {}
        results = []
        for name in self.outputs:
            found = scope[name]
            if isinstance(found, np.ndarray):
                outputs[name] = found
                continue
            tensor = lowering.result(found)
            results.append(tensor)
            outputs[name] = tensor, found.shape, found.dtype
        graph = Graph()
        for tensor in results:
            graph.build_forward_expand(tensor)
        used = {id(t) for t in graph.leafs}
        built = OnnxGraph(graph, {at: t for at, t in lowering.inputs.items() if id(t) in used}, outputs)
        self._store.place(built)
        return built


def _described(name: str, told: Input) -> str:
    sizes = ", ".join("?" if n is None else str(n) for n in told.shape or ())
    return f"{name}: {told.dtype.name} " + ("any shape" if told.shape is None else f"[{sizes}]")


def _stored(name: str, array: Array, n_rows: int) -> Array:
    """Return an input as f32, or (`n_rows`) as indices of rows, counted from the first."""
    if not n_rows:
        if array.dtype.kind == "i" and array.size and max(int(array.max()), -int(array.min())) > 1 << 24:
            raise ArgumentError(f"run: input {name!r} has integers beyond 2^24, where float32 is not exact")
        return np.ascontiguousarray(array, np.float32)
    if array.size and not -n_rows <= array.min() <= array.max() < n_rows:
        raise ArgumentError(
            f"run: input {name!r} has indices from {array.min()} to {array.max()} of {n_rows} rows"
        )
    return np.where(array < 0, array + n_rows, array).astype(np.int32)


def _check_ops(body: Body) -> None:
    """Raise an UnsupportedOpError that names all ops of a graph that have no converter."""
    known = CONVERTERS.keys() | FOLDED | {"If"}
    missing = {node.op: node.label for node in reversed(body.nodes) if node.op not in known}
    if missing:
        places = ", ".join(sorted(missing.values()))
        raise not_supported(", ".join(sorted(missing)), f"ggmlb has no converter for it (nodes {places})")


def _folded(body: Body, file: OnnxFile) -> Body:
    """Return a graph without the nodes of constants alone, which are computed once."""
    constants, nodes = dict(body.constants), []
    for node in body.nodes:
        if node.op in FOLDED and all(name in constants or not name for name in node.inputs):
            values = fold(node, [constants.get(name) for name in node.inputs])
            constants.update(zip(node.outputs, map(file.keep, values), strict=False))
        else:
            nodes.append(node)
    return body._replace(constants=constants, nodes=nodes)


def build_body(lowering: Lowering, body: Body, scope: Scope) -> None:
    """Convert a graph's nodes, and add their results to the values by name, `scope`."""
    for node in body.nodes:
        operands = [scope[name] if name else None for name in node.inputs]
        while operands and operands[-1] is None:
            operands.pop()
        lowering.op = node.op
        try:
            results = _results(lowering, node, operands, scope)
        except Error as error:
            if node.label not in error.message:
                error.args = (f"{error.message} (node {node.label})",)
            raise
        except FAULTS as error:
            raise not_supported(
                node.op, f"operands or attributes that do not fit (node {node.label}): {error}"
            ) from error
        sources = frozenset[str]().union(*(x.sources for x in operands if isinstance(x, Shaped)))
        for name, found in zip(node.outputs, results, strict=False):
            if isinstance(found, Shaped):
                found = replace(found, sources=found.sources | sources)
            scope[name] = found


def _results(
    lowering: Lowering, node: OnnxNode, operands: list[Operand | None], scope: Scope
) -> Sequence[Operand]:
    if node.op == "If":
        return _branch(lowering, node, operands[0], scope)
    values = [x for x in operands if isinstance(x, Shaped)]
    if not values and node.op in FOLDED:
        arrays: list[Any] = operands
        return fold(node, arrays)
    convert = CONVERTERS.get(node.op)
    if convert is None:
        if node.op in ("ConstantOfShape", "Range"):
            raise NeedsValues(node.op, frozenset[str]().union(*(x.sources for x in values)))
        raise not_supported(node.op, "ggmlb has no converter for it")
    types = {x.dtype.name for x in values} - set(INPUT_TYPES)
    if types:
        raise not_supported(node.op, f"operands of type {', '.join(sorted(types))}")
    results = convert(lowering, node, *operands)
    return results if isinstance(results, tuple) else (results,)


def _branch(lowering: Lowering, node: OnnxNode, condition: Operand | None, scope: Scope) -> Sequence[Operand]:
    """Build the branch of an If that a condition, known when the graph is built, chooses."""
    lowering.op = "If"
    chosen = bool(lowering.const(condition).reshape(()))
    body = node.get("then_branch" if chosen else "else_branch")
    if not isinstance(body, Body):
        raise not_supported("If", "a branch is missing")
    inner: Scope = {**scope, **body.constants}
    build_body(lowering, body, inner)
    return [inner[name] for name in body.outputs]


class _Weights:
    """Leafs of constants, those of the file made once, on the device of their turn."""

    def __init__(
        self, backends: Sequence[Backend], shares: list[float], matrix: DType, file: OnnxFile
    ) -> None:
        self._backends, self._matrix = backends, matrix
        self._leafs: dict[tuple[int, str, tuple[int, ...], tuple[int, ...]], tuple[Array, Tensor]] = {}
        self._waiting: list[tuple[bool, Backend | BufferType, Tensor, Array]] = []
        self._buffers = ExitStack()
        self._places = file.places()
        total = sum(end - start for start, end in self._places)
        self._edges = (np.cumsum(shares or [1.0]) / sum(shares or [1.0]) * total).tolist()
        self._used = 0
        self.spaces: list[Any] = []

    def leaf(self, array: Array, form: str) -> Tensor:
        """Return the leaf of a constant; see `Lowering`."""
        where = array.__array_interface__["data"][0]
        at = bisect_right(self._places, (where, 1 << 63)) - 1
        if at < 0 or where >= self._places[at][1]:
            return self._made(array, form, False)  # computed for one graph
        key = (where, form, array.shape, array.strides)
        found = self._leafs.get(key)
        if found is None:
            found = self._leafs[key] = (array, self._made(array, form, True))
        return found[1]

    def _made(self, array: Array, form: str, is_weight: bool) -> Tensor:
        dtype = DType.I32 if form == "i32" else DType.F32
        if form in ("matrix", "rows") and array.ndim == 2 and not array.shape[1] % self._matrix.block_size:
            dtype = self._matrix
        home = next((i for i, edge in enumerate(self._edges) if self._used < edge), len(self._edges) - 1)
        self._used += array.nbytes
        values = np.ascontiguousarray(array, np.int32 if dtype is DType.I32 else np.float32)
        device, leaf = self._backends[home].device, Context().new_tensor(dtype, extents(array.shape))
        where: Backend | BufferType = self._backends[home]
        if form == "matrix":
            fast = (b for b in device.extra_bufts if b.suits(leaf))
            grown = (b for b in fast if dtype is DType.F32 or b.alloc_size(leaf) <= leaf.nbytes)
            where = next(grown, where)
        if where is self._backends[home] and device.buffer_type.is_host and values.size:
            leaf = Context().from_array(values.reshape(leaf.ne[::-1]), dtype)
            leaf.placed("weights").usage = BufferUsage.WEIGHTS
        else:
            self._waiting.append((is_weight, where, leaf, values))
        return leaf

    def place(self, built: OnnxGraph) -> None:
        """Allocate and fill the leafs made since the last call; constants of `built` are freed with it."""
        passing = ExitStack()
        weakref.finalize(built, passing.close)
        while self._waiting:
            group = self._waiting[0][:2]
            mine = [(leaf, values) for *other, leaf, values in self._waiting if (*other,) == group]
            buffer = alloc_ctx_tensors([leaf for leaf, _ in mine], group[1])
            (self._buffers if group[0] else passing).enter_context(buffer)
            buffer.usage = BufferUsage.WEIGHTS
            if group[0]:
                self.spaces += [(inner.buft, inner.size) for inner in buffer.allocations]
            for leaf, values in mine:
                if values.size:
                    leaf.set_array(values.reshape(leaf.ne[::-1]))
            self._waiting = [entry for entry in self._waiting if entry[:2] != group]

    def free(self) -> None:
        """Free the memory of devices."""
        self._buffers.close()
