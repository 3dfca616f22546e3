"""Graphs of a compiled ggml, read as ggmlb's: tensors, operands, parameters, and their places in memory."""

from __future__ import annotations

import ctypes
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from ggmlb.backends.ggml.library import N_SRC, GgmlLibrary
from ggmlb.backends.ggml.params import decode
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import NO_OPS, GluOp, Op, TensorFlag, UnaryOp
from ggmlb.core.errors import UnsupportedOpError
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Ne, Tensor
from ggmlb.interface import Backend, Buffer, Device
from ggmlb.interface.registry import host_device
from ggmlb.system import log

Place = Callable[["CTensor", Tensor], None]
"""Sets `buffer` and `offset` of a tensor from the fields of the C tensor; leaves those not ours unplaced."""

AT_LEAST: Final[dict[Op, int]] = {
    Op.DSV4_HC_POST: 4, Op.FLASH_ATTN_EXT: 5, Op.GLU: 2, Op.ROPE: 3, Op.ROPE_BACK: 3, Op.SOFT_MAX: 3,
}  # fmt: skip
"""Operands that ggmlb lists even if absent, as `None`."""

MOST_ANSWERS: Final = 1 << 14
MOST_NODES: Final = 1 << 16
MOST_ALIKE: Final = 32
"""Sizes of the caches: answers to `supports_op`, nodes of all graphs, graphs at the same addresses."""

NEAR: Final = 4096
"""Tensors at most so far apart are compared as one range: no page lies between them [bytes]."""


class CTensor:
    """The fields of a `ggml_tensor`.

    Attributes:
        address: Of the C tensor.
        raw: Its bytes.
        src: Addresses of the operands, up to the last one that is there.
    """

    __slots__ = (
        "address", "buffer", "data", "flags", "name", "nb", "ne", "op", "params", "raw", "src", "type",
        "view_offs", "view_src",
    )  # fmt: skip

    def __init__(self, library: GgmlLibrary, address: int) -> None:
        self.address = address
        self.raw = ctypes.string_at(address, library.tensor_size)
        fields = library.unpack(self.raw)
        self.type, self.buffer = fields[:2]
        self.ne: Ne = fields[2:6]
        self.nb: Ne = fields[6:10]
        self.op, self.params, self.flags = fields[10:13]
        n = 13 + N_SRC
        while n > 13 and not fields[n - 1]:
            n -= 1
        self.src: tuple[int, ...] = fields[13:n]
        self.view_src, self.view_offs, self.data, self.name, _ = fields[13 + N_SRC :]

    @property
    def title(self) -> str:
        """Its name."""
        return str(self.name.partition(b"\0")[0], errors="replace")


