"""Rates: bandwidths and launch times of a device, measured or declared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import cache
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np

from ggmlb import Backend, Context, Device, DType, Graph, Tensor, alloc_ctx_tensors

N_WEIGHTS = 32 << 20
"""Smallest size of the measured weights [bytes]: larger than caches."""

N_MOVED = 16 << 20
"""Bytes of a long transfer."""

N_CALL = 4096
"""Bytes of a short transfer, as a token's hidden state."""

N_NODES = 64
"""Small nodes of a graph, to measure the time of one."""

LEAST_ROUNDS = 5
"""Minimum number of runs; the result is their median."""

BUDGET = 0.1
"""Time for further runs [s], as other programs may load the machine."""


class Rates(NamedTuple):
    """Bandwidths of a device, and its times for a transfer and for a graph node.

    Attributes:
        read: Weights read by matrix-vector products [bytes/s].
        move: Bandwidth of transfers to and from the host [bytes/s].
        call: Time of a short transfer, synchronisation included [s].
        launch: Time of a small node in a graph [s].
    """

    read: float
    move: float
    call: float
    launch: float


@cache
def measured_rates(device: Device, dtype: DType, shape: tuple[int, int]) -> Rates:
    """Measure a device's rates (bandwidths, times) with weights of `dtype` and `shape`, once per process.

    It takes tenths of a second and compiles kernels.

    Args:
        device: The device, with room for `N_WEIGHTS`.
        dtype: Type of the weights; f32 is used if the device has no product of it.
        shape: Shape of a weight, NumPy order.

    Raises:
        AllocationError: The device lacks room.
    """
    with ExitStack() as resources:
        stream = resources.enter_context(device.init_backend())
        read, launch = _graph_rates(resources, stream, dtype, shape)
        ctx = Context()
        moved = ctx.new_tensor(DType.I8, (N_MOVED,))
        resources.enter_context(alloc_ctx_tensors(ctx, stream))
        data = np.zeros(N_MOVED, np.uint8)

        def there_and_back(n: int) -> float:
            def run() -> None:
                moved.set(data[:n])
                moved.get(0, n)

            return _seconds(run)

        return Rates(read, 2 * N_MOVED / there_and_back(N_MOVED), there_and_back(N_CALL) / 2, launch)


def rates_of(
    devices: Iterable[Device], weights: tuple[DType, tuple[int, int]], declared: Mapping[str, float]
) -> dict[Device, Rates]:
    """Return devices' rates, measured with `weights` (type, shape); bandwidths in `declared` count instead.

    Args:
        devices: The devices.
        weights: Type and shape of the measured weights.
        declared: Bandwidths of devices by name, in place of measured ones [bytes/s].

    Raises:
        AllocationError: A device lacks room to measure.
    """
    found = {device: measured_rates(device, *weights) for device in dict.fromkeys(devices)}
    return {d: rates._replace(read=declared.get(d.name, rates.read)) for d, rates in found.items()}


def _graph_rates(
    resources: ExitStack, stream: Backend, dtype: DType, shape: tuple[int, int]
) -> tuple[float, float]:
    """Return the bandwidth of products [bytes/s], and the time of a small node [s]."""
    device, weights, ctx = stream.device, Context(), Context()
    x, y = (ctx.new_tensor(DType.F32, (n,)) for n in (shape[1], 64))
    matrix = Context().new_tensor(dtype, shape[::-1])
    if not device.supports_op(Context().mul_mat(matrix, x)):
        matrix = Context().new_tensor(DType.F32, shape[::-1])
    n = max(1, -(-N_WEIGHTS // matrix.nbytes))
    products = [ctx.mul_mat(weights.new_tensor(matrix.dtype, matrix.ne), x) for _ in range(n)]
    first = last = ctx.rms_norm(y, 1e-5)
    for _ in range(N_NODES):
        last = ctx.rms_norm(last, 1e-5)
    fast = next((buft for buft in device.extra_bufts if buft.suits(matrix)), stream.default_buffer_type)
    for buffer in (alloc_ctx_tensors(weights, fast), alloc_ctx_tensors(ctx, stream)):
        resources.enter_context(buffer).clear(0)
    one, many, all_products = (_plan_seconds(stream, nodes) for nodes in ([first], [last], products))
    launch = max(many - one, 0.0) / N_NODES
    return n * matrix.nbytes / max(all_products - n * launch, all_products / 2), launch


def _plan_seconds(stream: Backend, nodes: Iterable[Tensor]) -> float:
    plan = stream.graph_plan_create(Graph().build_forward_expand(*nodes))

    def run() -> None:
        stream.graph_plan_compute(plan)
        stream.synchronize()

    found = _seconds(run)
    stream.graph_plan_free(plan)
    return found


def _seconds(run: Callable[[], object]) -> float:
    """Return the median time of a call [s], after a warm-up."""
    run()
    took: list[float] = []
    while len(took) < LEAST_ROUNDS or sum(took) < BUDGET:
        start = perf_counter()
        run()
        took.append(perf_counter() - start)
    return median(took)
