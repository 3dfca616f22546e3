"""The memory report of a scheduler: every byte by device and contents, planned and allocated."""

from __future__ import annotations

import pytest

import ggmlb
from ggmlb.core.errors import GraphError
from ggmlb.testing.fake import FakeReg

F32 = ggmlb.DType.F32


def test_a_report_needs_a_graph() -> None:
    with (
        ggmlb.init_by_name("CPU") as cpu,
        ggmlb.Scheduler([cpu]) as scheduler,
        pytest.raises(GraphError, match="memory_report: there is no graph yet"),
    ):
        scheduler.memory_report()


@pytest.mark.parametrize("parallel", [False, True])
def test_every_byte_is_in_the_report(parallel: bool) -> None:
    fake, other = FakeReg(2).devices
    ctx, weights, cells = ggmlb.Context(), ggmlb.Context(), ggmlb.Context()
    w = weights.new_tensor(F32, (64, 64), "w")
    kept = cells.new_tensor(F32, (64, 8), "kept")
    x = ctx.new_tensor(F32, (64, 8), "x")
    y = ctx.add(ctx.mul_mat(w, x), kept)
    z = ctx.sqr(y)
    graph = ggmlb.Graph().build_forward_expand(z)
    with (
        fake.init_backend() as first,
        other.init_backend() as second,
        ggmlb.init_by_name("CPU") as cpu,
        ggmlb.alloc_ctx_tensors(weights, first) as holds_weights,
        ggmlb.alloc_ctx_tensors(cells, first) as holds_cells,
        ggmlb.Scheduler([first, second, cpu], parallel=parallel) as scheduler,
    ):
        holds_weights.usage = ggmlb.BufferUsage.WEIGHTS
        scheduler.set_tensor_backend(z, second)
        scheduler.split_graph(graph)
        before = scheduler.memory_report()
        assert before.allocated.total(kind="compute") == before.allocated.total(kind="copies") == 0
        scheduler.alloc_graph(graph)
        report = scheduler.memory_report()
        assert report.forecast == before.forecast
        for table in report:
            assert table.total(fake.name, "weights") == holds_weights.size
            assert table.total(fake.name, "placed") == holds_cells.size
            assert table.total(fake.name, "copies") == 0
            assert table.total(other.name, "copies") == scheduler.n_copies * y.nbytes
        allocated = sum(buffer.size for buffer in scheduler.buffers)
        results = report.allocated.total(kind="compute") + report.allocated.total(kind="copies")
        assert results == allocated >= report.forecast.total(kind="compute")
        assert [row["device"] for row in report.as_list()] == [a.device for a, _ in report.rows()]
        assert f"{holds_weights.size:,}" in str(report)
