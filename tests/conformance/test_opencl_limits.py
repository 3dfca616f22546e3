"""Limits and failures of real GPUs, posed: groups, memory of groups, allocations, arguments, lost devices."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import ggmlb.backends.gpu
from ggmlb import (
    Context,
    DeviceLostError,
    DeviceType,
    DType,
    Graph,
    MultiBuffer,
    Scheduler,
    alloc_ctx_tensors,
    device_by_name,
)
from ggmlb.backends.gpu import MAX_WG, RULES, Target, layout, lower
from ggmlb.backends.gpu.source import kernels
from tests.support.golden import CASES, first_of_their_kind
from tests.support.gpus import OPENCL, device_fixture, held, scaled
from tests.support.processes import ROOT, python

if TYPE_CHECKING:
    from ggmlb.backends.opencl.device import OpenClDevice

cl: Any = pytest.importorskip("pyopencl", reason="needs pyopencl: pip install 'ggmlb[opencl]'")
device = device_fixture(OPENCL)

LIMITS = {"OCLGRIND_MAX_WGSIZE": "64", "OCLGRIND_LOCAL_MEM_SIZE": str(32 << 10)}
"""A GPU with smaller groups than kernels prefer, and as little local memory as OpenCL allows."""


class Posing:
    """PyOpenCL's device, with other facts."""

    def __init__(self, cl_device: Any, **facts: int) -> None:
        self._cl_device = cl_device
        self.__dict__.update(facts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cl_device, name)


@pytest.mark.parametrize("limit", [1024, 256, 200, 64, 32])
def test_no_group_is_larger_than_the_device_can_have(
    device: OpenClDevice, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "cl_device", Posing(device.cl_device, max_work_group_size=limit))
    target = device._target(on_cpu=False)
    assert target.max_wg == min(MAX_WG, 1 << (limit.bit_length() - 1))
    nodes = [node for case in CASES for node in case.build().graph.nodes if RULES.declines(node) is None]
    groups = {launch.wg for node in nodes for launch in lower(node, target)}
    assert max(groups) <= limit
    assert all(wg & (wg - 1) == 0 for wg in groups)


def test_kernels_run_on_a_simulated_gpu_of_the_least_limits() -> None:
    """Programs whose work is shared otherwise there: products of many columns, and long rows."""
    chosen = first_of_their_kind(sorted(CASES, key=lambda case: len(case.id)), larger_groups)
    pattern = "|".join(f"^{re.escape(case.id)}$" for case in chosen)
    done = python("-m", "scripts.test_opencl", "oclgrind", "-j", "1", "-k", pattern, cwd=ROOT, **LIMITS)
    if done.returncode == 2 and "cannot be installed" in done.stdout:
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr


def larger_groups(graph: Graph) -> set[Any]:
    """Return the kernels of groups of more than 128 work-items that would compute a graph."""
    if any(map(RULES.declines, graph.nodes)):
        return set()
    launches = [launch for node in graph.nodes for launch in lower(node, Target(False, 2, 128))]
    return {launch.kernel.name for launch in launches if launch.wg > 128}


