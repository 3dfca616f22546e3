"""Gradients that a graph builds: each op's rule against central differences of the CPU's results."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import ArgumentError, Context, GluOp, Graph, GraphError, Scheduler, Tensor, UnaryOp

Build = Callable[..., Tensor]

SMOOTH = ("TANH", "SIGMOID", "GELU_ERF", "GELU_QUICK", "SILU", "EXP", "EXPM1", "SOFTPLUS", "GELU")
KINKED = ("ABS", "NEG", "ELU", "RELU", "HARDSWISH", "HARDSIGMOID")


def _ids(c: Context, *values: int) -> Tensor:
    return c.from_array(np.array(values, "i4"))


CASES: dict[str, tuple[Build, tuple[tuple[int, ...], ...]]] = {
    "add": (lambda c, a, b: c.add(a, b), ((4, 6, 2), (2, 3, 1))),
    "sub": (lambda c, a, b: c.sub(a, b), ((4, 6, 2), (4, 1, 2))),
    "mul": (lambda c, a, b: c.mul(a, b), ((4, 6, 2), (2, 3, 1))),
    "div": (lambda c, a, b: c.div(a, c.scale_bias(b, 0.2, 2)), ((4, 6, 2), (4, 1, 1))),
    "mul with itself": (lambda c, a: c.mul(a, a), ((5, 3),)),
    "add1": (lambda c, a, b: c.add1(a, b), ((5, 3), (1,))),
    "add_id": (lambda c, a, b: c.add_id(a, b, c.reshape_2d(_ids(c, 1, 0, 2, 2), 2, 2)), ((5, 2, 2), (5, 3))),
    "acc": (lambda c, a, b: c.acc(a, b, 24, 96, 96, 28), ((6, 4), (3, 2))),
    "set": (lambda c, a, b: c.set(a, b, 24, 96, 96, 28), ((6, 4), (3, 2))),
    "scale_bias": (lambda c, a: c.scale_bias(a, -1.5, 2), ((5, 3),)),
    "clamp": (lambda c, a: c.clamp(a, -0.5, 0.7), ((9, 3),)),
    "sqr": (lambda c, a: c.sqr(a), ((5, 3),)),
    "sqrt": (lambda c, a: c.sqrt(c.scale_bias(a, 0.2, 2)), ((5, 3),)),
    "log": (lambda c, a: c.log(c.scale_bias(a, 0.2, 2)), ((5, 3),)),
    "sin": (lambda c, a: c.sin(a), ((5, 3),)),
    "cos": (lambda c, a: c.cos(a), ((5, 3),)),
    "sum": (lambda c, a: c.sum(a), ((5, 3),)),
    "sum_rows": (lambda c, a: c.sum_rows(a), ((5, 3),)),
    "mean": (lambda c, a: c.mean(a), ((5, 3),)),
    "repeat": (lambda c, a: c.repeat_4d(a, 4, 6, 2, 1), ((2, 3),)),
    "repeat_back": (lambda c, a: c.repeat_back(a, c.new_tensor("f32", (2, 3))), ((4, 6),)),
    "concat": (lambda c, a, b: c.concat(a, b, 1), ((4, 2, 2), (4, 3, 2))),
    "pad": (lambda c, a: c.pad_ext(a, 1, 2, 0, 1), ((4, 3),)),
    "roll": (lambda c, a: c.roll(a, 1, -2), ((4, 3),)),
    "cont of permute": (lambda c, a: c.cont(c.permute(a, 2, 0, 3, 1)), ((4, 3, 2),)),
    "transpose": (lambda c, a: c.sqr(c.cont(c.transpose(a))), ((4, 3),)),
    "reshape": (lambda c, a: c.sqr(c.reshape_2d(a, 6, 2)), ((4, 3),)),
    "view": (lambda c, a: c.cont(c.view_2d(a, 2, 3, 20, 4)), ((5, 4),)),
    "view of a permutation": (
        lambda c, a: c.cont(c.view_2d(c.permute(a, 0, 2, 1, 3), 2, 2, 60, 24)), ((5, 3, 2),)
    ),
    "cast": (lambda c, a: c.cast(a, "f32"), ((5, 4),)),
    "cpy": (lambda c, a: c.cpy(a, c.from_array(np.zeros((4, 5), "f4"))), ((5, 4),)),
    "mul_mat": (lambda c, a, b: c.mul_mat(a, b), ((5, 4), (5, 3))),
    "mul_mat of broadcast matrices": (lambda c, a, b: c.mul_mat(a, b), ((5, 4, 2, 1), (5, 3, 4, 3))),
    "mul_mat of more broadcast matrices": (lambda c, a, b: c.mul_mat(a, b), ((5, 4, 1, 2), (5, 3, 3, 4))),
    "norm": (lambda c, a: c.norm(a, 1e-5), ((8, 3),)),
    "rms_norm": (lambda c, a: c.rms_norm(a, 1e-5), ((8, 3),)),
    "l2_norm": (lambda c, a: c.l2_norm(a, 1e-5), ((8, 3),)),
    "group_norm": (lambda c, a: c.group_norm(a, 2, 1e-5), ((3, 2, 4),)),
    "soft_max": (lambda c, a: c.soft_max_ext(a, None, 0.7), ((6, 3, 2),)),
    "soft_max with a mask and ALiBi": (
        lambda c, a: c.soft_max_ext(a, c.from_array(np.tri(3, 6, dtype="f4")), 0.7, 8.0), ((6, 3, 2),)
    ),
    "diag_mask": (lambda c, a: c.soft_max(c.diag_mask_inf(a, 1)), ((6, 5),)),
    "rope": (lambda c, a: c.rope_ext(a, _ids(c, 3, 5, 9), None, 6, ggmlb.RopeType.NEOX), ((8, 2, 3),)),
    "get_rows": (lambda c, a: c.get_rows(a, _ids(c, 2, 0, 2)), ((5, 4),)),
    "cross_entropy_loss": (
        lambda c, a: c.cross_entropy_loss(a, c.from_array(np.eye(3, 5, dtype="f4"))), ((5, 3),)
    ),
    "conv_2d": (lambda c, a, b: c.conv_2d(a, b, 2, 1, 1, 1), ((3, 2, 2, 3), (6, 5, 2, 2))),
    "pool_2d": (lambda c, a: c.pool_2d(a, "AVG", 2, 2, 2, 2), ((6, 4, 2),)),
    "leaky_relu": (lambda c, a: c.leaky_relu(a, 0.1), ((9, 3),)),
    **{n.lower(): (lambda c, a, n=n: c.unary(a, UnaryOp[n]), ((9, 3),)) for n in SMOOTH + KINKED},
    **{
        f"{op.name.lower()} split": (lambda c, a, b, op=op: c.glu_split(a, b, op), ((6, 3), (6, 3)))
        for op in GluOp if op is not GluOp.SWIGLU_OAI
    },
    "swiglu": (lambda c, a: c.swiglu(a), ((8, 3),)),
    "swiglu swapped": (lambda c, a: c.swiglu_swapped(a), ((8, 3),)),
    "geglu_erf swapped": (lambda c, a: c.geglu_erf_swapped(a), ((8, 3),)),
}  # fmt: skip


class Program:
    """A loss: the sum of a node's elements, each with its own weight."""

    def __init__(self, build: Build, shapes: tuple[tuple[int, ...], ...]) -> None:
        rng = np.random.default_rng(5)
        self.ctx = c = Context()
        self.operands = [c.set_param(c.new_tensor("f32", ne)) for ne in shapes]
        # Between multiples of 0.1, where functions with kinks have them.
        self.values = [(rng.integers(-20, 20, t.shape) / 10 + 0.05).astype("f4") for t in self.operands]
        node = build(c, *self.operands)
        self.weights = rng.uniform(0.5, 1.5, node.shape).astype("f4")
        self.node = c.set_output(node)
        self.loss = c.set_loss(c.sum(c.mul(node, c.from_array(self.weights))))
        self.graph = Graph().build_forward_expand(self.loss)
        self.forward = Graph().build_forward_expand(self.node)

    def gradients(self, device: str) -> list[Any]:
        self.graph.build_backward_expand(self.ctx)
        grads = [self.graph.grad(t) for t in self.operands]
        for grad in grads:
            assert grad is not None
            self.ctx.set_output(grad)
        with ExitStack() as stack:
            names = dict.fromkeys((device, "CPU"))
            backends = [stack.enter_context(ggmlb.init_by_name(name)) for name in names]
            scheduler = stack.enter_context(Scheduler(backends))
            scheduler.alloc_graph(self.graph)
            self.graph.reset()
            for t, value in zip(self.operands, self.values, strict=True):
                t.set_array(value)
            scheduler.graph_compute(self.graph)
            return [g.to_numpy() for g in grads if g is not None]

    def differences(self, step: float = 1e-2) -> list[Any]:
        """Five-point differences, summed in float64."""
        found = []
        with ggmlb.init_by_name("CPU") as cpu, Scheduler([cpu]) as scheduler:
            scheduler.alloc_graph(self.forward)

            def loss() -> float:
                for t, value in zip(self.operands, self.values, strict=True):
                    t.set_array(value)
                scheduler.graph_compute(self.forward)
                return math.fsum((self.node.to_numpy().astype("f8") * self.weights).ravel())

            for value in self.values:
                slope = np.empty(value.shape)
                for place in np.ndindex(value.shape):
                    here, at = value[place], {}
                    for k in (-2, -1, 1, 2):
                        value[place] = here + k * step
                        at[k] = loss()
                    value[place] = here
                    slope[place] = (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * step)
                found.append(slope)
        return found


