"""Passes 1-4: choose the backend of every tensor of a graph.

The rules are ggml's (ggml_backend_sched_split_graph): a tensor that lies somewhere stays there, an op
runs where its weights are, the rest follows its neighbours, and what nobody took goes to the backend
that can read most of its operands in place. Two differences: every choice has a `Cause`, and a node
that writes into the memory of another tensor always runs where that memory is (ggml may compute it on
another device, whose result then never reaches the tensor).
"""

from __future__ import annotations

import warnings
from enum import Enum
from typing import TYPE_CHECKING

from ggmlb.enums import NO_OPS, BufferUsage, Op, TensorFlag
from ggmlb.errors import GraphError, UnsupportedOpError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ggmlb.interface import Backend, Buffer, BufferType
    from ggmlb.scheduler.signature import Signature
    from ggmlb.tensor import Tensor


_NONE, _ROPE, _WEIGHTS = Op.NONE, Op.ROPE, BufferUsage.WEIGHTS  # looked up once: that costs more than a test


class Cause(str, Enum):
    """Why a tensor was given to a backend, with the pass that decided it."""

    USER = "set by the user"
    PLACED = "lies in the backend's memory"
    VIEW = "lies in the memory of its source"
    INPUT = "graph input: last backend"
    WEIGHT = "runs where its weight is"
    OFFLOAD = "offloaded: worth copying its weight"
    NEIGHBOUR = "follows the nodes around it"
    BEST = "most operands already there"
    UPGRADE = "same memory, higher priority"
    WRITES = "writes into memory that lies there"
    USED = "read by a node there"
    FIRST = "first backend that can run it"

    def __str__(self) -> str:
        return self.value


