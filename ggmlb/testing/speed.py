"""Summary of a device's speed: bandwidth of memory and transfers, products, latency of a small op.

For choosing a device and checking a driver's setup; mode `perf` measures each op.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Final

import numpy as np

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Device
from ggmlb.runtime.alloc import alloc_ctx_tensors
from ggmlb.testing.baseline import Timing
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
        samples: The values of which it is the median.
    """

    name: str
    unit: str
    value: float | None
    samples: tuple[float, ...] = ()


def names() -> list[str]:
    """Return the names of the measurements, in their order."""
    return [*_MEASURES]


def figure(device: Device, name: str) -> Figure:
    """Measure one figure of a device, by its name."""
    unit, measure = _MEASURES[name]
    took, work = measure(device)
    if took is None:
        return Figure(name, unit, None)
    samples = tuple(1e6 * t / work if unit == "us" else work / t / 1e9 for t in took.samples)
    return Figure(name, unit, median(samples), samples)


Result = tuple[Timing | None, float]
"""A time [s], `None` if the device does not support it; and the bytes or operations, or the number of ops."""


def _copy(device: Device) -> Result:
    ctx = Context()
    n = (1 << 22) * scale_of(device) ** 2
    node = ctx.cpy(ctx.new_tensor(F32, (n,)), ctx.new_tensor(F32, (n,)))
    return time_or_none(device, ctx, node), 2 * node.nbytes


def _prompt(device: Device, dtype: DType) -> Result:
    """Measure a product of 512 columns, in operations."""
    k = m = 1024 * scale_of(device)
    ctx = Context()
    node = ctx.mul_mat(ctx.new_tensor(dtype, (k, m)), ctx.new_tensor(F32, (k, 512)))
    return time_or_none(device, ctx, node), 2 * k * m * 512


def _token(device: Device, dtype: DType) -> Result:
    """Measure a product of one column, in bytes of weights."""
    k, m = 2048 * scale_of(device), 4096 * scale_of(device)
    ctx = Context()
    weights = ctx.new_tensor(dtype, (k, m))
    return time_or_none(device, ctx, ctx.mul_mat(weights, ctx.new_tensor(F32, (k, 1)))), weights.nbytes


def _transfer(device: Device, *, up: bool, pinned: bool = False) -> Result:
    """Measure a transfer between the host's memory and the device's."""
    nbytes = (16 << 20) * scale_of(device)
    host = device.host_buffer_type if pinned else None
    if pinned and host is None:
        return None, 0
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

        took = _timed(run)
        for buffer in buffers:
            buffer.free()
    return took, nbytes


def _chain(device: Device, n: int) -> tuple[Context, Tensor] | None:
    ctx = Context()
    y = ctx.new_tensor(F32, (64,))
    for _ in range(n):
        y = ctx.scale(y, 1.5)
    return (ctx, y) if device.supports_op(y) else None


def _small_op(device: Device) -> Result:
    """Measure one more op in a graph of many."""
    many, one = _chain(device, N_SMALL), _chain(device, 1)
    return (None if many is None or one is None else time_or_none(device, *many)), N_SMALL


def _round_trip(device: Device) -> Result:
    """Measure from queueing a graph of one op until it is done."""
    made = _chain(device, 1)
    if made is None:
        return None, 1
    ctx, y = made
    with device.init_backend() as stream, alloc_ctx_tensors(ctx, stream) as buffer:
        buffer.clear(0)
        graph = Graph().build_forward_expand(y)
        return _timed(lambda: stream.graph_compute(graph), 50), 1


def _small_write(device: Device) -> Result:
    ctx = Context()
    tensor = ctx.new_tensor(F32, (1,))
    with device.init_backend() as stream, alloc_ctx_tensors(ctx, stream):
        data = np.ones(1, np.float32)
        return _timed(lambda: tensor.set(data), 50), 1


def _timed(run: Callable[[], object], rounds: int = ROUNDS) -> Timing:
    """Return the time of a call, after one warm-up call."""
    run()
    times = []
    for _ in range(rounds):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return Timing(times)


_MEASURES: Final[dict[str, tuple[str, Callable[[Device], Result]]]] = {
    "copy in its memory": ("GB/s", _copy),
    "host to device": ("GB/s", partial(_transfer, up=True)),
    "device to host": ("GB/s", partial(_transfer, up=False)),
    "host to device, pinned": ("GB/s", partial(_transfer, up=True, pinned=True)),
    "device to host, pinned": ("GB/s", partial(_transfer, up=False, pinned=True)),
    **{
        f"product, {t.name.lower()} weights, 512 columns": ("GFLOP/s", partial(_prompt, dtype=t))
        for t in WEIGHTS
    },
    **{f"product, {t.name.lower()} weights, 1 column": ("GB/s", partial(_token, dtype=t)) for t in WEIGHTS},
    "a small op in a graph": ("us", _small_op),
    "a graph of one op, with waiting": ("us", _round_trip),
    "a write of 4 bytes": ("us", _small_write),
}
"""Unit and function of each measurement, by its name."""
