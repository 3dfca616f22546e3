"""Extension of griffe, which reads the source: adds the methods that op families make in loops, as `add`."""

from __future__ import annotations

import griffe

from scripts.pages.ops import families


class MadeMethods(griffe.Extension):
    """Adds to each class of an op family the methods that are seen only when it is imported."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: object) -> None:
        """Add the methods, as inspected."""
        for family in families():
            inspected = griffe.inspect(family.__name__.rpartition(".")[2], parent=pkg["core.ops"])
            for name, cls in inspected.classes.items():
                known = pkg[f"core.ops.{inspected.name}.{name}"]
                for method in set(cls.functions) - set(known.functions):
                    known.set_member(method, cls.functions[method])
