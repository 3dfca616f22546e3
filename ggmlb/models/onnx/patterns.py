"""recognise: chains of nodes that exporters write for one function, replaced by one node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from ggmlb.models.onnx.file import FAULTS, Body, OnnxNode


class Patterns:
    """The nodes of a graph, and searches in them.

    Args:
        body: The graph, with nodes of constants folded; its list of nodes is not changed.
    """

    def __init__(self, body: Body) -> None:
        self._by = {name: node for node in body.nodes for name in node.outputs if name}
        self._users: dict[str, list[OnnxNode]] = {}
        for node in body.nodes:
            for name in node.inputs:
                self._users.setdefault(name, []).append(node)
        self._kept = frozenset(body.outputs)
        self._constants = body.constants
        self.replaced: dict[int, OnnxNode] = {}

    def number(self, name: str) -> float | None:
        """Return the number that a constant of one element is, or `None`."""
        value = self._constants.get(name, np.empty(0))
        return float(value.reshape(())) if value.size == 1 and value.dtype.kind in "fiu" else None

    def producer(self, name: str, *ops: str) -> OnnxNode | None:
        """Return the node that computes a value, if its op is one of `ops`; else `None`."""
        node = self._by.get(name)
        return node if node is not None and node.op in ops else None

    def user(self, node: OnnxNode, *ops: str) -> OnnxNode | None:
        """Return the only user of a node's result, if it is one of these ops."""
        name = node.outputs[0]
        users = self._users.get(name, [])
        return users[0] if len(users) == 1 and users[0].op in ops and name not in self._kept else None

    def other(self, node: OnnxNode, name: str) -> str:
        """Return the other operand of a node of two."""
        return node.inputs[1] if node.inputs[0] == name else node.inputs[0]

    def scaled(self, name: str) -> tuple[str, float]:
        """Return the tensor and the factor, if a value is a tensor times a constant."""
        node = self.producer(name, "Mul", "Div")
        if node is None or len(node.inputs) != 2:
            return name, 1.0
        one, two = (self.number(each) for each in node.inputs)
        if two is not None and two:
            return node.inputs[0], two if node.op == "Mul" else 1 / two
        return (node.inputs[1], one) if one is not None and node.op == "Mul" else (name, 1.0)

    def replace(self, last: OnnxNode, op: str, inputs: Sequence[str], **attrs: object) -> None:
        """Replace the node at the end of a chain; those before it are left without users."""
        self.replaced[id(last)] = OnnxNode(op, inputs, last.outputs, attrs, last.label, last.version)

    # -- the chains ----------------------------------------------------------------------------

    def gelu(self, erf: OnnxNode) -> None:
        """`0.5 * x * (1 + erf(x / sqrt(2)))`, the factors in any order."""
        x, factor = self.scaled(erf.inputs[0])
        plus = self.user(erf, "Add")
        if abs(factor - math.sqrt(0.5)) > 1e-4 or plus is None:
            return
        if self.number(self.other(plus, erf.outputs[0])) != 1.0:
            return
        last, half, seen = plus, 1.0, False
        while (node := self.user(last, "Mul", "Div")) is not None and not (seen and half == 0.5):
            name = self.other(node, last.outputs[0])
            number = self.number(name)
            base, scale = self.scaled(name)
            if number is not None and number and (node.op == "Mul" or node.inputs[0] == last.outputs[0]):
                half *= number if node.op == "Mul" else 1 / number
            elif base == x and not seen and node.op == "Mul":
                half, seen = half * scale, True
            else:
                break
            last = node
        if seen and half == 0.5:
            self.replace(last, "Gelu", [x])

    def silu(self, sigmoid: OnnxNode) -> None:
        """`x * sigmoid(x)`."""
        product = self.user(sigmoid, "Mul")
        if product is not None and self.other(product, sigmoid.outputs[0]) == sigmoid.inputs[0]:
            self.replace(product, "Silu", [sigmoid.inputs[0]])

    def hard_swish(self, clip: OnnxNode) -> None:
        """`x * clip(x + 3, 0, 6) / 6`."""
        limits = [self.number(name) if name else None for name in clip.inputs[1:]]
        plus = self.producer(clip.inputs[0], "Add")
        product = self.user(clip, "Mul")
        if plus is None or product is None or (limits or [clip.get("min"), clip.get("max")]) != [0.0, 6.0]:
            return
        x = self.other(product, clip.outputs[0])
        last = self.user(product, "Mul", "Div")
        if last is None or x not in plus.inputs or self.number(self.other(plus, x)) != 3.0:
            return
        base, scale = self.scaled(last.outputs[0])
        if base == product.outputs[0] and abs(scale * 6 - 1) < 1e-6:
            self.replace(last, "HardSwish", [x])

    def _last_axis(self, node: OnnxNode) -> bool:
        axes = node.get("axes")
        if axes is None and len(node.inputs) == 2:
            value = self.number(node.inputs[1])
            axes = None if value is None else [int(value)]
        return axes == [-1] and bool(node.get("keepdims", 1))

    def layer_norm(self, quotient: OnnxNode) -> None:
        """`(x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps)`, and a weight and a bias behind it."""
        root = self.producer(quotient.inputs[1], "Sqrt")
        plus = root and self.producer(root.inputs[0], "Add")
        low = self.producer(quotient.inputs[0], "Sub")
        if plus is None or low is None:
            return
        for name in plus.inputs:
            eps, mean = self.number(self.other(plus, name)), self.producer(name, "ReduceMean")
            if eps is not None and mean is not None and eps >= 0:
                break
        else:
            return
        square = self.producer(mean.inputs[0], "Pow", "Mul")
        centre = self.producer(low.inputs[1], "ReduceMean")
        if square is None or centre is None or centre.inputs[0] != low.inputs[0]:
            return
        of = self.producer(square.inputs[0], "Sub")
        is_square = (
            square.inputs[1] == square.inputs[0] if square.op == "Mul" else self.number(square.inputs[1]) == 2
        )
        same = of is not None and of.inputs == low.inputs
        if is_square and same and self._last_axis(mean) and self._last_axis(centre):
            self.replace(quotient, "LayerNormalization", [low.inputs[0]], epsilon=eps, axis=-1)

    def attention(self, softmax: OnnxNode) -> None:
        """`softmax(x * scale + mask)` over the last axis."""
        if softmax.get("axis", -1 if softmax.version >= 13 else 1) != -1:
            return
        mask: list[str] = []
        name = softmax.inputs[0]
        plus = self.producer(name, "Add")
        if plus is not None:
            first, second = plus.inputs
            if self.producer(self.scaled(first)[0], "MatMul") is None:
                first, second = second, first
            if self.producer(self.scaled(first)[0], "MatMul") is None:
                return
            name, mask = first, [second]
        base, scale = self.scaled(name)
        product = self.producer(base, "MatMul")
        if product is not None and (scale != 1.0 or mask) and math.isfinite(scale):
            self.replace(softmax, "MaskedSoftmax", [base, *mask], scale=scale)


def recognise(body: Body) -> Body:
    """Return the graph with the chains replaced that one op computes; unused nodes are left out."""
    patterns = Patterns(body)
    finders = {"Erf": patterns.gelu, "Sigmoid": patterns.silu, "Clip": patterns.hard_swish,
               "Div": patterns.layer_norm, "Softmax": patterns.attention}  # fmt: skip
    for node in body.nodes:
        find = finders.get(node.op)
        if find is not None and node.inputs and len(node.outputs) == 1:
            with suppress(*FAULTS):  # a node with other operands or attributes is not of a chain
                find(node)
    nodes = [patterns.replaced.get(id(node), node) for node in body.nodes]
    wanted = set(body.outputs)
    kept: list[OnnxNode] = []
    for node in reversed(nodes):
        if wanted.isdisjoint(node.outputs):
            continue
        kept.append(node)
        wanted |= names_read(node)
    return body._replace(nodes=kept[::-1])


def names_read(node: OnnxNode) -> set[str]:
    """Return the names that a node reads, also in its subgraphs."""
    bodies = [value for value in node.attrs.values() if isinstance(value, Body)]
    inner = (names_read(each) for body in bodies for each in body.nodes)
    return {*node.inputs}.union(*(body.outputs for body in bodies), *inner)
