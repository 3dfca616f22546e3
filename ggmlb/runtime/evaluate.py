"""evaluate: a graph's values in one call, for notebooks and scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, overload

import numpy.typing as npt

from ggmlb.core.arguments import checked
from ggmlb.core.enums import DeviceType, Op, TensorFlag
from ggmlb.core.errors import ArgumentError, did_you_mean
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, registry
from ggmlb.runtime.scheduler import Scheduler

if TYPE_CHECKING:
    Devices = str | Backend | Sequence[str | Backend] | None


@overload
def evaluate(
    y: Tensor, inputs: Mapping[Tensor | str, npt.ArrayLike] | None = None, devices: Devices = None
) -> npt.NDArray[Any]: ...
@overload
def evaluate(
    y: Sequence[Tensor], inputs: Mapping[Tensor | str, npt.ArrayLike] | None = None, devices: Devices = None
) -> list[npt.NDArray[Any]]: ...
@checked
def evaluate(
    y: Tensor | Sequence[Tensor],
    inputs: Mapping[Tensor | str, npt.ArrayLike] | None = None,
    devices: Devices = None,
) -> npt.NDArray[Any] | list[npt.NDArray[Any]]:
    """Compute tensors and return their values: graph, scheduler, allocation and transfers in one call.

    For a graph that is computed again and again, use a `Scheduler`: it plans only once.

    Args:
        y: The tensors to compute.
        inputs: Values of the leafs that are not placed yet, by tensor or by name; converted to the
            leaf's type, quantised if it is.
        devices: Names of devices, or backends, highest priority first, as `"CUDA0"` or
            `["OpenCL0", "CPU"]`; by default those of `default_devices`, else the best. The CPU runs the
            remaining ops.

    Returns:
        For each of `y` a new array of `shape`; float32 for quantised types.

    Raises:
        ArgumentError: A leaf has no values, or `inputs` names none of the leafs.
        ShapeError: An array does not fit its leaf.
        RegistryError: There is no such device.
        AllocationError: A device lacks room.

    Example:
        >>> ctx = Context()
        >>> x = ctx.new_tensor("f32", 3, name="x")
        >>> evaluate(ctx.sqr(x), {"x": [1, 2, 3]})
        array([1., 4., 9.], dtype=float32)
    """
    results = [y] if isinstance(y, Tensor) else list(y)
    graph = Graph().build_forward_expand(*results)
    values = _values(graph, inputs or {})
    with ExitStack() as stack:
        stack.enter_context(_kept(results))
        scheduler = stack.enter_context(Scheduler(_backends(devices, stack)))
        scheduler.alloc_graph(graph)
        for leaf, array in values.items():
            leaf.set_array(array)
        scheduler.graph_compute(graph)
        arrays = [t.to_numpy() for t in results]
    return arrays[0] if isinstance(y, Tensor) else arrays


def _values(graph: Graph, inputs: Mapping[Tensor | str, npt.ArrayLike]) -> dict[Tensor, npt.ArrayLike]:
    """Match inputs to leafs; return the values by leaf."""
    leafs = [*graph.leafs, *(t for t in graph.nodes if t.op is Op.NONE)]  # parameters count as nodes
    by_name = {t.name: t for t in leafs if t.name}
    values: dict[Tensor, npt.ArrayLike] = {}
    for key, array in inputs.items():
        if isinstance(key, Tensor) and key in leafs:
            values[key] = array
        elif isinstance(key, str) and key in by_name:
            values[by_name[key]] = array
        else:
            name = key if isinstance(key, str) else key.describe()
            raise ArgumentError(f"evaluate: no leaf {name!r} in the graph{did_you_mean(name, by_name)}")
    missing = [t.describe() for t in leafs if t.buffer is None and t not in values]
    if missing:
        raise ArgumentError(f"evaluate: no values for {', '.join(missing)}; give them in inputs=")
    return values


@contextmanager
def _kept(results: list[Tensor]) -> Iterator[None]:
    """Flag results and their view sources as outputs while the graph is computed."""
    kept = {t: t.flags for r in results for t in (r, r.view_src) if t is not None}
    for tensor in kept:
        tensor.flags |= TensorFlag.OUTPUT
    try:
        yield
    finally:
        for tensor, flags in kept.items():
            tensor.flags = flags


def _backends(devices: Devices, stack: ExitStack) -> list[Backend]:
    """Open streams on the devices, and last on the CPU; they are closed with the stack."""
    if devices is None:
        devices = registry.default_devices() or None
    if devices is None:
        given: Sequence[str | Backend] = [stack.enter_context(registry.init_best())]
    else:
        given = [devices] if isinstance(devices, (str, Backend)) else devices
        if not given:
            raise ArgumentError("evaluate: no devices given; name one, or leave them out for the best")
    backends = [d if isinstance(d, Backend) else stack.enter_context(registry.init_by_name(d)) for d in given]
    if backends[-1].device.type is not DeviceType.CPU:
        backends.append(stack.enter_context(registry.init_by_name("CPU")))
    return backends