class Assignment:
    """The backends of a graph's tensors.

    Attributes:
        ids: Backend index by tensor; 0 is the highest priority.
        causes: Why, by tensor.
        separate: Whether streams of one device compute in memory of their own each, so that one need not
            wait for another.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        bufts: Sequence[BufferType],
        user: Mapping[Tensor, int],
        *,
        op_offload: bool,
        strict: bool,
        separate: bool = False,
    ) -> None:
        self.backends = backends
        self.bufts = bufts
        self.separate = separate
        self.ids: dict[Tensor, int] = {}
        self.causes: dict[Tensor, Cause] = {}
        self._user = dict(user)
        self._op_offload = op_offload
        self._strict = strict
        self._last = len(backends) - 1
        self._declines = [b.device.declines for b in backends]
        self._supported: list[dict[Tensor, bool]] = [{} for _ in backends]
        self._bufts_supported: list[dict[int, bool]] = [{} for _ in backends]
        self._holders: dict[int, tuple[int, ...]] = {}

    def run(self, signature: Signature) -> None:
        """Assign every tensor of a graph.

        Raises:
            UnsupportedOpError: No backend runs a node, or (strict) the wanted one does not.
        """
        listed = signature.tensors[: signature.n_leafs + signature.n_nodes]
        nodes = listed[signature.n_leafs :]
        work = [n for n in nodes if n.op not in NO_OPS]
        self._from_places(listed, signature)
        self._expand(work)
        self._upgrade_or_best(work)
        self._keep_writers_home(work)
        self._rest(nodes, signature.tensors[: signature.n_leafs] + signature.tensors[len(listed) :])

    # -- questions -----------------------------------------------------------------------------

    def supports(self, b: int, node: Tensor) -> bool:
        """Whether backend `b` runs the node; asked of the device once."""
        known = self._supported[b]
        answer = known.get(node)
        if answer is None:
            answer = known[node] = self._declines[b](node) is None
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

    def readable(self, tensor: Tensor, b: int) -> bool:
        """Whether backend `b` can use the tensor where it lies or will lie, without a copy."""
        root = tensor.view_src or tensor
        if root.buffer is not None:
            return self.supports_buft(b, root.buffer.buft)
        owner = self.ids.get(tensor)
        if owner is None:
            owner = self.ids.get(root)
        if owner is None or (self.separate and owner != b and self.bufts[owner] is self.bufts[b]):
            return False
        return self.supports_buft(b, self.bufts[owner])

    def shares(self, a: int, b: int) -> bool:
        """Whether one of two backends computes in memory that the other can use."""
        if self.separate and self.bufts[a] is self.bufts[b]:
            return False
        return self.supports_buft(a, self.bufts[b]) or self.supports_buft(b, self.bufts[a])

    # -- pass 1: what is placed already, and what the user asked for ----------------------------

    def _from_places(self, tensors: list[Tensor], signature: Signature) -> None:
        user, ids, causes, last = self._user, self.ids, self.causes, self._last
        placed, is_input = Cause.PLACED, TensorFlag.INPUT
        weights = {t for t in signature.outside if t.buffer is not None and t.buffer.usage is _WEIGHTS}
        roots = set(map(signature.numbers.__getitem__, weights))
        weights.update(t for t, base in zip(tensors, signature.bases, strict=False) if base in roots)
        leaf_owners: dict[Buffer, int] = {}
        for tensor in tensors:
            if user and tensor in user and self._honour(tensor, user[tensor]):
                self._set(tensor, user[tensor], Cause.USER)
                continue
            buffer = (tensor.view_src or tensor).buffer
            if buffer is not None:
                if tensor.op in NO_OPS:
                    owner = leaf_owners.get(buffer)
                    if owner is None:
                        owner = leaf_owners[buffer] = self._owner_of_placed(tensor)
                else:
                    owner = self._owner_of_placed(tensor)
                ids[tensor] = owner
                causes[tensor] = placed
            elif tensor.flags & is_input:
                self._set(tensor, last, Cause.INPUT)
            elif tensor.op is not _NONE and not weights.isdisjoint(tensor.src):
                self._from_weights(tensor)

    def _honour(self, tensor: Tensor, wanted: int) -> bool:
        if tensor.op in NO_OPS or self.supports(wanted, tensor):
            return True
        self._leaves(tensor, wanted, "the user asked for")
        return False

    def _leaves(self, node: Tensor, wanted: int, wish: str) -> None:
        """Report that a node cannot run where it was wished to: an error if strict, else a warning."""
        if not any(self.supports(b, node) for b in range(len(self.backends))):
            return  # an error that holds what each backend says will follow
        why = self._declines[wanted](node)
        name = self.backends[wanted].name
        message = f"{node.describe()} cannot run on {name}, which {wish}: {why}"
        if self._strict:
            raise UnsupportedOpError(message, reasons={name: why or ""})
        warnings.warn(message + "; it falls back to another device", RuntimeWarning, stacklevel=2)

    def _owner_of_placed(self, tensor: Tensor) -> int:
        root = tensor.view_src or tensor
        buffer = root.buffer
        assert buffer is not None
        leaf = tensor.op in NO_OPS
        for b in self.holders(buffer.buft):
            if leaf or self.supports(b, tensor):
                return b
        if leaf:  # memory of a device outside this scheduler: read through host memory
            return self._last
        raise UnsupportedOpError(
            f"{tensor.describe()} lies in a {buffer.name} buffer, and no backend both uses that memory and "
            f"runs the op:\n{self.complaints(tensor)}\nPlace it in another buffer, or copy it first.",
            reasons=self.reasons(tensor),
        )

    def _from_weights(self, node: Tensor) -> None:
        # The frequency factors of rope are too small to choose a backend by.
        if node.op is _ROPE:
            return
        for src in node.src:
            buffer = None if src is None else src.buffer
            if buffer is None or buffer.usage is not _WEIGHTS:
                continue
            holders = self.holders(buffer.buft)
            for owner in holders:
                if self.supports(owner, node):
                    self._from_weight(node, buffer, owner)
                    return
            if holders:
                self._leaves(node, holders[0], "holds its weight")
            return

    def _from_weight(self, node: Tensor, buffer: Buffer, owner: int) -> None:
        if self._op_offload and owner == self._last and buffer.is_host:
            for b in range(owner):
                if self.supports(b, node) and self.backends[b].offload_op(node):
                    self._set(node, b, Cause.OFFLOAD)
                    return
        self._set(node, owner, Cause.WEIGHT)

    # -- pass 2: neighbours --------------------------------------------------------------------

    def _expand(self, work: list[Tensor]) -> None:
        """Give unassigned nodes to the backend of the nodes before or after them.

        First the backends above the last, down and up, so that the last one (the CPU) runs a node only
        if its operands are there or nothing else surrounds it; then whatever is left.
        """
        ids = self.ids
        if set(ids.values()) != {self._last}:
            self._sweep(work, self._last)
            self._sweep(work[::-1], self._last)
        self._sweep(work, None)
        if not ids.keys() >= set(work):
            self._sweep(work[::-1], None)

    def _sweep(self, work: list[Tensor], skip: int | None) -> None:
        ids, causes, neighbour = self.ids, self.causes, Cause.NEIGHBOUR
        current: int | None = None
        for node in work:
            known = ids.get(node)
            if known is not None:
                current = None if known == skip else known
            elif current is not None and self.supports(current, node):
                ids[node] = current
                causes[node] = neighbour

    # -- pass 3: better places -----------------------------------------------------------------

    def _upgrade_or_best(self, work: list[Tensor]) -> None:
        n = len(self.backends)
        bufts = self.bufts
        above = [[b for b in range(i) if bufts[b] is bufts[i] and not self.separate] for i in range(n)]
        ids = self.ids
        if not any(above):
            work = [node for node in work if node not in ids]
        for node in work:
            current = ids.get(node)
            if current is None:
                self._best(node)
                continue
            for b in above[current]:
                if self.supports(b, node) and all(s is None or self.readable(s, b) for s in node.src):
                    self._set(node, b, Cause.UPGRADE)
                    break

    def _best(self, node: Tensor) -> None:
        most = -1
        for b in range(len(self.backends)):
            if self.supports(b, node):
                count = sum(s is not None and self.readable(s, b) for s in node.src)
                if count > most:
                    most = count
                    self._set(node, b, Cause.BEST)

    def _keep_writers_home(self, work: list[Tensor]) -> None:
        """Let the nodes that write into a tensor run where it is, or bring it to where all can run."""
        if len(set(self.ids.values())) < 2:
            return
        writers: dict[Tensor, list[Tensor]] = {}
        for node in work:
            if node.view_src is not None and node in self.ids:
                writers.setdefault(node.view_src, []).append(node)
        for base, nodes in writers.items():
            home = self.ids.setdefault(base, self.ids[nodes[0]])
            self.causes.setdefault(base, Cause.USED)
            away = [n for n in nodes if self.ids[n] != home and not self.readable(base, self.ids[n])]
            if not away:
                continue
            if not all(self.supports(home, n) for n in away):
                home = self._common_home(base, nodes, home)
                away = [n for n in (base, *nodes) if self.ids[n] != home]
            for node in away:
                if self.causes.get(node) is Cause.USER:
                    self._moves(node, base, home)
                self._set(node, home, Cause.WRITES)

    def _common_home(self, base: Tensor, nodes: list[Tensor], home: int) -> int:
        """Return a backend that runs a tensor's op and all nodes that write into the tensor."""
        if base.buffer is None:
            group = nodes if base.op in NO_OPS else [base, *nodes]
            for b in range(len(self.backends)):
                if all(self.supports(b, n) for n in group):
                    return b
        node = next(n for n in nodes if not self.supports(home, n))
        raise UnsupportedOpError(
            f"{node.describe()} writes into {base.describe()}, which lies on {self.backends[home].name}, "
            f"and no device runs what computes and what writes it:\n{self.complaints(node)}\n"
            "Add a backend that runs them all, or write into a copy.",
            reasons=self.reasons(node),
        )

    def _moves(self, node: Tensor, base: Tensor, home: int) -> None:
        """Report that a wish is not followed because a tensor and its writers stay together."""
        message = (
            f"{node.describe()} was set to {self.backends[self.ids[node]].name}, but {base.describe()} and "
            f"what writes into it must be on one device: {self.backends[home].name}"
        )
        if self._strict:
            raise GraphError(message + "; set all of them to the same backend")
        warnings.warn(message + "; it runs there", RuntimeWarning, stacklevel=2)

    # -- pass 4: sources and leftovers ---------------------------------------------------------

    def _rest(self, nodes: list[Tensor], others: list[Tensor]) -> None:
        """Assign what is left, given the tensors that are no nodes."""
        ids = self.ids
        # Where all of these have a backend, every source has one before its readers are looked at.
        is_open = not ids.keys() >= set(others)
        for node in nodes if is_open else [n for n in nodes if n not in ids]:
            current = ids.get(node)
            if current is None and node.view_src is not None and node.view_src in ids:
                current = ids[node.view_src]
                self._set(node, current, Cause.VIEW)
            if current is None and node.op not in NO_OPS:
                current = self._first(node)
            for src in node.src if is_open else ():
                if src is None or src in ids:
                    continue
                root = src.view_src
                if root is not None and root in ids:
                    self._set(src, ids[root], Cause.VIEW)
                elif current is not None:
                    self._set(src, current, Cause.USED)
                    if root is not None:
                        self._set(root, current, Cause.USED)
            if current is None:  # a view, whose source has just been given a backend, or a lone leaf
                root = node.view_src
                self._set(node, ids.get(root, self._last) if root is not None else self._last, Cause.VIEW)
                if root is not None and root not in ids:
                    self._set(root, ids[node], Cause.USED)

    def _first(self, node: Tensor) -> int:
        for b in range(len(self.backends)):
            if self.supports(b, node):
                self._set(node, b, Cause.FIRST)
                return b
        raise UnsupportedOpError(
            f"no device can run {node.describe()}:\n{self.complaints(node)}\n"
            "Add a backend that runs it (the CPU backend runs every op), or change its operands.",
            reasons=self.reasons(node),
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

    def _set(self, tensor: Tensor, backend: int, cause: Cause) -> None:
        self.ids[tensor] = backend
        self.causes[tensor] = cause
