"""Launches of a kind of node or group, with operand slots in place of memory, and their binding.

Rules see stand-ins of the tensors, whose buffer is an operand slot. So what they return serves all items of
the kind. A slot is the number of an operand of the item; after the operands come the pieces of scratch,
then the records of bad indices. A plan binds the slots of all its items at once.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

import numpy as np

from ggmlb.backends.common.fusion import Group
from ggmlb.backends.common.kinds import ALIGNED, Item, Kinds, Operands
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu.launch import BadIndex, Launch, Scratch
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    import numpy.typing as npt

    from ggmlb.backends.gpu.source import Kernel
    from ggmlb.interface import Buffer

    Ints = npt.NDArray[np.int64]

Step = TypeVar("Step", covariant=True)
"""Type of a backend's launch without the values of its arguments."""


@dataclass(slots=True, eq=False)
class OperandSlot:
    """Stands for the buffer of an operand.

    Attributes:
        number: Number of the operand.
        pack: Suffix of its type's name for the memory's byte order (`Buffer.packing`).
    """

    number: int
    pack: str

    def packing(self, tensor: Tensor) -> str:
        """As `Buffer.packing`."""
        return self.pack


@dataclass(frozen=True, slots=True, eq=False)
class Lowered(Generic[Step]):
    """The launches of a kind.

    Attributes:
        steps: The launches.
        nbytes: Size of each one's block of arguments [bytes], a multiple of 8.
        words: The blocks one after the other; where an address is, the offset in a slot.
        places: Places of addresses in `words`.
        slots: The slot of each.
        pieces: Of each piece of scratch memory its size [bytes], and its first and last launch.
        bad: Of each record of a bad index the operand that is the node, and the bound.
    """

    steps: list[Step]
    nbytes: list[int]
    words: Ints
    places: Ints
    slots: Ints
    pieces: list[tuple[int, int, int]]
    bad: list[tuple[int, int]]


class Lowering(Protocol[Step]):
    """How a backend lowers an item, and lays out a launch's arguments."""

    def lower(self, item: Item) -> list[Launch]:
        """Return the launches of an item."""

    def step(self, launch: Launch, slots: tuple[int, ...]) -> Step:
        """Return what is kept of a launch, given the slots of its tensors."""

    def block(self, launch: Launch) -> bytes:
        """Return a launch's block of arguments, with offsets in slots for addresses."""

    def address_words(self, kernel: Kernel) -> Sequence[int]:
        """Return where the addresses of a kernel's tensors are in its block, in words of 8 bytes."""


def lowered(item: Item, tensors: Sequence[Tensor | None], by: Lowering[Step]) -> Lowered[Step]:
    """Lower an item, given its operands in the order of their slots."""
    stand_ins = _stand_ins(item, tensors)
    launches = by.lower(_item_of(item, stand_ins))
    scratch: dict[Scratch, list[int]] = {}
    bad: dict[BadIndex, None] = {}
    for now, launch in enumerate(launches):
        for arg in launch.args:
            if isinstance(arg, Mem) and isinstance(arg.buffer, Scratch):
                scratch.setdefault(arg.buffer, [now, now])[1] = now
            elif isinstance(arg, Mem) and isinstance(arg.buffer, BadIndex):
                bad[arg.buffer] = None
    numbers: dict[object, int] = {}
    for buffer in [t.buffer for t in stand_ins.values() if t.buffer is not None]:
        numbers[buffer] = cast("OperandSlot", buffer).number
    numbers.update((made, len(tensors) + i) for i, made in enumerate([*scratch, *bad]))
    steps, blocks, places, slots = [], [], list[int](), list[int]()
    start = 0
    for launch in launches:
        mine = tuple([numbers[arg.buffer] for arg in launch.args if isinstance(arg, Mem)])
        slots += mine
        places += [start + word for word in by.address_words(launch.kernel)]
        steps.append(by.step(launch, mine))
        blocks.append(by.block(launch))
        start += len(blocks[-1]) // 8
    return Lowered(
        steps,
        [len(block) for block in blocks],
        np.frombuffer(b"".join(blocks), np.int64),
        np.array(places, np.int64),
        np.array(slots, np.int64),
        [(piece.nbytes, first, last) for piece, (first, last) in scratch.items()],
        [(numbers[record.node.buffer], record.n) for record in bad],
    )


def _stand_ins(item: Item, tensors: Sequence[Tensor | None]) -> dict[Tensor, Tensor]:
    """Return a stand-in for each tensor that rules may look at."""
    made: dict[Tensor, Tensor] = {}
    for number, tensor in enumerate(tensors):
        if tensor is None or tensor in made:
            continue
        stand_in = made[tensor] = tensor.reading((), None)
        stand_in.maker = None  # which what is kept of a kind must not keep alive
        if tensor.buffer is not None:
            slot = OperandSlot(number, tensor.buffer.packing(tensor))
            stand_in.buffer, stand_in.offset = cast("Buffer", slot), tensor.offset & ALIGNED
    for node in item.nodes if isinstance(item, Group) else (item,):
        made[node].src = tuple([None if s is None else made[s] for s in node.src])
    for tensor, stand_in in made.items():
        if tensor.view_src in made:
            stand_in.view_src = made[tensor.view_src]
    return made


