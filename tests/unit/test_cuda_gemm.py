"""Products as cuBLAS is asked for them, by a library of the same contract, beside the CPU backend."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ggmlb import Context, DType, Graph, init_by_name
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.cuda.cublas import Gemm, cannot_describe, gemms
from ggmlb.core.errors import BackendError
from ggmlb.core.tensor import Tensor
from tests.support.ptx.runner import Runner, place

Pair = tuple["Tensor", "Tensor"]

BATCHES: dict[str, tuple[tuple[int, int], tuple[int, int], str]] = {
    "plain": ((1, 1), (1, 1), "cublasGemmEx"),
    "matrices": ((3, 1), (3, 1), "cublasGemmStridedBatchedEx"),
    "both dims": ((3, 2), (3, 2), "cublasGemmStridedBatchedEx"),
    "last dim": ((1, 2), (1, 2), "cublasGemmStridedBatchedEx"),
    "one weight": ((1, 1), (4, 2), "cublasGemmEx"),
    "broadcast 2": ((2, 1), (4, 1), "cublasGemmStridedBatchedEx"),
    "broadcast 3": ((2, 1), (2, 2), "cublasGemmStridedBatchedEx"),
    "broadcast both": ((2, 2), (6, 4), "cublasGemmBatchedEx"),
}


def check(build: Callable[[Context], Pair], functions: set[str] | None = None) -> list[Gemm]:
    """Compare d = a^T b of the calls with that of the CPU backend."""
    ctx = Context()
    a, b = build(ctx)
    d = ctx.mul_mat(a, b)
    place(ctx)
    rng = np.random.default_rng(1)
    for t in ctx.tensors:
        if t.view_src is None and t is not d:
            t.set_array(rng.standard_normal(t.shape, np.float32))
    runner = Runner()
    calls = gemms(Mem.of(a), Mem.of(b), Mem.of(d))
    runner.run(calls)
    got = d.to_numpy().copy()
    with init_by_name("CPU") as cpu:
        cpu.graph_compute(Graph().build_forward_expand(d))
    # bf16 in both: the CPU's own rounding of b is the same.
    np.testing.assert_allclose(got, d.to_numpy(), rtol=2e-3, atol=2e-3)
    if functions is not None:
        assert {call for call in runner.blas.calls if "Gemm" in call} == functions
    return calls


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_batches(batch: str, dtype: DType) -> None:
    (a2, a3), (b2, b3), function = BATCHES[batch]
    check(
        lambda ctx: (ctx.new_tensor(dtype, (40, 5, a2, a3)), ctx.new_tensor(dtype, (40, 7, b2, b3))),
        {function},
    )


PERMUTED: dict[str, Callable[[Context], Pair]] = {
    "heads of both": lambda c: (
        c.permute(c.new_tensor(DType.F32, (16, 3, 6, 2)), 0, 2, 1, 3),
        c.permute(c.new_tensor(DType.F32, (16, 3, 4, 2)), 0, 2, 1, 3),
    ),
    "shared keys": lambda c: (
        c.permute(c.new_tensor(DType.F16, (16, 2, 6, 2)), 0, 2, 1, 3),
        c.permute(c.new_tensor(DType.F16, (16, 6, 4, 2)), 0, 2, 1, 3),
    ),
    "shared keys, stacked queries": lambda c: (
        c.permute(c.new_tensor(DType.F16, (16, 2, 6, 1)), 0, 2, 1, 3),
        c.new_tensor(DType.F16, (16, 4, 6, 1)),
    ),
    "dims 2 and 3": lambda c: (
        c.permute(c.new_tensor(DType.F32, (16, 6, 2, 3)), 0, 1, 3, 2),
        c.permute(c.new_tensor(DType.F32, (16, 4, 2, 3)), 0, 1, 3, 2),
    ),
    "window of rows": lambda c: (
        c.view_3d(c.new_tensor(DType.F32, (48, 9, 2)), 40, 6, 2, 4 * 48, 4 * 48 * 9, 4 * 8),
        c.view_3d(c.new_tensor(DType.F32, (40, 7, 2)), 40, 5, 2, 4 * 40, 4 * 40 * 7, 4 * 40),
    ),
    "one row": lambda c: (
        c.permute(c.new_tensor(DType.F32, (16, 5, 1, 1)), 0, 2, 1, 3),
        c.permute(c.new_tensor(DType.F32, (16, 1, 5, 1)), 0, 1, 2, 3),
    ),
}


@pytest.mark.parametrize("case", PERMUTED)
def test_permuted_operands(case: str) -> None:
    check(PERMUTED[case])


def test_what_cublas_cannot_read_is_said() -> None:
    ctx = Context()
    t = ctx.new_tensor(DType.F32, (8, 6, 2))
    assert cannot_describe(Mem.of(t)) is None
    assert cannot_describe(Mem.of(ctx.transpose(t))) == "elements of a row are 32 bytes apart"
    overlapping = Mem.of(t).window((8, 6, 2, 1), (4, 16, 192, 384))
    assert cannot_describe(overlapping) == "rows are 16 bytes apart"


def test_the_workspace_is_set_again_with_each_stream() -> None:
    ctx = Context()
    a, b = ctx.new_tensor(DType.F32, (4, 2)), ctx.new_tensor(DType.F32, (4, 3))
    d = ctx.mul_mat(a, b)
    place(ctx)
    runner = Runner()
    (gemm,) = gemms(Mem.of(a), Mem.of(b), Mem.of(d))
    call = runner.cublas.bind(gemm, runner.addresses(gemm), runner.upload)
    for stream in (5, 5, 6):
        call(stream)
    assert runner.blas.calls[2:] == [
        "cublasSetStream_v2", "cublasSetWorkspace_v2", "cublasGemmEx", "cublasGemmEx",
        "cublasSetStream_v2", "cublasSetWorkspace_v2", "cublasGemmEx",
    ]  # fmt: skip
    runner.cublas.close()
    runner.cublas.close()
    assert runner.blas.handles == 0


def test_f32_is_not_rounded_to_tf32() -> None:
    ctx = Context()
    a, b = ctx.new_tensor(DType.F32, (256, 2)), ctx.new_tensor(DType.F32, (256, 3))
    d = ctx.mul_mat(a, b)
    place(ctx)
    for t in (a, b):
        t.set_array(np.full(t.shape, 1.0 + 2.0**-12, np.float32))
    runner = Runner()
    (gemm,) = gemms(Mem.of(a), Mem.of(b), Mem.of(d))
    exact = 256 * (1.0 + 2.0**-12) ** 2
    runner.cublas.bind(gemm, runner.addresses(gemm), runner.upload)(1)
    assert float(d.to_numpy()[0, 0]) == pytest.approx(exact, rel=1e-6)


def test_a_refused_call_is_an_error_with_its_reason() -> None:
    ctx = Context()
    a, b = ctx.new_tensor(DType.F32, (4, 2)), ctx.new_tensor(DType.F32, (4, 3))
    d = ctx.mul_mat(a, b)
    place(ctx)
    runner = Runner()
    wrong = Gemm(Mem.of(a), Mem.of(b), Mem.of(d), 2, 3, 4, (3, 4, 2))
    with pytest.raises(BackendError, match=r"cublasGemmEx: an argument is invalid \(7\)"):
        runner.cublas.bind(wrong, runner.addresses(wrong), runner.upload)(1)
