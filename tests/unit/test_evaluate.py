"""evaluate: one call from tensors to values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import Context, Tensor, evaluate


@pytest.fixture
def program() -> tuple[Tensor, dict[str, Tensor], Any]:
    """The input's leaf, results of several kinds, and what they should be, given the input."""
    ctx = Context()
    w = np.random.default_rng(0).normal(size=(5, 8)).astype("f4")
    x = ctx.new_tensor("f32", (8, 3), name="x")
    y = ctx.mul_mat(ctx.from_array(w, name="w"), x)
    results = {"y": y, "later": ctx.sqr(y), "view": ctx.transpose(y), "leaf": x}
    return x, results, lambda v: {"y": v @ w.T, "later": (v @ w.T) ** 2, "view": (v @ w.T).T, "leaf": v}


X = np.random.default_rng(1).normal(size=(3, 8)).astype("f4")


@pytest.mark.parametrize("devices", [None, "CPU", "OpenCL0", ["OpenCL0", "CPU"]])
def test_values_on_any_devices(program: Any, devices: Any) -> None:
    x, results, expected = program
    for inputs in ({"x": X}, {x: X.tolist()}):
        values = evaluate(list(results.values()), inputs, devices)
        for name, value in zip(results, values, strict=True):
            np.testing.assert_allclose(value, expected(X)[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_backends_given_stay_open(program: Any) -> None:
    _, results, _ = program
    with ggmlb.init_by_name("CPU") as cpu:
        evaluate(results["y"], {"x": X}, cpu)
        assert not cpu.is_freed
        evaluate(results["y"], {"x": X}, [cpu])


def test_tensors_are_left_as_they_were(program: Any) -> None:
    _, results, _ = program
    flags = [t.flags for t in results.values()]
    evaluate(list(results.values()), {"x": X})
    kept = ggmlb.TensorFlag.OUTPUT | ggmlb.TensorFlag.INPUT
    assert [t.flags & kept for t in results.values()] == [f & kept for f in flags]
    assert all(t.buffer is None for t in results.values())


def test_parameters_are_given_as_other_leafs_are() -> None:
    ctx = Context()
    x, grad, rate = (ctx.new_tensor("f32", n, name) for n, name in ((3, "x"), (3, "grad"), (2, "rate")))
    step = ctx.opt_step_sgd(ctx.set_param(x), grad, rate)
    values = {"x": [1, 2, 3], grad: [1, 1, 2], "rate": [0.5, 0]}
    assert evaluate(step, values).tolist() == [0.5, 1.5, 2]
    with pytest.raises(ggmlb.ArgumentError, match=r"no values for .*'x'"):
        evaluate(step, {"grad": [1, 1, 2], "rate": [0.5, 0]})


@pytest.mark.parametrize(
    ("inputs", "devices", "error", "match"),
    [
        ({}, None, ggmlb.ArgumentError, "no values for .*'x'"),
        ({"xx": X}, None, ggmlb.ArgumentError, "did you mean 'x'"),
        ({"x": X.T}, None, ggmlb.ShapeError, r"give one of shape \(3, 8\)"),
        ({"x": X}, "CPU7", ggmlb.RegistryError, "did you mean 'CPU'"),
        ({"x": X}, [], ggmlb.ArgumentError, "no devices"),
    ],
)
def test_mistakes_are_named(
    program: Any, inputs: Any, devices: Any, error: type[Exception], match: str
) -> None:
    _, results, expected = program
    with pytest.raises(error, match=match):
        evaluate(results["y"], inputs, devices)
    np.testing.assert_allclose(evaluate(results["y"], {"x": X}), expected(X)["y"], rtol=1e-5, atol=1e-5)


def test_gradients_come_beside_values() -> None:
    ctx = Context()
    x, w = ctx.new_tensor("f32", (3, 2), name="x"), ctx.new_tensor("f32", (3, 4), name="w")
    y = ctx.set_name(ctx.mul_mat(w, x), "y")
    loss, other = ctx.sum(ctx.sqr(y)), ctx.set_loss(ctx.sum(y))
    values = {"x": np.arange(6).reshape(2, 3), "w": np.arange(12).reshape(4, 3)}
    flags = [t.flags & ~ggmlb.TensorFlag.COMPUTE for t in (x, w, y, loss, other)]
    (total, rows, _), grads = evaluate(
        [loss, y, other], values, "CPU", grad_of=loss, wrt=["w", x, "y", other]
    )
    expected = values["x"] @ values["w"].T
    assert total.item() == (expected**2).sum() and np.array_equal(rows, expected)
    by_w, by_x, by_y, by_other = grads
    assert np.array_equal(by_y, 2 * expected)
    assert np.array_equal(by_w, 2 * expected.T @ values["x"])
    assert np.array_equal(by_x, 2 * expected @ values["w"])
    assert np.array_equal(by_other, [0])  # on which the loss does not depend
    assert [t.flags & ~ggmlb.TensorFlag.COMPUTE for t in (x, w, y, loss, other)] == flags


def test_mistakes_with_gradients_are_named() -> None:
    ctx = Context()
    x = ctx.new_tensor("f32", 3, name="x")
    y, values = ctx.sqr(x), {"x": [1, 2, 3]}
    loss = ctx.sum(y)
    with pytest.raises(ggmlb.ArgumentError, match="is not an f32 scalar"):
        evaluate(y, values, grad_of=y, wrt=[x])
    with pytest.raises(ggmlb.ArgumentError, match="grad_of is given without wrt"):
        evaluate(y, values, grad_of=loss, wrt=[])
    with pytest.raises(ggmlb.ArgumentError, match="wrt is given without grad_of"):
        evaluate(y, values, wrt=[x])  # type: ignore[call-overload]
    with pytest.raises(ggmlb.GraphError, match="no node or leaf named 'z'"):
        evaluate(y, values, grad_of=loss, wrt=["z"])
    with pytest.raises(ggmlb.ArgumentError, match="of wrt is not in the graph"):
        evaluate(y, values, grad_of=loss, wrt=[ctx.new_tensor("f32", 3)])
    with pytest.raises(ggmlb.ArgumentError, match=r"no values for .*'x'"):
        evaluate(y, grad_of=loss, wrt=[x])
    assert evaluate(loss, values, grad_of=loss, wrt=[x])[1][0].tolist() == [2, 4, 6]
