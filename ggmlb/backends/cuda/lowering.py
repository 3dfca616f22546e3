"""From nodes to steps: one table says what computes a node on a card of which compute capability.

The rows of `CHOICES` are looked at in order, and the first that takes a node lowers it. A row is a fast path:
what it does not take goes to the portable kernels, which compute everything that they do not decline; the
array rules compute what has no kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ggmlb import kernels
from ggmlb.backends.cuda import array
from ggmlb.enums import NO_OPS, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ggmlb.backends.cuda.work import Work
    from ggmlb.kernels import Launch, Target
    from ggmlb.tensor import Tensor

MAX_GROUPS = 65535
"""What CUDA takes of a grid's second and third extents; the first is practically free."""


class Choice(NamedTuple):
    """A way to compute some nodes of an op.

    Attributes:
        op: The op.
        capability: Least compute capability, times ten.
        takes: Whether it computes a node that the device does not decline.
        lower: Adds its steps.
    """

    op: Op
    capability: int
    takes: Callable[[Tensor], bool]
    lower: Callable[[Tensor, Work], None]


CHOICES: tuple[Choice, ...] = ()


def declines(node: Tensor, target: Target) -> str | None:
    """Return why nothing here computes a node; `None` if something does."""
    why = kernels.declines(node)
    if why is None:
        return _too_many_groups(node, target)
    return why if array.declines(node) is not None else None


def _too_many_groups(node: Tensor, target: Target) -> str | None:
    if node.op in NO_OPS or max(node.ne[1:]) <= MAX_GROUPS >= node.ne[2] * node.ne[3]:
        return None
    for launch in kernels.lower(node, target):
        if max(launch.groups[1:]) > MAX_GROUPS:
            return f"its {launch.groups[1]} x {launch.groups[2]} groups of work are more than CUDA takes"
    return None


def lower(nodes: Iterable[Tensor], target: Target, capability: int, work: Work) -> None:
    """Add the steps of nodes that are not declined."""
    rules: array.ArrayLowering | None = None
    for node in nodes:
        if node.op in NO_OPS or node.is_empty:
            continue
        work.begin(node)
        for choice in CHOICES:
            if choice.op is node.op and choice.capability <= capability and choice.takes(node):
                choice.lower(node, work)
                break
        else:
            if kernels.declines(node) is None:
                launch_all(kernels.lower(node, target), work)
            else:
                rules = rules or array.ArrayLowering(work)
                rules.add(node)


def launch_all(launches: Iterable[Launch], work: Work) -> None:
    """Add launches; those without any group do nothing."""
    for launch in launches:
        if 0 not in launch.groups:
            work.launch(launch)
