"""Gradients beside ggml's own (ggml-python) and PyTorch's: `make test-oracle`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import Context, GluOp, GraphError, Scheduler, Tensor, evaluate
from ggmlb.testing.cases import cases_of
from ggmlb.testing.gradients import FAMILIES, gradients, problem_of

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(1800)]

WITH_GGML = importlib.util.find_spec("ggml") is not None
torch = pytest.importorskip("torch", reason="PyTorch is not installed")

# -- ggml ------------------------------------------------------------------------------------------

IN_GGML = {
    "abs", "acc", "add", "add_cast", "cast", "cont", "conv_2d", "cos", "cpy", "cpy to another shape",
    "cross_entropy_loss", "diag_mask_inf", "diag_mask_zero", "div", "dup", "exp", "expm1", "get_rows",
    "im2col of one dimension", "im2col of two dimensions", "log", "mean", "mul", "mul_mat", "neg",
    "pool_2d", "relu", "repeat", "repeat_back", "rms_norm", "rope", "scale", "set", "silu", "sin",
    "soft_max_ext", "softplus", "sqr", "sqrt", "sub", "sum", "sum_rows", "swiglu",
}  # fmt: skip
"""Families that ggml has gradients of; it ends its process for others, and for some types and layouts."""


@pytest.fixture(scope="module")
def scheduler():
    with ggmlb.init_by_name("CPU") as cpu, Scheduler([cpu]) as made:
        yield made


@pytest.mark.skipif(not WITH_GGML, reason="ggml-python is not installed")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_gradients_are_those_of_ggml(family: str, ggml: Any, scheduler: Scheduler) -> None:
    from tests.support.oracle import Missing, Refused

    n_compared, wrong = 0, []
    for case in cases_of(family):
        problem = problem_of(case)
        if not problem.operands:
            continue
        try:
            graph = problem.graph()
        except GraphError:
            continue
        names = [o.name for o in problem.operands]
        leafs, steps, outputs = case.program.request()
        leafs = [*leafs, ("w", 0, problem.out.ne, problem.values.tobytes())]
        steps = [*steps, ("product", "mul", (f"${outputs[0]}", "$w")), ("loss", "sum", ("$product",))]
        try:
            answers = ggml.compute(leafs, steps, [f"grad {n}" for n in names], ("loss", names))
        except (Refused, Missing):
            continue
        found = gradients(problem, graph, scheduler)
        for name, ours, (dtype, ne, data) in zip(names, found, answers, strict=True):
            if dtype != 0:
                continue
            theirs = np.frombuffer(data, np.float32).reshape(ne[::-1]).reshape(ours.shape)
            n_compared += 1
            if not np.allclose(ours, theirs, rtol=2e-3, atol=2e-3 * np.abs(theirs).max() + 1e-6):
                wrong.append(f"{case.id}: {name}: {np.abs(ours - theirs).max():.3g}")
    assert not wrong
    assert (n_compared > 0) == (family in IN_GGML)


@pytest.mark.skipif(not WITH_GGML, reason="ggml-python is not installed")
def test_a_training_graph_takes_no_more_memory_than_ggmls() -> None:
    """The memory of results, as ggml's allocator for graphs reserves it, of a step of a deep network."""
    from tests.support.oracle.training_memory import ggml_nbytes, our_nbytes

    for n_layers, n_batch in ((2, 8), (12, 64), (24, 32)):
        assert our_nbytes(n_layers, n_batch) <= 1.02 * ggml_nbytes(n_layers, n_batch)


# -- PyTorch -----------------------------------------------------------------------------------------

Ours = Callable[..., Tensor]


def ids(c: Context, *values: int) -> Tensor:
    return c.from_array(np.array(values, np.int32))


