"""Cases, samples and timings of every op: each file here adds its own to `RECORDS`."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from ggmlb.testing.ops.record import RECORDS

__all__ = ["RECORDS"]

for _family in iter_modules(__path__):
    import_module(f"{__name__}.{_family.name}")
