"""Weights split by rows over OpenCL devices, one in a context of its own, and over simulated cards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import (
    Backend,
    BackendReg,
    Buffer,
    BufferType,
    BufferUsage,
    Context,
    DType,
    Graph,
    Scheduler,
    Tensor,
    alloc_ctx_tensors,
)
from ggmlb.backends.cuda import CudaReg
from ggmlb.backends.cuda import backend_reg as cuda_reg
from ggmlb.core.errors import AllocationError, ArgumentError, FreedError, UnsupportedOpError
from ggmlb.parallel.row_split import SplitBuffer
from tests.support.processes import ROOT, python

N = 256
"""Extent of the sums."""

SHARES = [None, (0.0, 1.0), (3.0, 1.0, 0.0), (1.0, 0.3, 0.2), (1.0, 0.0, 2.0)]


def opencl_reg() -> BackendReg:
    """Three devices on one that is there: the last in another context, as on another platform."""
    import pyopencl as cl

    from ggmlb.backends.opencl import OpenClReg
    from ggmlb.backends.opencl.device import OpenClDevice

    reg = OpenClReg()
    found: Any = ggmlb.device_by_name("OpenCL0")
    contexts = [found.context, found.context, cl.Context([found.cl_device])]
    reg._devices = tuple(
        OpenClDevice(reg, f"OpenCL{i}", found.cl_device, context) for i, context in enumerate(contexts)
    )
    return reg


def played_reg(**params: Any) -> CudaReg:
    from tests.support.host_driver import HostDriver

    return CudaReg(HostDriver(**params))


@pytest.fixture(scope="module", params=["opencl", "played", pytest.param("card", marks=pytest.mark.gpu)])
def reg(request: pytest.FixtureRequest) -> BackendReg:
    if request.param == "opencl":
        return opencl_reg()
    if request.param == "played":
        return played_reg(n_devices=3, capacity=1 << 28)
    if len(cuda_reg().devices) < 2:
        pytest.skip("needs two cards")
    return cuda_reg()


@pytest.fixture
def split(reg: BackendReg) -> Callable[..., BufferType]:
    function = reg.get_proc_address("split_buffer_type")
    assert function is not None
    return function


@pytest.fixture
def stream(reg: BackendReg) -> Iterator[Backend]:
    with reg.devices[0].init_backend() as backend:
        yield backend


def weight(buft: BufferType, dtype: DType = DType.F32, n_rows: int = 200) -> tuple[Tensor, Buffer]:
    ctx = Context()
    w = ctx.new_tensor(dtype, (N, n_rows), "w")
    buffer = alloc_ctx_tensors(ctx, buft)
    buffer.usage = BufferUsage.WEIGHTS
    w.set_array(np.random.default_rng(n_rows).standard_normal((n_rows, N), np.float32))
    return w, buffer


def product(w: Tensor, ne: tuple[int, ...], stream: Backend) -> tuple[Tensor, Tensor, Graph]:
    """A product among other nodes."""
    ctx = Context()
    x = ctx.new_tensor(DType.F32, (N, *ne), "x")
    y = ctx.relu(ctx.mul_mat(w, ctx.scale(x, 1.0)))
    alloc_ctx_tensors(ctx, stream)
    return x, y, Graph().build_forward_expand(y)


def set_eager(reg: BackendReg, streams: set[int]) -> None:
    """Let the simulated driver run some devices' streams at once, and the others as late as can be."""
    cards = getattr(getattr(reg.devices[0], "driver", None), "cards", None)
    if cards is not None:
        cards.eager = streams


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.Q4_0, DType.Q4_K])
@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_products_are_those_of_one_device(
    reg: BackendReg, split: Callable[..., BufferType], stream: Backend, dtype: DType, shares: Any
) -> None:
    if shares and len(shares) > len(reg.devices):
        pytest.skip("needs three cards")
    rng = np.random.default_rng(0)
    for n_rows, ne in ((200, (1,)), (7, (8,)), (130, (64,)), (200, (3, 2))):
        w, buffer = weight(split(0, shares), dtype, n_rows)
        whole, _ = weight(stream.default_buffer_type, dtype, n_rows)
        x, y, graph = product(w, ne, stream)
        x_whole, y_whole, graph_whole = product(whole, ne, stream)
        for turn in range(3):
            set_eager(reg, {1, 2} if turn % 2 else set())
            columns = rng.standard_normal((*ne[::-1], N), np.float32)
            x.set(columns)
            x_whole.set(columns)
            y.memset(0xFF)
            stream.graph_compute(graph)
            stream.graph_compute(graph_whole)
            want = y_whole.to_numpy()
            assert np.abs(y.to_numpy() - want).max() <= 0.01 * want.max(), (n_rows, ne, turn)
        buffer.free()


