"""Table: the steps of a plan as machine code reads them, with addresses in place of symbols."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ggmlb.backends.common.fusion import Group
from ggmlb.backends.llvm.lowering import lower
from ggmlb.backends.llvm.lowering.steps import ALIGNED, NOTHING, NUMBER, OPERANDS, Lowered, Steps, symbol
from ggmlb.core.enums import NO_OPS
from ggmlb.core.placement import frozen
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, BufferType
from ggmlb.interface.host import aligned_empty
from ggmlb.system.progress import Task

if TYPE_CHECKING:
    import numpy.typing as npt

    from ggmlb.backends.common.workspace import Workspace
    from ggmlb.backends.llvm.backend import LlvmBackend
    from ggmlb.backends.llvm.kernels.activations import Layout

    Ints = npt.NDArray[np.int64]

ABSENT = -1
"""Form of an absent operand."""

MAX_KINDS = 4096
"""Most kinds of items, and forms of operands, that are kept."""


class Kinds:
    """The items that a stream has lowered, by their kind: op, parameters, and the forms of operands.

    Attributes:
        lowered: Steps by kind.
        forms: Numbers of forms: layout, alignment and packing.
        numbers: Of the forms to come; none is given twice.
    """

    def __init__(self) -> None:
        self.lowered: dict[Hashable, Lowered] = {}
        self.forms: dict[Hashable, int] = {}
        self.numbers = count()

    def make_room(self) -> None:
        """Forget all if there are many."""
        if max(len(self.lowered), len(self.forms)) > MAX_KINDS:
            self.lowered.clear()
            self.forms.clear()


class Made(NamedTuple):
    """An operand whose values lie in memory as bytes.

    Attributes:
        address, form: Of the operand.
        layout: How they lie.
        end: Where the operand ends.
    """

    address: int
    form: int
    layout: Layout
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
        items: Sequence[Tensor | Group],
        task: Task,
    ) -> None:
        self._backend, self._task, self._kinds = backend, task, backend.kinds
        self._kinds.make_room()
        self._kept: list[Any] = []
        self._made: Made | None = None
        self.errors = aligned_empty(64).view(np.int64)  # as the addresses of all slots are
        self.errors[:] = 0
        operands = [_operands(item) for item in items]
        self._read({*chain.from_iterable(operands)} - {None})
        found: list[Lowered] = []
        flat: list[int] = []
        n = len(self._addresses)
        for item, tensors in zip(items, operands, strict=True):
            numbers = list(map(self._numbers.__getitem__, tensors))
            found.append(self._lowered(item, tensors, numbers) if tensors else NOTHING)
            flat += (n, n + 1, n + 2, n + 3, *numbers)
        places = np.array(flat, np.int64)
        sizes = np.array([OPERANDS + len(tensors) for tensors in operands], np.int64)
        slots = np.array([*self._addresses, *self._memory(found)], np.int64)[places]
        self._bind(found, sizes, slots & ~ALIGNED)
        # Only what is run stays: the stream owns its plans, and must not be kept alive by them.
        del self._backend, self._task, self._kinds, self._addresses, self._forms, self._numbers, self._starts

    def _read(self, tensors: Collection[Tensor | None]) -> None:
        """Number operands, and look up where each is, and its form; an absent one is the last."""
        placed = [t for t in tensors if t is not None and t.buffer is not None]
        buffers = [t.buffer for t in placed]
        self._starts = starts = self._starts_of({*buffers})
        self._addresses = [starts[b] + t.offset for t, b in zip(placed, buffers, strict=True)]
        packs = {b: b.packing for b in starts if b and type(b.buft).packing is not BufferType.packing}
        packings = [packs[b](t) if b in packs else "" for t, b in zip(placed, buffers, strict=True)]
        layouts = [t.layout for t in placed]
        keys = zip(layouts, [a & ALIGNED for a in self._addresses], packings, strict=True)
        self._forms = list(map(self._kinds.forms.setdefault, keys, self._kinds.numbers))
        self._numbers: dict[Tensor | None, int] = dict(zip(placed, count()))
        self._numbers[None] = len(placed)
        self._forms.append(ABSENT)
        self._addresses.append(0)

    def _starts_of(self, buffers: Collection[Buffer | None]) -> dict[Buffer | None, int]:
        """Return the addresses of buffers, whose memory is kept."""
        memories = {b: b.base for b in buffers if b is not None}
        self._kept += memories.values()
        return {b: int(memory.ctypes.data) for b, memory in memories.items()}

    def _lowered(
        self, item: Tensor | Group, operands: Sequence[Tensor | None], numbers: Sequence[int]
    ) -> Lowered:
        """Return the steps of an item."""
        if isinstance(item, Group):
            nodes = item.nodes
            what: tuple[Hashable, ...] = (
                item.pattern, *item.parts, *[node in item.kept for node in nodes],
                *[(node.op, len(node.src), frozen(node.params)) for node in nodes],
            )  # fmt: skip
        else:
            nodes = (item,)
            what = (item.op, frozen(item.params))
        same: dict[int, int] = {}
        if len({*numbers}) < len(numbers):
            what += tuple(map(same.setdefault, numbers, count()))
        forms = self._forms
        made = self._made and self._still_made(nodes, numbers)
        kind = (what, made, *[forms[i] for i in numbers])
        lowered = self._kinds.lowered.get(kind)
        if lowered is None:
            first = {t: i for i, t in reversed([*enumerate(operands)]) if t is not None}
            symbols = {
                t: symbol(OPERANDS + i, self._addresses[numbers[i]] & ALIGNED) for t, i in first.items()
            }
            steps = Steps(self._backend, self._task, symbols, made)
            lower(item, steps)
            lowered = self._kinds.lowered[kind] = steps.lowered()
        if lowered.made is not None:
            slot, layout = lowered.made
            i, tensor = numbers[slot - OPERANDS], operands[slot - OPERANDS]
            assert tensor is not None
            address = self._addresses[i]
            self._made = Made(address, forms[i], layout, address + tensor.nbytes)
        return lowered

    def _still_made(self, nodes: Sequence[Tensor], numbers: Sequence[int]) -> tuple[int, Layout] | None:
        """Return the slot of an item's operand whose values lie in memory as bytes, and how."""
        made, addresses, forms = self._made, self._addresses, self._forms
        assert made is not None
        for node in nodes:
            start = addresses[self._numbers[node]]
            if start < made.end and made.address < start + node.nbytes:
                self._made = None  # what they were made from is written
                return None
        for slot, i in enumerate(numbers, OPERANDS):
            if addresses[i] == made.address and forms[i] == made.form:
                return slot, made.layout
        return None

    def _bind(self, found: Sequence[Lowered], sizes: Ints, slots: Ints) -> None:
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

    def _memory(self, found: Sequence[Lowered]) -> tuple[int, int, int, int]:
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


def _operands(item: Tensor | Group) -> Sequence[Tensor | None]:
    """Return the nodes of an item, each followed by its operands; nothing if it has nothing to compute."""
    if isinstance(item, Group):
        return [t for node in item.nodes for t in (node, *node.src)]
    return () if item.op in NO_OPS or item.is_empty else (item, *item.src)


def _starts(sizes: Ints) -> Ints:
    """Return where each of some parts begins that lie one after the other."""
    starts: Ints = np.cumsum(sizes) - sizes
    return starts
