"""Notebook representations of ggmlb's objects, and the views of a `Scheduler`.

`ggmlb.inspect.views` adds them to the classes, which do not depend on this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ggmlb.core.context import Context
from ggmlb.core.enums import NO_OPS
from ggmlb.core.errors import readable_size
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.inspect import draw
from ggmlb.inspect.html import Picture, bar, card, escape, memory_table, pre, table
from ggmlb.inspect.sanitizer import start_sanitizer
from ggmlb.inspect.trace import Trace
from ggmlb.interface import Backend, Buffer, Device, DeviceProps, GraphPlan
from ggmlb.interface.memory_table import MemoryReport, MemoryTable
from ggmlb.interface.registry import DeviceList
from ggmlb.runtime.scheduler import Scheduler

__all__ = ["PICTURES", "start_sanitizer", "to_dot", "to_svg", "trace"]

SHOWN_NBYTES: Final = 1 << 20
"""Largest size of a tensor shown with its values [bytes]."""


# -- descriptions of programs ----------------------------------------------------------------------


def _tensor(tensor: Tensor) -> str:
    """Facts and, of a small host tensor, values."""
    facts: dict[str, object] = {
        "ne": f"{list(tensor.ne[: tensor.n_dims])}, innermost first",
        "NumPy shape": tensor.shape,
        "nb": "" if tensor.is_contiguous() else f"{list(tensor.nb)} bytes",
        "params": ", ".join(f"{k} = {getattr(v, 'name', v)}" for k, v in tensor.params.items()),
        "operands": "; ".join("-" if s is None else s.describe() for s in tensor.src),
        "view of": "" if tensor.view_src is None else tensor.view_src.describe(),
        "memory": f"{tensor.nbytes:,} bytes, "
        + ("in no buffer yet" if tensor.buffer is None else f"{tensor.buffer.name} + {tensor.offset:,}"),
    }
    values = ""
    if tensor.buffer is not None and not tensor.buffer.is_freed and 0 < tensor.nbytes <= SHOWN_NBYTES:
        values = pre(np.array2string(tensor.to_numpy(), precision=4, threshold=64, suppress_small=True))
    return card(tensor.describe(), facts, values)


def _context(ctx: Context) -> str:
    """Table of its tensors."""
    rows = [
        (
            t.op_desc(),
            t.name,
            t.dtype.name.lower(),
            list(t.ne[: t.n_dims]),
            "-" if t.buffer is None else f"{t.buffer.name} + {t.offset:,}",
        )
        for t in ctx.tensors
    ]
    return card(repr(ctx)[1:-1], {}, table(("op", "name", "type", "ne", "memory"), rows))


def _graph(graph: Graph) -> str:
    """Table of its nodes."""
    rows = [
        (i, n.op_desc(), n.name, n.dtype.name.lower(), list(n.ne[: n.n_dims]), _names(n.src))
        for i, n in enumerate(graph.nodes)
    ]
    return card(repr(graph)[1:-1], {}, table(("", "op", "name", "type", "ne", "operands"), rows))


def _names(tensors: Sequence[Tensor | None]) -> str:
    return ", ".join(t.name or t.op_desc() for t in tensors if t is not None)


# -- devices and memory ----------------------------------------------------------------------------


def _buffer(buffer: Buffer) -> str:
    facts = {
        "size": f"{readable_size(buffer.size)} ({buffer.size:,} bytes)",
        "holds": buffer.usage.value,
        "host memory": "yes, NumPy sees it" if buffer.is_host else "no",
        "alignment": f"{buffer.alignment} bytes",
        "device": buffer.buft.device.name,
    }
    return card(f"Buffer in {buffer.name} memory{' (freed)' if buffer.is_freed else ''}", facts)


def _device(device: Device) -> str:
    props = device.props
    facts = {
        "type": props.type.value,
        "memory": _memory_bar(props),
        "can do": _abilities(props),
        "PCI id": props.device_id or "",
        "backend": device.reg.name,
    }
    return card(f"{props.name}: {props.description}", facts)


def _backend(stream: Backend) -> str:
    """Facts of a stream and of its device."""
    if stream.is_freed:
        return card(f"Stream on {stream.name} (freed)", {})
    props = stream.device.props
    facts = {
        "device": f"{props.name}: {props.description}, {props.type.value}",
        "memory": _memory_bar(props),
        "places tensors in": stream.default_buffer_type.name,
        "can do": _abilities(props),
        "backend": stream.device.reg.name,
    }
    return card(f"Stream on {stream.name}", facts)


def _memory_table(memory: MemoryTable) -> str:
    rows = [(u.device, u.memory, u.kind, f"{u.nbytes:,}") for u in memory]
    rows.append(("all", "", "", f"{memory.total():,}"))
    return card("Memory", {}, table(("device", "memory", "contents", "bytes"), rows))


def _memory_report(report: MemoryReport) -> str:
    return card("Memory", {}, memory_table(report))


def _device_list(devices: DeviceList) -> str:
    """Table of devices and unavailable backends."""
    rows: list[tuple[str, ...]] = [
        (p.name, p.type.value, p.description, _memory_bar(p), _abilities(p))
        for p in (device.props for device in devices)
    ]
    rows += [(missing.name, missing.kind, missing.reason, "", "") for missing in devices.unavailable]
    return table(("device", "type", "description", "memory", "can do"), rows)


def _abilities(props: DeviceProps) -> str:
    return ", ".join(name for name, has in props.caps.as_dict().items() if has)


def _memory_bar(props: DeviceProps) -> str:
    """Bar of a device's memory in use; empty if unknown."""
    free, total = props.memory_free, props.memory_total
    return bar(1 - free / total, f"{readable_size(free)} free of {readable_size(total)}") if total else ""


# -- views of a scheduler: see its methods of the same names --------------------------------------


def _scheduler(scheduler: Scheduler) -> str:
    graph = scheduler.graph
    return escape(repr(scheduler)) if graph is None else _picture(scheduler, graph).html(repr(scheduler))


def to_dot(scheduler: Scheduler, graph: Graph) -> str:
    """Return the split graph in Graphviz's DOT language."""
    return draw.to_dot(graph, scheduler.backends, scheduler.splits)


def to_svg(scheduler: Scheduler, graph: Graph) -> str:
    """Return an SVG drawing of the split graph."""
    return _picture(scheduler, graph).svg()


def trace(scheduler: Scheduler, path: str | Path | None) -> Trace:
    """Return a recorder of the scheduler's streams, written to `path`; it labels plans by split number."""

    def name(plan: GraphPlan) -> str:
        numbers = (f"split {i}:" for i, s in enumerate(scheduler.splits) if any(p is plan for p in s.plans))
        return f"{next(numbers, 'compute')} {len(plan.nodes)} nodes on {plan.backend.name}"

    return Trace(scheduler.backends, path, name_plan=name)


def _picture(scheduler: Scheduler, graph: Graph) -> Picture:
    work = [node for node in graph.nodes if node.op not in NO_OPS]
    causes = {node: str(p.cause) for node, p in zip(work, scheduler.placement, strict=True)}
    return draw.draw(scheduler.backends, scheduler.splits, causes)


PICTURES: Final[dict[type, Callable[[Any], str]]] = {
    Backend: _backend,
    Buffer: _buffer,
    Context: _context,
    Device: _device,
    DeviceList: _device_list,
    Graph: _graph,
    MemoryReport: _memory_report,
    MemoryTable: _memory_table,
    Scheduler: _scheduler,
    Tensor: _tensor,
}
"""The HTML representation of each class."""
