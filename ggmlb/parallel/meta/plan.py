"""The plan of a meta device: stages in which devices compute their slices, and exchanges between stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ggmlb.core.enums import NO_OPS, TensorFlag
from ggmlb.core.graph import Graph
from ggmlb.core.ops import SPECS
from ggmlb.core.placement import overlap, same_place
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, Buffer, GraphPlan
from ggmlb.parallel.meta.buffer import MetaBuffer
from ggmlb.parallel.meta.layout import slices_of_view
from ggmlb.parallel.meta.state import whole
from ggmlb.parallel.meta.sums import Sums

if TYPE_CHECKING:
    from ggmlb.core.sharding import SplitState
    from ggmlb.parallel.meta.backend import MetaBackend
    from ggmlb.parallel.meta.reduce import AllReduce

Slices = tuple[Tensor, ...]
"""One tensor per device."""


class SubgraphStage(NamedTuple):
    """A stage of a meta plan: independent plans, one per device, then any sum or gather over the devices."""

    plans: tuple[GraphPlan | None, ...]
    then: Callable[[], None] | None


class MetaPlan(GraphPlan):
    """The plan of a graph sharded over the devices.

    Attributes:
        stages: In order.
        n_reductions: Number of sums over the devices.
        n_gathers: Number of tensors gathered on each device, because an op needs them whole.
    """

    if TYPE_CHECKING:

        @property
        def backend(self) -> MetaBackend:
            """The meta device's stream that computes this plan."""

    def __init__(self, backend: MetaBackend, graph: Graph) -> None:
        super().__init__(backend, graph)
        self.stages: list[SubgraphStage] = []
        self._reductions: list[AllReduce] = []
        self._gathers: list[Gather] = []
        try:
            _Sharder(backend, self, graph).run()
        except BaseException:
            self.release()
            raise

    @property
    def n_reductions(self) -> int:
        """Number of all-reduce sums over the devices in this plan."""
        return len(self._reductions)

    @property
    def n_gathers(self) -> int:
        """Number of cut tensors that the plan assembles whole on every device."""
        return len(self._gathers)

    def reduction(self, parts: Slices, has_part: Sequence[bool]) -> AllReduce:
        """Create an all-reduce of `parts`, owned by the plan; `has_part`: whether each device adds a term."""
        self._reductions.append(self.backend.communicator.sum_of(parts, has_part))
        return self._reductions[-1]

    def gather(self, root: Tensor) -> Gather:
        """Create a gather, owned by the plan, that assembles the cut tensor `root` whole on each device."""
        self._gathers.append(Gather(self.backend.backends, root))
        return self._gathers[-1]

    def release(self) -> None:
        """Free each device's plans, and the memory of the gathers that this plan owns."""
        for stage in self.stages:
            for backend, own in zip(self.backend.backends, stage.plans, strict=True):
                if own is not None:
                    backend.graph_plan_free(own)
        self.stages = []
        self._reductions = []
        for gather in self._gathers:
            gather.free()


class Gather:
    """Assembles a cut (sharded) tensor whole on each device, through host memory."""

    def __init__(self, backends: Sequence[Backend], root: Tensor) -> None:
        self._backends = backends
        self._root = root
        self._buffers: list[Buffer] = []
        wholes = []
        try:
            for simple in backends:
                self._buffers.append(simple.alloc_buffer(root.nbytes))
                whole = Tensor(root.dtype, root.ne, name=root.name)
                whole.flags = root.flags
                whole.buffer = self._buffers[-1]
                wholes.append(whole)
        except BaseException:
            self.free()
            raise
        self.wholes: Slices = tuple(wholes)

    def __call__(self) -> None:
        """Wait for the parts, and gather them."""
        _wait(self._backends)
        data = self._root.get()
        for tensor in self.wholes:
            tensor.set(data)

    def free(self) -> None:
        """Free the devices' memory of the whole tensor."""
        for buffer in self._buffers:
            if not buffer.is_freed:
                buffer.free()


