"""Recipes: the recorded lowering of a node, reused for similar nodes.

The layers of a model differ only in the addresses of their tensors. A recipe records the calls that a
rule emits, with each array's place in an operand, the result or scratch; the next node of the same op,
types, extents, strides and parameters gets the same calls on its own memory. Calls that hide memory (in a
closure's cell, in a list) and work for several threads make no recipe.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.lowering import Step

Key = tuple[Any, ...]

SCRATCH: Final = -1
CONSTANT: Final = -2

HOLDS_NO_MEMORY: Final = (
    bool, int, float, str, slice, type, Enum, np.dtype, np.generic, np.ufunc, ModuleType,
)  # fmt: skip
"""Types of what a function may keep in its cells."""

_ABSENT: Final = (None,)
_array = np.ndarray


class Place(NamedTuple):
    """Where an argument of a call comes from.

    Attributes:
        where: The tensor in whose memory an array lies: 0 is the node, 1 its first operand; or SCRATCH, or
            CONSTANT.
        what: The number of the scratch array, or the constant.
        offset: From the beginning of the tensor or scratch [bytes].
        item: Type of the items.
        shape: NumPy order.
        strides: NumPy order [bytes].
    """

    where: int
    what: Any = None
    offset: int = 0
    item: Any = None
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()


class Recipe(NamedTuple):
    """The calls for a node.

    Attributes:
        calls: Functions, the places of their arguments, and the names of the last of these.
        scratch: Bytes of each array of scratch that the rule took, in order.
    """

    calls: list[tuple[Callable[..., Any], list[Place], tuple[str, ...]]]
    scratch: list[int]


def key_of(node: Tensor) -> Key:
    """Return what two nodes have in common that are lowered alike."""
    own: Any = node.buffer
    offset = node.offset
    key: Key = (node.op._value_, node.dtype._value_, node.ne, node.nb, id(own.buft))
    params = node.params
    if params:
        key += tuple(params.items())
        if 0 in params.values():
            key += (repr(params),)  # 0.0 equals -0.0, and False
    for t in node.src:
        if t is None:
            key += _ABSENT
        else:
            buffer: Any = t.buffer
            is_result = buffer is own and t.offset == offset
            key += (t.dtype._value_, t.ne, t.nb, id(buffer.buft), is_result)
    return key


def write(node: Tensor, steps: Sequence[Step], scratch: Sequence[Array]) -> Recipe | None:
    """Return the recipe of steps that a rule emitted; `None` if they cannot be repeated elsewhere."""
    spans = [_span(t) for t in (node, *node.src)]
    if _overlap([span for i, span in enumerate(spans) if not i or span != spans[0]]):
        return None  # which of them an array is of cannot be told
    taken = [(a.ctypes.data, a.ctypes.data + a.nbytes) for a in scratch]

    def place(arg: Any) -> Place | None:
        if not isinstance(arg, np.ndarray):
            return Place(CONSTANT, arg) if holds_no_memory(arg) else None
        address = arg.__array_interface__["data"][0]
        for i, (start, stop) in enumerate(taken):
            if start <= address < stop:
                return Place(SCRATCH, i, address - start, arg.dtype, arg.shape, arg.strides)
        for i, (start, stop) in enumerate(spans):
            if start <= address < stop:
                return Place(i, None, address - start, arg.dtype, arg.shape, arg.strides)
        return Place(CONSTANT, arg)

    def holds_no_memory(value: Any) -> bool:
        """Whether a value is the same for all nodes that are alike."""
        if value is None or isinstance(value, HOLDS_NO_MEMORY):
            return True
        if isinstance(value, np.ndarray):
            found = place(value)
            return found is not None and found.where == CONSTANT
        if isinstance(value, FunctionType):
            return all(holds_no_memory(cell.cell_contents) for cell in value.__closure__ or ())
        if isinstance(value, partial):
            return all(map(holds_no_memory, (value.func, *value.args, *value.keywords.values())))
        if type(value) is tuple:
            return all(map(holds_no_memory, value))
        if isinstance(value, BuiltinFunctionType | MethodType):
            return holds_no_memory(value.__self__)
        return bool(getattr(value, "keeps_no_memory", False))

    calls: list[tuple[Callable[..., Any], list[Place], tuple[str, ...]]] = []
    for step in steps:
        fn: Callable[..., Any] = step
        args: tuple[Any, ...] = ()
        names: dict[str, Any] = {}
        if isinstance(step, partial):
            fn, args, names = step.func, step.args, step.keywords
        places = [found for found in map(place, (*args, *names.values())) if found is not None]
        if len(places) < len(args) + len(names) or not holds_no_memory(fn):
            return None
        calls.append((fn, places, tuple(names)))
    return Recipe(calls, [a.nbytes for a in scratch])


def follow(recipe: Recipe, node: Tensor, scratch: Sequence[tuple[Array, int]]) -> list[Step]:
    """Return the steps for another node, over its own memory and scratch.

    Args:
        recipe: Of a node with the same key.
        node: What to compute.
        scratch: For each array of the recipe, memory and where in it the array begins.
    """
    tensors: Any = (node, *node.src)
    steps: list[Step] = []
    for fn, places, names in recipe.calls:
        args: list[Any] = []
        for where, what, offset, item, shape, strides in places:
            if where >= 0:
                tensor = tensors[where]
                args.append(_array(shape, item, tensor.buffer.base, tensor.offset + offset, strides))
            elif where == SCRATCH:
                memory, start = scratch[what]
                args.append(_array(shape, item, memory, start + offset, strides))
            else:
                args.append(what)
        if names:
            n = len(args) - len(names)
            steps.append(partial(fn, *args[:n], **dict(zip(names, args[n:], strict=True))))
        else:
            steps.append(partial(fn, *args) if args else fn)
    return steps


def _span(t: Tensor | None) -> tuple[int, int]:
    """The addresses of a tensor's memory."""
    if t is None or t.buffer is None:
        return 0, 0
    start = t.buffer.base.ctypes.data + t.offset
    return start, start + t.nbytes


def _overlap(spans: Sequence[tuple[int, int]]) -> bool:
    ordered = sorted(span for span in spans if span[0] < span[1])
    return any(a[1] > b[0] for a, b in itertools.pairwise(ordered))
