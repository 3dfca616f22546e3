"""What GPUs launch for a kind of node or group, with operand slots in place of memory, and its binding.

Rules see stand-ins of the tensors, whose buffer is an operand slot. So what they return serves all items of
the kind. A slot is the number of an operand of the item; after the operands come the pieces of scratch,
then the records of bad indices. A plan binds the slots of all its items at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import numpy as np

from ggmlb.backends.common.fusion import Group, Item
from ggmlb.backends.common.kinds import ALIGNED, Kinds, Operands, operands_of
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu.launch import BadIndex, PreparedOperand, Scratch
from ggmlb.core.ops import SPECS
from ggmlb.core.placement import overlap
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    import numpy.typing as npt

    from ggmlb.interface import Buffer

    Ints = npt.NDArray[np.int64]

Request = TypeVar("Request")
"""Type of what a backend's rules return: a launch."""

Step = TypeVar("Step", covariant=True)
"""Type of what a backend keeps of a request."""


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


class KindLowering(Protocol[Request, Step]):
    """How a backend lowers an item, and lays out the arguments of its requests."""

    def lower(self, item: Item) -> list[Request | PreparedOperand]:
        """Return the requests that compute an item, each form of an operand before those that read it."""

    def step(self, request: Request, slots: tuple[int, ...]) -> Step:
        """Return what is kept of a request, given the slots of its tensors."""

    def mems(self, request: Request) -> Sequence[Mem]:
        """Return a request's tensors."""

    def block(self, request: Request) -> bytes:
        """Return a request's block of arguments, with offsets in slots for addresses."""

    def address_words(self, request: Request) -> Sequence[int]:
        """Return where a request's tensors are in its block, in words of 8 bytes.

        There is the offset of each; or the address of its buffer, and its offset in the next word.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Lowered(Generic[Step]):
    """The requests of a kind.

    Attributes:
        steps: The requests.
        nbytes: Size of each one's block of arguments [bytes], a multiple of 8.
        words: The blocks one after the other; where an address is, the offset in a slot.
        places: Places of addresses in `words`.
        slots: The slot of each: operands, then `pieces`, then `given`, then `bad`.
        pieces: Of each piece of scratch memory its size [bytes], and its first and last step.
        given: The pieces that earlier items wrote: operand, form, which of the form's pieces, and last step.
        made: Of each form that was made the operand, its name, and its pieces.
        bad: Of each record of a bad index the operand that is the node, and the bound.
    """

    steps: list[Step]
    nbytes: list[int]
    words: Ints
    places: Ints
    slots: Ints
    pieces: list[tuple[int, int, int]]
    given: list[tuple[int, str, int, int]]
    made: list[tuple[int, str, list[int]]]
    bad: list[tuple[int, int]]


def lowered(
    item: Item,
    tensors: Sequence[Tensor | None],
    by: KindLowering[Request, Step],
    ready: Collection[tuple[int, str]] = (),
) -> Lowered[Step]:
    """Lower an item, given its operands in the order of their slots.

    Args:
        item: A node or group.
        tensors: Its operands.
        by: How the backend lowers it.
        ready: Forms of operands that earlier items made.
    """
    stand_ins = _stand_ins(item, tensors)
    numbers = {t: cast("OperandSlot", t.buffer).number for t in stand_ins.values() if t.buffer is not None}
    requests: list[Request] = []
    forms: dict[tuple[int, str], list[object]] = {}  # the pieces of scratch of each
    for request in by.lower(_item_of(item, stand_ins)):
        if isinstance(request, PreparedOperand):
            key = numbers[request.source], request.name
            forms[key] = [mem.buffer for mem in request.mems]
            requests += request.made_by if key not in ready else ()  # type: ignore[arg-type]
        else:
            requests.append(request)
    uses: dict[object, list[int]] = {}  # first and last step
    for now, request in enumerate(requests):
        for mem in by.mems(request):
            uses.setdefault(mem.buffer, [now, now])[1] = now
    given = [(key, i, piece) for key in forms if key in ready for i, piece in enumerate(forms[key])]
    theirs = {piece for _, _, piece in given}
    pieces = [piece for piece in uses if isinstance(piece, Scratch) and piece not in theirs]
    bad = [record for record in uses if isinstance(record, BadIndex)]
    slots: dict[object, int] = {t.buffer: number for t, number in numbers.items()}
    slots.update((x, len(tensors) + i) for i, x in enumerate([*pieces, *[g[2] for g in given], *bad]))
    found, places, start = list[int](), list[int](), 0
    steps, blocks = [], []
    for request in requests:
        mine = tuple([slots[mem.buffer] for mem in by.mems(request)])
        found += mine
        places += [start + word for word in by.address_words(request)]
        steps.append(by.step(request, mine))
        block = by.block(request)
        blocks.append(block + bytes(-len(block) % 8))
        start += len(blocks[-1]) // 8
    n = len(tensors)
    return Lowered(
        steps,
        [len(block) for block in blocks],
        np.frombuffer(b"".join(blocks), np.int64),
        np.array(places, np.int64),
        np.array(found, np.int64),
        [(piece.nbytes, *uses[piece]) for piece in pieces],  # type: ignore[misc]
        [(*key, i, uses.get(piece, [0, -1])[1]) for key, i, piece in given],
        [(*key, [slots[piece] - n for piece in made]) for key, made in forms.items() if key not in ready],
        [(numbers[record.node], record.n) for record in bad],
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


class BoundItems(Generic[Step]):
    """The steps of a plan's items, with memory for their slots.

    Args:
        items: Nodes and groups, in order.
        kinds: What was lowered before.
        by: How items are lowered.
        key: What else lowering depends on.
        is_apart: Whether an item is computed otherwise, and has no steps here.

    Attributes:
        n_steps: Number of steps of each item.
        apart: Whether it is computed otherwise.
        results: The node that each step computes, or the last node of its group.
        steps: The steps.
        new: Those of kinds that were not known.
        pieces: The pieces of scratch memory: size [bytes], first and last step.
        records: The bounds of indices, for the stream's record of bad ones.
        memory: The memory of slots; see `give`.
    """

    def __init__(
        self,
        items: Sequence[Item],
        kinds: Kinds[Lowered[Step]],
        by: KindLowering[Any, Step],
        key: Hashable = None,
        is_apart: Callable[[Item], bool] = lambda _: False,
    ) -> None:
        kinds.make_room()
        known, (key_number,) = kinds.lowered, kinds.numbered([key])
        self.apart = [is_apart(item) for item in items]
        tensors_of = [
            () if other else operands_of(item) for item, other in zip(items, self.apart, strict=True)
        ]
        operands = Operands(tensors_of, kinds)
        self.n_steps: list[int] = []
        self.results: list[Tensor] = []
        self.steps: list[Step] = []
        self.new: list[Step] = []
        pieces: list[list[int]] = []
        self.records: list[BadIndex] = []
        self.memory: list[Buffer | None] = [*operands.buffers, None]
        self._offsets = [address & ~ALIGNED for address in operands.addresses]
        self._slots: list[int] = []
        self._firsts: list[int] = []
        self._found: list[Lowered[Step]] = []
        self._of_pieces: list[int] = []  # numbers in `memory`
        self._of_records: list[int] = []
        self._ready: dict[Tensor, dict[str, list[int]]] = {}
        number_of = operands.numbers.__getitem__
        for item, tensors, is_other in zip(items, tensors_of, self.apart, strict=True):
            n = 0
            if tensors:
                ready = self._ready_for(tensors) if self._ready else ()
                numbers = list(map(number_of, tensors))
                kind = (key_number, ready, *operands.kind(item, numbers))
                found = known.get(kind)
                if found is None:
                    found = known[kind] = lowered(item, tensors, by, ready)
                    self.new += found.steps
                n = len(found.steps)
                self._firsts.append(len(self._slots))
                self._slots += numbers
                self._found.append(found)
                if found.pieces or found.given or found.bad:
                    self._provide_for(tensors, found, pieces)
                self.steps += found.steps
            self.n_steps.append(n)
            self.results += [item.result if isinstance(item, Group) else item] * n
            if self._ready and (tensors or is_other):
                self._forget_written(item)
        self.pieces: tuple[tuple[int, int, int], ...] = tuple([(n, first, last) for n, first, last in pieces])
        del self._ready

    def _ready_for(self, tensors: Sequence[Tensor | None]) -> tuple[tuple[int, str], ...]:
        """Return the forms of an item's operands that earlier items made, by operand."""
        found = [(i, t) for i, t in enumerate(tensors) if t in self._ready and t not in tensors[:i]]
        return tuple([(i, form) for i, t in found for form in self._ready[t]])

    def _provide_for(
        self, tensors: Sequence[Tensor | None], found: Lowered[Step], pieces: list[list[int]]
    ) -> None:
        """Append the slots of an item's scratch memory and records of bad indices."""
        now, first = len(self.steps), len(pieces)
        for nbytes, start, end in found.pieces:
            pieces.append([nbytes, now + start, now + end])
            self._of_pieces.append(self._provide())
        for i, form, piece, last in found.given:
            at = self._ready[cast("Tensor", tensors[i])][form][piece]
            self._slots.append(self._of_pieces[at])
            pieces[at][2] = max(pieces[at][2], now + last)
        for i, bound in found.bad:
            self.records.append(BadIndex(cast("Tensor", tensors[i]), bound))
            self._of_records.append(self._provide())
        for i, form, made in found.made:
            of_operand = self._ready.setdefault(cast("Tensor", tensors[i]), {})
            of_operand[form] = [first + piece for piece in made]

    def _provide(self) -> int:
        """Append a slot for memory that the plan provides; return its number."""
        self._slots.append(len(self.memory))
        self.memory.append(None)
        self._offsets.append(0)
        return len(self.memory) - 1

    def _forget_written(self, item: Item) -> None:
        """Forget forms of operands in whose memory an item writes."""
        for node in item.nodes if isinstance(item, Group) else (item,):
            for t in (node, *[node.sources[i] for i in SPECS[node.op].also_written]):
                for source in [source for source in self._ready if overlap(source, t)]:
                    del self._ready[source]

    def give(
        self, scratch: Buffer | None, places: Sequence[int], records: Sequence[tuple[Buffer, int]]
    ) -> None:
        """Provide the memory of pieces, at these offsets in one buffer, and the record, with numbers."""
        for i, place in zip(self._of_pieces, places, strict=True):
            self.memory[i], self._offsets[i] = scratch, place
        for i, (buffer, offset) in zip(self._of_records, records, strict=True):
            self.memory[i], self._offsets[i] = buffer, offset

    def blocks(self, starts: Mapping[Buffer, int] | None = None) -> tuple[Ints, list[int]]:
        """Return the steps' blocks of arguments with addresses, and where each begins and the last ends.

        Args:
            starts: The addresses of buffers, for blocks that have them before the offsets.
        """
        found = self._found
        nbytes = np.array([n for each in found for n in each.nbytes], np.int64)
        if not nbytes.size:
            return np.zeros(0, np.int64), []
        values = np.concatenate([each.words for each in found])
        n_words, n_places = np.array([(each.words.size, each.places.size) for each in found], np.int64).T
        at = np.cumsum(n_words) - n_words
        where = np.concatenate([each.places for each in found]) + np.repeat(at, n_places)
        firsts = np.array(self._firsts, np.int64)
        slots = np.concatenate([each.slots for each in found]) + np.repeat(firsts, n_places)
        slots = np.array(self._slots, np.int64)[slots]
        if starts is not None:
            bases = np.array([0 if buffer is None else starts[buffer] for buffer in self.memory], np.int64)
            values[where] += bases[slots]
            where += 1
        values[where] += np.array(self._offsets, np.int64)[slots]
        return values, [*(np.cumsum(nbytes) - nbytes).tolist(), int(nbytes.sum())]

    def slot_memory(self) -> tuple[list[Buffer | None], list[int]]:
        """Return the memory of the slots of all items, and for each step where its item's begin."""
        firsts: list[int] = []
        for first, each in zip(self._firsts, self._found, strict=True):
            firsts += [first] * len(each.steps)
        return [self.memory[i] for i in self._slots], firsts
