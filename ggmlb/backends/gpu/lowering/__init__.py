"""Lowering of nodes and groups to launches, by the table of rules registered in this package's modules."""

from importlib import import_module
from pkgutil import iter_modules

from ggmlb.backends.gpu.lowering.base import RULES, GpuRules, lower

__all__ = ["RULES", "GpuRules", "lower"]

for _family in iter_modules(__path__):
    import_module(f"{__name__}.{_family.name}")
