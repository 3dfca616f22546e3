"""Ops whose function is a Python callable on NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from sys import maxsize
from typing import Any

from ggmlb.backends.common.rules import ANY, operands
from ggmlb.backends.cpu.lowering import PLAIN, RULES, NodeLowering
from ggmlb.backends.cpu.views import View
from ggmlb.core.enums import Op
from ggmlb.core.ops.custom import MAX_ARGS, N_TASKS_MAX
from ggmlb.core.tensor import Tensor


def _emit(lw: NodeLowering, t: Tensor, fun: Callable[..., Any]) -> None:
    """Emit one call of the function per task, in parallel: its cost is unknown."""
    n_tasks, n = t.params["n_tasks"], lw.workers(maxsize, maxsize)
    if n_tasks != N_TASKS_MAX:
        n = min(n, n_tasks)
    values = [_values(lw, x) for x in (t, *t.sources)]
    lw.emit_parallel([[(partial(fun, i, n, t.params["userdata"]), tuple(values))] for i in range(n)])


def _values(lw: NodeLowering, t: Tensor) -> View:
    """The values as the tensor's own type; those of a quantised type as float32."""
    x = lw.view(t)
    return lw.f32(x) if t.dtype.is_quantized else replace(x, item=t.dtype.numpy)


@RULES.rule(Op.MAP_CUSTOM1, operands(ANY, out=PLAIN))
@RULES.rule(Op.MAP_CUSTOM2, operands(ANY, ANY, out=PLAIN))
@RULES.rule(Op.MAP_CUSTOM3, operands(ANY, ANY, ANY, out=PLAIN))
def map_custom(lw: NodeLowering, t: Tensor) -> None:
    """Call the user's `fun(dst, a, .., ith, nth, userdata)` for each of `nth` tasks (MAP_CUSTOM)."""
    fun = t.params["fun"]
    _emit(lw, t, lambda i, n, userdata, dst, *args: fun(dst, *args, i, n, userdata))


@RULES.rule(Op.CUSTOM, operands(*[ANY] * (MAX_ARGS + 1), out=PLAIN))
def custom(lw: NodeLowering, t: Tensor) -> None:
    """Call the user's `fun(dst, args, ith, nth, userdata)` for each of `nth` tasks (CUSTOM)."""
    fun = t.params["fun"]
    _emit(lw, t, lambda i, n, userdata, dst, *args: fun(dst, args, i, n, userdata))
