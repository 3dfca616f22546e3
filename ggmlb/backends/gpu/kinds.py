"""Cached launches of each kind of node or fused group, and the binding of their arguments to memory.

Rules get copies of the tensors whose buffers are placeholders, operand slots. So the launches that they
return serve all items (nodes or groups) of the kind. Slots are numbered: the operands of the item, then its
pieces of scratch, then records of out-of-range indices. A plan binds the slots of all its items at once.
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
"""Type of the results of a backend's rules: a launch or a library call."""

Step = TypeVar("Step", covariant=True)
"""Type of a request in the cache: without the arguments."""


@dataclass(slots=True, eq=False)
class OperandSlot:
    """Placeholder for an operand's buffer in cached launches, replaced by a buffer when a plan binds them.

    Attributes:
        number: Number of the operand.
        pack: Suffix of its type's name for the memory's byte order (`Buffer.packing`).
    """

    number: int
    pack: str

    def packing(self, tensor: Tensor) -> str:
        """Return the suffix of the tensor's type name that names its packed layout; empty for ggml's own."""
        return self.pack


class KindLowering(Hashable, Protocol[Request, Step]):
    """Interface of backends: lowers a node or group to requests (such as launches), packs arguments."""

    def lower(self, item: Item) -> list[Request | PreparedOperand]:
        """Return the requests (such as launches) that compute a node or group, and convert operands."""

    def step(self, request: Request, slots: tuple[int, ...]) -> Step:
        """Return what to cache for a request; `slots` are the numbers that stand for its tensors' buffers."""

    def mems(self, request: Request) -> Sequence[Mem]:
        """Return the tensor arguments of a request, in order."""

    def block(self, request: Request) -> bytes:
        """Return a request's packed arguments; a tensor has its offset within a slot, no address."""

    def address_words(self, request: Request) -> Sequence[int]:
        """Return where a request's tensors are in its argument block, in words of 8 bytes.

        At a position is the tensor's offset, or its buffer's address followed by the offset.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Lowered(Generic[Step]):
    """The cached steps of a kind of node or group, with slot numbers in place of buffers.

    Attributes:
        steps: The steps.
        nbytes: Size of each step's argument block [bytes], a multiple of 8.
        words: All argument blocks in order; in place of addresses, the offset within a slot.
        places: Positions of addresses in `words`.
        slots: The slot of each address. Numbered: operands, then `pieces`, then `given`, then `bad`.
        pieces: For each piece of scratch memory its size [bytes], and its first and last step.
        given: Scratch with operands that earlier items converted: operand, form, index of the form's piece,
            last step.
        made: For each operand that these steps convert: the operand, its form, and the pieces of scratch.
        bad: For each record of out-of-range indices: the number of the node, and the bound.
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
    """Lower a node or group to steps that can be cached, as buffers are numbered slots in them.

    Args:
        item: The node or group.
        tensors: Its operands, in the order of their slots.
        by: The backend's lowering.
        ready: Operands and forms to which earlier items have converted them.
    """
    stand_ins = _stand_ins(item, tensors)
    numbers = {t: cast("OperandSlot", t.buffer).number for t in stand_ins.values() if t.buffer is not None}
    requests: list[Request] = []
    forms: dict[tuple[int, str], list[object]] = {}  # pieces of scratch
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
    """Return a copy of each tensor for the rules, with an operand slot as buffer."""
    made: dict[Tensor, Tensor] = {}
    for number, tensor in enumerate(tensors):
        if tensor is None or tensor in made:
            continue
        stand_in = made[tensor] = tensor.reading((), None)
        stand_in.maker = None  # the cache must not keep it alive
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
    """The steps of a plan, from the cache, and the binding of their slots to buffers.

    Args:
        items: Nodes and groups, in order.
        kinds: Cache of lowered kinds.
        by: The backend's lowering, with the target; it is a part of the cache key.
        is_apart: Whether an item is not lowered here (a row-split product), and has no steps.

    Attributes:
        n_steps: Number of steps of each item.
        results: The node that each step computes, or the last node of its group.
        steps: The steps.
        new: Steps that were not in the cache.
        pieces: The pieces of scratch memory: size [bytes], first and last step.
        records: The nodes that read indices, with their bounds.
        memory: The buffers of slots; `give` sets those of scratch and records.
    """

    def __init__(
        self,
        items: Sequence[Item],
        kinds: Kinds[Lowered[Step]],
        by: KindLowering[Any, Step],
        is_apart: Callable[[Item], bool] = lambda _: False,
    ) -> None:
        kinds.make_room()
        known, (key_number,) = kinds.lowered, kinds.numbered([by])
        apart = [is_apart(item) for item in items]
        tensors_of = [() if other else operands_of(item) for item, other in zip(items, apart, strict=True)]
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
        for item, tensors, is_other in zip(items, tensors_of, apart, strict=True):
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
            if is_other:
                self._ready.clear()  # the product's own plans use the same scratch memory
            elif self._ready and tensors:
                self._forget_written(item)
        self.pieces: tuple[tuple[int, int, int], ...] = tuple([(n, first, last) for n, first, last in pieces])
        del self._ready

    def _ready_for(self, tensors: Sequence[Tensor | None]) -> tuple[tuple[int, str], ...]:
        """Return the converted forms of an item's operands that earlier items left in scratch."""
        found = [(i, t) for i, t in enumerate(tensors) if t in self._ready and t not in tensors[:i]]
        return tuple([(i, form) for i, t in found for form in self._ready[t]])

    def _provide_for(
        self, tensors: Sequence[Tensor | None], found: Lowered[Step], pieces: list[list[int]]
    ) -> None:
        """Append the slots of an item's scratch memory and records of out-of-range indices."""
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
        """Invalidate converted operands whose source an item overwrites."""
        for node in item.nodes if isinstance(item, Group) else (item,):
            for t in (node, *[node.sources[i] for i in SPECS[node.op].also_written]):
                for source in [source for source in self._ready if overlap(source, t)]:
                    del self._ready[source]

    def give(
        self, scratch: Buffer | None, places: Sequence[int], records: Sequence[tuple[Buffer, int]]
    ) -> None:
        """Bind scratch slots to `scratch` at offsets `places`, and arguments `bad` to bad-index `records`."""
        for i, place in zip(self._of_pieces, places, strict=True):
            self.memory[i], self._offsets[i] = scratch, place
        for i, (buffer, offset) in zip(self._of_records, records, strict=True):
            self.memory[i], self._offsets[i] = buffer, offset

    def blocks(self, starts: Mapping[Buffer, int] | None = None) -> tuple[Ints, list[int]]:
        """Return an array of all argument blocks, with buffer addresses from `starts`, and where each begins.

        Args:
            starts: Buffer addresses, for argument blocks that contain them (CUDA).
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
        """Return the buffer of every slot, and for each step the first slot of its node or group."""
        firsts: list[int] = []
        for first, each in zip(self._firsts, self._found, strict=True):
            firsts += [first] * len(each.steps)
        return [self.memory[i] for i in self._slots], firsts
