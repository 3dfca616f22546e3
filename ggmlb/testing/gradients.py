"""Mode `grad`: gradients computed by a device, compared with finite differences on the CPU.

The loss of a case is a weighted sum of its first output's elements. A few elements of each operand are
changed by several steps, and the loss is summed in float64. Where short and long steps disagree, the
function has a kink, and the element is skipped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.errors import Error, GraphError, one_line
from ggmlb.core.graph import Graph
from ggmlb.core.lifetime import Freeable
from ggmlb.core.ops import SPECS
from ggmlb.core.ops.spec import zero_gradient
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Device
from ggmlb.interface.registry import device_by_name
from ggmlb.runtime.scheduler import Scheduler
from ggmlb.testing.compute import refusal
from ggmlb.testing.devices import weight_memories
from ggmlb.testing.ops import RECORDS
from ggmlb.testing.placing import alloc_weight, weight_of
from ggmlb.testing.results import CaseResult, Finding, Outcome

if TYPE_CHECKING:
    from ggmlb.testing.cases import KitCase
    from ggmlb.testing.programs import Built

N_ELEMENTS: Final = 6
"""Number of elements of an operand that are varied."""

STEP: Final = 2.0**-6
"""Largest change of an element; half and a quarter of it are used, too."""

EPS: Final = 6e-7
"""Relative rounding error of a float32 result; sums of products have more than half a unit."""

WEIGHTS: Final = "weights of the loss"

MOST_NMSE: Final = 1e-4
"""Allowed error of a gradient, in addition to that of the finite differences."""

FAMILIES: Final = frozenset(name for op, r in RECORDS.items() if SPECS[op].backward for name in r.families)
"""Families of ops that have a backward rule."""


class GradientBench(Freeable):
    """Tests gradients of a device against finite differences on the CPU, which also runs declined ops.

    Args:
        device: The device under test.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._stack = ExitStack()
        cpu = self._stack.enter_context(device_by_name("CPU").init_backend())
        streams = [cpu]
        if device.name != cpu.name:
            streams.insert(0, self._stack.enter_context(device.init_backend()))
        self._scheduler = self._stack.enter_context(Scheduler(streams))
        self._reference = self._stack.enter_context(Scheduler([cpu]))
        self._weights = {buft.name: buft for buft in weight_memories(device)}

    def free(self) -> None:
        """Free the bench's streams and memory.

        Raises:
            FreedError: They were freed before.
        """
        self.is_freed = True
        self._stack.close()

    def check(self, case: KitCase) -> CaseResult:
        """Compare the gradients of a case's operands with finite differences."""
        start, facts = perf_counter(), dict[str, Any]()
        try:
            with warnings.catch_warnings():
                # Memory for weights may serve products only, and the CPU then works on a copy.
                warnings.simplefilter("ignore", RuntimeWarning)
                found = self._check(case, facts)
        except Exception as error:  # a backend may raise anything; the next case is tested all the same
            found = Finding.failed(error)
        return found.result("grad", self.device.name, case.family, case.id, perf_counter() - start, facts)

    def _check(self, case: KitCase, facts: dict[str, Any]) -> Finding:
        skipped = Outcome.SKIPPED
        problem = problem_of(case)
        if why := refusal(self.device, problem.built):
            return Finding(skipped, f"not supported: {why}")
        if not problem.operands:
            return Finding(skipped, "no float32 operand of which a float32 result has a gradient")
        try:
            graph = problem.graph()
        except GraphError as error:
            return Finding(skipped, f"no gradient: {one_line(error)}")
        with ExitStack() as stack:
            if case.memory:
                try:
                    stack.enter_context(
                        alloc_weight(problem.built.graph.nodes[-1], self._weights[case.memory])
                    )
                except Error as error:
                    return Finding(skipped, f"not supported: {one_line(error)}")
                if why := refusal(self.device, problem.built):
                    return Finding(skipped, f"not supported: {why}")
            found = gradients(problem, graph, self._scheduler)
        left = {p.op for p in self._scheduler.placement if p.device != self.device.name}
        if left:
            facts["left to the CPU"] = ", ".join(sorted(left))
        return self._compared(case, [operand.name for operand in problem.operands], problem.values, found)

    def _compared(
        self,
        case: KitCase,
        names: Sequence[str],
        weights: npt.NDArray[Any],
        grads: Sequence[npt.NDArray[Any]],
    ) -> Finding:
        built = case.program.case(case.id).build()
        self._reference.alloc_graph(built.graph)
        out = built.tensors[case.program.outputs[0]]
        worst, n_smooth, wrong, details = 0.0, 0, list[str](), list[str]()

        inputs = [(t, s.data) for s in built.case.leafs if (t := built.tensors[s.name]).buffer is not None]

        def loss(leaf: Tensor, array: npt.NDArray[np.float32]) -> tuple[float, float]:
            for tensor, values in inputs:  # all, because an op in place may have changed them
                tensor.set(values)
            leaf.set_array(array)
            self._reference.graph_compute(built.graph)
            products = out.to_numpy().astype(np.float64) * weights
            return float(products.sum()), float(np.sqrt((products**2).sum()))

        for name, grad in zip(names, grads, strict=True):
            if not np.isfinite(grad).all():
                return Finding(Outcome.FAILED, f"the gradient of {name} is not finite")
            leaf, data = built.tensors[name], next(s.data for s in built.case.leafs if s.name == name)
            array = data.view(np.float32).reshape(leaf.shape)
            chosen = np.random.default_rng(3).permutation(array.size)[:N_ELEMENTS]
            slopes = [_slope(loss, leaf, array, np.unravel_index(place, array.shape)) for place in chosen]
            is_smooth = np.array([s.is_smooth for s in slopes], np.bool_)
            smooth = [
                (grad.flat[at], s.value, s.doubt) for at, s in zip(chosen, slopes, strict=True) if s.is_smooth
            ]
            n_smooth += len(smooth)
            off = [max(abs(float(found) - value) - 2 * doubt, 0.0) for found, value, doubt in smooth]
            error, scale = (sum(x * x for x in xs) for xs in (off, [value for _, value, _ in smooth]))
            nmse = error / scale if scale else float(error > 0)
            worst = max(worst, nmse)
            if nmse > MOST_NMSE:
                wrong.append(f"the gradient of {name} has nmse {nmse:.3g}, above {MOST_NMSE:g}")
                at, error = max(zip(chosen[is_smooth], off, strict=True), key=lambda of: of[1])
                index = [int(i) for i in reversed(np.unravel_index(at, array.shape))]
                slope = slopes[list(chosen).index(at)].value
                details.append(
                    f"{name}: largest error of {len(off)} tried elements: {error:.3g} at {index}: "
                    f"expected {slope:.6g} by differences, got {grad.flat[at]:.6g}"
                )
        if not n_smooth:
            return Finding(Outcome.SKIPPED, "no element moves the result smoothly in float32")
        return Finding(
            Outcome.FAILED if wrong else Outcome.PASSED, "; ".join(wrong), worst, "\n".join(details)
        )