def test_rows_are_dealt_out_by_share(reg: BackendReg, split: Callable[..., BufferType]) -> None:
    def rows(shares: tuple[float, ...] | None, n_rows: int) -> list[tuple[str, int, int]]:
        return [(d.name[-1], a, b) for d, a, b in split(0, shares).rows(n_rows)]  # type: ignore[attr-defined]

    assert rows((3, 1), 400) == [("0", 0, 320), ("1", 320, 400)], "whole tiles, and the rest"
    assert rows((3, 1), 8) == [("0", 0, 6), ("1", 6, 8)], "too few for tiles"
    assert rows((1, 1), 1) == [("1", 0, 1)]
    assert rows((0, 1), 130) == [("1", 0, 130)]
    assert rows((1, 0), 130) == [("0", 0, 130)], "not the rest to one with no share"
    if len(reg.devices) > 2:
        assert [a for a, *_ in rows(None, 640)] == ["0", "1", "2"], "as they have memory"


@pytest.mark.parametrize("dtype", [DType.F32, DType.Q4_K])
def test_bytes_come_back(split: Callable[..., BufferType], dtype: DType) -> None:
    w, buffer = weight(split(0, (3, 1)), dtype)
    with buffer:
        data = np.random.default_rng(1).integers(0, 256, w.nbytes, np.uint8)
        w.set(data)
        assert np.array_equal(w.get(), data)
        border = buffer.pieces[0][0].stop  # type: ignore[attr-defined]
        w.set(data[:999], border - 500)
        w.memset(7, border - 3, 6)
        data[border - 500 : border + 499] = data[:999].copy()
        data[border - 3 : border + 3] = 7
        assert np.array_equal(w.get(), data)
        assert np.array_equal(w.get(border - 10, 20), data[border - 10 : border + 10])
        last = Context().view_2d(w, N, 150, w.nb[1], 50 * w.nb[1])
        assert np.array_equal(last.get(), data[50 * w.nb[1] :])
        buffer.clear(3)
        assert (w.get() == 3).all()


def test_each_of_several_weights_has_pieces_of_its_own(split: Callable[..., BufferType]) -> None:
    ctx = Context()
    weights = [ctx.new_tensor(DType.F32, (N, n_rows)) for n_rows in (200, 130, 7)]
    with alloc_ctx_tensors(ctx, split(0, (3, 1))):
        data = [np.random.default_rng(w.ne[1]).standard_normal(w.shape, np.float32) for w in weights]
        for w, values in zip(weights, data, strict=True):
            w.set_array(values)
        for w, values in zip(weights, data, strict=True):
            assert np.array_equal(w.to_numpy(), values)
        last = Context().view_2d(weights[1], N, 30, weights[1].nb[1], 100 * weights[1].nb[1])
        assert np.array_equal(last.to_numpy(), data[1][100:])


