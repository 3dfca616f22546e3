"""Where partial results are summed over the devices: as late as linear ops allow.

A product cut along its sum gives a part of the result on each device. `reduce(a) * w` is `reduce(a * w)`, and
`reduce(a) + reduce(b)` is `reduce(a + b)`: devices compute such nodes on their parts, and one sum follows. So
weighted experts are summed once for all, and parallel branches together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.core.enums import NO_OPS, BufferUsage, TensorFlag
from ggmlb.core.ops import SPECS
from ggmlb.core.sharding import MIRRORED, PARTIAL
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.core.graph import Graph
    from ggmlb.parallel.meta.device import MetaDevice

HasPart = tuple[bool, ...]
"""For each device, whether it has a part of a sum."""


class Sums:
    """The partial results of a graph on a meta device, and those among them that are summed.

    Attributes:
        outcomes: How the operands and results of the nodes are split.
        parts: For each partial result, which devices have a part.
        ends: The partial results that are summed; the others are read as parts only.
    """

    def __init__(self, graph: Graph, device: MetaDevice) -> None:
        self._device = device
        self._nodes = [n for n in graph.nodes if n.op not in NO_OPS and not n.is_empty]
        self.outcomes = {node: device.outcome(node) for node in self._nodes}
        self._products: dict[Tensor, HasPart] = {}
        for node, (result, wants) in self.outcomes.items():
            if result == PARTIAL and node.view_src is None:
                has = tuple(map(all, zip(*[w.extents() for w in wants if w.is_cut], strict=True)))
                self._products[node] = has if any(has) else (True,) * len(has)
        self.ends: set[Tensor] = set()
        self.parts: dict[Tensor, HasPart] = {}
        if self._products:
            self._find_readers(graph)
        while self._products:
            groups = self._follow()
            more = {n for n in self.parts if not self._is_read_as_parts(n)} - self.ends
            if not more:  # sum the products themselves where their results take more sums
                dear = [g for g in groups if len(self.ends & g) > len(self._products.keys() & g)]
                more = self._products.keys() & set().union(*dear) - self.ends
            if not more:
                break
            self.ends |= more  # the nodes that read these are followed anew
        self.ends &= self.parts.keys()

    def _find_readers(self, graph: Graph) -> None:
        """Find the nodes that read each tensor or views of it, and the tensors that others may read."""
        whole, n_reads = graph if graph.whole is None else graph.whole, graph.use_counts()
        self._readers: dict[Tensor, list[Tensor]] = {}
        self._shown: set[Tensor] = set()
        for node in whole.nodes:
            if node.flags & TensorFlag.OUTPUT or not n_reads[node]:
                self._shown.add(_root(node))
            if node.op not in NO_OPS:
                for root in {_root(s) for s in node.src if s is not None}:
                    self._readers.setdefault(root, []).append(node)

    def _follow(self) -> list[set[Tensor]]:
        """Set `parts`, if `ends` are summed; return the groups of results that depend on each other."""
        self.parts = {}
        group_of: dict[Tensor, set[Tensor]] = {}
        for node in self._nodes:
            has, operands = self._products.get(node), self._operands(node)
            if operands:
                has = self.parts[operands[0]]
            if has is not None:
                self.parts[node] = has
                members = {node}.union(*[group_of[operand] for operand in operands])
                group_of.update(dict.fromkeys(members, members))
        return list({id(members): members for members in group_of.values()}.values())

    def _operands(self, node: Tensor) -> list[Tensor]:
        """Return the partial results that a node reads as parts, itself or views; its result is then one."""
        roots = [None if s is None else _root(s) for s in node.src]
        pending = [i for i, root in enumerate(roots) if root in self.parts and root not in self.ends]
        if not pending or tuple(pending) not in SPECS[node.op].linear or node.view_src is not None:
            return []
        others = [s for i, s in enumerate(node.src) if s is not None and i not in pending]
        found = [_root(node.sources[i]) for i in pending]
        is_alike = len({self.parts[root] for root in found}) == 1
        return found if is_alike and all(self._device.state(s) == MIRRORED for s in others) else []

    def _is_read_as_parts(self, tensor: Tensor) -> bool:
        """Whether a partial result need not be summed, because only nodes that read parts use it."""
        return (
            tensor not in self._shown
            and tensor.buffer is not None
            and tensor.buffer.usage is BufferUsage.COMPUTE  # else the user may read it
            and all(r in self.outcomes and tensor in self._operands(r) for r in self._readers[tensor])
        )


def _root(tensor: Tensor) -> Tensor:
    return tensor if tensor.view_src is None else tensor.view_src
