"""GgmlPlan: a graph as `ggml_cgraph`s, built once."""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb.backends.ggml import abi
from ggmlb.backends.ggml.buffer import GgmlBuffer
from ggmlb.backends.ggml.library import operands
from ggmlb.core.enums import NO_OPS, BufferUsage, Op, TensorFlag
from ggmlb.core.errors import BackendError
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import GraphPlan
from ggmlb.system import env

if TYPE_CHECKING:
    from ggmlb.backends.ggml.backend import GgmlBackend

GRAPH_ROOM = 1 << 12
"""Size of a context that holds one graph, besides the graph [bytes]."""


INDICES: Final[dict[Op, tuple[int, Callable[[Tensor], int]]]] = {
    Op.GET_ROWS: (1, lambda node: node.sources[0].ne[1]),
    Op.GET_ROWS_BACK: (1, lambda node: node.ne[1]),
    Op.SET_ROWS: (1, lambda node: node.ne[1]),
    Op.MUL_MAT_ID: (2, lambda node: node.sources[0].ne[2]),
    Op.ADD_ID: (2, lambda node: node.sources[1].ne[1]),
    Op.SSM_SCAN: (6, lambda node: node.sources[0].ne[3]),
}
"""The operand that holds indices, and their exclusive upper bound. ggml does not handle others: it aborts, or
accesses other memory."""


SORTS: Final = frozenset({Op.ARGSORT, Op.TOP_K, Op.ARGMAX})
"""Ops whose results are indices of elements of a row."""


class Indices(NamedTuple):
    """Row indices in host memory (unsigned), their exclusive upper bound, and the nodes that use them."""

    numbers: npt.NDArray[np.unsignedinteger]
    n: int
    nodes: list[Tensor]


class GgmlPlan(GraphPlan):
    """The nodes of a graph as `ggml_cgraph`s, with the tensors' addresses.

    Attributes:
        parts: The C graphs: one; on a CPU a further one wherever computed indices must be checked first.
    """

    def __init__(self, backend: GgmlBackend, graph: Graph) -> None:
        super().__init__(backend, graph)
        nodes = [node for node in graph.nodes if node.op is not Op.NONE]  # in ggml, these are leafs
        parts = [nodes] if backend.device.caps.async_ else _split(nodes)
        self.parts = [CGraph(backend, part, _needed(graph, part)) for part in parts]

    def release(self) -> None:
        """Free the `ggml_cgraph`s."""
        for part in self.parts:
            part.release()


class CGraph:
    """A `ggml_cgraph` of some nodes; operands that are not among them are its leafs.

    Attributes:
        c_graph: The `ggml_cgraph`.
    """

    def __init__(self, backend: GgmlBackend, nodes: list[Tensor], needed: set[Tensor]) -> None:
        device, library = backend.device, backend.device.library
        c = library.load()
        inside = set(nodes)
        leafs = dict.fromkeys(
            s for n in nodes for s in (*n.src, n.view_src) if s is not None and s not in inside
        )
        tensors = (*leafs, *nodes)
        memory = self._tensors = library.room(len(tensors))
        base, size = ctypes.addressof(memory), library.tensor_size
        where: dict[Tensor | None, int] = {t: base + i * size for i, t in enumerate(tensors)}
        where[None] = 0
        for i, t in enumerate(tensors):
            buffer, address = device.place(t)
            extra = t.buffer.extra(t) if isinstance(t.buffer, GgmlBuffer) else 0
            if t in inside:
                flags = t.flags | TensorFlag.COMPUTE | (TensorFlag.OUTPUT if t in needed else 0)
                links = (where[t.view_src], t.view_offs, operands(t, where))
                library.pack(memory, i, t, (buffer, address, extra or 0), links, flags)
            else:
                flags = t.flags & ~TensorFlag.PARAM  # ggml counts parameters among nodes
                library.pack(memory, i, t, (buffer, address, extra or 0), None, flags)
            if extra is None:
                c["backend_buffer_init_tensor"](buffer, where[t])
        n = len(tensors) + 8
        room = c["graph_overhead_custom"](n, False) + GRAPH_ROOM
        context = c["init"](abi.InitParams(room, None, True))
        self._end = weakref.finalize(self, c["free"], context)
        self._end.atexit = False
        self.c_graph: int = c["new_graph_custom"](context, n, False)
        append, c_graph = c["build_forward_expand"], self.c_graph
        for node in nodes:
            append(c_graph, where[node])
        assert c["graph_n_nodes"](c_graph) == len(nodes)
        self._indices = () if device.caps.async_ else _indices(nodes)

    def check_indices(self, name: str) -> None:
        """Check row indices (as of get_rows) that are in host memory; `name`: the backend's, for errors.

        Raises:
            BackendError: One is out of range; the message has the backend's `name` and each node.
        """
        wrong: list[str] = []
        for numbers, n, nodes in self._indices:
            bad = numbers[numbers >= n]
            if bad.size:
                number = bad.view(f"i{bad.itemsize}")[0]
                wrong += [
                    f"{node.describe()}: row number {number} for a tensor of {n} rows" for node in nodes
                ]
        if wrong:
            raise BackendError(f"{name} computed nothing: {'; '.join(wrong)}")

    def release(self) -> None:
        """Free the `ggml_cgraph`."""
        self._end()


def _split(nodes: list[Tensor]) -> list[list[Tensor]]:
    """Split before each node that reads computed indices, except a sort's, which are in range."""
    parts: list[list[Tensor]] = [[]]
    writes = Counter[Tensor]()
    for node in nodes:
        if node.op in INDICES and not node.is_empty:
            at, bound = INDICES[node.op]
            root = node.sources[at].view_src or node.sources[at]
            is_sorted = writes[root] == 1 and root.op in SORTS and root.sources[0].ne[0] <= bound(node)
            if writes[root] and not is_sorted:
                parts.append([])
                writes.clear()
        parts[-1].append(node)
        if node.op not in NO_OPS:
            writes[node.view_src or node] += 1
    return parts


def _indices(nodes: list[Tensor]) -> tuple[Indices, ...]:
    """Return the indices in host memory that nodes read, and that none of them writes."""
    written = {node.view_src or node for node in nodes if node.op not in NO_OPS}
    found: dict[tuple[Tensor, int], Indices] = {}
    for node in nodes:
        if node.op not in INDICES or node.is_empty:
            continue
        at, bound = INDICES[node.op]
        t, n = node.sources[at], bound(node)
        if t.buffer is None or not t.buffer.is_host or (t.view_src or t) in written:
            continue
        if (t, n) not in found:
            unsigned = np.dtype(f"u{t.dtype.type_size}")
            numbers = np.ndarray(t.ne[::-1], unsigned, t.buffer.base.data, t.offset, t.nb[::-1])
            found[t, n] = Indices(numbers, n, [])
        found[t, n].nodes.append(node)
    return tuple(found.values())


def _needed(graph: Graph, nodes: list[Tensor]) -> set[Tensor]:
    """Return the nodes to flag as outputs, because their results are read outside of these nodes.

    ggml's fusion omits a result that only one node reads, unless flagged. Here a result may also be read by
    another part of the plan or graph, or by the user if no scheduler placed it.
    """
    if not env.flag("GGMLB_FUSE", default=True):
        return {*nodes}
    reads = Counter(s for node in nodes for s in node.src if s is not None)
    everywhere = reads if graph.whole is None and len(nodes) == len(graph.nodes) else graph.use_counts()
    return {
        node
        for node in nodes
        if node.buffer is None
        or node.buffer.usage is not BufferUsage.COMPUTE
        or reads[node] != everywhere[node]
    }
