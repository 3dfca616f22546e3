"""Program: a topology assigned, split, allocated and planned once, for all graphs that have it."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from ggmlb.enums import BufferUsage
from ggmlb.errors import GraphError
from ggmlb.scheduler.split import SplitGraph, variant

if TYPE_CHECKING:
    from ggmlb.alloc import GraphAllocator
    from ggmlb.graph import Graph
    from ggmlb.interface import Buffer, GraphPlan
    from ggmlb.scheduler.assign import Assignment, Cause
    from ggmlb.scheduler.signature import Signature
    from ggmlb.tensor import Tensor

_buffer = attrgetter("buffer")
_offset = attrgetter("offset")
_src = attrgetter("src")


class Program:
    """What a scheduler keeps of a topology, bound to one graph at a time.

    The image that is allocated and planned is the program's own (see `split.py`). Binding another graph
    of the same signature gives its tensors the places of their twins, and costs nothing else.

    Attributes:
        signature: The topology, with the tensors of the graph that is bound.
        splits: In the order of execution.
        buffers: Buffer of each tensor, by number, once allocated.
        offsets: Offset of each tensor in its buffer, by number.
        stamp: The allocator's count of allocations when it was placed; -1 if it is not.
    """

    def __init__(self, signature: Signature, assignment: Assignment, n_copies: int) -> None:
        signature.keep()
        self.signature = signature
        self._assignment = assignment
        self._n_copies = n_copies
        split = SplitGraph(signature, assignment, n_copies)
        self.splits = split.splits
        self.graph, self.node_ids, self.leaf_ids = split.graph, split.node_ids, split.leaf_ids
        self._first = signature.tensors
        self._images = [split.images.get(t) or t for t in signature.tensors]
        for image, params in zip(self._images, signature.params, strict=True):
            image.params = params
        self._owned: list[int] = []
        self.forget_plans()
        self._members: list[tuple[list[int], list[int]]] | None = None
        self.buffers: list[Buffer | None] = []
        self.offsets: list[int] = []
        self.stamp = -1
        self._lie: tuple[list[Buffer | None], list[int]] = ([], [])
        self._sources: list[tuple[Tensor | None, ...]] = []

    # -- facts ---------------------------------------------------------------------------------

    def backend_id(self, tensor: Tensor) -> int | None:
        """Return the backend of a tensor of the bound graph, or `None` if it is none."""
        number = self.signature.numbers.get(tensor)
        return None if number is None else self._assignment.ids.get(self._first[number])

    def cause(self, node: Tensor) -> Cause:
        """Return why a node of the bound graph is where it is."""
        return self._assignment.causes[self._first[self.signature.numbers[node]]]

    def reasons(self, node: Tensor) -> dict[str, str]:
        """Return what each backend that declines a node says, by its name."""
        return self._assignment.reasons(node)

    # -- binding -------------------------------------------------------------------------------

    def bind(self, signature: Signature) -> None:
        """Take over another graph of the same signature."""
        mine = self.signature
        if self._members is None:
            numbers = mine.numbers
            self._members = [
                ([numbers[t] for t in s.nodes], [numbers[t] for t in s.views]) for s in self.splits
            ]
        tensors = signature.tensors
        for split, (nodes, views) in zip(self.splits, self._members, strict=True):
            split.nodes = [tensors[i] for i in nodes]
            split.views = [tensors[i] for i in views]
            for item in split.inputs:
                item.tensor = tensors[item.number]
        mine.tensors, mine.numbers = tensors, signature.numbers

    def allocate(self, allocator: GraphAllocator) -> None:
        """Place the image, unless it lies where it did.

        Raises:
            AllocationError: A device lacks room.
        """
        if self.stamp == allocator.n_reallocs and allocator.keeps_places():
            return
        for i in self._owned:
            self._images[i].buffer = None
        allocator.alloc_graph_n(self.graph, self.node_ids, self.leaf_ids)
        self.stamp = allocator.n_reallocs
        copies = (copy for split in self.splits for item in split.inputs for copy in item.copies)
        bound = [*self._images, *copies]
        lie = list(map(_buffer, bound)), list(map(_offset, bound))
        if lie != self._lie:
            self._lie = lie
            self.forget_plans()
            n = len(self._images)
            buffers = lie[0][:n]
            self.buffers, self.offsets = buffers, lie[1][:n]
            own = {b for b in set(buffers) if b is not None and b.usage is BufferUsage.COMPUTE}
            self._owned = [i for i, buffer in enumerate(buffers) if buffer in own]

    def place(self) -> None:
        """Place the tensors of the bound graph where their twins lie."""
        tensors = self.signature.tensors
        for tensor, buffer, offset in zip(tensors, self.buffers, self.offsets, strict=True):
            tensor.buffer = buffer
            tensor.offset = offset
        self._sources = list(map(_src, tensors))

    def release(self) -> None:
        """Take the places back from the tensors of the bound graph, if nobody else has moved them."""
        tensors, buffers, offsets = self.signature.tensors, self.buffers, self.offsets
        for i in self._owned:
            tensor = tensors[i]
            if tensor.buffer is buffers[i] and tensor.offset == offsets[i]:
                tensor.buffer = None

    def check(self) -> None:
        """Check, after something moved somewhere, that it was nothing of ours; note changed parameters.

        Raises:
            GraphError: A tensor of the bound graph was moved, or reads other tensors.
            FreedError: A tensor of the user's lies in freed memory.
        """
        signature = self.signature
        tensors = signature.tensors
        if (
            list(map(_buffer, tensors)) != self.buffers
            or list(map(_offset, tensors)) != self.offsets
            or list(map(_src, tensors)) != self._sources
        ):
            there = zip(tensors, self.buffers, self.offsets, self._sources, strict=True)
            moved = next(t for t, b, o, s in there if t.buffer is not b or t.offset != o or t.src != s)
            raise GraphError(
                f"{moved.describe()} was moved or changed since this scheduler allocated the graph; "
                "call alloc_graph again, and set the inputs again"
            )
        signature.check_freed()
        params = [t.params for t in tensors]
        if not signature.has_params(params):
            signature.params = params
            signature.keep()
            for image, changed in zip(self._images, signature.params, strict=True):
                if image.params != changed:
                    image.params = changed
            self.forget_plans()

    # -- plans ---------------------------------------------------------------------------------

    def plan(self, index: int, c: int) -> GraphPlan:
        """Return the plan of a split that reads the c-th copies, made when first asked for."""
        split = self.splits[index]
        plan = split.plans[c]
        if plan is None:
            plan = split.plans[c] = split.backend.graph_plan_create(self.variant(c)[index])
        return plan

    def variant(self, c: int) -> list[Graph]:
        """Return the graphs of the splits that read the c-th copies."""
        graphs = self._variants[c]
        if graphs is None:
            graphs = [s.graph for s in self.splits] if c == 0 else variant(self.graph, self.splits, c)
            self._variants[c] = graphs
        return graphs

    def forget_plans(self) -> None:
        """Drop the plans: what they bound has changed."""
        self._variants: list[list[Graph] | None] = [None] * self._n_copies
        for split in self.splits:
            split.plans = [None] * self._n_copies
