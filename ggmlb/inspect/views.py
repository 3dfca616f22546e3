"""Adds notebook representations and drawings to classes; the drawing code is imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final, cast

from ggmlb.core.context import Context
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, Buffer, Device
from ggmlb.interface.memory_table import MemoryReport, MemoryTable
from ggmlb.interface.registry import DeviceList
from ggmlb.runtime.scheduler import Scheduler
from ggmlb.runtime.scheduler.scheduler import Views

SHOWN: Final = (
    Backend, Buffer, Context, Device, DeviceList, Graph, MemoryReport, MemoryTable, Scheduler, Tensor,
)  # fmt: skip
"""The classes that `ggmlb.inspect.notebook` represents."""

_DRAWN_BY: Final = "ggmlb.inspect.notebook"


class _Views:
    """The functions of `ggmlb.inspect.notebook`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(_DRAWN_BY), name)


def register() -> None:
    """Set `_repr_html_` of ggmlb's displayed classes (`SHOWN`), and `Scheduler.views`."""
    for shown in SHOWN:
        type.__setattr__(shown, "_repr_html_", _html)
    Scheduler.views = cast("Views", _Views())


def _html(shown: Any) -> str:
    """Return the representation of an object in a notebook."""
    pictures = import_module(_DRAWN_BY).PICTURES
    html: str = next(pictures[kind] for kind in type(shown).__mro__ if kind in pictures)(shown)
    return html
