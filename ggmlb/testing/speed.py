"""Summary of a device's speed: bandwidth of memory and transfers, products, latency of a small op.

For choosing a device and checking a driver's setup; mode `perf` measures each op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Final

import numpy as np

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import BufferType, Device
from ggmlb.runtime.alloc import alloc_ctx_tensors
from ggmlb.testing.perf import scale_of, time_or_none

F32 = DType.F32
WEIGHTS: Final = (DType.F32, DType.F16, DType.Q8_0, DType.Q4_0)
"""Types of weights whose products are measured."""
N_SMALL: Final = 200
"""Number of small ops in a graph, to measure the cost of one."""
ROUNDS: Final = 5


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement of a device's speed: a name, a unit and a value.

    Attributes:
        name: Name of the measurement.
        unit: `GB/s`, `GFLOP/s` or `us`.
        value: `None` if the device does not support it.
    """

    name: str
    unit: str
    value: float | None


def figures(device: Device) -> Iterator[Figure]:
    """Measure a device's bandwidths, products and latencies; yield each as soon as it is known."""
    scale = scale_of(device)
    yield Figure("copy in its memory", "GB/s", _copy(device, (1 << 22) * scale * scale))
    nbytes = (16 << 20) * scale
    yield Figure("host to device", "GB/s", _transfer(device, nbytes, None, up=True))
    yield Figure("device to host", "GB/s", _transfer(device, nbytes, None, up=False))
    host = device.host_buffer_type
    yield Figure("host to device, pinned", "GB/s", _transfer(device, nbytes, host, up=True) if host else None)
    yield Figure(
        "device to host, pinned", "GB/s", _transfer(device, nbytes, host, up=False) if host else None
    )
    for dtype in WEIGHTS:
        name = dtype.name.lower()
        took, work, _ = _product(device, dtype, 1024 * scale, 1024 * scale, 512)
        yield Figure(f"product, {name} weights, 512 columns", "GFLOP/s", took and work / took / 1e9)
    for dtype in WEIGHTS:
        name = dtype.name.lower()
        took, _, read = _product(device, dtype, 2048 * scale, 4096 * scale, 1)
        yield Figure(f"product, {name} weights, 1 column", "GB/s", took and read / took / 1e9)
    yield Figure("a small op in a graph", "us", _small_op(device))
    yield Figure("a graph of one op, with waiting", "us", _round_trip(device))
    yield Figure("a write of 4 bytes", "us", _small_write(device))


def _copy(device: Device, n: int) -> float | None:
    ctx = Context()
    node = ctx.cpy(ctx.new_tensor(F32, (n,)), ctx.new_tensor(F32, (n,)))
    took = time_or_none(device, ctx, node)
    return took and 2 * node.nbytes / took / 1e9


def _product(device: Device, dtype: DType, k: int, m: int, n: int) -> tuple[float | None, int, int]:
    """Return a product's time [s], arithmetic operations, and bytes of weights."""
    ctx = Context()
    weights = ctx.new_tensor(dtype, (k, m))
    node = ctx.mul_mat(weights, ctx.new_tensor(F32, (k, n)))
    return time_or_none(device, ctx, node), 2 * k * m * n, weights.nbytes


def _transfer(device: Device, nbytes: int, host: BufferType | None, *, up: bool) -> float:
    """Return the bandwidth between the host's memory and the device's [GB/s]."""
    ctx, host_ctx = Context(), Context()
    tensor = ctx.new_tensor(DType.I8, (nbytes,))
    data = np.ones(nbytes, np.uint8)
    buffers = []
    with device.init_backend() as stream:
        buffers.append(alloc_ctx_tensors(ctx, stream))
        if host is not None:
            place = host_ctx.new_tensor(DType.I8, (nbytes,))
            buffers.append(alloc_ctx_tensors(host_ctx, host))
            data = buffers[1].base[place.offset : place.offset + nbytes]
            data[:] = 1

        def run() -> None:
            if up:
                stream.set_tensor_async(tensor, data)
            else:
                stream.get_tensor_async(tensor, data)
            stream.synchronize()

        took = _median(run)
        for buffer in buffers:
            buffer.free()
    return nbytes / took / 1e9


def _chain(device: Device, n: int) -> tuple[Context, Tensor] | None:
    ctx = Context()
    y = ctx.new_tensor(F32, (64,))
    for _ in range(n):
        y = ctx.scale(y, 1.5)
    return (ctx, y) if device.supports_op(y) else None


def _small_op(device: Device) -> float | None:
    """Return the time of one more op in a graph of many [us]."""
    many, one = _chain(device, N_SMALL), _chain(device, 1)
    if many is None or one is None:
        return None
    took = time_or_none(device, *many)
    return took and 1e6 * took / N_SMALL


def _round_trip(device: Device) -> float | None:
    """Return the time from queueing a graph of one op until it is done [us]."""
    made = _chain(device, 1)
    if made is None:
        return None
    ctx, y = made
    with device.init_backend() as stream, alloc_ctx_tensors(ctx, stream) as buffer:
        buffer.clear(0)
        graph = Graph().build_forward_expand(y)
        return 1e6 * _median(lambda: stream.graph_compute(graph), 50)


def _small_write(device: Device) -> float:
    ctx = Context()
    tensor = ctx.new_tensor(F32, (1,))
    with device.init_backend() as stream, alloc_ctx_tensors(ctx, stream):
        data = np.ones(1, np.float32)
        return 1e6 * _median(lambda: tensor.set(data), 50)


def _median(run: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the median time of a call, after one warm-up call [s]."""
    run()
    times = []
    for _ in range(rounds):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return median(times)
