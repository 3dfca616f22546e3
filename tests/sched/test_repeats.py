"""Graphs with equal parts: what is found for a shorter graph is what is found for the whole one."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import BufferUsage
from ggmlb.core.errors import BackendError
from ggmlb.core.graph import Graph
from ggmlb.core.repeats import Repeats
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend
from ggmlb.interface.registry import init_by_name
from ggmlb.runtime.alloc import alloc_ctx_tensors
from ggmlb.runtime.scheduler import Scheduler, program
from ggmlb.testing.fake import FakeReg

WIDTH, N_CELLS = 32, 8


@dataclass(frozen=True)
class Model:
    """A model of equal layers, with what may break their equality.

    Attributes:
        n_layers: How many.
        ops: What a layer does to the states.
        odd: What is different about one layer, the number `at`.
        first_on: The layers up to this one lie on the first device.
        shared: Whether the layers' weights lie in one buffer.
        before: Nodes between the input and the first layer.
    """

    n_layers: int = 12
    ops: tuple[str, ...] = ("norm", "mix", "gate")
    odd: str = ""
    at: int = 5
    first_on: int = 12
    shared: bool = False
    before: int = 0


OPS = ("norm", "mix", "gate", "keep", "look", "scale", "inplace", "skip", "far", "custom")
ODD = (
    "",
    "scale",
    "sign",
    "flag",
    "weight",
    "reads first",
    "type",
    "request",
    "usage",
    "alias",
    "output",
    "swap",
    "leaf view",
)

models = st.builds(
    Model,
    n_layers=st.integers(8, 14),
    ops=st.lists(st.sampled_from(OPS), min_size=2, max_size=5).map(tuple),
    odd=st.sampled_from(ODD),
    at=st.integers(0, 13),
    first_on=st.integers(0, 14),
    shared=st.booleans(),
    before=st.sampled_from((0, 20)),
)


def added(y: Any, x: Any, ith: int, nth: int, data: Any) -> None:
    y[...] = x + data[0]


class Layers:
    """The weights and caches of a model's layers."""

    def __init__(self, m: Model, backends: list[Backend], stack: ExitStack) -> None:
        self.model, self.backends, self.layers = m, backends, []
        self.data = np.arange(2 * m.n_layers).reshape(-1, 2)
        contexts: dict[int, Context] = {}
        for i in range(m.n_layers):
            where = 0 if i < m.first_on else len(backends) - 1
            c = contexts.setdefault(where if m.shared else where + 2 * i, Context())
            dtype = DType.F16 if m.odd == "type" and i == m.at else DType.F32
            layer = {"wide": c.new_tensor(dtype, (WIDTH, WIDTH)), "gain": c.new_tensor(DType.F32, (WIDTH,))}
            layer |= {"cells": c.new_tensor(DType.F32, (WIDTH, N_CELLS))}
            if m.odd == "alias" and i == m.at:
                layer["gain"] = c.view_1d(layer["cells"], WIDTH, 0)
            self.layers.append(layer)
        for where, c in contexts.items():
            buffer = stack.enter_context(alloc_ctx_tensors(c, backends[0 if where % 2 == 0 else -1]))
            buffer.usage = BufferUsage.WEIGHTS
            if m.odd == "usage" and where // 2 == m.at:
                buffer.usage = BufferUsage.ANY

    def fill(self) -> None:
        random = np.random.default_rng(0)
        for layer in self.layers:
            for t in layer.values():
                t.set_array(0.2 * random.standard_normal(t.shape, np.float32))

    def graph(self, sched: Scheduler | None = None) -> tuple[Graph, Tensor, Tensor, Tensor]:
        c, m, g = Context(), self.model, Graph()
        x0 = x = c.set_input(c.new_tensor(DType.F32, (WIDTH, 2)))
        rows = c.set_input(c.new_tensor(DType.I64, (2,)))
        far, chain = (c.sin(x), c.cos(x)), []
        for _ in range(m.before):  # more than a layer before the first that reads what lies far
            x = c.tanh(x)
            chain.append(x)
        if "far" in m.ops and sched is not None:
            g.build_forward_expand(*far)
            for where, tensors in ((0, far), (-1, chain)):
                for t in tensors:
                    sched.set_tensor_backend(t, self.backends[where])
        previous = first = x
        for i, w in enumerate(self.layers):
            odd = m.odd if i == m.at else ""
            if odd == "weight" and i:
                w = self.layers[i - 1]
            ops = m.ops[::-1] if odd == "swap" else m.ops
            for op in ops:
                if op == "norm":
                    x = c.mul(c.rms_norm(x, 1e-5), w["gain"])
                elif op == "mix":
                    x = c.add(x, c.mul_mat(w["wide"], first if odd == "reads first" else x))
                elif op == "gate":
                    x = c.swiglu_split(c.mul_mat(w["wide"], x), x)
                elif op == "keep":
                    g.build_forward_expand(c.set_rows(w["cells"], x, rows))
                elif op == "look":
                    x = c.add(x, c.view_2d(w["cells"], WIDTH, 2, w["cells"].nb[1], w["cells"].nb[1]))
                elif op == "scale":
                    x = c.scale_bias(x, 0.5 if odd == "scale" else 0.75, -0.0 if odd == "sign" else 0.0)
                elif op == "inplace":
                    x = c.silu_inplace(x)
                elif op == "far":
                    x = c.add(c.add(x, far[0]), far[1])
                elif op == "custom":
                    x = c.map_custom1(x, added, userdata=self.data[i])
                else:
                    x = c.add(x, previous)
            if odd == "flag":
                c.set_input(x)
            if m.odd == "output":
                c.set_output(x)
            if odd == "request" and sched is not None:
                sched.set_tensor_backend(x, self.backends[-1])
            previous = x
            first = x if not i else first
        if m.odd == "leaf view":
            x = c.mul(x, c.view_tensor(self.layers[m.at % m.n_layers]["gain"]))
        return g.build_forward_expand(c.set_output(c.sqr(x))), x0, rows, g.nodes[-1]