class Reader:
    """Reads the tensors and graphs of a library for one device.

    Args:
        library: The library.
        device: The device.
        place: Places tensors.
    """

    def __init__(self, library: GgmlLibrary, device: Device, place: Place) -> None:
        self.library = library
        self._device = device
        self._place = place
        facts, layout = library.facts, library.facts["tensor"]
        self.dtypes = {number: dtype for dtype, number in library.types.items()}
        self._ops = {number: op for op, number in library.ops.items()}
        self._no_ops = frozenset(number for op, number in library.ops.items() if op in NO_OPS)
        self._unary = _members(UnaryOp, facts["unary_ops"])
        self._glu = _members(GluOp, facts["glu_ops"])
        self._kind = slice(layout["ne"], layout["src"])  # extents, strides, op, parameters, flags
        self._shape = slice(layout["ne"], layout["op"])
        self._params: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._answers: dict[tuple[Any, ...], str | None] = {}

    # -- tensors -------------------------------------------------------------------------------

    def tensor(self, c: CTensor) -> Tensor:
        """Return a leaf with type, extents and strides of a C tensor, without a place.

        Raises:
            LookupError: ggmlb lacks its type.
        """
        leaf = Tensor(self._dtype(c), c.ne, c.nb)
        leaf.flags = c.flags & ~TensorFlag.COMPUTE
        return leaf

    def _dtype(self, c: CTensor) -> DType:
        dtype = self.dtypes.get(c.type)
        if dtype is None:
            raise LookupError(f"ggmlb has no type {c.type}")
        return dtype

    def _node(self, c: CTensor, source: Callable[[int], Tensor]) -> Tensor:
        """Return a node; `source` gives the tensor at an address."""
        op, dtype = self._ops.get(c.op), self._dtype(c)
        if op is None:
            raise LookupError(f"ggmlb has no op {c.op}")
        sources = c.src
        if op is Op.CPY and sources[1] == c.address:  # a cast: in ggml, src[1] is the result
            sources = sources[:1]
        src = tuple([source(s) if s else None for s in sources])
        if len(src) < AT_LEAST.get(op, 0):
            src += (None,) * (AT_LEAST[op] - len(src))
        if op is Op.LIGHTNING_INDEXER and src[3] is not None and src[3].ne[3] != c.ne[3]:
            raise LookupError("ggmlb's LIGHTNING_INDEXER takes one mask for each stream")
        view = source(c.view_src) if c.view_src else None
        node = Tensor(
            dtype, c.ne, c.nb, op=op, src=src, params=self._decoded(op, c), view_src=view,
            view_offs=c.view_offs if view is not None else 0, name=c.title,
        )  # fmt: skip
        node.flags = c.flags
        return node

    def _decoded(self, op: Op, c: CTensor) -> dict[str, Any]:
        key = (op, c.params, c.ne[0] if op is Op.TOP_K else 0)
        found = self._params.get(key)
        if found is None:
            if len(self._params) >= MOST_ANSWERS:
                self._params.clear()
            try:
                found = self._params[key] = decode(op, c.params, c.ne, self._unary, self._glu)
            except ValueError as error:  # a value that an enum of ggmlb's lacks
                raise LookupError(f"{op}: {error}") from None
        return found

    # -- ops -----------------------------------------------------------------------------------

    def one_level(self, address: int) -> Tensor:
        """Return the node at an address, its operands as leafs without places.

        Raises:
            LookupError: ggmlb lacks the op, a type or a parameter value.
        """
        leafs: dict[int, Tensor] = {}

        def source(at: int) -> Tensor:
            if at not in leafs:
                leafs[at] = self.tensor(CTensor(self.library, at))
            return leafs[at]

        return self._node(CTensor(self.library, address), source)

    def declines(
        self, c: CTensor, device: Device, known: Mapping[int, CTensor] = MappingProxyType({})
    ) -> str | None:
        """Return why a device cannot compute a node with plain operands, or `None`; equal nodes share it.

        Args:
            c: The node.
            device: The device.
            known: Operands that were read before; others are read, and nothing beyond them.
        """
        if c.op in self._no_ops and c.type in self.dtypes:
            return None
        key: list[Any] = [device, c.type, c.raw[self._kind]]
        for s in c.src:
            if s and s != c.address:
                t = known.get(s) or CTensor(self.library, s)
                key += (t.type, t.raw[self._shape], c.view_src in (s, t.view_src) and c.view_src != 0)
            else:
                key.append(s != 0)
        asked = tuple(key)
        with suppress(KeyError):
            return self._answers[asked]
        if len(self._answers) >= MOST_ANSWERS:
            self._answers.clear()
        try:
            node = self.one_level(c.address)
        except LookupError as error:
            why: str | None = str(error)
        else:
            why = device.declines(node)
        self._answers[asked] = why
        if why is not None:
            log.record("ggml", log.DEBUG, "%s declines node %s: %s", device.name, c.title, why)
        return why

    # -- graphs --------------------------------------------------------------------------------

    def graph(self, addresses: Sequence[int]) -> tuple[list[NodeRun], tuple[list[CTensor], ...]]:
        """Return a graph of C nodes, and the C tensors read: nodes, what these refer to, the others.

        Raises:
            LookupError: ggmlb lacks a type.
            UnsupportedOpError: The device declines a node, and so does the CPU.
        """
        library, place = self.library, self._place
        read: dict[int, CTensor] = {}
        tensors: dict[int, Tensor] = {}
        groups: list[tuple[bool, list[Tensor]]] = []
        mine = set(addresses)

        def c_tensor(at: int) -> CTensor:
            found = read.get(at)
            if found is None:
                found = read[at] = CTensor(library, at)
            return found

        def source(at: int) -> Tensor:
            found = tensors.get(at)
            if found is None:
                found = tensors[at] = leaf(c_tensor(at))
            return found

        def leaf(c: CTensor) -> Tensor:
            if not c.view_src:
                found = self.tensor(c)
                place(c, found)
                return found
            return Tensor(self._dtype(c), c.ne, c.nb, view_src=source(c.view_src), view_offs=c.view_offs)

        inside = [c_tensor(address) for address in addresses]
        is_flagged = any(c.flags & TensorFlag.COMPUTE for c in inside)  # not in older versions
        for c in inside:
            if is_flagged and not c.flags & TensorFlag.COMPUTE:
                continue
            for s in (*c.src, c.view_src):
                if s:
                    c_tensor(s)
            why = self.declines(c, self._device, read)
            if why is not None and self.declines(c, host_device(), read) is not None:
                raise UnsupportedOpError(f"{self._device.name} cannot compute node {c.title!r}: {why}")
            node = tensors[c.address] = self._node(c, source)
            if node.view_src is None:
                place(c, node)
            if node.op in NO_OPS and not self._can_use(node):  # a view of another backend's tensor
                continue
            is_packed = any(s is not None and self._is_packed(s) for s in node.src)
            by_cpu = why is not None or (is_packed and self._device.declines(node) is not None)
            if not groups or by_cpu or groups[-1][0]:
                groups.append((by_cpu, []))
            groups[-1][1].append(node)
        runs = [NodeRun(nodes, by_cpu) for by_cpu, nodes in groups]
        direct = {s for c in inside for s in (*c.src, c.view_src)}
        levels: tuple[list[CTensor], ...] = (inside, [], [])
        for c in read.values():
            if c.address not in mine:
                levels[1 if c.address in direct else 2].append(c)
        return runs, levels

    def _can_use(self, tensor: Tensor) -> bool:
        return tensor.buffer is not None and self._device.supports_buft(tensor.buffer.buft)

    def _is_packed(self, tensor: Tensor) -> bool:
        return tensor.buffer is not None and tensor.buffer.buft in self._device.extra_bufts


