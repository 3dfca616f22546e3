"""Graph: the nodes needed for given results, in topological order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, cast

from ggmlb.core import arguments
from ggmlb.core.backward import append_gradients, check_accumulator, tensors_needing_gradients
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, TensorFlag
from ggmlb.core.errors import ArgumentError, GraphError, did_you_mean, kind_of
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.core.context import Context
    from ggmlb.interface import Buffer


@arguments.named("a graph, as Graph().build_forward_expand(tensor) makes one")
@arguments.checked_methods
class Graph:
    """A compute graph: nodes in topological order, and the leafs that they read (ggml_cgraph).

    Attributes:
        nodes: Tensors computed by an op (views included), each after its sources.
        leafs: Tensors without an op: inputs, weights, constants.
        whole: The graph of which this one is a part (a view); other parts may read its results. `None`
            for a whole graph.
        owner_checks: Whether the owner of the graph (a scheduler) checks for changed tensors and replans.
            Otherwise its plans check.
        marks: Notes on nodes by `Backend.graph_optimize`, for the backend's plans. Clear them when the nodes
            change.
    """

    __slots__ = (
        "__weakref__", "_accs", "_grads", "_seen", "leafs", "marks", "nodes", "owner_checks", "whole",
    )  # fmt: skip

    def __init__(self, nodes: Iterable[Tensor] = (), leafs: Iterable[Tensor] = ()) -> None:
        self.nodes: list[Tensor] = list(nodes)
        self.leafs: list[Tensor] = list(leafs)
        self.whole: Graph | None = None
        self.owner_checks = False
        self.marks: dict[Tensor, object] = {}
        self._seen: set[Tensor] = {*self.nodes, *self.leafs}
        self._grads: dict[Tensor, Tensor] = {}
        self._accs: dict[Tensor, Tensor] = {}

    def build_forward_expand(self, *results: Tensor) -> Graph:
        """Append the nodes needed to compute `results`; return the graph itself.

        Parents come in the order of `src`, depth first, as in ggml (ggml_build_forward_expand).

        Raises:
            ArgumentError: A result is no tensor.
        """
        for result in results:
            if not isinstance(result, Tensor):
                raise ArgumentError(
                    f"build_forward_expand: {kind_of(result)} is no tensor; give results of a Context's ops"
                )
            self._visit(result)
        return self

    def _visit(self, result: Tensor) -> None:
        # Iterative: thousands of chained nodes would exceed the recursion limit.
        seen, append = self._seen, self._append
        if result in seen:
            return
        seen.add(result)
        stack = [result]
        while stack:
            tensor = stack[-1]
            for src in tensor.src:  # restarts after each source, as a node has few
                if src is not None and src not in seen:
                    seen.add(src)
                    if src.src:
                        stack.append(src)
                        break
                    append(src)
            else:
                stack.pop()
                append(tensor)

    def _append(self, tensor: Tensor) -> None:
        if tensor.op is Op.NONE and not tensor.flags & TensorFlag.PARAM:
            self.leafs.append(tensor)
        else:
            tensor.flags |= TensorFlag.COMPUTE
            self.nodes.append(tensor)

    def add_node(self, tensor: Tensor) -> None:
        """Append one node, whose sources must already be in the graph (ggml_graph_add_node).

        Raises:
            GraphError: A source is not in the graph.
        """
        for src in tensor.src:
            if src is not None and src not in self._seen:
                raise GraphError(
                    f"add_node({tensor.describe()}): its source {src.describe()} is not in the graph; "
                    "add it first, or use build_forward_expand"
                )
        if tensor not in self._seen:
            self._seen.add(tensor)
            self._append(tensor)

    # -- gradients -----------------------------------------------------------------------------

    def add_alloc_dep(self, tensor: Tensor, until: Tensor) -> None:
        """Keep a tensor allocated until a later node is computed (add_alloc_dep of graph_optimize).

        For `Backend.graph_optimize` of backends that compute nodes at other times than the graph's order
        says, as on several streams: no result before `until` is placed in the tensor's memory. A view
        without an op is inserted after `until`.

        Args:
            tensor: A node of the graph, or a tensor that its nodes read.
            until: A node of the graph.

        Raises:
            ArgumentError: `until` is no node of the graph.
        """
        if until not in self.nodes:
            raise ArgumentError(
                f"add_alloc_dep: {until.describe()} is no node of this graph; give one of `graph.nodes`"
            )
        self.nodes.insert(self.nodes.index(until) + 1, alloc_dep(tensor))

    def build_backward_expand(self, ctx: Context, grad_accs: Mapping[Tensor, Tensor] | None = None) -> Graph:
        """Append nodes for the gradients of the losses, added to `grad_accs` if given; return the graph.

        Losses and parameters are those of the graph's nodes marked by `set_loss` and `set_param`. Call
        `reset` once the graph is allocated, and before each computation from which gradients are to start
        at zero: it sets the gradients of the losses to 1. To read a gradient afterwards, mark it by
        `set_output`.

        Args:
            ctx: The context that the new nodes belong to.
            grad_accs: For some tensors an f32 tensor of the same shape, to which each computation adds the
                gradient. Without one, a gradient is computed anew.

        Source: ggml_build_backward_expand.

        Raises:
            GraphError: No node is a loss or a parameter, the graph has gradients already, or an op has no
                gradient; nothing has been appended then.
            ArgumentError: An accumulator does not fit, or its tensor is not in the graph.
        """
        losses = [t for t in self.nodes if t.flags & TensorFlag.LOSS]
        params = [t for t in self.nodes if t.flags & TensorFlag.PARAM]
        if not losses or not params:
            what, how = ("loss", "set_loss") if not losses else ("parameter", "set_param")
            raise GraphError(f"build_backward_expand: no node is a {what}; mark one by {how}, then build")
        if self._grads:
            raise GraphError("build_backward_expand: the graph has gradients already; build a new graph")
        accs = dict(grad_accs or {})
        for tensor, acc in accs.items():
            if not isinstance(tensor, Tensor) or tensor not in self._seen:
                raise ArgumentError(f"build_backward_expand: {tensor!r} is not in the graph")
            check_accumulator(tensor, acc)
        n_made = len(ctx.tensors)
        for loss in losses:
            if loss not in accs:
                acc = accs[loss] = ctx.new_tensor(DType.F32, loss.ne, f"grad for {loss.name or 'loss'}")
                ctx.set_output(ctx.set_input(acc))
        grads = dict(accs)
        try:
            append_gradients(
                ctx, self.nodes, grads, accs, tensors_needing_gradients(self.nodes, losses, params)
            )
        except GraphError:
            del ctx.tensors[n_made:]
            raise
        self._grads, self._accs = grads, accs
        return self.build_forward_expand(*grads.values())

    def grad(self, tensor: Tensor) -> Tensor | None:
        """Return the gradient of a tensor: f32, of its shape; `None` if it has none (ggml_graph_get_grad)."""
        return self._grads.get(tensor)

    def grad_acc(self, tensor: Tensor) -> Tensor | None:
        """Return the accumulator of a tensor's gradient, or `None` (ggml_graph_get_grad_acc)."""
        return self._accs.get(tensor)

    def reset(self) -> None:
        """Set the gradients of losses to 1, other accumulators and the moments of AdamW to 0.

        Source: ggml_graph_reset.

        Raises:
            NotAllocatedError: One of them is in no buffer.
        """
        for node in self.nodes:
            if node.op is Op.OPT_STEP_ADAMW:
                node.operand(2).memset(0)
                node.operand(3).memset(0)
        for tensor, acc in self._accs.items():
            if tensor.flags & TensorFlag.LOSS:
                acc.set_array(1.0)
            else:
                acc.memset(0)

    def view(self, i0: int, i1: int) -> Graph:
        """Return a graph of the nodes `i0` to `i1`; the leafs and earlier nodes that they read are its leafs.

        The part refers to the whole graph, so that results that only other parts read are still computed.
        """
        nodes = self.nodes[i0:i1]
        inside = set(nodes)
        outside = dict.fromkeys(s for n in nodes for s in n.src if s is not None and s not in inside)
        part = Graph(nodes, outside)
        part.whole = self if self.whole is None else self.whole
        part.owner_checks = self.owner_checks
        return part

    def memory(self) -> set[Buffer | None]:
        """Return the buffers of the nodes and their sources as a set, which has `None` if any is unplaced."""
        return {t.buffer for node in self.nodes for t in (node, *node.src) if t is not None}

    def use_counts(self) -> Counter[Tensor]:
        """Return how often the nodes of the whole graph read each tensor (use_counts of ggml_cgraph)."""
        nodes = self.nodes if self.whole is None else self.whole.nodes
        counts = Counter(chain.from_iterable([node.src for node in nodes]))
        del counts[None]
        return cast("Counter[Tensor]", counts)

    def node(self, name: str) -> Tensor:
        """Return the node or leaf of that name (ggml_graph_get_tensor).

        Raises:
            GraphError: No node or leaf has the name.
        """
        for tensor in self:
            if tensor.name == name:
                return tensor
        names = [tensor.name for tensor in self if tensor.name]
        raise GraphError(f"the graph has no node or leaf named {name!r}{did_you_mean(name, names)}")

    def to_dot(self) -> str:
        """Return the graph in Graphviz's DOT language (ggml_graph_dump_dot)."""
        ids = {tensor: f"t{i}" for i, tensor in enumerate(self)}
        lines = ["digraph ggmlb {", '  node [shape=box, fontname="sans-serif", style=filled];']
        for tensor, ident in ids.items():
            colour = "#ffe9a8" if tensor.op is Op.NONE else "#d7e8ff"
            lines.append(f'  {ident} [label="{dot_quoted(tensor.describe())}", fillcolor="{colour}"];')
        for tensor, ident in ids.items():
            lines += [f"  {ids[s]} -> {ident};" for s in tensor.src if s is not None and s in ids]
        return "\n".join([*lines, "}"])

    def __iter__(self) -> Iterator[Tensor]:
        """Leafs, then nodes."""
        yield from self.leafs
        yield from self.nodes

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._seen

    def __len__(self) -> int:
        return len(self.nodes)

    def __repr__(self) -> str:
        return f"<Graph {len(self.nodes)} nodes, {len(self.leafs)} leafs>"


def alloc_dep(tensor: Tensor) -> Tensor:
    """Return a view without an op, which keeps a tensor allocated up to its position in a graph."""
    name = f"{tensor.name} (needed)"
    return Tensor(tensor.dtype, tensor.ne, tensor.nb, src=(tensor,), view_src=tensor, name=name)


def dot_quoted(text: str) -> str:
    """Escape a text for a quoted string in Graphviz's DOT language."""
    return text.replace("\\", "\\\\").replace('"', '\\"')
