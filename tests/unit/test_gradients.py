"""Gradients that graphs build; mode `grad` of the kit has the rules of ops (`conformance/test_kit.py`)."""

from __future__ import annotations

import numpy as np
import pytest

import ggmlb
from ggmlb import ArgumentError, Context, Graph, GraphError, Scheduler, evaluate

DEVICES = ["CPU", "LLVM", "OpenCL0"]


@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_a_gradient_add_up(device: str) -> None:
    """Of a tensor that is read twice by one node, by another one, and by views, one of a permutation."""
    c = Context()
    x = c.new_tensor("f32", (5, 3, 2), name="x")
    turned = c.permute(x, 0, 2, 1, 3)  # [5, 2, 3]
    windows = [c.cont(c.view_3d(turned, 2, 2, 2, turned.nb[1], turned.nb[2], 4 * i)) for i in (0, 1, 3)]
    terms = [c.sum(c.mul(x, x)), c.sum(c.scale(x, 3)), *(c.sum(c.sqr(w)) for w in windows)]
    loss = terms[0]
    for term in terms[1:]:
        loss = c.add(loss, term)
    values = np.random.default_rng(2).standard_normal((2, 3, 5)).astype(np.float32)
    _, (found,) = evaluate(loss, {x: values}, device, grad_of=loss, wrt=[x])
    times = np.zeros((2, 3, 5))
    for first in (0, 1, 3):
        times[:, :2, first : first + 2] += 1
    np.testing.assert_allclose(found, 2 * values * (1 + times) + 3, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_a_value_that_grows_in_place_of_others_is_kept_for_its_gradient(device: str) -> None:
    """A chain, of whose results the gradients read some and not others."""
    c = Context()
    x = c.new_tensor("f32", 6, name="x")
    y = c.exp(c.scale(c.tanh(c.neg(c.exp(c.scale(x, 0.5)))), 2))
    loss = c.sum(y)
    values = np.linspace(-1, 1, 6)
    _, (found,) = evaluate(loss, {x: values}, device, grad_of=loss, wrt=[x])
    e = np.exp(values / 2)
    t = np.tanh(-e)
    np.testing.assert_allclose(found, np.exp(2 * t) * 2 * (1 - t**2) * -e / 2, rtol=1e-5)


def test_an_accumulator_adds_up_until_it_is_reset() -> None:
    c = Context()
    x = c.set_param(c.new_tensor("f32", 3))
    loss = c.set_loss(c.sum(c.sqr(x)))
    graph = Graph().build_forward_expand(loss)
    acc = c.set_output(c.set_input(c.new_tensor("f32", 3)))
    graph.build_backward_expand(c, {x: acc})
    assert graph.grad_acc(x) is acc
    assert graph.grad(loss) is graph.grad_acc(loss)
    with ggmlb.init_by_name("CPU") as cpu, Scheduler([cpu]) as scheduler:
        scheduler.alloc_graph(graph)
        for times in (1, 2):
            x.set_array([1, 2, 3])
            if times == 1:
                graph.reset()
            scheduler.graph_compute(graph)
            assert acc.to_numpy().tolist() == [2 * times, 4 * times, 6 * times]
        graph.reset()
        assert acc.to_numpy().tolist() == [0, 0, 0]


def test_what_has_no_gradient_is_said_when_the_graph_is_built() -> None:
    c = Context()
    x = c.set_param(c.new_tensor("f32", 4, "x"))
    loss = c.set_loss(c.sum(c.set_name(c.cumsum(x), "running")))
    graph = Graph().build_forward_expand(loss)
    before = len(c), len(graph)
    with pytest.raises(GraphError, match=r"CUMSUM has no gradient for operand 0.*'running'"):
        graph.build_backward_expand(c)
    assert (len(c), len(graph)) == before
    inplace = Graph().build_forward_expand(c.set_loss(c.sum(c.sqr_inplace(c.neg(x)))))
    with pytest.raises(GraphError, match=r"overwrites its operand.*use sqr instead of its in-place"):
        inplace.build_backward_expand(c)


def test_a_graph_needs_a_loss_and_a_parameter_and_accumulators_that_fit() -> None:
    c = Context()
    x = c.new_tensor("f32", 4)
    loss = c.sum(c.sqr(x))
    with pytest.raises(GraphError, match="no node is a loss; mark one by set_loss"):
        Graph().build_forward_expand(loss).build_backward_expand(c)
    c.set_loss(loss)
    with pytest.raises(GraphError, match="no node is a parameter; mark one by set_param"):
        Graph().build_forward_expand(loss).build_backward_expand(c)
    c.set_param(x)
    graph = Graph().build_forward_expand(loss)
    with pytest.raises(ArgumentError, match=r"give a contiguous f32 tensor of ne \[4, 1, 1, 1\]"):
        graph.build_backward_expand(c, {x: c.new_tensor("f32", 5)})
    with pytest.raises(ArgumentError, match="is not in the graph"):
        graph.build_backward_expand(c, {c.new_tensor("f32", 4): c.new_tensor("f32", 4)})
    graph.build_backward_expand(c)
    with pytest.raises(GraphError, match="has gradients already"):
        graph.build_backward_expand(c)


def test_nothing_flows_through_steps() -> None:
    c = Context()
    x = c.set_param(c.new_tensor("f32", 4))
    graph = Graph().build_forward_expand(c.set_loss(c.sum(c.step(x)))).build_backward_expand(c)
    assert graph.grad(x) is None


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_one_element_take_the_same_scalar(device: str) -> None:
    """Rows that a device may see as one; there is but one number beside them."""
    c = Context()
    x, s = c.new_tensor("f32", (1, 5, 2), name="x"), c.new_tensor("f32", 1, name="s")
    rows = np.arange(10).reshape(2, 5, 1)
    product, repeated = evaluate([c.mul(x, s), c.repeat(s, x)], {x: rows, s: [3]}, device)
    assert np.array_equal(product, 3 * rows) and np.array_equal(repeated, np.full(rows.shape, 3))
