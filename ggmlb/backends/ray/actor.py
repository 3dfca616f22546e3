"""The Ray actor of a node."""

from __future__ import annotations

import os

import ray

from ggmlb.backends.ray.node import Node

WATCH = "watch"
"""Concurrency group, a thread of its own, in which a busy actor answers that it is alive."""


class NodeActor(Node):
    """A node as an actor: `run` in the order of the calls, `ping` at any time."""

    @ray.method(concurrency_group=WATCH)  # type: ignore[untyped-decorator]
    def ping(self) -> int:
        """Return the number of the process."""
        return os.getpid()