def _host_buffer(tensor: Tensor) -> Buffer:
    return host_device().buffer_type.alloc_buffer(max(tensor.nbytes, 1))


def _members(enum: Any, numbers: Mapping[str, int]) -> dict[int, Any]:
    return {number: enum[name] for name, number in numbers.items() if name in enum.__members__}


# -- known graphs ----------------------------------------------------------------------------------


class NodeRun:
    """Nodes of a graph that one stream computes: the device's, or the CPU's for one that the device declines.

    Args:
        nodes: Consecutive nodes; one for the CPU.
        by_cpu: Whether the CPU computes it, on copies of its operands.
    """

    def __init__(self, nodes: list[Tensor], by_cpu: bool) -> None:
        self.by_cpu = by_cpu
        self._copies: dict[Tensor, Tensor] = {}
        self.result = nodes[0].view_src or nodes[0]
        if by_cpu:
            node = nodes[0].reading(tuple(map(self._copy, nodes[0].src)), self._copy(nodes[0].view_src))
            if node.view_src is not None:
                node.buffer, node.offset = node.view_src.buffer, node.view_offs
            else:
                node.buffer, node.offset = _host_buffer(node), 0
                self._copies[self.result] = node
            nodes = [node]
        known = set(nodes)
        self.graph = Graph(nodes, dict.fromkeys(s for n in nodes for s in n.sources if s not in known))
        self.graph.owner_checks = True  # each node was checked, and a change gives another graph

    def _copy(self, tensor: Tensor | None) -> Tensor | None:
        """Return a leaf in host memory like a tensor, a view as one of its root's copy."""
        if tensor is None:
            return None
        root = tensor.view_src or tensor
        if root not in self._copies:
            copy = self._copies[root] = Tensor(root.dtype, root.ne, root.nb)
            copy.buffer = _host_buffer(root)
        copy = self._copies[root]
        if tensor is root:
            return copy
        return Tensor(tensor.dtype, tensor.ne, tensor.nb, view_src=copy, view_offs=tensor.view_offs)

    def copied(self) -> list[Buffer | None]:
        """Return the device's buffers that it reads and writes by copies."""
        return [tensor.buffer for tensor in self._copies]

    def compute(self, stream: Backend, cpu: Backend | None) -> int:
        """Compute the nodes on the device's stream, or on the CPU's if given; return the status."""
        if cpu is None:
            return int(stream.graph_compute_async(self.graph))
        stream.synchronize()
        for tensor, copy in self._copies.items():
            copy.set(tensor.get())
        status = cpu.graph_compute(self.graph)
        self.result.set(self._copies[self.result].get())
        return int(status)


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A graph that was read, and the C memory that it was read from.

    Attributes:
        runs: The graph.
        ranges: Address and bytes of each range of C tensors. Those of the nodes are first: if they are
            unchanged, the tensors that they refer to still exist, and may be read; these come next.
        buffers: The buffers of its tensors.
    """

    runs: list[NodeRun]
    ranges: tuple[tuple[int, bytes], ...]
    buffers: frozenset[Buffer | None]

    def is_current(self) -> bool:
        """Whether the C tensors are unchanged."""
        read = ctypes.string_at
        return all(read(address, len(content)) == content for address, content in self.ranges)


class KnownGraphs:
    """The graphs that a stream computed last, found again by the contents of their C tensors.

    A program calls with the same graph for each token; reading it takes longer than computing it.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._graphs: OrderedDict[bytes, list[Known]] = OrderedDict()
        self._freed: deque[Buffer] = deque()

    def find(self, pointers: bytes) -> list[NodeRun]:
        """Return the graph of an array of node pointers, read anew if a tensor has changed.

        Raises:
            Error: As `Reader.graph`.
        """
        self._drop()
        found = next((known for known in self._graphs.get(pointers, ()) if known.is_current()), None)
        if found is None:
            runs, levels = self._reader.graph(memoryview(pointers).cast("Q").tolist())
            ranges = tuple(found for level in levels for found in _ranges(level))
            buffers = frozenset(b for r in runs for b in (*r.graph.memory(), *r.copied()))
            found = Known(runs, ranges, buffers)
            same = self._graphs.setdefault(pointers, [])
            same.append(found)
            del same[:-MOST_ALIKE]
        self._graphs.move_to_end(pointers)
        while len(self._graphs) > 1 and self._n_nodes > MOST_NODES:
            self._graphs.popitem(last=False)
        return found.runs

    def forget(self, buffers: Iterable[Buffer]) -> None:
        """Drop the graphs that use one of the buffers before the next `find`; any thread may call it."""
        self._freed.extend(buffers)

    def _drop(self) -> None:
        freed = {self._freed.popleft() for _ in range(len(self._freed))}
        if freed:
            for same in self._graphs.values():
                same[:] = [known for known in same if freed.isdisjoint(known.buffers)]
            self._graphs = OrderedDict((key, same) for key, same in self._graphs.items() if same)

    @property
    def _n_nodes(self) -> int:
        return sum(len(pointers) // 8 * len(same) for pointers, same in self._graphs.items())


def _ranges(tensors: Sequence[CTensor]) -> list[tuple[int, bytes]]:
    """Return address and content of C tensors, neighbours as one range."""
    found: list[list[int]] = []
    for c in sorted(tensors, key=lambda c: c.address):
        end = c.address + len(c.raw)
        if found and c.address - found[-1][1] < NEAR:
            found[-1][1] = end
        else:
            found.append([c.address, end])
    return [(start, ctypes.string_at(start, end - start)) for start, end in found]
