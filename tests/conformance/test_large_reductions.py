"""Reductions of many elements to one number: by all groups of a GPU, of every layout, with the same bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from ggmlb import Context, Device, Graph, Tensor, alloc_ctx_tensors
from ggmlb.backends.gpu import Target, lower
from tests.support.gpus import OPENCL, PLAYED, device_fixture

device = device_fixture(OPENCL, PLAYED)


def loss(logits: npt.NDArray[np.float64], shares: npt.NDArray[np.float64]) -> float:
    n_rows = logits.size // logits.shape[-1]
    return float((shares * (np.log(np.exp(logits).sum(-1, keepdims=True)) - logits)).sum() / n_rows)


OPS: dict[str, tuple[str, int, Callable[..., float]]] = {
    "sum": ("f32", 1, lambda a: a.sum()),
    "count_equal": ("i32", 2, lambda a, b: (a == b).sum()),
    "cross_entropy_loss": ("f32", 2, loss),
}
"""Type and number of operands, and the result."""

LAYOUTS: dict[str, Callable[[Context, Tensor], Tensor]] = {
    "whole": lambda ctx, t: t,
    "rows with gaps": lambda ctx, t: ctx.view_2d(t, t.ne[0] - 1, t.ne[1], t.nb[1], 0),
    "columns": lambda ctx, t: ctx.permute(t, 1, 0, 2, 3),
}


def node_of(ctx: Context, op: str, layout: str, ne: tuple[int, ...]) -> Tensor:
    dtype, n_operands, _ = OPS[op]
    operands = [LAYOUTS[layout](ctx, ctx.new_tensor(dtype, ne)) for _ in range(n_operands)]
    return getattr(ctx, op)(*operands)  # type: ignore[no-any-return]


@pytest.mark.parametrize("target", [Target(True, 4, 1), Target(False, 132, 128)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ne", [(4096, 1024), (4_194_301, 1), (4_194_301, 3)], ids=str)
def test_millions_of_elements_keep_every_unit_busy(op: str, ne: tuple[int, int], target: Target) -> None:
    if op == "cross_entropy_loss" and ne[1] < 4:
        pytest.skip("a group has whole rows")
    first, *_ = lower(node_of(Context(), op, "whole", ne), target)
    assert first.groups[0] >= target.n_units


@pytest.mark.parametrize("split", ["cpu", "gpu"])
@pytest.mark.parametrize("ne", [(257, 157), (40_009, 1), (3, 9_001)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_every_element_counts_once_and_runs_give_the_same_bits(
    device: Device, op: str, layout: str, ne: tuple[int, int], split: str
) -> None:
    if device.name.startswith("CUDA") and split == "cpu":
        pytest.skip("CUDA has GPUs only")
    ctx, rng = Context(), np.random.default_rng(5)
    node = node_of(ctx, op, layout, ne)
    params = None if device.name.startswith("CUDA") else {"work_split": split}
    with device.init_backend(params) as stream, alloc_ctx_tensors(ctx, stream):
        for t in (t for t in ctx.tensors if t.op.name == "NONE" and t.view_src is None):
            t.set_array(rng.integers(0, 4, t.shape).astype(t.dtype.numpy))  # sums are exact
        operands = [t.to_numpy().astype(np.float64) for t in node.sources]
        graph, found = Graph().build_forward_expand(node), set()
        for _ in range(3):
            node.memset(0xFF, 0, node.nbytes)
            stream.graph_compute(graph)
            found.add(node.to_numpy().tobytes())
    (bits,) = found
    rtol = 1e-4 if op == "cross_entropy_loss" else 0
    np.testing.assert_allclose(np.frombuffer(bits, node.dtype.numpy)[0], OPS[op][2](*operands), rtol=rtol)