@pytest.mark.parametrize("name", CASES)
def test_the_rule_of_each_op_agrees_with_differences(name: str) -> None:
    program = Program(*CASES[name])
    expected = program.differences()
    for found, slope in zip(program.gradients("CPU"), expected, strict=True):
        np.testing.assert_allclose(found, slope, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("name", ["mul_mat of broadcast matrices", "gelu_erf", "norm", "soft_max"])
def test_other_devices_agree_with_the_cpu(name: str) -> None:
    here = Program(*CASES[name]).gradients("CPU")
    for device in ("LLVM", "OpenCL0"):
        for a, b in zip(Program(*CASES[name]).gradients(device), here, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4, err_msg=device)


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
    with pytest.raises(GraphError, match=r"CUMSUM has no gradient for its operand 0.*'running'"):
        graph.build_backward_expand(c)
    assert (len(c), len(graph)) == before
    inplace = Graph().build_forward_expand(c.set_loss(c.sum(c.sqr_inplace(c.neg(x)))))
    with pytest.raises(GraphError, match=r"is computed in place.*use the form of sqr that makes a new"):
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


@pytest.mark.parametrize("device", ["CPU", "LLVM", "OpenCL0"])
def test_rows_of_one_element_take_the_same_scalar(device: str) -> None:
    """Rows that a device may see as one; there is but one number beside them."""
    c = Context()
    x, s = c.new_tensor("f32", (1, 5, 2), name="x"), c.new_tensor("f32", 1, name="s")
    rows = np.arange(10).reshape(2, 5, 1)
    product, repeated = ggmlb.evaluate([c.mul(x, s), c.repeat(s, x)], {x: rows, s: [3]}, device)
    assert np.array_equal(product, 3 * rows) and np.array_equal(repeated, np.full(rows.shape, 3))
