"""Cache of lowered nodes: nodes and fused groups of the same kind are lowered once.

A kind is an op or pattern, its parameters, and the form of each operand: layout, alignment, packing. Cached
steps refer to operands by number, not by address. So a new graph whose kinds are cached is not lowered: only
addresses are bound.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from itertools import chain, count, repeat
from typing import Final, Generic, TypeVar

from ggmlb.backends.common.fusion import Group, Item
from ggmlb.core.enums import NO_OPS
from ggmlb.core.placement import frozen
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Buffer, BufferType

Lowered = TypeVar("Lowered")
"""Type of a backend's steps before addresses are bound."""

ALIGNED: Final = 63
"""Mask of the address bits that are part of an operand's form: its alignment."""

ABSENT: Final = -1
"""Form of an absent operand."""

MAX_KINDS: Final = 4096
"""Largest number of kinds, and of forms, in the cache."""


class Kinds(Generic[Lowered]):
    """Cache of lowered steps by kind: an op or fusion pattern, its parameters, and its operands' layouts.

    Attributes:
        lowered: Steps by kind.
        forms: Number of each operand form: layout, alignment and packing.
    """

    def __init__(self) -> None:
        self.lowered: dict[Hashable, Lowered] = {}
        self.forms: dict[Hashable, int] = {}
        self._numbers = count()  # of new forms; never reused, as kinds contain them

    def numbered(self, keys: Iterable[Hashable]) -> list[int]:
        """Return an integer id for each operand form (layout, alignment, packing); equal forms share it."""
        return list(map(self.forms.setdefault, keys, self._numbers))

    def make_room(self) -> None:
        """Clear the cache if it has more than `MAX_KINDS` entries."""
        if max(len(self.lowered), len(self.forms)) > MAX_KINDS:
            self.lowered.clear()
            self.forms.clear()


class Operands:
    """Numbering of all operands of a plan's nodes and groups; absent operands (`None`) get the last number.

    Args:
        tensors: For each item its nodes, each followed by its operands; empty if it computes nothing.
        kinds: Cache that numbers their forms.
        starts_of: Returns the addresses of buffers; by default 0, as offsets determine the alignment
            (buffers begin at multiples of 64 bytes).

    Attributes:
        numbers: The number of each tensor.
        buffers: The buffer of each number.
        addresses: The address of each number.
        forms: The form of each number.
    """

    def __init__(
        self,
        tensors: Iterable[Sequence[Tensor | None]],
        kinds: Kinds[Lowered],
        starts_of: Callable[[Collection[Buffer]], Mapping[Buffer, int]] | None = None,
    ) -> None:
        placed: list[Tensor] = []
        self.buffers: list[Buffer] = []
        for t in {*chain.from_iterable(tensors)}:
            if t is not None and t.buffer is not None:
                placed.append(t)
                self.buffers.append(t.buffer)
        starts = dict.fromkeys(self.buffers, 0) if starts_of is None else starts_of({*self.buffers})
        self.addresses = [starts[b] + t.offset for t, b in zip(placed, self.buffers, strict=True)]
        packs = {b: b.packing for b in starts if type(b.buft).packing is not BufferType.packing}
        packings: Iterable[str] = repeat("")
        if packs:
            packings = [packs[b](t) if b in packs else "" for t, b in zip(placed, self.buffers, strict=True)]
        layouts = [t.layout for t in placed]
        low = [a & ALIGNED for a in self.addresses]
        self.forms = [*kinds.numbered(zip(layouts, low, packings, strict=False)), ABSENT]
        self.numbers: dict[Tensor | None, int] = dict(zip(placed, count()))
        self.numbers[None] = len(placed)
        self.addresses.append(0)

    def kind(self, item: Item, numbers: Sequence[int]) -> tuple[Hashable, ...]:
        """Return the cache key of a node or group, whose operands have these `numbers` in `Operands`."""
        what = _what(item)
        forms = map(self.forms.__getitem__, numbers)
        if len({*numbers}) == len(numbers):
            return (what, *forms)
        same: dict[int, int] = {}
        return (what, *forms, tuple(map(same.setdefault, numbers, count())))


def operands_of(item: Item) -> Sequence[Tensor | None]:
    """Return each node of an item (node or group), then its operands; none for views, empty results."""
    if isinstance(item, Group):
        return [t for node in item.nodes for t in (node, *node.src)]
    return () if item.op in NO_OPS or item.is_empty else (item, *item.src)


def _what(item: Item) -> tuple[Hashable, ...]:
    """Return an item's op or pattern, and its parameters."""
    if isinstance(item, Tensor):
        return item.op, frozen(item.params) if item.params else ()
    kept = item.kept
    return (
        item.pattern, *item.parts, *[node in kept for node in item.nodes],
        *[(node.op, len(node.src), frozen(node.params)) for node in item.nodes],
    )  # fmt: skip