class _Sharder:
    """Builder of a meta plan: shards a graph's nodes in order."""

    def __init__(self, backend: MetaBackend, plan: MetaPlan, graph: Graph) -> None:
        self._backend = backend
        self._backends = backend.backends
        self._device = backend.device
        self._plan = plan
        self._graph = graph
        self._n = len(backend.backends)
        self._sums = Sums(graph, backend.device)
        self._known: dict[Tensor, Slices] = {}
        self._gathered: dict[Tensor, Slices] = {}
        self._shards: list[list[Tensor]] = [[] for _ in range(self._n)]
        self._ends: list[tuple[list[int], Callable[[], None] | None]] = []

    def run(self) -> None:
        for node in self._graph.nodes:
            if node.op not in NO_OPS and not node.is_empty:
                self._compute(node)
        self._close(None)
        self._flag_what_others_read()
        # A device's stages are views of one graph: fusion must know all readers of a result.
        graphs = [Graph(nodes) for nodes in self._shards]
        for graph in graphs:
            graph.owner_checks = True  # slices change with their tensors, which this plan checks
        starts = [0] * self._n
        for ends, then in self._ends:
            plans = tuple(
                backend.graph_plan_create(graph.view(start, end)) if end > start else None
                for backend, graph, start, end in zip(self._backends, graphs, starts, ends, strict=True)
            )
            self._plan.stages.append(SubgraphStage(plans, then))
            starts = ends

    def _close(self, then: Callable[[], None] | None) -> None:
        """End the stage."""
        self._ends.append(([len(nodes) for nodes in self._shards], then))

    def _flag_what_others_read(self) -> None:
        """Mark slices as outputs if nodes outside of this graph read them."""
        here = Counter(s for node in self._graph.nodes for s in node.src if s is not None)
        for node, n in self._graph.use_counts().items():
            if n > here[node]:
                for own in self._known.get(node, ()):
                    own.flags |= TensorFlag.OUTPUT

    def _compute(self, node: Tensor) -> None:
        result, wants = self._sums.outcomes[node]
        root = node.view_src
        into = node if root is None else root
        by_wholes = False
        if root is not None and not self._fits(node, root, result):
            result, wants = whole(wants)
            by_wholes = self._device.state(into).is_cut
        places = self._wholes(node) if by_wholes else self._places(node)
        pairs = zip(node.src, wants, strict=True)
        operands = [None if src is None else self._operand(src, want, places) for src, want in pairs]
        slices = tuple(
            _computing(node, place, [None if o is None else o[j] for o in operands])
            for j, place in enumerate(places)
        )
        # A device with empty operands has no part of a sum; other results may be empty.
        has_part = self._sums.parts.get(node, (True,) * self._n)
        for own, nodes, has in zip(slices, self._shards, has_part, strict=True):
            if has and not own.is_empty:
                nodes.append(own)
        if not by_wholes:
            self._known[node] = slices
        if root is not None or by_wholes:
            self._wrote(into, by_wholes)
        for i in SPECS[node.op].also_written:
            operand = node.sources[i]
            self._wrote(operand.view_src or operand, self._device.state(operand) != wants[i])
        if node in self._sums.ends:
            self._close(self._plan.reduction(slices, has_part))

    def _wrote(self, root: Tensor, by_wholes: bool) -> None:
        """Record a write: earlier gathers of the memory are outdated, unless the whole was written."""
        gathered = self._gathered.pop(root, None)
        if by_wholes and gathered is not None:
            self._close(partial(_write_slices, self._backends, root, gathered))

    def _fits(self, node: Tensor, root: Tensor, result: SplitState) -> bool:
        """Whether a node that writes into another tensor has a result sharded like that tensor."""
        state = self._device.state(node)
        return result == state and (state.is_cut or not self._device.state(root).is_cut)

    def _places(self, node: Tensor) -> Slices:
        """Return the places of a node's slices."""
        if node.view_src is not None:
            return self._slices(node)
        assert isinstance(node.buffer, MetaBuffer)
        return node.buffer.slices(node)

    def _operand(self, src: Tensor, want: SplitState, places: Slices) -> Slices:
        """Return the slices of an operand in the required state, for results at `places`.

        An allocator may place a result in an operand's memory, where slices cut from a whole operand have
        other strides than the result's: these are cut from a copy.
        """
        state = self._device.state(src)
        if state == want:
            return self._slices(src)
        wholes = self._wholes(src) if state.is_cut else self._slices(src)
        if not want.is_cut:
            return wholes
        found = self._cut(src, want, wholes)
        apart = [not overlap(a, b) or same_place(a, b) for a, b in zip(places, found, strict=True)]
        return found if all(apart) else self._cut(src, want, self._wholes(src))

    def _cut(self, src: Tensor, want: SplitState, wholes: Slices) -> Slices:
        """Return the devices' slices of an operand that each of them has whole."""
        axis, (parts,) = want.axis, want.segments
        step = src.nb[axis]
        starts = [sum(parts[:j]) for j in range(self._n)]
        per_step = src.dtype.block_size if axis == 0 else 1
        return tuple(
            _view(
                whole, (*src.ne[:axis], parts[j], *src.ne[axis + 1 :]), whole.nb, starts[j] // per_step * step
            )
            for j, whole in enumerate(wholes)
        )

    def _slices(self, tensor: Tensor) -> Slices:
        """Return each device's part of a tensor, in its current state."""
        known = self._known.get(tensor)
        if known is not None:
            return known
        root = tensor.view_src
        if root is None:
            assert isinstance(tensor.buffer, MetaBuffer)
            slices = tensor.buffer.slices(tensor)
        elif not (state := self._device.state(root)).is_cut:
            slices = tuple(_view(own, tensor.ne, tensor.nb, tensor.view_offs) for own in self._slices(root))
        else:
            view = slices_of_view(tensor.dtype, root.ne, state, tensor.ne, tensor.nb, tensor.view_offs)
            if view is None:
                return self._wholes(tensor)  # not cached: a write would outdate it
            pairs = zip(self._slices(root), view.slices, strict=True)
            slices = tuple(_view(own, part.ne, part.nb, part.offset) for own, part in pairs)
        self._known[tensor] = slices
        return slices

    def _wholes(self, tensor: Tensor) -> Slices:
        """Return the whole tensor on each device; the tensor that owns its memory is gathered."""
        root = tensor.view_src or tensor
        wholes = self._gathered.get(root)
        if wholes is None:
            gather = self._plan.gather(root)
            self._close(gather)
            wholes = self._gathered[root] = gather.wholes
        if tensor is root:
            return wholes
        return tuple(_view(whole, tensor.ne, tensor.nb, tensor.view_offs) for whole in wholes)


def _computing(node: Tensor, place: Tensor, operands: Sequence[Tensor | None]) -> Tensor:
    """Return a device's node, which writes its slice at a place."""
    own = place.reading(tuple(operands), place.view_src)
    own.op, own.params, own.flags, own.name = node.op, node.params, node.flags, node.name
    return own


def _wait(backends: Sequence[Backend]) -> None:
    for backend in backends:
        backend.synchronize()


def _write_slices(backends: Sequence[Backend], root: Tensor, wholes: Slices) -> None:
    """Write a tensor that each device computed whole back to its slices."""
    _wait(backends)
    root.set(wholes[0].get())


def _view(own: Tensor, ne: Sequence[int], nb: Sequence[int], offset: int) -> Tensor:
    """Return a view of a device's tensor."""
    extents, strides = (ne[0], ne[1], ne[2], ne[3]), (nb[0], nb[1], nb[2], nb[3])
    return Tensor(own.dtype, extents, strides, view_src=own, view_offs=offset, name=own.name)
