"""MemoryTable: bytes by device, memory and contents. MemoryReport: planned and allocated bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ggmlb.interface.buffer_type import BufferType

HOST = "CPU"
"""Name of host memory, which LLVM uses, too."""

KINDS = ("weights", "adapters", "experts", "kv", "placed", "copies", "compute")
"""Contents: weights, LoRA adapters, cached experts, the KV cache, other tensors that were allocated
before, copies for other devices, and results of nodes."""

Space = tuple[BufferType, int]
"""Buffer type and bytes."""


class Use(NamedTuple):
    """Bytes of one kind of contents, such as weights, in memory of one buffer type.

    Attributes:
        device: The device whose memory it is; `HOST` for the machine's.
        memory: The buffer type's name.
        kind: Of `KINDS`.
        nbytes: Bytes.
    """

    device: str
    memory: str
    kind: str
    nbytes: int


def device_of(buft: BufferType) -> str:
    """Return the name of the device whose memory a buffer type uses; `HOST` for host memory."""
    is_host = buft.is_host or buft.device.buffer_type.is_host
    return HOST if is_host else buft.device.name


class MemoryTable:
    """Bytes by device, memory and kind of contents, as a table in text and notebooks.

    Attributes:
        uses: In the order of devices, memories and kinds; none is of 0 bytes.

    Args:
        spaces: Buffer types and bytes by kind of contents.
    """

    def __init__(self, spaces: Mapping[str, Iterable[Space]]) -> None:
        found: dict[tuple[str, str, str], int] = {}
        for kind in KINDS:
            for buft, nbytes in spaces.get(kind, ()):
                key = device_of(buft), buft.name, kind
                found[key] = found.get(key, 0) + nbytes
        order = list(dict.fromkeys(device for device, _, _ in found))
        ordered = sorted(found, key=lambda key: (order.index(key[0]), KINDS.index(key[2]), key[1]))
        self.uses = tuple(Use(*key, found[key]) for key in ordered if found[key])

    @property
    def devices(self) -> list[str]:
        """The devices that are used."""
        return list(dict.fromkeys(use.device for use in self.uses))

    def total(self, device: str | None = None, kind: str | None = None) -> int:
        """Return the total bytes, of one device or all, and of one kind of contents or all."""
        return sum(u.nbytes for u in self.uses if device in (None, u.device) and kind in (None, u.kind))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemoryTable) and set(self.uses) == set(other.uses)

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Use]:
        return iter(self.uses)

    def as_list(self) -> list[dict[str, Any]]:
        """Return the rows as dictionaries, for JSON."""
        return [use._asdict() for use in self.uses]

    def __repr__(self) -> str:
        each = ", ".join(f"{device} {self.total(device):,}" for device in self.devices)
        return f"<MemoryTable [bytes]: {each}>"

    def __str__(self) -> str:
        rows = [*self.uses, Use("all", "", "", self.total())]
        return "\n".join(f"{u.device:<10} {u.memory:<18} {u.kind:<8} {u.nbytes:>16,}" for u in rows)


class MemoryReport(NamedTuple):
    """Planned and allocated bytes, as a table in text and notebooks.

    Attributes:
        forecast: Planned sizes.
        allocated: Sizes of what is allocated now.
    """

    forecast: MemoryTable
    allocated: MemoryTable

    def rows(self) -> list[tuple[Use, Use]]:
        """Return pairs of planned and allocated `Use`, one per device, memory and kind of contents."""
        planned, real = ({use[:3]: use for use in table} for table in self)
        keys = dict.fromkeys([*planned, *real])
        return [(planned.get(key, Use(*key, 0)), real.get(key, Use(*key, 0))) for key in keys]

    def as_list(self) -> list[dict[str, Any]]:
        """Return the rows as dictionaries, for JSON."""
        return [
            {
                "device": a.device,
                "memory": a.memory,
                "kind": a.kind,
                "forecast": a.nbytes,
                "allocated": b.nbytes,
            }
            for a, b in self.rows()
        ]

    def __str__(self) -> str:
        lines = [f"{'device':<10} {'memory':<18} {'kind':<8} {'forecast':>16} {'allocated':>16}"]
        for a, b in self.rows():
            lines.append(f"{a.device:<10} {a.memory:<18} {a.kind:<8} {a.nbytes:>16,} {b.nbytes:>16,}")
        return "\n".join(lines)