def _item_of(item: Item, stand_ins: dict[Tensor, Tensor]) -> Item:
    if isinstance(item, Tensor):
        return stand_ins[item]
    parts = {name: stand_ins[node] for name, node in item.parts.items()}
    views = tuple([stand_ins[view] for view in item.views if view in stand_ins])
    return Group(item.pattern, parts, views, tuple([stand_ins[node] for node in item.kept]))


class Bound(Generic[Step]):
    """The launches of a plan's items, with memory for their slots.

    Args:
        items: Nodes and groups, in order.
        kinds: What was lowered before.
        by: How items are lowered.
        key: What else lowering depends on.

    Attributes:
        n_steps: Number of launches of each item.
        results: The node that each launch computes, or the last node of its group.
        steps: The launches.
        pieces: The pieces of scratch memory, as `Lowered` says, by the plan's launches.
        records: The records of bad indices.
    """

    def __init__(
        self, items: Sequence[Item], kinds: Kinds[Lowered[Step]], by: Lowering[Step], key: Hashable = None
    ) -> None:
        kinds.make_room()
        operands = Operands(items, kinds, _no_starts)
        self.n_steps: list[int] = []
        self.results: list[Tensor] = []
        self.steps: list[Step] = []
        self.pieces: list[tuple[int, int, int]] = []
        self.records: list[BadIndex] = []
        self.memory: list[Buffer | None] = [*operands.buffers, None]
        self._offsets = [address & ~ALIGNED for address in operands.addresses]
        self._slots: list[int] = []
        self._firsts: list[int] = []
        self._found: list[Lowered[Step]] = []
        self._given: tuple[list[int], list[int]] = [], []  # numbers of pieces and records
        for item, tensors in zip(items, operands.tensors, strict=True):
            if not tensors:
                self.n_steps.append(0)
                continue
            numbers = list(map(operands.numbers.__getitem__, tensors))
            kind = (key, *operands.kind(item, numbers))
            found = kinds.lowered.get(kind)
            if found is None:
                found = kinds.lowered[kind] = lowered(item, tensors, by)
            self._add(item, tensors, numbers, found)

    def _add(
        self, item: Item, tensors: Sequence[Tensor | None], numbers: list[int], found: Lowered[Step]
    ) -> None:
        now, n = len(self.steps), len(found.steps)
        self._firsts.append(len(self._slots))
        self._slots += numbers
        if found.pieces or found.bad:
            for given, n_more in zip(self._given, (len(found.pieces), len(found.bad)), strict=True):
                new = range(len(self.memory), len(self.memory) + n_more)
                given.extend(new)
                self._slots += new
                self.memory += [None] * n_more
                self._offsets += [0] * n_more
            self.pieces += [(nbytes, now + first, now + last) for nbytes, first, last in found.pieces]
            self.records += [BadIndex(cast("Tensor", tensors[i]), bound) for i, bound in found.bad]
        self.n_steps.append(n)
        self.steps += found.steps
        self.results += [item.result if isinstance(item, Group) else item] * n
        self._found.append(found)

    def give(
        self, scratch: Buffer | None, places: Sequence[int], records: Sequence[tuple[Buffer, int]]
    ) -> None:
        """Provide the memory of pieces, at these offsets in one buffer, and of records."""
        pieces, bad = self._given
        for i, place in zip(pieces, places, strict=True):
            self.memory[i], self._offsets[i] = scratch, place
        for i, (buffer, offset) in zip(bad, records, strict=True):
            self.memory[i], self._offsets[i] = buffer, offset

    def blocks(self, starts: Mapping[Buffer, int] | None = None) -> tuple[Ints, list[int]]:
        """Return the launches' blocks of arguments with addresses, and where each begins [bytes].

        Args:
            starts: The addresses of buffers; 0 by default, for kernels that get buffers by themselves.
        """
        found = self._found
        nbytes = np.array([n for each in found for n in each.nbytes], np.int64)
        if not found or not nbytes.size:
            return np.zeros(0, np.int64), []
        addresses = np.array(self._offsets, np.int64)
        if starts is not None:
            addresses += [0 if buffer is None else starts[buffer] for buffer in self.memory]
        values = np.concatenate([each.words for each in found])
        n_words, n_places = np.array([(each.words.size, each.places.size) for each in found], np.int64).T
        at = np.cumsum(n_words) - n_words
        where = np.concatenate([each.places for each in found]) + np.repeat(at, n_places)
        firsts = np.array(self._firsts, np.int64)
        slots = np.concatenate([each.slots for each in found]) + np.repeat(firsts, n_places)
        values[where] += addresses[np.array(self._slots, np.int64)[slots]]
        return values, [*(np.cumsum(nbytes) - nbytes).tolist(), int(nbytes.sum())]

    def slot_memory(self) -> tuple[list[Buffer | None], list[int]]:
        """Return the memory of the slots of all items, and for each launch where its item's begin."""
        firsts: list[int] = []
        for first, each in zip(self._firsts, self._found, strict=True):
            firsts += [first] * len(each.steps)
        return [self.memory[i] for i in self._slots], firsts


def _no_starts(buffers: Collection[Buffer]) -> dict[Buffer, int]:
    """Return 0 for each buffer, as only offsets count in a form: buffers begin at multiples of 64 bytes."""
    return dict.fromkeys(buffers, 0)