def test_what_is_declined(reg: BackendReg, split: Callable[..., BufferType], stream: Backend) -> None:
    main, other = reg.devices[:2]
    buft = split(0, (1, 1))
    assert split(0, (1, 1)) is buft
    assert buft.name == f"{main.name}_Split"
    assert not buft.is_host
    assert (main.supports_buft(buft), other.supports_buft(buft)) == (True, False)
    assert not ggmlb.device_by_name("CPU").supports_buft(buft)
    w, buffer = weight(buft)
    assert isinstance(buffer, SplitBuffer)
    assert {part.usage for part in buffer.parts} == {BufferUsage.WEIGHTS}
    ctx = Context()
    x, ids = ctx.new_tensor(DType.F32, (N, 3)), ctx.new_tensor(DType.I32, (1, 3))
    wide = ctx.view_2d(ctx.new_tensor(DType.F32, (2 * N, 3)), N, 3, 8 * N, 0)
    assert main.supports_op(ctx.mul_mat(w, x))
    one_expert = ctx.reshape_3d(x, N, 1, 3)
    for node, why in (
        (ctx.get_rows(w, ctx.new_tensor(DType.I32, (3,))), "mul_mat only"),
        (ctx.mul_mat_id(w, one_expert, ids), "mul_mat only"),
        (ctx.mul_mat(x, w), "src1 is in"),
        (ctx.mul_mat(ctx.view_2d(w, N, 100, w.nb[1], 0), x), "is a view"),
        (ctx.mul_mat(w, wide), "not contiguous"),
    ):
        assert why in (main.declines(node) or "")
    graph = Graph().build_forward_expand(ctx.get_rows(w, ctx.new_tensor(DType.I32, (3,))))
    alloc_ctx_tensors(ctx, stream)
    with pytest.raises(UnsupportedOpError, match="mul_mat only"):
        stream.graph_compute(graph)
    x, _, graph = product(w, (1,), stream)
    stream.graph_compute(graph)
    buffer.free()
    assert all(part.is_freed for part in buffer.parts)
    with pytest.raises(FreedError, match="freed"):
        stream.graph_compute(graph)


def test_wrong_splits_are_refused(reg: BackendReg, split: Callable[..., BufferType]) -> None:
    with pytest.raises(ArgumentError, match=f"no {reg.name}99"):
        split(99, None)
    for shares in ((0.0, 0.0), (1.0, -1.0), (1.0,) * 17):
        with pytest.raises(ArgumentError, match="more than 0 for one"):
            split(0, shares)
    experts = Context()
    experts.new_tensor(DType.F32, (8, 8, 2))
    with pytest.raises(ArgumentError, match="holds contiguous matrices"):
        alloc_ctx_tensors(experts, split(0, (1.0, 1.0)))


def test_a_scheduler_brings_products_to_the_main_device(
    reg: BackendReg, split: Callable[..., BufferType]
) -> None:
    w, buffer = weight(split(1, (1, 1)), n_rows=140)
    rng = np.random.default_rng(0)
    x_values = rng.standard_normal((5, N), np.float32)
    with (
        reg.devices[0].init_backend() as first,
        reg.devices[1].init_backend() as main,
        ggmlb.init_by_name("CPU") as cpu,
        Scheduler([first, main, cpu], sanitize=True) as sched,
        buffer,
    ):
        for _ in range(3):
            ctx = Context()
            x = ctx.set_input(ctx.new_tensor(DType.F32, (N, 5), "x"))
            y = ctx.mul_mat(w, x)
            z = ctx.set_output(ctx.sqr(y))
            graph = Graph().build_forward_expand(z)
            sched.alloc_graph(graph)
            x.set_array(x_values)
            for _ in range(2):
                sched.graph_compute(graph)
                want = (x_values @ w.to_numpy().T) ** 2
                assert np.abs(z.to_numpy() - want).max() < 1e-3 * want.max()
            assert sched.get_tensor_backend(y) is main


