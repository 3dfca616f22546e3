"""assign: passes 1-4, which choose the backend of every tensor of a graph.

The rules are ggml's (ggml_backend_sched_split_graph): placed tensors stay, an op runs where its weights
are, other nodes follow their neighbours, and the rest go to the backend that can read most of their
operands in place. Three differences: every choice has a `Cause`; a node that writes into another tensor
always runs where that tensor is (ggml may compute it on another device, and the tensor is never updated);
and a view is always where its source is, even if the user requested another backend (ggml then reads it
there without a copy).
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count, islice
from typing import TYPE_CHECKING

from ggmlb.core.enums import PYTHON_OPS, BufferUsage, Op, TensorFlag
from ggmlb.core.errors import GraphError, UnsupportedOpError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, Buffer, BufferType

if TYPE_CHECKING:
    from ggmlb.runtime.compile.read import IndexedGraph


class AssignRules:
    """The backends and options of a scheduler that decide how graphs are assigned and split.

    Attributes:
        backends: In order of priority, highest first.
        bufts: The memory each computes in.
        op_offload: Whether a device may compute a node whose weight is in host memory.
        strict: Whether a request that cannot be granted is an error.
        separate: Whether streams of one device have separate compute memory, so that one need not wait for
            another.
        answers: For each backend, whether it supports each kind of node (see `kinds`).
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        bufts: Sequence[BufferType],
        op_offload: bool = True,
        strict: bool = False,
        separate: bool = False,
    ) -> None:
        self.backends, self.bufts = tuple(backends), tuple(bufts)
        self.op_offload, self.strict, self.separate = op_offload, strict, separate
        self.last = len(self.backends) - 1
        self.answers: list[dict[int, bool]] = [{} for _ in self.backends]
        self._kinds: dict[Hashable, int] = {}
        self._users: dict[BufferType, frozenset[int]] = {}

    def users(self, buft: BufferType) -> frozenset[int]:
        """Return the indices of the backends that can use memory of this type (asked once, then cached)."""
        known = self._users.get(buft)
        if known is None:
            can = [b.device.supports_buft(buft) for b in self.backends]
            known = self._users[buft] = frozenset([i for i, yes in enumerate(can) if yes])
        return known

    def kinds(self, graph: IndexedGraph) -> list[int]:
        """Return a number for each tensor; a device supports either all nodes of one number, or none.

        Nodes of a kind agree in op, parameters, and in flags, layouts and memory of node and operands,
        so that `answers` holds across graphs. In graphs with custom functions, all kinds differ.
        """
        if max(len(self._kinds), *map(len, self.answers)) > MAX_KINDS:
            self._kinds.clear()
            self.answers = [{} for _ in self.backends]
        kinds = [*islice(_numbers, len(graph.tensors))]  # unique, unless a node's kind is known
        if not PYTHON_OPS.isdisjoint(graph.ops):
            return kinds
        number, roots, (begins, ends) = self._kinds.setdefault, [*graph.roots, -1], graph.spans
        homes = {b: b.buft for b in {*graph.buffers} if b is not None}
        buffers, layouts = graph.buffers, graph.layouts
        # How a tensor is stored in a buffer depends on its layout; a view is stored as its source.
        memories = [(homes[b], layouts[i]) if (b := buffers[i]) is not None else None for i in graph.roots]
        is_view = [base >= 0 for base in graph.bases]
        params = [(*p.items(),) if p else () for p in graph.params]
        facts = zip(graph.ops, layouts, graph.flags, graph.view_offs, is_view, memories, params)  # noqa: B905
        try:
            forms = [*map(number, facts, _numbers), -1]
        except TypeError:  # a parameter without a hash
            return kinds
        operands, owners = [forms[i] for i in graph.sources], [roots[i] for i in graph.sources]
        for node in graph.work:
            begin, end = begins[node], ends[node]
            kind: tuple[Hashable, ...] = (forms[node], *operands[begin:end])
            touched = [roots[node], *owners[begin:end]]
            if len({*touched}) < len(touched):
                kind = (*kind, tuple(map(touched.index, touched)))
            kinds[node] = number(kind, kinds[node])
        return kinds

    def are_separate(self, a: int, b: int) -> bool:
        """Whether two backends use separate buffers of the same buffer type."""
        return self.separate and a != b and self.bufts[a] is self.bufts[b]

    def shares(self, a: int, b: int) -> bool:
        """Whether one of two backends can use the other's memory."""
        if self.separate and self.bufts[a] is self.bufts[b]:
            return False
        return a in self.users(self.bufts[b]) or b in self.users(self.bufts[a])


