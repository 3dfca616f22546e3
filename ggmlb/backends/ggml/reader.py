"""Graphs of a compiled ggml, read as ggmlb's: tensors, operands, parameters, and their places in memory."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ggmlb.backends.ggml.library import N_SRC, GgmlLibrary
from ggmlb.backends.ggml.params import decode
from ggmlb.core.enums import NO_OPS, GluOp, Op, TensorFlag, UnaryOp
from ggmlb.core.errors import UnsupportedOpError
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Ne, Tensor
from ggmlb.interface import Buffer, Device

Place = Callable[["CTensor", Tensor], None]
"""Sets `buffer` and `offset` of a tensor from the fields of the C tensor; leaves those not ours unplaced."""

AT_LEAST: Final[dict[Op, int]] = {
    Op.FLASH_ATTN_EXT: 5, Op.GLU: 2, Op.ROPE: 3, Op.ROPE_BACK: 3, Op.SOFT_MAX: 3,
}  # fmt: skip
"""Operands that ggmlb lists even if absent, as `None`."""

MOST_ANSWERS: Final = 1 << 14
MOST_GRAPHS: Final = 48
"""Sizes of the caches of answers to `supports_op` and of graphs."""

NEAR: Final = 4096
"""Tensors at most so far apart are compared as one range: no page lies between them [bytes]."""


class CTensor:
    """The fields of a `ggml_tensor`.

    Attributes:
        address: Of the C tensor.
        raw: Its bytes.
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
        self.src: tuple[int, ...] = fields[13 : 13 + N_SRC]
        self.view_src, self.view_offs, self.data, self.name, _ = fields[13 + N_SRC :]


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
        dtype = self.dtypes.get(c.type)
        if dtype is None:
            raise LookupError(f"ggmlb has no type {c.type}")
        leaf = Tensor(dtype, c.ne, c.nb)
        leaf.flags = c.flags & ~TensorFlag.COMPUTE
        return leaf

    def _node(self, c: CTensor, source: Callable[[int], Tensor]) -> Tensor:
        """Return a node; `source` gives the tensor at an address."""
        op, dtype = self._ops.get(c.op), self.dtypes.get(c.type)
        if op is None or dtype is None:
            raise LookupError(f"ggmlb has no op {c.op}" if op is None else f"ggmlb has no type {c.type}")
        sources: list[int] = list(c.src)
        if op is Op.CPY and sources[1] == c.address:  # a cast: in ggml, src[1] is the result
            sources[1] = 0
        n = max((i + 1 for i, s in enumerate(sources) if s), default=0)
        src = tuple(source(s) if s else None for s in sources[: max(n, AT_LEAST.get(op, 0))])
        if op is Op.LIGHTNING_INDEXER and src[3] is not None and src[3].ne[3] != c.ne[3]:
            raise LookupError("ggmlb's LIGHTNING_INDEXER takes one mask for each stream")
        if op is Op.DSV4_HC_POST and len(src) < 4:
            raise LookupError(f"this form of {op} came after ggml 0.21")
        view = source(c.view_src) if c.view_src else None
        node = Tensor(
            dtype, c.ne, c.nb, op=op, src=src, params=self._decoded(op, c), view_src=view,
            view_offs=c.view_offs if view is not None else 0,
            name=c.name.partition(b"\0")[0].decode(errors="replace"),
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

    def declines(self, address: int) -> str | None:
        """Return why the device cannot compute the C node at an address, or `None`; reads one level."""
        c = CTensor(self.library, address)
        return self._answer(c, {s: CTensor(self.library, s) for s in (*c.src, c.view_src) if s})

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

    def _answer(self, c: CTensor, sources: Mapping[int, CTensor]) -> str | None:
        """Return why the device declines a node, with plain operands; equal nodes share an answer."""
        key: list[Any] = [c.type, c.raw[self._kind]]
        for s in c.src:
            if s and s != c.address:
                t = sources[s]
                key += (t.type, t.raw[self._shape], c.view_src in (s, t.view_src) and c.view_src != 0)
            else:
                key.append(s != 0)
        asked = tuple(key)
        if asked not in self._answers:
            if len(self._answers) >= MOST_ANSWERS:
                self._answers.clear()
            try:
                node = self.one_level(c.address)
                why = None if node.op in NO_OPS else self._device.declines(node)
            except LookupError as error:
                why = str(error)
            self._answers[asked] = why
        return self._answers[asked]

    # -- graphs --------------------------------------------------------------------------------

    def graph(self, addresses: Sequence[int]) -> tuple[Graph, tuple[list[CTensor], ...]]:
        """Return a graph of C nodes, and the C tensors read: nodes, what these refer to, the others.

        Raises:
            LookupError: ggmlb lacks a type.
            UnsupportedOpError: The device declines a node.
        """
        library, place = self.library, self._place
        read: dict[int, CTensor] = {}
        tensors: dict[int, Tensor] = {}
        nodes: list[Tensor] = []
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
            root, dtype = source(c.view_src), self.dtypes.get(c.type)
            if dtype is None:
                raise LookupError(f"ggmlb has no type {c.type}")
            return Tensor(dtype, c.ne, c.nb, view_src=root, view_offs=c.view_offs)

        inside = [c_tensor(address) for address in addresses]
        is_flagged = any(c.flags & TensorFlag.COMPUTE for c in inside)  # not in older versions
        for c in inside:
            if is_flagged and not c.flags & TensorFlag.COMPUTE:
                continue
            for s in (*c.src, c.view_src):
                if s:
                    c_tensor(s)
            why = self._answer(c, read)
            if why is not None:
                name = c.name.partition(b"\0")[0].decode(errors="replace")
                raise UnsupportedOpError(f"{self._device.name} cannot compute node {name!r}: {why}")
            node = tensors[c.address] = self._node(c, source)
            if node.view_src is None:
                place(c, node)
            nodes.append(node)
        known = set(nodes)
        graph = Graph(nodes, dict.fromkeys(s for n in nodes for s in n.sources if s not in known))
        graph.owner_checks = True  # each node was checked, and a change gives another graph
        direct = {s for c in inside for s in (*c.src, c.view_src)}
        levels: tuple[list[CTensor], ...] = (inside, [], [])
        for c in read.values():
            if c.address not in mine:
                levels[1 if c.address in direct else 2].append(c)
        return graph, levels


def _members(enum: Any, numbers: Mapping[str, int]) -> dict[int, Any]:
    return {number: enum[name] for name, number in numbers.items() if name in enum.__members__}


# -- known graphs ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A graph that was read, and the C memory that it was read from.

    Attributes:
        ranges: Address and bytes of each range of C tensors. Those of the nodes are first: if they are
            unchanged, the tensors that they refer to still exist, and may be read; these come next.
        buffers: The buffers of its tensors.
    """

    graph: Graph
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
        self._graphs: OrderedDict[tuple[bytes, int], Known] = OrderedDict()
        self._n_read = 0

    def find(self, pointers: bytes) -> Graph:
        """Return the graph of an array of node pointers, read anew if a tensor has changed.

        Raises:
            Error: As `Reader.graph`.
        """
        for key in [key for key in self._graphs if key[0] == pointers]:
            known = self._graphs[key]
            if known.is_current():
                self._graphs.move_to_end(key)
                return known.graph
        addresses = memoryview(pointers).cast("Q").tolist()
        graph, levels = self._reader.graph(addresses)
        ranges = tuple(found for level in levels for found in _ranges(level))
        self._n_read += 1
        self._graphs[pointers, self._n_read] = Known(graph, ranges, frozenset(graph.memory()))
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return graph

    def forget(self, buffers: Iterable[Buffer]) -> None:
        """Drop the graphs that use one of the buffers."""
        gone = set(buffers)
        for key in [key for key, known in self._graphs.items() if not gone.isdisjoint(known.buffers)]:
            del self._graphs[key]


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