def found(layers: Layers) -> tuple[Repeats | None, list[object]]:
    """Everything that a scheduler finds of a graph, and its results."""
    layers.fill()
    with Scheduler(layers.backends) as sched:
        graph, x, rows, y = layers.graph(sched)
        sched.alloc_graph(graph)
        p = sched._program
        tensors = p.signature.tensors
        facts: list[object] = [
            [p.backend_id(t) for t in tensors], [p.cause(t) for t in graph.nodes], str(sched),
            sched.placement,
            [(s.backend.name, s.numbers, s.view_numbers, s.ordered, s.order) for s in sched.splits],
            [[(i.number, {*i.readers}, i.is_constant) for i in s.inputs] for s in sched.splits],
            [t.offset for t in tensors], str(sched.memory_report()),
        ]  # fmt: skip
        for k in range(2):
            x.set_array(np.random.default_rng(k).standard_normal((2, WIDTH), np.float32))
            if rows.buffer is not None:
                rows.set_array(np.array([1, 4 + k]))
            sched.graph_compute(graph)
            facts.append(y.to_numpy().tobytes())
        facts.append([c.to_numpy().tobytes() for layer in layers.layers for c in layer.values()])
        assert [n.describe() for s in sched.splits for n in s.plan.nodes] == [
            tensors[i].describe() for s in sched.splits for i in s.order
        ]
        again, x2, rows2, y2 = layers.graph(sched)
        sched.alloc_graph(again)
        x2.set_array(np.ones((2, WIDTH)))
        if rows2.buffer is not None:
            rows2.set_array(np.array([0, 2]))
        sched.graph_compute(again)
        facts.append(y2.to_numpy().tobytes())
        return p._repeats, facts


def compared(m: Model, backends: list[Backend]) -> Repeats | None:
    """Compare what is found with and without a shorter graph; return the parts."""
    with ExitStack() as stack:
        layers = Layers(m, backends, stack)
        repeats, facts = found(layers)
        with patch.object(program, "find_repeats", lambda graph: None):
            none, whole = found(layers)
        assert none is None
        for a, b in zip(facts, whole, strict=True):
            assert a == b
        return repeats


@pytest.fixture(scope="module")
def stacks():
    with ExitStack() as stack:
        cpu, llvm = (stack.enter_context(init_by_name(name)) for name in ("CPU", "LLVM"))
        fakes = [stack.enter_context(d.init_backend()) for d in FakeReg(2).devices]
        yield {"CPU": [cpu], "LLVM": [llvm, cpu], "fakes": [*fakes, cpu], "fake": [fakes[0], cpu],
            "mixed": [fakes[0], llvm]}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*(must be on one device|falls back to another device):RuntimeWarning")
