"""Table: the steps of a plan as machine code reads them, with addresses in place of symbols."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ggmlb.backends.common.fusion import Group
from ggmlb.backends.common.kinds import ALIGNED, Item, Operands, operands_of
from ggmlb.backends.llvm.lowering import lower
from ggmlb.backends.llvm.lowering.steps import NOTHING, NUMBER, OPERANDS, LoweredSteps, Steps, symbol
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer
from ggmlb.interface.host import aligned_empty
from ggmlb.system.progress import Task

if TYPE_CHECKING:
    import numpy.typing as npt

    from ggmlb.backends.common.workspace import Workspace
    from ggmlb.backends.llvm.backend import LlvmBackend
    from ggmlb.backends.llvm.kernels.activations import ActivationLayout

    Ints = npt.NDArray[np.int64]


class Made(NamedTuple):
    """An operand whose values lie in memory as bytes.

    Attributes:
        address, form: Of the operand.
        layout: How they lie.
        end: Where the operand ends.
    """

    address: int
    form: int
    layout: ActivationLayout
    end: int


class Table:
    """The bound steps of items; one of a known kind is not lowered again.

    Args:
        backend: The stream.
        items: Nodes and groups, in order.
        task: Told when kernels are compiled.

    Attributes:
        address: Of the first step.
        n_steps: Number of steps.
        ends: For each item, the number of steps up to its end.
        shares: Whether any step is for several threads.
        errors: Row number, limit and step of the first fault that a kernel found; zeros if none.
    """

    def __init__(
        self,
        backend: LlvmBackend,
        items: Sequence[Item],
        task: Task,
    ) -> None:
        self._backend, self._task, self._kinds = backend, task, backend.kinds
        self._kinds.make_room()
        self._kept: list[Any] = []
        self._made: Made | None = None
        self.errors = aligned_empty(64).view(np.int64)  # as the addresses of all slots are
        self.errors[:] = 0
        tensors_of = [operands_of(item) for item in items]
        self._operands = operands = Operands(tensors_of, self._kinds, self._starts_of)
        found: list[LoweredSteps] = []
        flat: list[int] = []
        n = len(operands.addresses)
        for item, tensors in zip(items, tensors_of, strict=True):
            numbers = list(map(operands.numbers.__getitem__, tensors))
            found.append(self._lowered(item, tensors, numbers) if tensors else NOTHING)
            flat += (n, n + 1, n + 2, n + 3, *numbers)
        places = np.array(flat, np.int64)
        sizes = np.array([OPERANDS + len(tensors) for tensors in tensors_of], np.int64)
        slots = np.array([*operands.addresses, *self._memory(found)], np.int64)[places]
        self._bind(found, sizes, slots & ~ALIGNED)
        # Only what is run stays: the stream owns its plans, and must not be kept alive by them.
        del self._backend, self._task, self._kinds, self._operands

    def _starts_of(self, buffers: Collection[Buffer]) -> dict[Buffer, int]:
        """Return the addresses of buffers, whose memory is kept."""
        memories = {b: b.base for b in buffers}
        self._kept += memories.values()
        return {b: int(memory.ctypes.data) for b, memory in memories.items()}

    def _lowered(self, item: Item, tensors: Sequence[Tensor | None], numbers: Sequence[int]) -> LoweredSteps:
        """Return the steps of an item."""
        operands = self._operands
        nodes = item.nodes if isinstance(item, Group) else (item,)
        made = self._made and self._still_made(nodes, numbers)
        kind = (made, *operands.kind(item, numbers))
        lowered = self._kinds.lowered.get(kind)
        if lowered is None:
            first = {t: i for i, t in reversed([*enumerate(tensors)]) if t is not None}
            addresses = operands.addresses
            symbols = {t: symbol(OPERANDS + i, addresses[numbers[i]] & ALIGNED) for t, i in first.items()}
            steps = Steps(self._backend, self._task, symbols, made)
            lower(item, steps)
            lowered = self._kinds.lowered[kind] = steps.lowered()
        if lowered.made is not None:
            slot, layout = lowered.made
            i, tensor = numbers[slot - OPERANDS], tensors[slot - OPERANDS]
            assert tensor is not None
            address = operands.addresses[i]
            self._made = Made(address, operands.forms[i], layout, address + tensor.nbytes)
        return lowered

    def _still_made(
        self, nodes: Sequence[Tensor], numbers: Sequence[int]
    ) -> tuple[int, ActivationLayout] | None:
        """Return the slot of an item's operand whose values lie in memory as bytes, and how."""
        made, addresses, forms = self._made, self._operands.addresses, self._operands.forms
        assert made is not None
        for node in nodes:
            start = addresses[self._operands.numbers[node]]
            if start < made.end and made.address < start + node.nbytes:
                self._made = None  # what they were made from is written
                return None
        for slot, i in enumerate(numbers, OPERANDS):
            if addresses[i] == made.address and forms[i] == made.form:
                return slot, made.layout
        return None

    def _bind(self, found: Sequence[LoweredSteps], sizes: Ints, slots: Ints) -> None:
        """Write the table: the steps of all items, with their operands' addresses."""
        n_steps, n_args, n_symbols = (
            np.array(n, np.int64)
            for n in ([x.n_steps for x in found], [x.args.size for x in found], [x.slots.size for x in found])
        )
        self.ends = np.cumsum(n_steps).tolist()
        self.n_steps = int(n_steps.sum())
        self.shares = any([x.shares for x in found])
        if not self.n_steps:
            self.address = 0
            return
        firsts, starts = _starts(sizes), _starts(n_args)
        slots[firsts + NUMBER] = _starts(n_steps)
        self._args = values = np.concatenate([x.args for x in found])
        self._words = words = np.concatenate([x.words for x in found])
        where = np.concatenate([x.places for x in found]) + np.repeat(starts, n_symbols)
        what = np.concatenate([x.slots for x in found]) + np.repeat(firsts, n_symbols)
        values[where] += slots[what]
        words[:, 1] += np.repeat(8 * starts, n_steps) + values.ctypes.data
        self.address = int(words.ctypes.data)
        self._kept.append([x.kept for x in found])

    def _memory(self, found: Sequence[LoweredSteps]) -> tuple[int, int, int, int]:
        """Return the addresses of scratch, activations and errors, and a place for the number of a step."""
        scratch = self._take(self._backend.scratch, max([x.n_scratch for x in found], default=0))
        activations = self._take(self._backend.activations, max([x.n_activations for x in found], default=0))
        return scratch, activations, self.errors.ctypes.data, 0

    def _take(self, workspace: Workspace, nbytes: int) -> int:
        """Return the address of memory that the stream's plans share."""
        workspace.restart()
        memory = workspace.take((nbytes,), np.uint8)
        self._kept.append(memory)
        return int(memory.ctypes.data)


def _starts(sizes: Ints) -> Ints:
    """Return where each of some parts begins that lie one after the other."""
    starts: Ints = np.cumsum(sizes) - sizes
    return starts
