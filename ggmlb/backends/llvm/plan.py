"""LlvmPlan: the steps of a graph with their addresses, in an array read by `kernels.driver`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ggmlb.backends.common.fusion import Group, Item, fuse
from ggmlb.backends.common.kinds import ALIGNED, Operands, operands_of
from ggmlb.backends.llvm.lowering.context import (
    NOTHING,
    NUMBER,
    OPERANDS,
    RULES,
    LoweredSteps,
    LoweringContext,
    lower,
    symbol,
)
from ggmlb.core.enums import Status
from ggmlb.core.errors import BackendError
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, GraphPlan
from ggmlb.interface.host import aligned_empty
from ggmlb.system import progress

if TYPE_CHECKING:
    import numpy.typing as npt

    from ggmlb.backends.common.workspace import Workspace
    from ggmlb.backends.llvm.backend import LlvmBackend
    from ggmlb.backends.llvm.kernels.activations import ActivationLayout

    Ints = npt.NDArray[np.int64]


class LlvmPlan(GraphPlan):
    """A graph as steps (kernel launches); computing it again allocates nothing.

    Attributes:
        n_steps: Number of steps.
    """

    def __init__(self, backend: LlvmBackend, graph: Graph) -> None:
        super().__init__(backend, graph)
        self._pool = backend.pool
        self._kept: list[Any] = []  # memory that steps point to
        # Row number, limit and step of the first error that a kernel found, or zeros.
        self._errors = aligned_empty(64).view(np.int64)
        self._errors[:] = 0
        with progress.task(f"{backend.name}: compiling kernels") as task:
            self._items = fuse(graph, backend.can_fuse, by_place=False, names=RULES.patterns)
            self._lower(backend, task)
        self._span = self._pool.span(self._address, 0, self.n_steps)
        self._faults = self._errors.data  # a memoryview: NumPy's code would be out of the caches after steps

    def _lower(self, backend: LlvmBackend, task: progress.Task) -> None:
        """Lower new kinds of nodes, and set the addresses of all steps."""
        self._bind(*_Kinds(backend, self._items, task, self._kept).found(self._errors))

    def _bind(self, found: Sequence[LoweredSteps], sizes: Ints, slots: Ints) -> None:
        """Concatenate the steps of all items, and replace symbols by addresses.

        Args:
            found: The steps of each item.
            sizes: Number of slots of each item.
            slots: Addresses of the slots of all items.
        """
        n_steps, n_args, n_symbols = (
            np.array(n, np.int64)
            for n in ([x.n_steps for x in found], [x.args.size for x in found], [x.slots.size for x in found])
        )
        self._ends = np.cumsum(n_steps).tolist()  # number of steps up to the end of each item
        self.n_steps = int(n_steps.sum())
        self._shares = any([x.shares for x in found])
        self._address = 0
        if not self.n_steps:
            return
        firsts, starts = _starts(sizes), _starts(n_args)
        slots[firsts + NUMBER] = _starts(n_steps)
        values = np.concatenate([x.args for x in found])
        words = np.concatenate([x.words for x in found])
        where = np.concatenate([x.places for x in found]) + np.repeat(starts, n_symbols)
        what = np.concatenate([x.slots for x in found]) + np.repeat(firsts, n_symbols)
        values[where] += slots[what]
        words[:, 1] += np.repeat(8 * starts, n_steps) + values.ctypes.data
        self._address = int(words.ctypes.data)
        self._kept += (values, words, [x.kept for x in found])

    def run(self) -> Status:
        """Compute the graph; before each node, call the backend's abort callback if there is one.

        Raises:
            BackendError: A row index is out of range; the message has the node.
        """
        if self.backend.abort_callback is None:
            self._pool.run(self._span, self._shares)
        else:
            first = 0
            for end in self._ends:
                if self.backend.is_aborted():
                    return Status.ABORTED
                if end > first:
                    self._pool.run(self._pool.span(self._address, first, end), self._shares)
                first = end
        if self._faults[2]:  # the step, counted from 1
            self._raise()
        return Status.SUCCESS

    def _raise(self) -> None:
        row, limit, i = self._errors[:3].tolist()
        self._errors[:] = 0
        item = self._items[next(k for k, end in enumerate(self._ends) if end >= i)]
        node = item.result if isinstance(item, Group) else item
        raise BackendError(
            f"{self.backend.name} failed to compute {node.describe()}: "
            f"row number {row} for a tensor of {limit} rows"
        )


class _Quantized(NamedTuple):
    """The operand whose quantised values are cached in the stream's memory for activations.

    Attributes:
        address: The operand's address.
        form: Number of the operand's layout, alignment and packing (`Kinds.forms`).
        layout: Layout of the quantised values.
        end: End address of the operand.
    """

    address: int
    form: int
    layout: ActivationLayout
    end: int


class _Kinds:
    """Finds the steps of items by kind in the device's cache, and lowers those that are missing.

    Args:
        backend: The stream.
        items: Nodes and groups, in order.
        task: Progress task, notified when a kernel is compiled.
        kept: List that keeps the memory of operands and scratch alive.
    """

    def __init__(
        self, backend: LlvmBackend, items: Sequence[Item], task: progress.Task, kept: list[Any]
    ) -> None:
        self._backend, self._items, self._task, self._kept = backend, items, task, kept
        self._lowered_for = backend.lowered_for
        backend.kinds.make_room()
        self._tensors_of = [operands_of(item) for item in items]
        self._operands = Operands(self._tensors_of, backend.kinds, self._starts_of)
        self._quantized: _Quantized | None = None

    def _starts_of(self, buffers: Collection[Buffer]) -> dict[Buffer, int]:
        """Return the addresses of buffers, and keep their memory alive."""
        memories = {b: b.base for b in buffers}
        self._kept += memories.values()
        return {b: int(memory.ctypes.data) for b, memory in memories.items()}

    def found(self, errors: Ints) -> tuple[list[LoweredSteps], Ints, Ints]:
        """Return the steps of each item, its number of slots, and the addresses of all slots."""
        operands, found, flat = self._operands, list[LoweredSteps](), list[int]()
        n = len(operands.addresses)
        common = n, n + 1, n + 2, n + 3
        for item, tensors in zip(self._items, self._tensors_of, strict=True):
            numbers = list(map(operands.numbers.__getitem__, tensors))
            found.append(self._lowered(item, tensors, numbers) if tensors else NOTHING)
            flat += common
            flat += numbers
        scratch = self._take(self._backend.scratch, max([x.n_scratch for x in found], default=0))
        activations = self._take(self._backend.activations, max([x.n_activations for x in found], default=0))
        addresses = [*operands.addresses, scratch, activations, errors.ctypes.data, 0]
        sizes = np.array([OPERANDS + len(tensors) for tensors in self._tensors_of], np.int64)
        slots = np.array(addresses, np.int64)[np.array(flat, np.int64)] & ~ALIGNED
        return found, sizes, slots

    def _lowered(self, item: Item, tensors: Sequence[Tensor | None], numbers: Sequence[int]) -> LoweredSteps:
        """Return the steps of an item, given its operands' indices in `Operands`."""
        operands, kinds = self._operands, self._backend.kinds
        quantized = self._quantized and self._still_quantized(item, numbers)
        kind = (self._lowered_for, quantized, *operands.kind(item, numbers))
        lowered = kinds.lowered.get(kind)
        if lowered is None:
            first = {t: i for i, t in reversed([*enumerate(tensors)]) if t is not None}
            addresses = operands.addresses
            symbols = {t: symbol(OPERANDS + i, addresses[numbers[i]] & ALIGNED) for t, i in first.items()}
            ctx = LoweringContext(self._backend, self._task, symbols, quantized)
            lower(item, ctx)
            lowered = kinds.lowered[kind] = ctx.lowered()
        if lowered.quantized is not None:
            slot, layout = lowered.quantized
            i, tensor = numbers[slot - OPERANDS], tensors[slot - OPERANDS]
            assert tensor is not None
            address = operands.addresses[i]
            self._quantized = _Quantized(address, operands.forms[i], layout, address + tensor.nbytes)
        return lowered

    def _still_quantized(self, item: Item, numbers: Sequence[int]) -> tuple[int, ActivationLayout] | None:
        """Return slot and layout of the item's operand whose quantised values are cached, or `None`."""
        known, addresses, forms = self._quantized, self._operands.addresses, self._operands.forms
        assert known is not None
        for node in item.nodes if isinstance(item, Group) else (item,):
            start = addresses[self._operands.numbers[node]]
            if start < known.end and known.address < start + node.nbytes:
                self._quantized = None  # the operand is overwritten
                return None
        for slot, i in enumerate(numbers, OPERANDS):
            if addresses[i] == known.address and forms[i] == known.form:
                return slot, known.layout
        return None

    def _take(self, workspace: Workspace, nbytes: int) -> int:
        """Return the address of memory shared by the stream's plans, of at least `nbytes`."""
        workspace.restart()
        memory = workspace.take((nbytes,), np.uint8)
        self._kept.append(memory)
        return int(memory.ctypes.data)


def _starts(sizes: Ints) -> Ints:
    """Return the start offset of each consecutive part (the exclusive prefix sum)."""
    starts: Ints = np.cumsum(sizes) - sizes
    return starts
