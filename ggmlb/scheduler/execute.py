"""Computing the splits: copies in, then the plan, in an order that no copy can race.

The order rests on three rules. Work on one backend runs in the order it was queued. A copy runs after
what was queued before it on both sides, and before what is queued later (`tensor_copy_async`). A backend
that shares memory with others waits for what they were given before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ggmlb.enums import Status, TensorFlag
from ggmlb.interface import Backend, tensor_copy, tensor_copy_async
from ggmlb.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.scheduler.split import Split, SplitInput

EvalCallback = Callable[[Tensor, bool], bool]
"""`callback(node, ask)`: with `ask` it says whether it wants the node's data; without, the data is
there, and `False` stops the computation (ggml_backend_sched_eval_callback)."""


def compute_splits(splits: Sequence[Split], callback: EvalCallback | None) -> Status:
    """Queue all splits; what they need to be right is ordered, nothing more is waited for.

    Returns:
        `Status.ABORTED` as soon as an abort callback or the eval callback asks for it.
    """
    for split in splits:
        backend = split.backend
        for other in split.after:
            other.synchronize()
        for item in split.inputs:
            _copy_in(item, backend)
        if callback is None:
            plan = split.plan
            if plan is None:
                plan = split.plan = backend.graph_plan_create(split.graph)
            status = backend.graph_plan_compute(plan)
        else:
            status = _compute_watched(split, callback)
        if status is not Status.SUCCESS:
            return status
    return Status.SUCCESS


def _copy_in(item: SplitInput, backend: Backend) -> None:
    if item.tensor.flags & TensorFlag.INPUT:
        # The user may overwrite an input as soon as the call returns, so it is copied now: after the
        # work that still reads the copy's memory, and after whatever computes the input.
        backend.synchronize()
        item.backend.synchronize()
        tensor_copy(item.src, item.copy)
    else:
        tensor_copy_async(item.backend, backend, item.src, item.copy)


def _compute_watched(split: Split, callback: EvalCallback) -> Status:
    """Compute up to each node that the callback wants, and show it."""
    backend, graph = split.backend, split.graph
    done = 0
    for i, node in enumerate(graph.nodes, 1):
        shown = split.originals.get(node, node)
        if not callback(shown, True):
            continue
        # The node is the part's last: no fused kernel leaves it out, nor what later parts read.
        status = backend.graph_compute(graph.view(done, i))
        done = i
        if status is not Status.SUCCESS:
            return status
        if not callback(shown, False):
            return Status.ABORTED
    return backend.graph_compute(graph.view(done, len(graph))) if done < len(graph) else Status.SUCCESS
