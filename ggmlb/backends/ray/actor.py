"""The Ray actor of a node."""

from __future__ import annotations

import os
from typing import Any

import ray

from ggmlb.backends.ray.node import Node

WATCH = "watch"
"""Concurrency group, a thread of its own, in which a busy actor answers that it is alive."""


class NodeActor:
    """A node as an actor: `run` in the order of the calls, `ping` at any time.

    The node is a part of it, as Ray puts a call of its own around each method of an actor's class. `start`
    makes it, as Ray tells of an error in a constructor in words only.
    """

    def start(self, *args: Any) -> list[dict[str, Any]]:
        """Make the node; see `Node`. Return its facts."""
        self._node = Node(*args)
        return self._node.facts()

    def run(self, message: bytes, *apart: Any) -> Any:
        """See `Node.run`."""
        return self._node.run(message, *apart)

    @ray.method(concurrency_group=WATCH)  # type: ignore[untyped-decorator]
    def ping(self) -> int:
        """Return the number of the process."""
        return os.getpid()
