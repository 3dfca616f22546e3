"""The Ray actor that serves a machine's devices."""

from __future__ import annotations

import os
from typing import Any

import ray

from ggmlb.backends.ray.node import Node

WATCH = "watch"
"""Concurrency group (a separate thread) in which a busy actor answers `ping` and `abort`."""


class NodeActor:
    """A Ray actor that owns a `Node`, the remote end of a connection.

    Calls of `run` are in order; `ping` and `abort` answer at any time.

    It does not derive from `Node`, as Ray wraps each method of an actor's class. `start` replaces the
    constructor, of which Ray reports errors only as text.
    """

    def start(self, *args: Any) -> list[dict[str, Any]]:
        """Create the `Node`; return the `facts` about its devices."""
        self._node = Node(*args)
        return self._node.facts()

    def run(self, message: bytes, *apart: Any) -> Any:
        """Run the commands of a message on the machine's `Node`; return their results."""
        return self._node.run(message, *apart)

    @ray.method(concurrency_group=WATCH)  # type: ignore[untyped-decorator]
    def abort(self, number: int) -> None:
        """Stop computation number `number` at its next step, if it is not done."""
        self._node.aborted = number

    @ray.method(concurrency_group=WATCH)  # type: ignore[untyped-decorator]
    def ping(self) -> int:
        """Return the id of the actor's process."""
        return os.getpid()