@pytest.mark.parametrize("name", ["CPU", "LLVM", "fakes", "fake", "mixed"])
@example(m=Model(14, ("norm", "mix", "gate"), "leaf view", 7, first_on=0, shared=True))
@example(m=Model(14, ("norm", "mix", "gate", "custom"), first_on=0))
@example(m=Model(14, ("norm", "mix", "inplace", "far"), first_on=0, before=20))
@example(m=Model(11, ("norm", "look", "look"), first_on=0))  # groups over the border of two parts
@example(m=Model(8, ("norm", "norm", "look", "mix"), first_on=0))
@example(m=Model(12, ("norm", "norm", "keep"), "flag", 0, first_on=0))  # the first part reads a copy
@given(m=models)
def test_the_shorter_graph_finds_what_the_whole_one_does(stacks, name, m):
    compared(m, stacks[name])


@pytest.mark.parametrize("name", ["CPU", "LLVM", "fake"])
def test_layers_are_found_and_what_makes_one_different_is_noticed(stacks, name):
    plain = Model(24, ("norm", "mix", "keep", "look", "gate", "scale"), first_on=24)
    repeats = compared(plain, stacks[name])
    assert repeats is not None and repeats.n_parts >= 11
    for odd in set(ODD) - {"", "flag", "request", "output"}:
        part = compared(Model(24, plain.ops, odd, 12, 24), stacks[name])
        assert part is None or part.n_parts <= 12, odd


def test_an_op_that_is_rarer_than_layers_hides_none(stacks):
    weights, c = Context(), Context()
    layers = [weights.new_tensor(DType.F32, (WIDTH, WIDTH)) for _ in range(30)]
    x = c.sqrt(c.set_input(c.new_tensor(DType.F32, (WIDTH, 2))))
    for w in layers:
        x = c.silu(c.add(x, c.mul_mat(w, x)))
    graph = Graph().build_forward_expand(c.set_output(c.sqrt(c.sqrt(x))))
    with alloc_ctx_tensors(weights, stacks["CPU"][0]), Scheduler(stacks["CPU"]) as sched:
        sched.split_graph(graph)
        assert sched._program._repeats is not None and sched._program._repeats.n_nodes == 3


def test_a_failure_names_the_node_of_a_layer_that_was_left_out(stacks):
    backends = stacks["LLVM"]
    weights = Context()
    tables = [weights.new_tensor(DType.F32, (WIDTH, 4)) for _ in range(30)]
    indices = [weights.new_tensor(DType.I32, (2,)) for _ in tables]
    c = Context()
    x = c.set_input(c.new_tensor(DType.F32, (WIDTH, 2)))
    for i, (table, index) in enumerate(zip(tables, indices, strict=True)):
        x = c.add(x, c.set_name(c.get_rows(table, index), f"rows {i}"))
    graph = Graph().build_forward_expand(c.set_output(x))
    with alloc_ctx_tensors(weights, backends[-1]) as buffer, Scheduler(backends) as sched:
        buffer.clear(0)
        sched.alloc_graph(graph)
        assert sched._program._repeats is not None
        graph.leafs[0].set_array(np.zeros((2, WIDTH)))
        sched.graph_compute(graph)
        calls = []
        backends[0].abort_callback = lambda: bool(calls.append(1))
        sched.graph_compute(graph)
        backends[0].abort_callback = None
        assert len(calls) == 60
        indices[17].set_array(np.array([1, 9]))
        with pytest.raises(BackendError, match=r"'rows 17'.*row number 9 for a tensor of 4 rows"):
            sched.graph_compute(graph)


@pytest.mark.parametrize("shifted", [{}, {7: 16}, {3: 32, 15: 4}])
def test_layers_at_other_alignments_compute_the_same(stacks, shifted):
    weights, c = Context(), Context()
    layers = [weights.new_tensor(DType.F32, (WIDTH,)) for _ in range(20)]
    x0 = x = c.set_input(c.new_tensor(DType.F32, (WIDTH, 2)))
    expected = np.ones((2, WIDTH))
    with stacks["LLVM"][0].device.buffer_type.alloc_buffer(1 << 16) as buffer:
        for i, w in enumerate(layers):
            w.buffer, w.offset = buffer, 1024 * i + shifted.get(i, 0)
            w.set_array(np.linspace(1, 1.5, WIDTH) + i / 64)
            x = c.sqrt(c.sqr(c.sin(c.mul(x, w))))
            expected = np.abs(np.sin(expected * w.to_numpy()))
        graph = Graph().build_forward_expand(c.set_output(x))
        with Scheduler(stacks["LLVM"]) as sched:
            sched.alloc_graph(graph)
            assert sched._program._repeats is not None
            x0.set_array(np.ones((2, WIDTH)))
            sched.graph_compute(graph)
            np.testing.assert_allclose(x.to_numpy(), expected, rtol=1e-3)
            assert bool(sched.splits[0].plan._table.results) == (not shifted), "bound by a shorter graph"