@dataclass(frozen=True)
class Problem:
    """A case with a loss (weighted sum of its result), whose gradients are checked.

    Attributes:
        built: The case.
        out: The result that is summed.
        operands: The leafs to differentiate with respect to.
        values: The weights of the sum.
    """

    built: Built
    out: Tensor
    operands: Sequence[Tensor]
    values: npt.NDArray[np.float32]

    def graph(self) -> Graph:
        """Return the graph that computes the loss and its gradients for the operands.

        Raises:
            GraphError: An op has none.
        """
        ctx = self.built.ctx
        weights = ctx.set_input(ctx.new_tensor(DType.F32, self.out.ne, WEIGHTS))
        loss = ctx.set_loss(ctx.sum(ctx.mul(self.out, weights)))
        for operand in self.operands:
            ctx.set_param(operand)
        return Graph().build_forward_expand(loss).build_backward_expand(ctx)


def problem_of(case: KitCase) -> Problem:
    """Return a case with a loss; its `operands` are empty without float32 operands or a float32 result."""
    built = case.program.case(case.id).build()
    out = built.tensors[case.program.outputs[0]]
    operands = differentiable(out) if out.dtype is DType.F32 and not out.is_empty else []
    if case.memory:
        operands = [o for o in operands if o is not weight_of(built.graph.nodes[-1])]
    values = np.random.default_rng(7).uniform(0.5, 1.5, out.shape).astype(np.float32)
    return Problem(built, out, operands, values)


def gradients(problem: Problem, graph: Graph, scheduler: Scheduler) -> list[npt.NDArray[np.float32]]:
    """Return the gradient of each operand, as a scheduler computes them."""
    built = problem.built
    grads = [graph.grad(operand) for operand in problem.operands]
    for grad in grads:
        if grad is not None:
            for tensor in (grad, grad.view_src or grad):
                built.ctx.set_output(tensor)
    scheduler.alloc_graph(graph)
    graph.reset()
    graph.node(WEIGHTS).set_array(problem.values)
    for leaf in built.case.leafs:
        if built.tensors[leaf.name].buffer is not None:  # else only its shape is read
            built.tensors[leaf.name].set(leaf.data)
    scheduler.graph_compute(graph)
    return [
        np.zeros(o.shape, np.float32) if g is None else g.to_numpy()
        for o, g in zip(problem.operands, grads, strict=True)
    ]


class _Slope(NamedTuple):
    """The derivative at an element, by finite differences.

    Attributes:
        value: By the shorter steps.
        doubt: Difference from that by longer steps, plus the rounding error of results in float32.
        is_smooth: Whether the two agree: there is no kink, and no rounding to a short type.
    """

    value: float
    doubt: float
    is_smooth: bool


Loss = Callable[[Tensor, "npt.NDArray[np.float32]"], tuple[float, float]]
"""The loss with other values of a leaf, and its size without cancellation."""


def _slope(loss: Loss, leaf: Tensor, array: npt.NDArray[np.float32], place: tuple[Any, ...]) -> _Slope:
    losses, at, size = {}, {}, 0.0
    for k in (-4, -2, -1, 1, 2, 4):
        moved = array.copy()
        moved[place] += np.float32(k * STEP / 4)
        at[k] = float(moved[place])
        losses[k], of = loss(leaf, moved)
        size = max(size, of)

    def secant(k: int) -> float:
        return (losses[k] - losses[-k]) / (at[k] - at[-k])

    short, long = ((4 * secant(k) - secant(2 * k)) / 3 for k in (1, 2))
    rounding = EPS * size / STEP
    doubt = abs(short - long)
    return _Slope(short, doubt + rounding, doubt <= 0.02 * abs(short) + 4 * rounding)


def differentiable(out: Tensor) -> list[Tensor]:
    """Return the f32 leafs for which a result has a gradient."""
    found: list[Tensor] = []
    seen, left = {out}, [out]
    while left:
        tensor = left.pop()
        if tensor.op is Op.NONE and tensor.dtype is DType.F32 and not tensor.is_empty:
            found.append(tensor)
        rules = SPECS[tensor.op].backward
        for i, source in enumerate(tensor.src):
            if source is not None and source not in seen and rules.get(i, zero_gradient) is not zero_gradient:
                seen.add(source)
                left.append(source)
    return found