def rotated(x: Any) -> Any:
    """`rope` of pairs side by side, of positions 3, 5 and 9."""
    half = torch.arange(0, 8, 2, dtype=torch.float64) / 8
    angles = torch.tensor([3.0, 5.0, 9.0], dtype=torch.float64)[:, None, None] * 10000.0**-half
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack(
        [a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1
    ).flatten(-2)


F: Any = torch.nn.functional

PAIRS: dict[str, tuple[Ours, Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "add": (lambda c, a, b: c.add(a, b), lambda a, b: a + b, ((3, 4, 5), (4, 5))),
    "sub": (lambda c, a, b: c.sub(a, b), lambda a, b: a - b, ((3, 4, 5), (1, 5))),
    "mul": (lambda c, a, b: c.mul(a, b), lambda a, b: a * b, ((3, 4, 5), (4, 1))),
    "div": (
        lambda c, a, b: c.div(a, c.scale_bias(b, 0.2, 2)),
        lambda a, b: a / (0.2 * b + 2),
        ((3, 4, 5), (4, 5)),
    ),
    "mul_mat": (lambda c, a, b: c.mul_mat(a, b), lambda a, b: b @ a.mT, ((4, 6), (5, 6))),
    "mul_mat of heads": (
        lambda c, a, b: c.mul_mat(a, b),
        lambda a, b: b @ a.repeat_interleave(3, 0).mT,
        ((2, 4, 6), (6, 5, 6)),
    ),
    "out_prod": (
        lambda c, a, b: c.cont(c.mul_mat(c.cont(c.transpose(a)), c.cont(c.transpose(b)))),
        lambda a, b: b.mT @ a,
        ((6, 4), (6, 5)),
    ),
    "norm": (lambda c, a: c.norm(a, 1e-5), lambda a: F.layer_norm(a, a.shape[-1:]), ((4, 9),)),
    "rms_norm": (
        lambda c, a: c.rms_norm(a, 1e-5),
        lambda a: F.rms_norm(a, a.shape[-1:], eps=1e-5),
        ((4, 9),),
    ),
    "group_norm": (
        lambda c, a: c.group_norm(a, 2, 1e-5),
        lambda a: F.group_norm(a[None], 2)[0],
        ((4, 3, 5),),
    ),
    "l2_norm": (lambda c, a: c.l2_norm(a, 1e-6), lambda a: F.normalize(a, dim=-1), ((4, 9),)),
    "soft_max": (lambda c, a: c.soft_max_ext(a, None, 0.7), lambda a: (0.7 * a).softmax(-1), ((2, 4, 9),)),
    "cross entropy": (
        lambda c, a: c.cross_entropy_loss(a, c.from_array(np.eye(4, 9, dtype="f4"))),
        lambda a: F.cross_entropy(a, torch.arange(4))[None],
        ((4, 9),),
    ),
    "get_rows": (lambda c, a: c.get_rows(a, ids(c, 2, 0, 2)), lambda a: a[[2, 0, 2]], ((4, 5),)),
    "rope": (lambda c, a: c.rope(a, ids(c, 3, 5, 9), 8, 0), rotated, ((3, 2, 8),)),
    "conv_2d": (
        lambda c, a, b: c.conv_2d(a, b, 2, 1, 1, 0),
        lambda a, b: F.conv2d(b, a, stride=(1, 2), padding=(0, 1)),
        ((3, 2, 2, 3), (2, 2, 5, 6)),
    ),
    "max pool": (lambda c, a: c.pool_2d(a, "MAX", 2, 2, 2, 2), lambda a: F.max_pool2d(a, 2), ((2, 4, 6),)),
    "mean pool": (lambda c, a: c.pool_2d(a, "AVG", 2, 2, 2, 2), lambda a: F.avg_pool2d(a, 2), ((2, 4, 6),)),
    "concat": (lambda c, a, b: c.concat(a, b, 1), lambda a, b: torch.cat([a, b], -2), ((2, 4), (3, 4))),
    "repeat": (lambda c, a: c.repeat_4d(a, 8, 6, 1, 1), lambda a: a.repeat(3, 2), ((2, 4),)),
    "permute": (lambda c, a: c.cont(c.permute(a, 2, 0, 1, 3)), lambda a: a.permute(2, 0, 1), ((3, 4, 5),)),
    "mean": (lambda c, a: c.mean(a), lambda a: a.mean(-1, keepdim=True), ((4, 9),)),
    "sum_rows": (lambda c, a: c.sum_rows(a), lambda a: a.sum(-1, keepdim=True), ((4, 9),)),
    "clamp": (lambda c, a: c.clamp(a, -0.5, 0.7), lambda a: a.clamp(-0.5, 0.7), ((4, 9),)),
    "pad": (lambda c, a: c.pad(a, 2, 1, 0, 0), lambda a: F.pad(a, (0, 2, 0, 1)), ((4, 3),)),
    "swiglu": (lambda c, a: c.swiglu(a), lambda a: F.silu(a[..., :4]) * a[..., 4:], ((3, 8),)),
    "geglu": (
        lambda c, a, b: c.glu_split(a, b, GluOp.GEGLU),
        lambda a, b: F.gelu(a, approximate="tanh") * b,
        ((3, 8), (3, 8)),
    ),
    **{
        name: (lambda c, a, op=name: c.unary(a, op.upper()), fn, ((4, 9),))
        for name, fn in {
            "tanh": torch.tanh,
            "sigmoid": torch.sigmoid,
            "silu": F.silu,
            "gelu_erf": F.gelu,
            "relu": F.relu,
            "gelu": lambda a: F.gelu(a, approximate="tanh"),
            "elu": F.elu,
            "exp": torch.exp,
            "abs": torch.abs,
            "softplus": F.softplus,
            "hardswish": F.hardswish,
            "hardsigmoid": F.hardsigmoid,
            "expm1": torch.expm1,
            "gelu_quick": lambda a: a * torch.sigmoid(1.702 * a),
        }.items()
    },
    **{
        name: (
            lambda c, a, op=name: getattr(c, op)(c.scale_bias(a, 0.2, 2)),
            lambda a, fn=fn: fn(0.2 * a + 2),
            ((4, 9),),
        )
        for name, fn in {
            "sqr": torch.square,
            "sqrt": torch.sqrt,
            "log": torch.log,
            "sin": torch.sin,
            "cos": torch.cos,
        }.items()
    },
}


@pytest.mark.parametrize("device", ["CPU", "LLVM", "OpenCL0"])
@pytest.mark.parametrize("name", PAIRS)
def test_gradients_are_those_of_pytorch(name: str, device: str) -> None:
    ours, theirs, shapes = PAIRS[name]
    rng, c = np.random.default_rng(4), Context()
    values = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    leafs = [c.new_tensor("f32", shape[::-1], f"x{i}") for i, shape in enumerate(shapes)]
    y = ours(c, *leafs)
    weights = rng.uniform(0.5, 1.5, y.shape).astype(np.float32)
    loss = c.sum(c.mul(y, c.from_array(weights)))
    inputs: dict[Tensor | str, Any] = {f"x{i}": value for i, value in enumerate(values)}
    _, grads = evaluate(loss, inputs, device, grad_of=loss, wrt=leafs)
    doubles = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in values]
    (theirs(*doubles).reshape(weights.shape) * torch.from_numpy(weights)).sum().backward()
    for found, double in zip(grads, doubles, strict=True):
        expected = double.grad.numpy()
        np.testing.assert_allclose(
            found.reshape(expected.shape), expected, rtol=1e-4, atol=2e-5 * np.abs(expected).max()
        )
