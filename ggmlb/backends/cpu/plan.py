"""CpuPlan: a list of bound NumPy calls; CpuLowering: binds the calls of each kind of node to its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from operator import length_hint
from time import perf_counter_ns
from typing import Any

import numpy as np

import ggmlb.backends.cpu.ops  # noqa: F401 (fills the table of rules)
from ggmlb.backends.common.kinds import Kinds, Operands, operands_of
from ggmlb.backends.common.workspace import Array, Workspace
from ggmlb.backends.cpu.lowering import (
    CALLBACKS,
    LoweredCalls,
    PlacedCall,
    Step,
    TiledGroup,
    TileStage,
    lower,
    steps_of,
)
from ggmlb.backends.cpu.threads import Threads
from ggmlb.backends.cpu.views import View
from ggmlb.core.enums import NO_OPS, Status
from ggmlb.core.errors import AllocationError, BackendError, Error
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, Command, GraphPlan

_array = np.ndarray

BoundStep = Callable[[], Any]
"""A call with its arguments bound to memory."""

Memory = list[tuple[Array, int]]
"""For each number of memory that views refer to: the array, and the operand's offset in it [bytes]."""


class CpuLowering:
    """Lowering of nodes to bound calls: looks up or lowers each node's kind, then binds it to memory.

    Args:
        kinds: The device's cache of lowered nodes.
        workspace: Scratch memory.
        threads: Threads for the tiles of big nodes.
    """

    def __init__(self, kinds: Kinds[LoweredCalls], workspace: Workspace, threads: Threads) -> None:
        self._kinds = kinds
        self._workspace = workspace
        self._threads = threads
        self._steps: list[BoundStep] = []
        self._counts: list[int] = []
        self._group: TiledGroup | None = None
        self._group_node = 0

    def lower(self, nodes: Iterable[Tensor]) -> tuple[list[BoundStep], list[int]]:
        """Return the steps (calls on arrays) that compute the nodes, and how many steps each node has.

        Raises:
            UnsupportedOpError: The rules decline a node.
        """
        kinds, n_threads = self._kinds, self._threads.n
        kinds.make_room()
        nodes = list(nodes)
        tensors_of = list(map(operands_of, nodes))
        operands = Operands(tensors_of, kinds)
        bases = {b: b.base for b in {*operands.buffers}}
        starts = operands.addresses  # one more than buffers: that of absent operands
        memory: Memory = [*zip(map(bases.__getitem__, operands.buffers), starts), (None, 0)]  # noqa: B905
        self._steps, self._counts = [], []
        for node, tensors in zip(nodes, tensors_of, strict=True):
            self._counts.append(0)
            if not tensors:
                continue
            numbers = list(map(operands.numbers.__getitem__, tensors))
            kind = None if node.op in CALLBACKS else (n_threads, *operands.kind(node, numbers))
            lowered = kinds.lowered.get(kind)
            if lowered is None:
                lowered = lower(node, n_threads)
                if lowered.is_kept:
                    kinds.lowered[kind] = lowered
            self._bind(lowered, list(map(memory.__getitem__, numbers)))
        if self._group is not None:
            self._flush()
        return self._steps, self._counts

    def _bind(self, lowered: LoweredCalls, memory: Memory) -> None:
        """Append the steps of a node, given the memory of its operands."""
        if self._group is None:
            self._workspace.restart()
        memory += map(self._workspace.reserve, lowered.scratch)
        for step in lowered.steps:
            if isinstance(step, TileStage):
                self._add_stage(step, memory)
            else:
                if self._group is not None:
                    self._flush()
                self._append([step], memory)

    def _add_stage(self, stage: TileStage, memory: Memory) -> None:
        """Add a stage to the current group, begin a new group, or append its steps."""
        if self._group is not None or stage.alone is None:
            bound = stage.bound(partial(_placed, memory))
            joins = self._group is not None and self._group.accepts(bound)
            if joins or stage.alone is None:
                if not joins:
                    self._flush()
                    self._group = TiledGroup(bound)
                self._group_node = len(self._counts) - 1
                return
            self._flush()
        self._append(stage.alone, memory)

    def _append(self, steps: list[Step], memory: Memory, node: int = -1) -> None:
        """Append steps, counted for a node."""
        for step in steps:
            if isinstance(step, tuple):
                self._steps.append(_bound(step, memory))
            else:
                lists = [[_bound(call, memory) for call in calls] for calls in step]
                self._steps.append(partial(self._threads.run, lists))
            self._counts[node] += 1

    def _flush(self) -> None:
        """Append the steps of the pending group, counted for the node of its last stage."""
        group, self._group = self._group, None
        if group is not None:
            self._append(steps_of(group.lists(self._scratch)), [], self._group_node)

    def _scratch(self, shape: tuple[int, ...]) -> View:
        array = self._workspace.take(shape)
        return View.packed(array.view(np.uint8), shape, array.dtype)


def _bound(call: PlacedCall, memory: Memory) -> BoundStep:
    """Bind a call to memory."""
    fn, places = call
    args: list[Any] = []
    for where, item, offset, shape, strides in places:
        if where >= 0:
            base, start = memory[where]
            args.append(_array(shape, item, base, start + offset, strides))
        else:
            args.append(item)
    return partial(fn, *args)


def _placed(memory: Memory, view: View) -> View:
    """Return a view with its memory in place of the number."""
    if not isinstance(view.memory, int):
        return view
    base, start = memory[view.memory]
    return View(base, view.type, view.item, start + view.offset, view.shape, view.strides)


class CpuPlan(GraphPlan):
    """The steps (NumPy calls with their arrays) of a graph, and how many steps each node has.

    Nodes that run tile by tile together share steps, which count for the last of them.
    """

    def __init__(self, backend: Backend, graph: Graph, lowering: CpuLowering) -> None:
        super().__init__(backend, graph)
        self.steps, self.counts = lowering.lower(self.nodes)

    def run(self) -> Status:
        """Call the steps in order; before each node, call the backend's abort callback if there is one.

        If timing is on, the time of each node is recorded.

        Raises:
            BackendError: NumPy failed, or a step found bad data; names the node.
        """
        steps = iter(self.steps)
        abort = self.backend.abort_callback
        commands = self.backend.commands
        if abort is None and commands is None:
            self._call(steps, None)
            return Status.SUCCESS
        for node, count in zip(self.nodes, self.counts, strict=True):
            if self.backend.is_aborted():
                return Status.ABORTED
            start = perf_counter_ns()
            self._call(steps, count)
            if commands is not None and count:
                commands.append(Command(node.describe(), False, start, perf_counter_ns()))
        return Status.SUCCESS

    def _call(self, steps: Iterator[BoundStep], count: int | None) -> None:
        """Call the next steps, or all."""
        try:
            for step in islice(steps, count):
                step()
        except Exception as error:
            what = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
            failed = self._node_of(len(self.steps) - length_hint(steps) - 1)
            kind = AllocationError if isinstance(error, MemoryError) else BackendError
            raise kind(f"{self.backend.name} failed to compute {failed}: {what}") from error

    def _node_of(self, step: int) -> str:
        """Describe the node of a step, with the nodes that share it."""
        together: list[str] = []
        for node, count in zip(self.nodes, self.counts, strict=True):
            if count:
                step -= count
                if step < 0:
                    return " with ".join([*together, node.describe()])
                together = []
            elif node.op not in NO_OPS and not node.is_empty:
                together.append(node.describe())
        raise AssertionError(f"step index too large by {step + 1}: report this bug in ggmlb")
