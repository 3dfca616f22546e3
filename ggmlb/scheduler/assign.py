"""Passes 1-4: choose the backend of every tensor of a graph.

The rules are ggml's (ggml_backend_sched_split_graph): a tensor that lies somewhere stays there, an op
runs where its weights are, the rest follows its neighbours, and what nobody took goes to the backend
that can read most of its operands in place. Three differences: every choice has a `Cause`; a node
that writes into the memory of another tensor always runs where that memory is (ggml may compute it on
another device, whose result then never reaches the tensor); and a view lies where its source does,
even if the user asked for another place (ggml then reads it there without a copy).
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ggmlb.enums import NO_OPS, BufferUsage, Op, TensorFlag
from ggmlb.errors import GraphError, UnsupportedOpError
from ggmlb.scheduler.rules import Cause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ggmlb.interface import Buffer, BufferType
    from ggmlb.scheduler.rules import Rules
    from ggmlb.scheduler.signature import Signature
    from ggmlb.tensor import Tensor


_ROPE, _WEIGHTS = Op.ROPE, BufferUsage.WEIGHTS  # looked up once: that costs more than a test

UNKNOWN = -1
"""Backend index of what has none yet."""


class Assignment:
    """The backends of a graph's tensors, by their numbers in its signature.

    Attributes:
        ids: Backend index of each tensor; 0 is the highest priority.
        causes: Why, of each tensor.
        backends, bufts, separate: As the rules say.

    Raises:
        UnsupportedOpError: No backend runs a node, or (strict) the wanted one does not.
    """

    def __init__(self, signature: Signature, rules: Rules) -> None:
        self.backends = backends = rules.backends
        self.bufts = rules.bufts
        self.separate = rules.separate
        self._op_offload = rules.op_offload
        self._strict = rules.strict
        n = len(signature.tensors)
        self.ids = [UNKNOWN] * n
        self.causes: list[Cause | None] = [None] * n
        self._tensors, self._ops, self._buffers = signature.tensors, signature.ops, signature.buffers
        self._signature, self._bases, self._wishes = signature, signature.bases, signature.wishes
        self._last = len(backends) - 1
        self._declines = [b.device.declines for b in backends]
        self._supported: list[list[bool | None]] = [[None] * n for _ in backends]
        self._bufts_supported: list[dict[int, bool]] = [{} for _ in backends]
        self._holders: dict[int, tuple[int, ...]] = {}

        nodes = signature.nodes
        work = [i for i in nodes if self._ops[i] not in NO_OPS]
        self._from_places(signature)
        self._expand(work)
        self._upgrade_or_best(work)
        self._keep_writers_home(work)
        self._rest(nodes, (*signature.listed[: signature.n_leafs], *signature.unlisted))

    # -- questions -----------------------------------------------------------------------------

    def supports(self, b: int, node: int) -> bool:
        """Whether backend `b` runs the node; asked of the device once."""
        answer = self._supported[b][node]
        if answer is None:
            answer = self._supported[b][node] = self._declines[b](self._tensors[node]) is None
        return answer

    def supports_buft(self, b: int, buft: BufferType) -> bool:
        """Whether backend `b` can use memory of that type; asked once."""
        known = self._bufts_supported[b]
        answer = known.get(id(buft))
        if answer is None:
            answer = known[id(buft)] = self.backends[b].supports_buft(buft)
        return answer

    def holders(self, buft: BufferType) -> tuple[int, ...]:
        """The backends that can use memory of that type."""
        known = self._holders.get(id(buft))
        if known is None:
            n = len(self.backends)
            known = self._holders[id(buft)] = tuple(b for b in range(n) if self.supports_buft(b, buft))
        return known

    def root(self, i: int) -> int:
        """The tensor in whose memory a tensor lies: itself, if it is no view."""
        base = self._bases[i]
        return i if base < 0 else base

    def _sources(self, node: int) -> list[int]:
        """Numbers of the sources that are there."""
        return [s for s in self._signature.reads[node] if s >= 0]

    def readable(self, i: int, b: int) -> bool:
        """Whether backend `b` can use the tensor where it lies or will lie, without a copy."""
        root = self.root(i)
        buffer = self._buffers[root]
        if buffer is not None:
            return self.supports_buft(b, buffer.buft)
        owner = self.ids[i]
        if owner < 0:
            owner = self.ids[root]
        if owner < 0 or (self.separate and owner != b and self.bufts[owner] is self.bufts[b]):
            return False
        return self.supports_buft(b, self.bufts[owner])

    def shares(self, a: int, b: int) -> bool:
        """Whether one of two backends computes in memory that the other can use."""
        if self.separate and self.bufts[a] is self.bufts[b]:
            return False
        return self.supports_buft(a, self.bufts[b]) or self.supports_buft(b, self.bufts[a])

    # -- pass 1: what is placed already, and what the user asked for ----------------------------

    def _from_places(self, signature: Signature) -> None:
        ids, causes, bases, buffers = self.ids, self.causes, self._bases, self._buffers
        for i, wanted in self._wishes.items():
            if self._honour(i, wanted):
                self._set(i, wanted, Cause.USER)
        outside, placed = set(signature.outside), Cause.PLACED
        owners: dict[Buffer | None, int] = {}
        for i in (*signature.outside, *[i for i in signature.views if bases[i] in outside]):
            if ids[i] >= 0:
                continue
            base = bases[i]
            buffer = buffers[i if base < 0 else base]
            if self._ops[i] not in NO_OPS:
                ids[i] = self._owner_of_placed(i)
            elif buffer in owners:
                ids[i] = owners[buffer]
            else:
                ids[i] = owners[buffer] = self._owner_of_placed(i)
            causes[i] = placed
        for i in signature.flagged:
            if ids[i] < 0 and signature.flags[i] & TensorFlag.INPUT:
                self._set(i, self._last, Cause.INPUT)
        lying = [(i, buffers[i]) for i in (*signature.outside, *signature.views)]
        weights = {i: b for i, b in lying if b is not None and b.usage is _WEIGHTS}
        done = UNKNOWN
        for node, src in zip(signature.readers, signature.sources, strict=True):
            if src in weights and node != done:
                done = node  # the first weight of a node decides
                if ids[node] < 0:
                    self._from_weight(node, weights[src])

    def _honour(self, i: int, wanted: int) -> bool:
        if self._ops[i] in NO_OPS or self.supports(wanted, i):
            return True
        self._leaves(i, wanted, "the user asked for")
        return False

    def _leaves(self, node: int, wanted: int, wish: str) -> None:
        """Report that a node cannot run where it was wished to: an error if strict, else a warning."""
        if not any(self.supports(b, node) for b in range(len(self.backends))):
            return  # an error that holds what each backend says will follow
        tensor, name = self._tensors[node], self.backends[wanted].name
        why = self._declines[wanted](tensor)
        message = f"{tensor.describe()} cannot run on {name}, which {wish}: {why}"
        if self._strict:
            raise UnsupportedOpError(message, reasons={name: why or ""})
        warnings.warn(message + "; it falls back to another device", RuntimeWarning, stacklevel=2)

    def _owner_of_placed(self, i: int) -> int:
        buffer = self._buffers[self.root(i)]
        assert buffer is not None
        leaf = self._ops[i] in NO_OPS
        for b in self.holders(buffer.buft):
            if leaf or self.supports(b, i):
                return b
        if leaf:  # memory of a device outside this scheduler: read through host memory
            return self._last
        tensor = self._tensors[i]
        raise UnsupportedOpError(
            f"{tensor.describe()} lies in a {buffer.name} buffer, and no backend both uses that memory and "
            f"runs the op:\n{self.complaints(tensor)}\nPlace it in another buffer, or copy it first.",
            reasons=self.reasons(tensor),
        )

    def _from_weight(self, node: int, buffer: Buffer) -> None:
        # The frequency factors of rope are too small to choose a backend by.
        if self._ops[node] is _ROPE:
            return
        holders = self.holders(buffer.buft)
        for owner in holders:
            if self.supports(owner, node):
                offload = self._op_offload and owner == self._last and buffer.is_host
                above = self._offloads_to(node) if offload else None
                self.ids[node] = owner if above is None else above
                self.causes[node] = Cause.WEIGHT if above is None else Cause.OFFLOAD
                return
        if holders:
            self._leaves(node, holders[0], "holds its weight")

    def _offloads_to(self, node: int) -> int | None:
        """Return the first device that finds it worth copying the node's weights out of host memory."""
        for b in range(self._last):
            if self.supports(b, node) and self.backends[b].offload_op(self._tensors[node]):
                return b
        return None

    # -- pass 2: neighbours --------------------------------------------------------------------

    def _expand(self, work: list[int]) -> None:
        """Give unassigned nodes to the backend of the nodes before or after them.

        First the backends above the last, down and up, so that the last one (the CPU) runs a node only
        if its operands are there or nothing else surrounds it; then whatever is left.
        """
        if not {*self.ids} <= {UNKNOWN, self._last}:
            self._sweep(work, self._last)
            self._sweep(work[::-1], self._last)
        self._sweep(work, UNKNOWN)
        if UNKNOWN in map(self.ids.__getitem__, work):
            self._sweep(work[::-1], UNKNOWN)

    def _sweep(self, work: list[int], skip: int) -> None:
        ids, causes, neighbour = self.ids, self.causes, Cause.NEIGHBOUR
        current = UNKNOWN
        for node in work:
            known = ids[node]
            if known >= 0:
                current = UNKNOWN if known == skip else known
            elif current >= 0 and self.supports(current, node):
                ids[node] = current
                causes[node] = neighbour

    # -- pass 3: better places -----------------------------------------------------------------

    def _upgrade_or_best(self, work: list[int]) -> None:
        n = len(self.backends)
        bufts = self.bufts
        above = [[b for b in range(i) if bufts[b] is bufts[i] and not self.separate] for i in range(n)]
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

    def _keep_writers_home(self, work: list[int]) -> None:
        """Let the nodes that write into a tensor run where it is, or bring it to where all can run."""
        ids, bases = self.ids, self._bases
        if len({*ids} - {UNKNOWN}) < 2:
            return
        writers: dict[int, list[int]] = {}
        for node in work:
            if bases[node] >= 0 and ids[node] >= 0:
                writers.setdefault(bases[node], []).append(node)
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

    def _common_home(self, base: int, nodes: list[int], home: int) -> int:
        """Return a backend that runs a tensor's op and all nodes that write into the tensor."""
        if self._buffers[base] is None:
            group = nodes if self._ops[base] in NO_OPS else [base, *nodes]
            for b in range(len(self.backends)):
                if all(self.supports(b, n) for n in group):
                    return b
        node = self._tensors[next(n for n in nodes if not self.supports(home, n))]
        raise UnsupportedOpError(
            f"{node.describe()} writes into {self._tensors[base].describe()}, which lies on "
            f"{self.backends[home].name}, and no device runs what computes and what writes it:\n"
            f"{self.complaints(node)}\nAdd a backend that runs them all, or write into a copy.",
            reasons=self.reasons(node),
        )

    def _moves(self, node: int, base: int, home: int) -> None:
        """Report that a wish is not followed because a tensor and its writers stay together."""
        message = (
            f"{self._tensors[node].describe()} was set to {self.backends[self.ids[node]].name}, but "
            f"{self._tensors[base].describe()} and what writes into it must be on one device: "
            f"{self.backends[home].name}"
        )
        if self._strict:
            raise GraphError(message + "; set all of them to the same backend")
        warnings.warn(message + "; it runs there", RuntimeWarning, stacklevel=2)

    # -- pass 4: sources and leftovers ---------------------------------------------------------

    def _rest(self, nodes: Sequence[int], others: Sequence[int]) -> None:
        """Assign what is left, given the tensors that are no nodes."""
        ids, bases = self.ids, self._bases
        # Where all of these have a backend, every source has one before its readers are looked at.
        is_open = UNKNOWN in map(ids.__getitem__, others)
        for node in nodes if is_open else [i for i in nodes if ids[i] < 0]:
            current, base = ids[node], bases[node]
            if current < 0 and base >= 0 and ids[base] >= 0:
                current = ids[base]
                self._set(node, current, Cause.VIEW)
            if current < 0 and self._ops[node] not in NO_OPS:
                current = self._first(node)
            for src in self._sources(node) if is_open else ():
                if ids[src] >= 0:
                    continue
                root = bases[src]
                if root >= 0 and ids[root] >= 0:
                    self._set(src, ids[root], Cause.VIEW)
                elif current >= 0:
                    self._set(src, current, Cause.USED)
                    if root >= 0:
                        self._set(root, current, Cause.USED)
            if current < 0:  # a view, whose source has just been given a backend, or a lone leaf
                self._set(node, ids[base] if base >= 0 and ids[base] >= 0 else self._last, Cause.VIEW)
                if base >= 0 and ids[base] < 0:
                    self._set(base, ids[node], Cause.USED)
        for node in self._wishes:
            base = bases[node]
            if base >= 0 and ids[node] != ids[base] and self._ops[node] in NO_OPS:
                self._set(node, ids[base], Cause.VIEW)  # whatever was asked for

    def _first(self, node: int) -> int:
        for b in range(len(self.backends)):
            if self.supports(b, node):
                self._set(node, b, Cause.FIRST)
                return b
        tensor = self._tensors[node]
        raise UnsupportedOpError(
            f"no device can run {tensor.describe()}:\n{self.complaints(tensor)}\n"
            "Add a backend that runs it (the CPU backend runs every op), or change its operands.",
            reasons=self.reasons(tensor),
        )

    # -- words ---------------------------------------------------------------------------------

    def reasons(self, node: Tensor) -> dict[str, str]:
        """What each backend that declines the node says, by its name."""
        answers = (
            (b.name, declines(node)) for b, declines in zip(self.backends, self._declines, strict=True)
        )
        return {name: why for name, why in answers if why is not None}

    def complaints(self, node: Tensor) -> str:
        """`reasons` as indented lines."""
        return "\n".join(f"  {name}: {why}" for name, why in self.reasons(node).items())

    def _set(self, i: int, backend: int, cause: Cause) -> None:
        self.ids[i] = backend
        self.causes[i] = cause
