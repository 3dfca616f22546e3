"""Ops whose function is a Python callable on NumPy arrays."""

from __future__ import annotations

from functools import partial
from sys import maxsize
from typing import TYPE_CHECKING

from ggmlb.backends.common.rules import ANY, operands
from ggmlb.backends.cpu.rules import PLAIN, RULES
from ggmlb.core.enums import Op
from ggmlb.core.ops.custom import MAX_ARGS, N_TASKS_MAX
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.lowering import CpuLowering


def _values(lw: CpuLowering, t: Tensor) -> Array:
    """The values as the tensor's own type; those of a quantised type as float32."""
    return lw.f32(t) if t.dtype.is_quantized else lw.array(t).view(t.dtype.numpy)


def _call(lw: CpuLowering, t: Tensor, *operands: object) -> None:
    """Emit the calls of the function, one per task; a task's work is not known, and taken to be much."""
    fun, n_tasks, userdata = (t.params[name] for name in ("fun", "n_tasks", "userdata"))
    n = lw.workers(maxsize, maxsize)
    if n_tasks != N_TASKS_MAX:
        n = min(n, n_tasks)
    dst = _values(lw, t)
    calls = [partial(fun, dst, *operands, i, n, userdata) for i in range(n)]
    if n == 1:
        lw.emit(calls[0])
    else:
        lw.emit(lw.run_parallel, [[call] for call in calls])


@RULES.rule(Op.MAP_CUSTOM1, operands(ANY, out=PLAIN))
@RULES.rule(Op.MAP_CUSTOM2, operands(ANY, ANY, out=PLAIN))
@RULES.rule(Op.MAP_CUSTOM3, operands(ANY, ANY, ANY, out=PLAIN))
def map_custom(lw: CpuLowering, t: Tensor) -> None:
    """`fun(dst, a, .., ith, nth, userdata)`."""
    _call(lw, t, *(_values(lw, s) for s in t.sources))


@RULES.rule(Op.CUSTOM, operands(*[ANY] * (MAX_ARGS + 1), out=PLAIN))
def custom(lw: CpuLowering, t: Tensor) -> None:
    """`fun(dst, args, ith, nth, userdata)`."""
    _call(lw, t, tuple(_values(lw, s) for s in t.sources))