class Cause(str, Enum):
    """Why a tensor was given to a backend, with the pass that decided it."""

    USER = "set by the user"
    PLACED = "placed in the backend's memory"
    VIEW = "in the memory of its source"
    INPUT = "graph input: last backend"
    WEIGHT = "runs where its weight is"
    OFFLOAD = "offloaded: worth copying its weight"
    NEIGHBOUR = "follows the nodes around it"
    BEST = "most operands already there"
    UPGRADE = "same memory, higher priority"
    WRITES = "writes into memory there"
    USED = "read by a node there"
    FIRST = "first backend that can run it"

    def __str__(self) -> str:
        return self.value


# The most frequent causes, looked up once: access to enum members is slow before Python 3.12.
_PLACED, _WEIGHT, _NEIGHBOUR, _VIEW = Cause.PLACED, Cause.WEIGHT, Cause.NEIGHBOUR, Cause.VIEW

UNKNOWN = -1
"""Backend index of unassigned tensors."""

MAX_KINDS = 1 << 14
"""Maximum number of kinds of nodes with cached answers."""

_numbers = count()  # of kinds, unique in the process


@dataclass(frozen=True, slots=True)
class Assignment:
    """The backends of a graph's tensors.

    Attributes:
        ids: Index of each tensor's backend, by number; 0 is the highest priority.
        causes: Cause of each tensor's assignment.
        foreign: Numbers of the tensors in memory that no backend here can use: they are copied to be read.
    """

    ids: list[int]
    causes: list[Cause | None]
    foreign: set[int]


def assign(graph: IndexedGraph, rules: AssignRules, requests: Mapping[int, int]) -> Assignment:
    """Choose the backend of every tensor of a graph, with regard to the user's `requests`.

    Args:
        graph: The graph.
        rules: The backends, and the scheduler's options.
        requests: Backend index of the tensors whose backend the user requested, by number.

    Raises:
        UnsupportedOpError: No backend runs a node, or (strict) the requested one does not.
    """
    passes = _Passes(graph, rules, requests)
    work = graph.work
    passes.from_places()
    passes.from_weights(work)
    passes.expand(work)
    passes.upgrade_or_best(work)
    passes.pin_inplace_writers(work)
    passes.rest()
    return Assignment(passes.ids, passes.causes, passes.foreign)


def readable(graph: IndexedGraph, rules: AssignRules, ids: Sequence[int], i: int, b: int) -> bool:
    """Whether backend `b` reads tensor `i` without a copy, if unplaced tensors go to the backends `ids`."""
    root = graph.roots[i]
    buffer = graph.buffers[root]
    if buffer is not None:
        return b in rules.users(buffer.buft)
    owner = ids[root]  # its memory may hold a result that another backend wrote in place
    if owner < 0:
        owner = ids[i]
    return owner >= 0 and not rules.are_separate(owner, b) and b in rules.users(rules.bufts[owner])


def refusal(graph: IndexedGraph, rules: AssignRules, node: int, b: int) -> str | None:
    """Return why the backend with index `b` cannot run a node, given by number; `None` if it can."""
    for i, src in enumerate(graph.reads(node)) if graph.some_unreadable else ():
        root = graph.roots[src] if src >= 0 else -1
        buffer = graph.buffers[root] if root >= 0 else None
        if buffer is None or b in rules.users(buffer.buft) or buffer.buft.is_readable(graph.tensors[root]):
            continue
        return f"src{i} is in {buffer.name} memory, which it can neither use nor copy"
    return rules.backends[b].device.declines(graph.tensors[node])


def reasons(graph: IndexedGraph, rules: AssignRules, node: int) -> dict[str, str]:
    """Return the reason of each backend that cannot run a node, by the backend's name."""
    answers = ((backend.name, refusal(graph, rules, node, b)) for b, backend in enumerate(rules.backends))
    return {name: why for name, why in answers if why is not None}


