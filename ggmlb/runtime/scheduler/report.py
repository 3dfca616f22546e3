"""Reports of a scheduler: placement of each node, memory, and splits as text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ggmlb.core.enums import NO_OPS, BufferUsage
from ggmlb.core.errors import readable_size
from ggmlb.core.graph import Graph
from ggmlb.interface import BufferType
from ggmlb.interface.memory_table import MemoryReport, MemoryTable, Space
from ggmlb.system import log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ggmlb.interface import Backend
    from ggmlb.runtime.alloc import GraphAllocator
    from ggmlb.runtime.compile.assign import Cause
    from ggmlb.runtime.compile.executable import Executable
    from ggmlb.runtime.compile.split import Split


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """Where and why one node runs: its device, split, cause, copied operands, and other devices' refusals.

    Attributes:
        node: Its name, or its op and index.
        op: The op, or the function of a unary or GLU node.
        device: The device that computes it.
        split: Index of its split.
        cause: The cause of its assignment.
        rejected: Devices that decline it, with reasons.
        copies: Names of the operands copied to its device.
    """

    node: str
    op: str
    device: str
    split: int
    cause: Cause
    rejected: dict[str, str] = field(default_factory=dict)
    copies: tuple[str, ...] = ()


def placements(graph: Graph, executable: Executable) -> list[NodePlacement]:
    """Return where and why each computed node of a graph was placed, one record each, in order."""
    index = {node: i for i, node in enumerate(graph.nodes)}
    records = []
    for i_split, split in enumerate(executable.splits):
        copied = {item.tensor for item in split.inputs}
        for node in split.nodes:
            if node.op in NO_OPS:
                continue
            records.append(
                NodePlacement(
                    node=node.name or f"{node.op_desc().lower()}_{index[node]}",
                    op=node.op_desc(),
                    device=split.backend.name,
                    split=i_split,
                    cause=executable.cause(node),
                    rejected=executable.reasons(node),
                    copies=tuple(s.name or s.op_desc() for s in node.src if s is not None and s in copied),
                )
            )
    return records


def memory_report(
    executable: Executable, allocator: GraphAllocator, backends: Sequence[Backend]
) -> MemoryReport:
    """Return the memory of an executable by device and contents, planned and allocated."""
    placed: dict[str, list[Space]] = {"weights": [], "placed": []}
    known = executable.graph.buffers
    for buffer in dict.fromkeys(b for b in (known[i] for i in executable.graph.outside) if b is not None):
        kind = "weights" if buffer.usage is BufferUsage.WEIGHTS else "placed"
        placed[kind] += [(inner.buft, inner.size) for inner in buffer.allocations]
    copied: Counter[BufferType] = Counter()
    for split in executable.splits:
        buft = allocator.bufts[[*backends].index(split.backend)]
        copied[buft] += sum(copy.nbytes for item in split.inputs for copy in item.copies)
    planned: Counter[BufferType] = Counter()
    for buft, nbytes in zip(
        allocator.bufts, allocator.indexed_size(executable.copied, executable.memories), strict=True
    ):
        planned[buft] += nbytes
    allocated: Counter[BufferType] = Counter()
    for buffer in allocator.buffers:
        for inner in buffer.allocations:
            allocated[inner.buft] += inner.size

    def table(compute: Counter[BufferType]) -> MemoryTable:
        copies = {buft: min(copied[buft], compute[buft]) for buft in compute}
        results = {buft: nbytes - copies[buft] for buft, nbytes in compute.items()}
        return MemoryTable({**placed, "copies": copies.items(), "compute": results.items()})

    return MemoryReport(table(planned), table(allocated))


def record_fallbacks(graph: Graph, executable: Executable, backends: Sequence[Backend]) -> None:
    """Log the nodes that a backend of higher priority declines, once for each of its reasons."""
    if not log.is_enabled("scheduler", log.INFO):
        return
    rank = {backend.name: i for i, backend in enumerate(backends)}
    moved: dict[tuple[str, str, str], list[str]] = {}
    for placed in placements(graph, executable):
        for device, why in placed.rejected.items():
            if rank[device] < rank[placed.device]:
                moved.setdefault((device, why, placed.device), []).append(placed.node)
    for (device, why, other), nodes in moved.items():
        text = "%s declines %s: %s; on %s instead"
        log.record("scheduler", log.INFO, text, device, _brief(nodes), why, other)


def render(graph: Graph, executable: Executable) -> str:
    """Return a compiled graph's splits as text: inputs with sizes, and nodes with placement causes.

    Consecutive nodes with the same cause share a line.
    """
    n_copied = sum(item.nbytes for s in executable.splits for item in s.inputs)
    n_inputs = sum(len(s.inputs) for s in executable.splits)
    n_work = sum(n.op not in NO_OPS for n in graph.nodes)
    lines = [
        f"{n_work} nodes in {_count(len(executable.splits), 'split')}, "
        f"{_count(n_inputs, 'copy', 'copies')} between devices ({readable_size(n_copied)})"
    ]
    for i, split in enumerate(executable.splits):
        work = [n for n in split.nodes if n.op not in NO_OPS]
        lines.append(f"split {i} on {split.backend.name}: {_count(len(work), 'node')}")
        lines += [
            f"  copies {item.tensor.name or item.tensor.describe()} from {item.origin} "
            f"({readable_size(item.nbytes)})"
            for item in split.inputs
        ]
        lines += _runs(split, executable)
    return "\n".join(lines)


def _runs(split: Split, executable: Executable) -> list[str]:
    lines: list[str] = []
    run: list[str] = []
    reason = ""
    for node in [*(n for n in split.nodes if n.op not in NO_OPS), None]:
        why = ""
        if node is not None:
            rejected = executable.reasons(node)
            why = str(executable.cause(node)) + "".join(f"; {d} declines: {r}" for d, r in rejected.items())
        if run and why != reason:
            lines.append(f"  {_brief(run)} - {reason}")
            run = []
        reason = why
        if node is not None:
            run.append(node.op_desc().lower() + (f" {node.name!r}" if node.name else ""))
    return lines


def _brief(names: list[str]) -> str:
    if len(names) <= 4:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, ... {names[-1]} ({len(names)} nodes)"


def _count(n: int, one: str, many: str = "") -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"
