"""Table: the steps of a plan as machine code reads them, with addresses in place of symbols."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ggmlb.backends.common.fusion import Group
from ggmlb.backends.llvm.lowering import lower
from ggmlb.backends.llvm.lowering.steps import ALIGNED, OPERANDS, Lowered, Steps, symbol
from ggmlb.core.enums import NO_OPS
from ggmlb.core.placement import frozen
from ggmlb.core.tensor import Tensor
from ggmlb.interface import BufferType
from ggmlb.system.progress import Task

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Workspace
    from ggmlb.backends.llvm.backend import LlvmBackend
    from ggmlb.interface import Buffer

MAX_KINDS = 4096
"""Most kinds of items, and forms of operands, that are kept."""


class Kinds:
    """The items that a stream has lowered, by their kind: op, parameters, and the forms of operands.

    Attributes:
        lowered: Steps by kind.
        forms: Numbers of forms: layout, alignment and packing.
    """

    def __init__(self) -> None:
        self.lowered: dict[Hashable, Lowered] = {}
        self.forms: dict[Hashable, int] = {}

    def make_room(self) -> None:
        """Forget all if there are many."""
        if max(len(self.lowered), len(self.forms)) > MAX_KINDS:
            self.lowered.clear()
            self.forms.clear()


class Place(NamedTuple):
    """Where an operand is, and the number of its form."""

    address: int
    form: int


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

    def __init__(self, backend: LlvmBackend, items: Sequence[Tensor | Group], task: Task) -> None:
        self._backend, self._task, self._kinds = backend, task, backend.kinds
        self._kinds.make_room()
        self._buffers: dict[Buffer, tuple[int, bool]] = {}
        self._places: dict[Tensor | None, Place] = {None: Place(0, -1)}
        self._kept: list[Any] = []
        # The operand whose values lie in memory as bytes, how many, and the end of the operand.
        self._made: tuple[Place, int, int] | None = None
        self.errors = np.zeros(8, np.int64)
        self.ends: list[int] = []
        found: list[Lowered] = []
        places: list[list[Place]] = []
        self.n_steps = 0
        for item in items:
            if isinstance(item, Group) or (item.op not in NO_OPS and not item.is_empty):
                lowered, at = self._lowered(item)
                found.append(lowered)
                places.append(at)
                self.n_steps += lowered.n_steps
            self.ends.append(self.n_steps)
        self.shares = any([lowered.shares for lowered in found])
        self._bind(found, places)

    def _lowered(self, item: Tensor | Group) -> tuple[Lowered, list[Place]]:
        """Return the steps of an item, and the places of its operands."""
        kind: tuple[Hashable, ...]
        if isinstance(item, Group):
            nodes = item.nodes
            operands = [t for node in nodes for t in (node, *node.src)]
            kind = (
                item.pattern, *item.parts, *[node in item.kept for node in nodes],
                *[(node.op, len(node.src), frozen(node.params)) for node in nodes],
            )  # fmt: skip
        else:
            nodes = (item,)
            operands = [item, *item.src]
            kind = (item.op, frozen(item.params))
        same: dict[Tensor | None, int] = {}
        kind += tuple(map(same.setdefault, operands, range(OPERANDS, OPERANDS + len(operands))))
        known = self._places
        places = [known.get(t) or self._place(t) for t in operands]
        made = None
        if self._made is not None:
            place, nbytes, end = self._made
            if any([known[t].address < end and place.address < known[t].address + t.nbytes for t in nodes]):
                self._made = None  # what they were made from is written
            elif place in places:
                made = OPERANDS + places.index(place), nbytes
        kind = (*kind, made, *[form for _, form in places])
        lowered = self._kinds.lowered.get(kind)
        if lowered is None:
            symbols = {t: symbol(i, known[t].address & ALIGNED) for t, i in same.items() if t is not None}
            steps = Steps(self._backend, self._task, symbols, made)
            lower(item, steps)
            lowered = self._kinds.lowered[kind] = steps.lowered()
        if lowered.made is not None:
            slot, nbytes = lowered.made
            place, tensor = places[slot - OPERANDS], operands[slot - OPERANDS]
            assert tensor is not None
            self._made = place, nbytes, place.address + tensor.nbytes
        return lowered, places

    def _place(self, tensor: Tensor | None) -> Place:
        assert tensor is not None
        buffer = tensor.buffer
        assert buffer is not None
        base, packs = self._buffers.get(buffer) or self._memory(buffer)
        address = base + tensor.offset
        packing = buffer.packing(tensor) if packs else ""
        form = (tensor.layout, address & ALIGNED, packing)
        forms = self._kinds.forms
        place = self._places[tensor] = Place(address, forms.setdefault(form, len(forms)))
        return place

    def _memory(self, buffer: Buffer) -> tuple[int, bool]:
        """Return the address of a buffer, and whether it may store tensors in another order."""
        memory = buffer.base
        self._kept.append(memory)
        packs = type(buffer.buft).packing is not BufferType.packing
        found = self._buffers[buffer] = int(memory.ctypes.data), packs
        return found

    def _bind(self, found: Sequence[Lowered], places: Sequence[Sequence[Place]]) -> None:
        backend = self._backend
        scratch = self._take(backend.scratch, max([x.n_scratch for x in found], default=0))
        activations = self._take(backend.activations, max([x.n_activations for x in found], default=0))
        errors = int(self.errors.ctypes.data)
        bases: list[int] = []
        first_bases: list[int] = []
        n = 0
        for lowered, at in zip(found, places, strict=True):
            first_bases.append(len(bases))
            bases += (scratch, activations, errors, n)
            bases += [address & ~ALIGNED for address, _ in at]
            n += lowered.n_steps
        if not found:
            self._words = self._args = np.zeros(1, np.int64)
            self.address = 0
            return
        self._args = args = np.concatenate([x.args for x in found])
        self._words = words = np.concatenate([x.words for x in found])
        starts = np.cumsum([0, *[x.args.size for x in found[:-1]]])
        n_symbols = [x.slots.size for x in found]
        symbols = np.concatenate([x.places for x in found]) + np.repeat(starts, n_symbols)
        slots = np.concatenate([x.slots for x in found]) + np.repeat(first_bases, n_symbols)
        args[symbols] += np.array(bases, np.int64)[slots]
        words[:, 1] += np.repeat(8 * starts, [x.n_steps for x in found]) + args.ctypes.data
        self.address = int(words.ctypes.data)
        self._kept.append([x.kept for x in found])

    def _take(self, workspace: Workspace, nbytes: int) -> int:
        """Return the address of memory that the stream's plans share."""
        workspace.restart()
        memory = workspace.take((nbytes,), np.uint8)
        self._kept.append(memory)
        return int(memory.ctypes.data)