class _Passes:
    """The passes over one graph: each fills in some of `ids` and `causes`."""

    def __init__(self, graph: IndexedGraph, rules: AssignRules, requests: Mapping[int, int]) -> None:
        self.backends = rules.backends
        self.bufts = rules.bufts
        self.ids: list[int] = []
        self.causes: list[Cause | None] = []
        self.foreign: set[int] = set()
        self._rules, self._requests = rules, requests
        self._graph = graph
        self._tensors, self._computes = graph.tensors, graph.computes
        self._roots, self._bases, self._buffers = graph.roots, graph.bases, graph.buffers
        self._last = rules.last
        self._kinds = rules.kinds(graph)

    # -- queries -------------------------------------------------------------------------------

    def supports(self, b: int, node: int) -> bool:
        """Whether backend `b` runs the node; asked once for each kind."""
        kind, known = self._kinds[node], self._rules.answers[b]
        answer = known.get(kind)
        if answer is None:
            answer = known[kind] = refusal(self._graph, self._rules, node, b) is None
        return answer

    def _sources(self, node: int) -> list[int]:
        """Return the numbers of the present sources."""
        return [s for s in self._graph.reads(node) if s >= 0]

    def readable(self, i: int, b: int) -> bool:
        """Whether backend `b` can use the tensor without a copy, at its present or planned place."""
        return readable(self._graph, self._rules, self.ids, i, b)

    def _holders(self, buft: BufferType) -> list[int]:
        """Return the backends that can use memory of that type, by priority."""
        return sorted(self._rules.users(buft))

    # -- pass 1: placed tensors and the user's requests -----------------------------------------

    def from_places(self) -> None:
        """Keep tensors where they are placed, or where the user requested; inputs go to the last backend."""
        graph, buffers = self._graph, self._buffers
        owners = {buffer: self._owner_of_leafs(buffer) for buffer in {*buffers}}
        strange = {b for b in owners if b is not None and not self._holders(b.buft)}
        if strange:
            self.foreign = {i for i, root in enumerate(self._roots) if buffers[root] in strange}
        self.ids = ids = [owners[buffers[root]] for root in self._roots]
        self.causes = causes = [None if owner < 0 else _PLACED for owner in ids]
        for i, wanted in self._requests.items():
            is_view = self._bases[i] >= 0 and not self._computes[i]  # always where its source is
            if not is_view and self._honour(i, wanted):
                self._set(i, wanted, Cause.USER)
        for i, computes in enumerate(self._computes):
            if not computes or buffers[self._roots[i]] is None:
                continue
            is_asked = causes[i] is Cause.USER
            if not is_asked or not self.readable(i, ids[i]):
                owner = self._owner_of_result(i)
                if is_asked:
                    self._moves(i, self._roots[i], owner)
                self._set(i, owner, _PLACED)
        for i in graph.flagged:
            is_input = ids[i] < 0 and graph.flags[i] & TensorFlag.INPUT
            if is_input and (not self._computes[i] or self.supports(self._last, i)):
                self._set(i, self._last, Cause.INPUT)

    def _honour(self, i: int, wanted: int) -> bool:
        if not self._computes[i] or self.supports(wanted, i):
            return True
        self._leaves(i, wanted, "the user asked for")
        return False

    def _leaves(self, node: int, wanted: int, request: str) -> None:
        """Report that a node cannot run on the requested backend: an error if strict, else a warning."""
        if not any(self.supports(b, node) for b in range(len(self.backends))):
            return  # a later error has the reason of each backend
        tensor, name = self._tensors[node], self.backends[wanted].name
        why = refusal(self._graph, self._rules, node, wanted)
        message = f"{tensor.describe()} cannot run on {name}, which {request}: {why}"
        if self._rules.strict:
            raise UnsupportedOpError(message, reasons={name: why or ""})
        warnings.warn(message + "; it falls back to another device", RuntimeWarning, stacklevel=2)

    def _owner_of_leafs(self, buffer: Buffer | None) -> int:
        """Return the backend of leafs in a buffer."""
        if buffer is None:
            return UNKNOWN
        # Memory of a device outside this scheduler (`foreign`) counts as the last backend's, the host's.
        return next(iter(self._holders(buffer.buft)), self._last)

    def _owner_of_result(self, i: int) -> int:
        """Return the backend of a result placed in a buffer of the user."""
        buffer, tensor = self._buffers[self._roots[i]], self._tensors[i]
        assert buffer is not None
        for b in self._holders(buffer.buft):
            if self.supports(b, i):
                return b
        raise UnsupportedOpError(
            f"{tensor.describe()} is in a {buffer.name} buffer, and no backend that can use it runs the "
            f"op:\n{self.complaints(tensor)}\nPlace it in another buffer, or copy it first.",
            reasons=self._reasons(tensor),
        )

    def from_weights(self, work: list[int]) -> None:
        """Assign ops to the backend of their first weight."""
        ids, causes, tensors, ops, rope = self.ids, self.causes, self._tensors, self._graph.ops, Op.ROPE
        weights = [b for b in {*self._buffers} if b is not None and b.usage is BufferUsage.WEIGHTS]
        # The backends that can use each buffer, and whether others may copy its weights (`offload_op`).
        homes: dict[Buffer | None, tuple[Sequence[int], bool]]
        homes = {b: (self._holders(b.buft), self._rules.op_offload and b.is_host) for b in weights}
        for node in work:
            if ids[node] >= 0:
                continue
            for src in tensors[node].src:
                if src is not None and src.buffer in homes:
                    break
            else:
                continue
            if ops[node] is rope:  # its frequency factors are too small to decide the backend
                continue
            holders, is_offered = homes[src.buffer]
            for owner in holders:
                if self.supports(owner, node):
                    ids[node] = owner
                    causes[node] = _WEIGHT
                    if is_offered and self.bufts[owner] is self.bufts[self._last]:
                        self._offload(node, owner)
                    break
            else:
                if holders:
                    self._leaves(node, holders[0], "holds its weight")

    def _offload(self, node: int, owner: int) -> None:
        """Assign a node to the first device for which copying its weights from host memory is worthwhile.

        Its owner is the last backend or one with the same memory, such as an accelerator beside the CPU
        (ggml does not offload from the latter). Only devices before the owner are candidates.
        """
        for b in range(owner):
            if self.supports(b, node) and self.backends[b].offload_op(self._tensors[node]):
                self._set(node, b, Cause.OFFLOAD)
                return

    # -- pass 2: neighbours --------------------------------------------------------------------

    def expand(self, work: list[int]) -> None:
        """Assign unassigned nodes to the backend of the nodes before or after them.

        The backends before the last are expanded first, down and up, so that the last one (the CPU) runs
        a node only if its operands are there or no other backend is near; then all backends.
        """
        if not {*self.ids} <= {UNKNOWN, self._last}:
            self._sweep(work, self._last)
            self._sweep(work[::-1], self._last)
        self._sweep(work, UNKNOWN)
        if UNKNOWN in map(self.ids.__getitem__, work):
            self._sweep(work[::-1], UNKNOWN)

    def _sweep(self, work: list[int], skip: int) -> None:
        ids, causes = self.ids, self.causes
        current = UNKNOWN
        for node in work:
            known = ids[node]
            if known >= 0:
                current = UNKNOWN if known == skip else known
            elif current >= 0 and self.supports(current, node):
                ids[node] = current
                causes[node] = _NEIGHBOUR

    # -- pass 3: better places -----------------------------------------------------------------

    def upgrade_or_best(self, work: list[int]) -> None:
        """Move nodes to a backend of the same memory and higher priority; assign unassigned ones."""
        n = len(self.backends)
        bufts = self.bufts
        above = [[b for b in range(i) if bufts[b] is bufts[i] and not self._rules.separate] for i in range(n)]
        ids = self.ids
        if not any(above):
            work = [node for node in work if ids[node] < 0]
        for node in work:
            current = ids[node]
            if current < 0:
                self._best(node)
                continue
            for b in above[current]:
                if self.supports(b, node) and all(self.readable(s, b) for s in self._sources(node)):
                    self._set(node, b, Cause.UPGRADE)
                    break

    def _best(self, node: int) -> None:
        most = -1
        for b in range(len(self.backends)):
            if self.supports(b, node):
                count = sum(self.readable(s, b) for s in self._sources(node))
                if count > most:
                    most = count
                    self._set(node, b, Cause.BEST)

    def pin_inplace_writers(self, work: list[int]) -> None:
        """Assign the nodes that write into a tensor, and the tensor, to one backend that runs them all."""
        ids = self.ids
        if len({*ids} - {UNKNOWN}) < 2 and not self.foreign:
            return
        writers: dict[int, list[int]] = {}
        for node, written in self._graph.writes.items():
            for base in written if ids[node] >= 0 else ():
                writers.setdefault(base, []).append(node)
        for base, nodes in writers.items():
            if ids[base] < 0:
                self._set(base, ids[nodes[0]], Cause.USED)
            home = ids[base]
            away = [n for n in nodes if ids[n] != home and not self.readable(base, ids[n])]
            if not away:
                continue
            if not all(self.supports(home, n) for n in away):
                home = self._common_home(base, nodes, home)
                away = [n for n in (base, *nodes) if ids[n] != home]
            for node in away:
                if self.causes[node] is Cause.USER:
                    self._moves(node, base, home)
                self._set(node, home, Cause.WRITES)
        for node, written in self._graph.writes.items():
            for base in written if len(written) > 1 and ids[node] >= 0 else ():
                if self.readable(base, ids[node]):
                    continue
                buffer = self._buffers[base]
                if buffer is None and not self._computes[base]:
                    self._set(base, ids[node], Cause.USED)
                else:
                    where = self.backends[ids[base]].name if buffer is None else f"{buffer.name} memory"
                    raise UnsupportedOpError(
                        f"{self._tensors[node].describe()} on {self.backends[ids[node]].name} writes into "
                        f"{self._tensors[base].describe()} on {where}; "
                        "place all tensors that it writes on one device",
                        reasons=self._reasons(self._tensors[node]),
                    )

    def _common_home(self, base: int, nodes: list[int], home: int) -> int:
        """Return a backend that runs a tensor's op and all nodes that write into the tensor."""
        if self._buffers[base] is None:
            group = [base, *nodes] if self._computes[base] else nodes
            for b in range(len(self.backends)):
                if all(self.supports(b, n) for n in group):
                    return b
        node = self._tensors[next(n for n in nodes if not self.supports(home, n))]
        raise UnsupportedOpError(
            f"{node.describe()} writes into {self._tensors[base].describe()} on {self.backends[home].name}, "
            "and no device runs all nodes that compute or write it:\n"
            f"{self.complaints(node)}\nAdd a backend that runs them all, or write into a copy.",
            reasons=self._reasons(node),
        )

    def _moves(self, node: int, base: int, home: int) -> None:
        """Report a request that is ignored because a tensor and its writers must be on one backend."""
        message = (
            f"{self._tensors[node].describe()} was set to {self.backends[self.ids[node]].name}, but "
            f"{self._tensors[base].describe()} and the nodes that write into it must be on one device: "
            f"{self.backends[home].name}"
        )
        if self._rules.strict:
            raise GraphError(f"{message}; set {self._tensors[node].describe()} to it, too, or to none")
        warnings.warn(message + "; it runs there", RuntimeWarning, stacklevel=2)

    # -- pass 4: sources and leftovers ---------------------------------------------------------

    def rest(self) -> None:
        """Assign the remaining nodes and sources."""
        ids, bases, graph = self.ids, self._bases, self._graph
        nodes, others = graph.nodes, (*graph.listed[: graph.n_leafs], *graph.unlisted)
        # If all of these have a backend, every source has one before its readers are visited.
        is_open = UNKNOWN in map(ids.__getitem__, others)
        for node in nodes if is_open else [i for i in nodes if ids[i] < 0]:
            current, base = ids[node], bases[node]
            if current < 0 and self._computes[node]:
                current = self._first(node)
            elif current < 0 and base >= 0 and ids[base] >= 0:
                current = ids[base]
                self._set(node, current, _VIEW)
            for src in self._sources(node) if is_open else ():
                if ids[src] >= 0:
                    continue
                root = bases[src]
                if root >= 0 and ids[root] >= 0:
                    self._set(src, ids[root], _VIEW)
                elif current >= 0:
                    self._set(src, current, Cause.USED)
                    if root >= 0:
                        self._set(root, current, Cause.USED)
            if current < 0:  # a view, whose source has just been given a backend, or a lone leaf
                self._set(node, ids[base] if base >= 0 and ids[base] >= 0 else self._last, _VIEW)
                if base >= 0 and ids[base] < 0:
                    self._set(base, ids[node], Cause.USED)

    def _first(self, node: int) -> int:
        for b in range(len(self.backends)):
            if self.supports(b, node):
                self._set(node, b, Cause.FIRST)
                return b
        tensor = self._tensors[node]
        raise UnsupportedOpError(
            f"no device can run {tensor.describe()}:\n{self.complaints(tensor)}\n"
            "Add a backend that runs it (the CPU runs every op, in f32), or change its operands.",
            reasons=self._reasons(tensor),
        )

    # -- messages ------------------------------------------------------------------------------

    def _reasons(self, node: Tensor) -> dict[str, str]:
        """Return the reason of each backend that cannot run a node, by name."""
        return reasons(self._graph, self._rules, self._graph.numbers[node])

    def complaints(self, node: Tensor) -> str:
        """Return each backend's reason to decline a node, as indented lines."""
        return "\n".join(f"  {name}: {why}" for name, why in self._reasons(node).items())

    def _set(self, i: int, backend: int, cause: Cause) -> None:
        self.ids[i] = backend
        self.causes[i] = cause