def test_a_device_without_local_memory_is_left_out_with_the_reason(
    device: OpenClDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ggmlb.backends.opencl import device as module

    monkeypatch.setattr(module, "LOCAL_MEMORY", device.cl_device.local_mem_size + 1)
    failures: list[str] = []
    assert module._open(device.reg, device.cl_device.platform, 0, failures) == []
    assert any("bytes of local memory; kernels need" in why for why in failures)


def test_arguments_fit_the_least_that_devices_take() -> None:
    for kernel in kernels().values():
        buffers = sum(param.kind == "tensor" for param in kernel.params)
        assert layout(kernel, "opencl").size + 8 * buffers <= 1024, kernel.name


def test_texts_need_neither_halves_nor_doubles() -> None:
    folder = Path(ggmlb.backends.gpu.__file__).parent / "kernels"
    for file in (*folder.glob("*.knl"), *folder.glob("*.h")):
        text = re.sub(r"/\*.*?\*/", "", file.read_text(), flags=re.S)
        assert (
            not re.search(r"\bdouble\b|cl_khr_fp|\bhalf\b(?! \*)", text) or file.name == "prelude_cuda.h"
        ), file
        assert not re.search(r"(?<![\w.])\d+\.\d*(e[-+]?\d+)?(?![\w.])", text), file


def test_weights_are_spread_over_buffers_of_the_largest_size(
    device: OpenClDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = 1 << 20
    with device.init_backend() as stream:
        monkeypatch.setattr(device, "cl_device", Posing(device.cl_device, max_mem_alloc_size=largest))
        ctx = Context()
        weights = [ctx.new_tensor(DType.F32, (256, 256)) for _ in range(10)]
        with alloc_ctx_tensors(ctx, stream) as memory:
            assert isinstance(memory, MultiBuffer)
            assert all(buffer.size <= largest for buffer in memory.parts)
            for i, w in enumerate(weights):
                w.set_array(np.full((256, 256), i, np.float32))
            work = Context()
            total = weights[0]
            for w in weights[1:]:
                total = work.add(total, w)
            with alloc_ctx_tensors(work, stream):
                stream.graph_compute(Graph().build_forward_expand(total))
                assert np.all(total.to_numpy() == sum(range(10)))
        with pytest.raises(ggmlb.AllocationError, match="one buffer holds at most 1,048,576 bytes"):
            stream.alloc_buffer(largest + 1)


@pytest.mark.parametrize(
    ("kind", "platform", "split"),
    [("CPU", "Intel(R) OpenCL", "cpu"), ("CPU", "rusticl", "gpu"), ("GPU", "NVIDIA CUDA", "gpu")],
)
def test_the_work_split_follows_the_compiler(
    device: OpenClDevice, kind: str, platform: str, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    posing: Any = Posing(device.cl_device)
    posing.platform = SimpleNamespace(name=platform)
    monkeypatch.setattr(device, "cl_device", posing)
    monkeypatch.setattr(device, "_kind", DeviceType[kind])
    assert device.work_split == split


def test_streams_are_queues_that_run_in_order(device: OpenClDevice) -> None:
    with device.init_backend() as stream:
        out_of_order = cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE
        assert not stream.queue.properties & out_of_order
        assert not device.transfers.properties & out_of_order


def test_a_wait_does_not_rely_on_finish(device: OpenClDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on rusticl 22.3, whose clFinish does not wait for what clFlush began."""

    class Queue(cl.CommandQueue):
        def finish(self) -> None:
            pass

    with device.init_backend() as stream:
        monkeypatch.setattr(stream, "queue", Queue(device.context, device.cl_device))
        x, y, graph = scaled(stream)
        x.set(np.full(1000, 3, np.float32))
        stream.graph_compute(graph)
        out = np.zeros(1000, np.float32)
        with held(stream):
            stream.graph_compute_async(graph)
            stream.get_tensor_async(y, out)
        stream.synchronize()
        assert np.all(out == y.to_numpy())


@pytest.mark.parametrize("code", [-2, -36])
def test_a_lost_device_is_told_and_others_go_on(
    device: OpenClDevice, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device.init_backend() as stream, device_by_name("CPU").init_backend() as cpu:
        ctx = Context()
        x = ctx.set_input(ctx.new_tensor(DType.F32, (64,)))
        y = ctx.sqr(x)
        graph = Graph().build_forward_expand(y)
        scheduler = Scheduler([stream, cpu])
        scheduler.set_tensor_backend(y, stream)
        scheduler.alloc_graph(graph)
        x.set_array(np.full(64, 3, np.float32))
        scheduler.graph_compute(graph)

        def fails(*_: object, **__: object) -> None:
            raise cl.RuntimeError(
                cl._cl._ErrorRecord(msg="lost", code=code, routine="clEnqueueNDRangeKernel")
            )

        with monkeypatch.context() as lost:
            lost.setattr(cl, "enqueue_nd_range_kernel", fails)
            with pytest.raises(DeviceLostError, match=r"OpenCL0 is lost.*without\('OpenCL0'\)") as raised:
                scheduler.graph_compute(graph)
            assert raised.value.devices == ("OpenCL0",)
            with scheduler.without(*raised.value.devices) as rest:
                rest.alloc_graph(graph)
                x.set_array(np.full(64, 4, np.float32))
                rest.graph_compute(graph)
                assert np.all(y.to_numpy() == 16)
