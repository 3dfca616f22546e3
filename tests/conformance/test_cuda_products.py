"""CUDA's own products and what follows them, computed at once as node by node, by the kernels that should."""

from __future__ import annotations

import numpy as np
import pytest

from ggmlb import Context, DType, Graph, GraphAllocator, alloc_ctx_tensors
from ggmlb.backends.cuda import CudaReg
from ggmlb.backends.cuda.backend import CudaBackend
from ggmlb.backends.cuda.device import CudaDevice
from ggmlb.backends.cuda.kernels.products import FEW_COLUMNS, GLU_COLUMNS
from ggmlb.core.tensor import Tensor
from tests.support.gpus import CUDA, device_fixture

device = device_fixture(*CUDA)

N_RUNS = 3


WEIGHTS = [DType.F32, DType.F16, DType.BF16, DType.Q4_0, DType.Q8_0, DType.Q4_K, DType.Q6_K]


@pytest.mark.parametrize(
    ("dtype", "n", "matrices"),
    [(t, 1, 1) for t in WEIGHTS]
    + [(DType.Q4_0, 2, 3), (DType.F16, 2, 2), (DType.Q8_0, 5, 1), (DType.F16, 7, 1), (DType.Q4_0, 40, 1)],
    ids=str,
)
@pytest.mark.parametrize("what", ["bias", "residual", "glu", "glu biases", "glu halves"])
def test_products_and_what_follows_them(
    stream: CudaBackend, dtype: DType, n: int, matrices: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by = "mul_mat_vec16" if not dtype.is_quantized else "mul_mat_q8" if n <= FEW_COLUMNS else "mul_mat_mma"
    check_product(stream, dtype, n, matrices, what, monkeypatch, by=by)


@pytest.mark.parametrize(("dtype", "n"), [(DType.F16, 20), (DType.Q4_0, 260)], ids=str)
@pytest.mark.parametrize("what", ["bias", "glu", "glu biases", "glu residuals"])
def test_products_by_cublas_and_what_follows_them(
    stream: CudaBackend, dtype: DType, n: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_product(stream, dtype, n, 1, what, monkeypatch, by="gemm")


def check_product(
    stream: CudaBackend,
    dtype: DType,
    n: int,
    matrices: int,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    by: str,
) -> None:
    """Compare what is computed at once with the same, node by node, and look at the kernels."""
    k, m = 512, 37
    results, kernels = [], []
    for fused in ("0", "1"):
        monkeypatch.setenv("GGMLB_FUSE", fused)
        rng = np.random.default_rng(1)
        ctx = Context()
        leafs: list[tuple[Tensor, np.ndarray]] = []

        def leaf(dtype: DType, *ne: int) -> Tensor:
            t = ctx.set_input(ctx.new_tensor(dtype, ne))  # noqa: B023
            leafs.append((t, rng.standard_normal(t.shape, np.float32)))  # noqa: B023
            return t

        def product(part: str) -> Tensor:
            rows = 2 * m if what == "glu halves" else m
            y = ctx.mul_mat(leaf(dtype, k, rows), x)  # noqa: B023
            if what in ("bias", "glu biases"):
                return ctx.add(y, leaf(DType.F32, rows))  # noqa: B023
            if "residual" in what:
                return ctx.add(y, leaf(DType.F32, rows, n, matrices))  # noqa: B023
            return y

        x = leaf(DType.F32, k, n, matrices)
        if what == "glu halves":
            y = ctx.swiglu(product("both"))
        elif what.startswith("glu"):
            y = ctx.geglu_split(product("gate"), product("up"))
        else:
            y = product("")
        graph = Graph().build_forward_expand(ctx.set_output(y))
        stream.graph_optimize(graph)
        with GraphAllocator(stream.default_buffer_type) as allocator:
            allocator.alloc_graph(graph)
            for _ in range(N_RUNS):
                for t in graph:
                    if t.view_src is None:
                        t.memset(0xFF)  # NaN, whatever is not written
                for t, data in leafs:
                    t.set_array(data)
                stream.graph_compute(graph)
            results.append(y.to_numpy())
            plan = stream.graph_plan_create(graph)
            kernels.append([step.key[0] for part in plan.parts for step in part.steps])  # type: ignore[attr-defined]
    atol = 1e-5 * float(np.abs(results[0]).max())
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=atol)
    one_by_one, at_once = kernels
    assert one_by_one.count(by) == (2 if what in ("glu", "glu biases", "glu residuals") else 1)
    if by == "gemm":
        # Residuals lie where the sums are to be written: the products must not go there first.
        assert ("glu_added" in at_once) == (what == "glu biases")
        assert ("combine" in at_once) == (what != "glu" and what != "glu biases")
    else:
        alone = what.startswith("glu") and n > GLU_COLUMNS
        if alone and what != "glu halves" and by != "mul_mat_mma":
            by = by.replace("mul_mat", "mul_mats")  # both, then the unit
        assert at_once.count(by) == (one_by_one.count(by) if alone and by == "mul_mat_mma" else 1)
        assert ("glu" in at_once) == alone
        assert "combine" not in at_once


@pytest.mark.parametrize(("asked", "prec", "src"), [("0", 0, 0), ("1", 0, 0), ("1", 10, 0), ("1", 0, 10)])
def test_products_of_f32_use_tf32_only_where_that_is_asked(
    device: CudaDevice, asked: str, prec: int, src: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the bound of docs/cuda.md; products of few columns, and precise ones, are those of f32."""
    monkeypatch.setenv("GGMLB_CUDA_TF32", asked)
    fresh = CudaReg(device.driver).devices[device.index]  # the variable is read once
    rng = np.random.default_rng(1)
    ctx = Context()
    w, many, few = (ctx.new_tensor(DType.F32, (300, n)) for n in (37, 20, 2))
    products = [ctx.prec_set_src(ctx.mul_mat_set_prec(ctx.mul_mat(w, x), prec), src, 1) for x in (many, few)]
    with fresh.init_backend() as stream, alloc_ctx_tensors(ctx, stream):
        for t in (w, many, few):
            t.set(rng.standard_normal(t.shape, np.float32))
        stream.graph_compute(Graph().build_forward_expand(*products))
        exact = [x.to_numpy().astype("f8") @ w.to_numpy().T.astype("f8") for x in (many, few)]
        most = np.abs(many.to_numpy()) @ np.abs(w.to_numpy().T)
        errors = [np.abs(y.to_numpy() - want) for y, want in zip(products, exact, strict=True)]
    is_rounded = asked == "1" and not prec and not src and device.facts.capability >= 80
    assert (errors[0] < 2.0**-9 * most).all()
    assert (errors[0].max() > 1e-4) == is_rounded
    assert errors[1].max() < 1e-4