def test_a_scheduler_copies_the_rows_together_for_another_op(
    reg: BackendReg, split: Callable[..., BufferType]
) -> None:
    w, buffer = weight(split(0, (1, 1)))
    with (
        reg.devices[0].init_backend() as main,
        ggmlb.init_by_name("CPU") as cpu,
        Scheduler([main, cpu]) as sched,
        buffer,
    ):
        ctx = Context()
        i = ctx.set_input(ctx.new_tensor(DType.I32, (3,), "i"))
        rows = ctx.get_rows(w, i)
        y = ctx.set_output(ctx.mul_mat(w, rows))
        graph = Graph().build_forward_expand(y)
        with pytest.warns(RuntimeWarning, match="holds the weights of mul_mat only; it falls back"):
            sched.alloc_graph(graph)
        i.set_array(np.array([199, 0, 64]))
        sched.graph_compute(graph)
        values = w.to_numpy()
        want = values[[199, 0, 64]] @ values.T
        assert np.abs(y.to_numpy() - want).max() < 1e-4 * want.max()
        assert (sched.get_tensor_backend(rows), sched.get_tensor_backend(y)) == (cpu, main)


def test_memory_is_shared_by_products_and_given_back(
    reg: BackendReg, split: Callable[..., BufferType]
) -> None:
    gc.collect()
    free = [device.memory[0] for device in reg.devices]
    w, buffer = weight(split(0, (1, 1)), n_rows=N)
    with reg.devices[0].init_backend() as stream:
        left = []
        for n in (1, 20):
            ctx = Context()
            y = x = ctx.new_tensor(DType.F32, (N, 100), "x")
            for _ in range(n):
                y = ctx.mul_mat(w, y)
            with alloc_ctx_tensors(ctx, stream):
                x.memset(0)
                stream.graph_compute(Graph().build_forward_expand(y))
                left.append(reg.devices[1].memory[0])
        assert left[0] == left[1] < free[1]
        buffer.free()
        del ctx, x, y, w, buffer
    del stream
    gc.collect()
    assert [device.memory[0] for device in reg.devices] == free


def test_memory_that_runs_out_half_way_is_given_back() -> None:
    reg = played_reg(n_devices=2, capacity=1 << 20)
    driver: Any = reg.devices[0].driver
    split = reg.get_proc_address("split_buffer_type")
    assert split is not None
    taken = reg.devices[1].buffer_type.alloc_buffer(1 << 19)
    ctx = Context()
    ctx.new_tensor(DType.F32, (1024, 400))  # 800 kB on each card
    with pytest.raises(AllocationError) as caught:
        alloc_ctx_tensors(ctx, split(0, (1.0, 1.0)))
    assert caught.value.total == 1 << 20
    assert driver.cards.counts["trim"] > 0
    assert reg.devices[0].memory[0] == 1 << 20
    taken.free()
    with alloc_ctx_tensors(ctx, split(0, (1.0, 1.0))):
        pass


MINILM = """
import json
from pathlib import Path
import numpy as np
import ggmlb
from ggmlb.models import BertEmbedder

golden = Path("tests/golden/minilm")
sentences = json.loads((golden / "sentences.json").read_text())
reference = np.load(golden / "embeddings.npz")["embeddings"]
split = ggmlb.reg_by_name("OpenCL").get_proc_address("split_buffer_type")(0, (2, 1))
matrices = {"(qkv|out|up|down).*weight": split}
for weight_type, least in ((None, 0.99999), ("q8_0", 0.999)):
    options = {"weight_type": weight_type, "override_tensors": matrices}
    with BertEmbedder(devices=["OpenCL0", "CPU"], **options) as embedder:
        cosines = (embedder.embed(sentences) * reference).sum(axis=1)
        assert cosines.min() >= least, (weight_type, cosines.min())
        nodes = [n for s in embedder.scheduler.splits if s.backend.name == "OpenCL0" for n in s.nodes]
        there = [n for n in nodes if n.op is ggmlb.Op.MUL_MAT and n.src[0].buffer.buft is split]
        assert len(there) == 24, len(there)
"""


def test_minilm_with_weights_split_over_two_opencl_devices(only_pocl: dict[str, str]) -> None:
    done = python("-c", MINILM, cwd=ROOT, POCL_DEVICES="pthread pthread", **only_pocl)
    assert done.returncode == 0, done.stderr
