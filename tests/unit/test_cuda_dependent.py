"""Programmatic dependent launch: kernels that may start early wait before they access memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ggmlb import Context, DType, Graph, alloc_ctx_tensors
from ggmlb.backends.cuda import CudaReg
from ggmlb.backends.cuda.driver import text
from ggmlb.backends.cuda.kernels import PACKAGE
from ggmlb.backends.gpu.source import Kernel, kernels
from tests.support import ptx
from tests.support.gpus import host_driver
from tests.support.ptx import PtxError
from tests.support.ptx.machine import why_not
from tests.support.ptx.programs import PROGRAMS

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
RUN = ("q4_0, three weights", "top_k, rows in segments", "portable heads")


@pytest.fixture
def fresh() -> Iterator[None]:
    """Kernels are compiled again, for this test alone."""
    ptx.build.cache_clear()
    yield
    ptx.build.cache_clear()


@pytest.mark.parametrize("kernel", [*kernels().values(), *kernels(PACKAGE).values()], ids=lambda k: k.name)
def test_every_kernel_waits_first(kernel: Kernel) -> None:
    before, after = text(kernel, (), 128, dependent=True).split("    wait_for_previous_kernel();\n")
    assert before.endswith(")\n{\n") and WAIT in before
    assert before + after == text(kernel, (), 128)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("program", RUN)
def test_results_are_the_same(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx, "text", lambda *key: text(*key[:3], dependent=True))
    assert PROGRAMS[program]()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("program", RUN)
def test_an_access_before_the_wait_is_told(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptx, "text", lambda *key: text(*key[:3], dependent=True).replace(WAIT, ""))
    with pytest.raises(PtxError, match="before it has waited for the kernel before"):
        PROGRAMS[program]()


@pytest.mark.parametrize("wanted", ["0", "1"])
def test_launches_have_the_attribute_where_it_is_wanted(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the driver of the tests, which checks it; captured, and replayed."""
    monkeypatch.setenv("GGMLB_CUDA_PDL", wanted)
    driver, ctx = host_driver(), Context()
    w, x = ctx.new_tensor(DType.Q8_0, (64, 96)), ctx.new_tensor(DType.F32, (64, 2))
    y = ctx.rms_norm(ctx.mul_mat(w, x), 1e-5)
    graph = Graph().build_forward_expand(y)
    with CudaReg(driver).devices[0].init_backend() as stream, alloc_ctx_tensors(ctx, stream):
        for t in (w, x):
            t.set_array(np.ones(t.shape, np.float32))
        for _ in range(3):
            stream.graph_compute(graph)
            assert np.allclose(y.to_numpy(), 1, atol=1e-2)
    names = {"mul_mat_q8", "quantize_q8", "rms_norm"} if wanted == "1" else set()
    assert {*driver.cards.dependent} == names
    assert driver.cards.counts["replay"] == 2
