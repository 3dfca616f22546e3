"""Copies of whole graphs on other devices, and the comparison of two backends node by node."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ggmlb.core.arguments import answer, checked
from ggmlb.core.context import Context
from ggmlb.core.enums import VIEW_OPS, Op, Status
from ggmlb.core.errors import ArgumentError
from ggmlb.core.graph import Graph
from ggmlb.core.lifetime import Freeable
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, tensor_copy
from ggmlb.runtime.alloc import alloc_ctx_tensors
from ggmlb.runtime.compile.read import IndexedGraph


class GraphCopy(Freeable):
    """A clone of a graph with its data in memory of another backend (ggml_backend_graph_copy).

    A context manager, which frees the memory on exit.

    Attributes:
        graph: The clone; its nodes and leafs are in the order of the original's.
        ctx: The context of its tensors.
        buffer: The buffer of their data.
    """

    def __init__(self, backend: Backend, graph: Graph) -> None:
        self._clones = _clones(graph)
        self.ctx = Context()
        self.ctx.tensors += self._clones.values()
        self.graph = Graph((self._clones[t] for t in graph.nodes), (self._clones[t] for t in graph.leafs))
        self.buffer = alloc_ctx_tensors(self.ctx, backend)
        try:
            for tensor, clone in self._clones.items():
                if clone.view_src is None:
                    tensor_copy(tensor, clone)
        except BaseException:
            self.free()
            raise

    def __getitem__(self, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor of the original graph."""
        return self._clones[tensor]

    def free(self) -> None:
        """Free the copied graph's memory (ggml_backend_graph_copy_free).

        Raises:
            FreedError: It was freed before.
        """
        self.is_freed = True
        self.buffer.free()


def _clones(graph: Graph) -> dict[Tensor, Tensor]:
    """Clone the tensors of a graph without data; nodes of other parts of the whole graph become leafs."""
    clones = {tensor: tensor.reading((), None) for tensor in IndexedGraph(graph).tensors}
    for tensor, clone in clones.items():
        clone.op, clone.params, clone.buffer = Op.NONE, dict(tensor.params), None
        clone.view_src = None if tensor.view_src is None else clones[tensor.view_src]
    for node in graph.nodes:
        clones[node].op = node.op
        clones[node].src = tuple(None if s is None else clones[s] for s in node.src)
    return clones


@checked
def graph_copy(backend: Backend, graph: Graph) -> GraphCopy:
    """Clone an allocated graph, with its data, in memory of `backend`; no two tensors share bytes.

    Raises:
        AllocationError: The backend's device lacks room.
        NotAllocatedError: A tensor of the graph is in no buffer.

    Source: ggml_backend_graph_copy.
    """
    return GraphCopy(backend, graph)


@checked
def compare_graph_backend(
    backend1: Backend,
    backend2: Backend,
    graph: Graph,
    callback: Callable[[int, Tensor, Tensor], bool],
    test_nodes: Collection[Tensor] | None = None,
) -> bool:
    """Compute a graph on two backends; call back with each node (or each of `test_nodes`) and its copy.

    Args:
        backend1: The backend of the graph's memory.
        backend2: The backend that computes a copy.
        graph: Computed node by node; each node reads what its own backend computed before.
        callback: Called with the node's index, the node, and its copy. Without `test_nodes`, `False` ends
            the comparison.
        test_nodes: Compute both graphs whole, and call back for these nodes only.

    Returns:
        Whether all nodes were compared: `False` if the callback or an abort callback ended it.

    Raises:
        ArgumentError: One of `test_nodes` is not in the graph.
        AllocationError: The second backend lacks room for the copy.
        NotAllocatedError: A tensor of the graph is in no buffer.

    Source: ggml_backend_compare_graph_backend.
    """
    for node in test_nodes or ():
        if node not in graph.nodes:
            raise ArgumentError(
                f"compare_graph_backend: {node.describe()} of test_nodes is no node of the graph"
            )
    with graph_copy(backend2, graph) as copy:
        pairs = list(zip(graph.nodes, copy.graph.nodes, strict=True))
        if test_nodes:
            if not _computed(backend1, graph) or not _computed(backend2, copy.graph):
                return False
            for i, (node, clone) in enumerate(pairs):
                if node in test_nodes:
                    callback(i, node, clone)
            return True
        for i, (node, clone) in enumerate(pairs):
            if node.op in VIEW_OPS:
                continue
            if not _computed(backend1, graph.view(i, i + 1)) or not _computed(
                backend2, copy.graph.view(i, i + 1)
            ):
                return False
            if not answer("the callback of compare_graph_backend", callback(i, node, clone)):
                return False
    return True


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of a node's values on two backends.

    Attributes:
        index: The node's index in the graph.
        node: Its name; may be empty.
        op: Its op, type and extents.
        nmse: Mean squared difference over the mean square of the first backend's values; infinite where
            only one of them is zero, infinite or NaN.
        max_error: The largest difference of two elements.
    """

    index: int
    node: str
    op: str
    nmse: float
    max_error: float


@checked
def differences(backend1: Backend, backend2: Backend, graph: Graph) -> list[Difference]:
    """Return the error of each computed node on `backend2`, in order, against its value on `backend1`.

    Each backend continues with its own values, so that a difference also shows in later nodes.

    Raises:
        Error: As `compare_graph_backend`.
    """
    found: list[Difference] = []

    def note(index: int, node: Tensor, clone: Tensor) -> bool:
        nmse, largest = errors(node.to_numpy(), clone.to_numpy())
        op = node.describe().split(" (")[0]
        found.append(Difference(index, node.name, op, nmse, largest))
        return True

    compare_graph_backend(backend1, backend2, graph, note)
    return found


def errors(reference: npt.NDArray[Any], values: npt.NDArray[Any]) -> tuple[float, float]:
    """Return the normalised mean squared error (NMSE) and the largest absolute error of values.

    They are infinite where only one of two elements is infinite or NaN, or only the reference is all 0.
    """
    a, b = reference.astype(np.float64).reshape(-1), values.astype(np.float64).reshape(-1)
    finite = np.isfinite(a)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if not same[~finite].all() or not np.isfinite(b[finite]).all():
        return math.inf, math.inf
    a, b = a[finite], b[finite]
    error = np.abs(a - b)
    largest = float(error.max(initial=0))
    if not largest:
        return 0.0, 0.0
    scale = float(np.mean(a * a))
    return (float(np.mean(error * error)) / scale if scale else math.inf), largest


class _Measured(Protocol):
    @property
    def nmse(self) -> float: ...


AnyDifference = TypeVar("AnyDifference", bound=_Measured)


def first_above(found: Iterable[AnyDifference], limit: float) -> AnyDifference | None:
    """Return the first of the differences `found` whose NMSE is NaN or above `limit`, or `None`."""
    return next((d for d in found if not d.nmse <= limit), None)


def _computed(backend: Backend, graph: Graph) -> bool:
    return backend.graph_compute(graph) is Status.SUCCESS
