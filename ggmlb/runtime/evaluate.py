"""evaluate: a graph's values in one call, for notebooks and scripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from ggmlb.core.arguments import alias, checked
from ggmlb.core.context import Context
from ggmlb.core.enums import DeviceType, Op, TensorFlag
from ggmlb.core.errors import ArgumentError, did_you_mean
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, registry
from ggmlb.runtime.scheduler import Scheduler

if TYPE_CHECKING:
    Devices = str | Backend | Sequence[str | Backend] | None

    Array = npt.NDArray[Any]
    Inputs = Mapping[Tensor | str, npt.ArrayLike] | None
alias("Devices", "str | Backend | Sequence[str | Backend] | None")


@overload
def evaluate(
    y: Tensor,
    inputs: Inputs = None,
    devices: Devices = None,
) -> Array: ...
@overload
def evaluate(
    y: Sequence[Tensor],
    inputs: Inputs = None,
    devices: Devices = None,
) -> list[Array]: ...
@overload
def evaluate(
    y: Tensor, inputs: Inputs = None, devices: Devices = None, *, grad_of: Tensor, wrt: Sequence[Tensor | str]
) -> tuple[Array, list[Array]]: ...
@overload
def evaluate(
    y: Sequence[Tensor],
    inputs: Inputs = None,
    devices: Devices = None,
    *,
    grad_of: Tensor,
    wrt: Sequence[Tensor | str],
) -> tuple[list[Array], list[Array]]: ...
@checked
def evaluate(
    y: Tensor | Sequence[Tensor],
    inputs: Mapping[Tensor | str, npt.ArrayLike] | None = None,
    devices: Devices = None,
    *,
    grad_of: Tensor | None = None,
    wrt: Sequence[Tensor | str] = (),
) -> Any:
    """Compute tensors `y`, with `grad_of` also gradients for `wrt`, in one call; return their values.

    For a graph that is computed again and again, use a `Scheduler`: it plans only once.

    Args:
        y: The tensors to compute.
        inputs: Values of the leafs that are not placed yet, by tensor or by name; converted to the
            leaf's type, quantised if it is.
        devices: Names of devices, or backends, highest priority first, as `"CUDA0"` or
            `["OpenCL0", "CPU"]`; by default those of `default_devices`, else the best. The CPU runs the
            remaining ops.
        grad_of: A scalar to differentiate, too.
        wrt: Tensors to differentiate with respect to: leafs or nodes of its graph, or their names.

    Returns:
        For each of `y` a new array of `shape`; float32 for quantised types. With `grad_of`, a pair: that,
        and the gradient of each of `wrt`, float32, of its shape.

    Raises:
        ArgumentError: A leaf has no values, `inputs` names none of the leafs, or `wrt` none of the graph.
        ShapeError: An array does not fit its leaf, or `grad_of` is no scalar.
        GraphError: An op has no gradient.
        RegistryError: There is no such device.
        AllocationError: A device lacks room.

    Example:
        >>> ctx = Context()
        >>> x = ctx.new_tensor("f32", 3, name="x")
        >>> evaluate(ctx.sqr(x), {"x": [1, 2, 3]})
        array([1., 4., 9.], dtype=float32)
        >>> loss = ctx.sum(ctx.sqr(x))
        >>> evaluate(loss, {"x": [1, 2, 3]}, grad_of=loss, wrt=["x"])
        (array([14.], dtype=float32), [array([2., 4., 6.], dtype=float32)])
    """
    results = [y] if isinstance(y, Tensor) else list(y)
    with ExitStack() as stack:
        graph, grads = _graph(results, grad_of, wrt, stack)
        values = _values(graph, inputs or {}, grad_of)
        wanted = [*results, *(g for g in grads if g is not None)]
        stack.enter_context(_flagged(wanted + [t.view_src for t in wanted if t.view_src], TensorFlag.OUTPUT))
        scheduler = stack.enter_context(Scheduler(_backends(devices, stack)))
        scheduler.alloc_graph(graph)
        if grad_of is not None:
            graph.reset()
        for leaf, array in values.items():
            leaf.set_array(array)
        scheduler.graph_compute(graph)
        arrays = [t.to_numpy() for t in results]
        found: Any = arrays[0] if isinstance(y, Tensor) else arrays
        if grad_of is None:
            return found
        sources = [_named(graph, t) for t in wrt]
        return found, [
            np.zeros(t.shape, np.float32) if g is None else g.to_numpy()
            for t, g in zip(sources, grads, strict=True)
        ]


def _graph(
    results: list[Tensor], loss: Tensor | None, wrt: Sequence[Tensor | str], stack: ExitStack
) -> tuple[Graph, list[Tensor | None]]:
    """Return the graph and the requested gradients; tensors are flagged until the stack is closed."""
    graph = Graph().build_forward_expand(*results)
    if loss is None:
        if wrt:
            raise ArgumentError(
                "evaluate: wrt is given without grad_of; give grad_of=, the scalar to differentiate"
            )
        return graph, []
    graph.build_forward_expand(loss)
    sources = [_named(graph, t) for t in wrt]
    if not sources:
        raise ArgumentError("evaluate: grad_of is given without wrt; give wrt=, tensors that it depends on")
    ctx = Context()
    stack.enter_context(_flagged(graph, 0, ~(TensorFlag.LOSS | TensorFlag.PARAM)))
    ctx.set_loss(loss)
    stack.enter_context(_flagged(sources, TensorFlag.PARAM))
    graph = Graph().build_forward_expand(*results, loss).build_backward_expand(ctx)
    return graph, [graph.grad(t) for t in sources]


def _named(graph: Graph, tensor: Tensor | str) -> Tensor:
    """Return a tensor of the graph, given by itself or by name.

    Raises:
        ArgumentError: The graph does not have it.
    """
    if isinstance(tensor, str):
        return graph.node(tensor)
    if tensor not in graph:
        raise ArgumentError(
            f"evaluate: {tensor.describe()} of wrt is not in the graph of grad_of; give its operands"
        )
    return tensor


def _values(
    graph: Graph, inputs: Mapping[Tensor | str, npt.ArrayLike], loss: Tensor | None
) -> dict[Tensor, npt.ArrayLike]:
    """Match inputs to leafs; return the values by leaf."""
    leafs = [*graph.leafs, *(t for t in graph.nodes if t.op is Op.NONE)]  # parameters count as nodes
    if loss is not None:
        leafs = [t for t in leafs if t is not graph.grad_acc(loss)]
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
def _flagged(tensors: Iterable[Tensor], flags: int, kept: int = -1) -> Iterator[None]:
    """Context manager that sets flags of tensors and clears those not in `kept`; restored at exit."""
    before = {t: t.flags for t in tensors}
    for tensor in before:
        tensor.flags = tensor.flags & kept | flags
    try:
        yield
    finally:
        for tensor, flags in before.items():
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
