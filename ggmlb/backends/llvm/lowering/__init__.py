"""Lowering of nodes and fused groups to kernel launches (steps); each module has the rules of some ops."""

from importlib import import_module
from pkgutil import iter_modules

for _family in iter_modules(__path__):  # each registers its rules
    import_module(f"{__name__}.{_family.name}")
