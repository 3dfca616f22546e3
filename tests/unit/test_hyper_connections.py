"""Forms of the hyper-connections that came after ggml 0.21, so that no golden program has them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

import ggmlb
from ggmlb import Context, DType, Graph, Tensor
from tests.support.ptx import BACKWARD, Compiler, Memory
from tests.support.ptx.machine import why_not
from tests.support.ptx.programs import CARD, steps_of
from tests.support.ptx.runner import Runner, place

N, HC, TOKENS = 31, 4, 5

Values = npt.NDArray[np.float64]
Form = tuple[Callable[[Context, list[Tensor]], Tensor], Callable[[list[Values]], Values]]

FORMS: dict[str, Form] = {
    "gated": (
        lambda c, t: c.dsv4_hc_pre_gated(t[0], t[1], 0.25),
        lambda t: 0.25 * (t[0] / (1 + np.exp(-t[1]))).sum(axis=1),
    ),
    "identity": (
        lambda c, t: c.dsv4_hc_post(t[2], t[0], t[3]),
        lambda t: t[2][:, None] * t[3][:, :, None] + t[0],
    ),
}


def program(form: str) -> tuple[Context, Tensor, list[tuple[Tensor, npt.NDArray[np.float32]]], Values]:
    """Return a context, its node, the leafs with their values, and the right result."""
    ctx, rng = Context(), np.random.default_rng(3)
    shapes = [(N, HC, TOKENS), (N, HC, TOKENS), (N, TOKENS), (HC, TOKENS)]
    leafs = [ctx.new_tensor(DType.F32, ne) for ne in shapes]
    values = [rng.standard_normal(t.shape, np.float32) * 4 for t in leafs]
    build, right = FORMS[form]
    node = build(ctx, leafs)
    return ctx, node, list(zip(leafs, values, strict=True)), right([v.astype(np.float64) for v in values])


@pytest.mark.parametrize("device", ["CPU", "OpenCL0", "ggml:CPU"])
@pytest.mark.parametrize("form", FORMS)
def test_values(form: str, device: str) -> None:
    if device not in {d.name for d in ggmlb.devices()}:
        pytest.skip(f"there is no {device}")
    ctx, node, leafs, right = program(form)
    with ggmlb.init_by_name(device) as backend, ggmlb.alloc_ctx_tensors(ctx, backend):
        if (why := backend.device.declines(node)) is not None:
            pytest.skip(why)  # an older ggml
        for leaf, values in leafs:
            leaf.set_array(values)
        backend.graph_compute(Graph().build_forward_expand(node))
        np.testing.assert_allclose(node.to_numpy(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("form", FORMS)
def test_values_of_cuda(form: str) -> None:
    ctx, node, leafs, right = program(form)
    place(ctx)
    for leaf, values in leafs:
        leaf.set_array(values)
    Runner(Memory(Compiler(80))).run(steps_of(node, CARD, True), order=BACKWARD)
    np.testing.assert_allclose(node.to_numpy(), right, rtol=1e-5, atol=1e-5)
