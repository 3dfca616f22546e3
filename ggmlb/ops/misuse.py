"""What a caller got wrong, told once an op has failed on it: a right call pays only for being passed on."""

from __future__ import annotations

from functools import update_wrapper
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from ggmlb.errors import ArgumentError, Error, kind_of
from ggmlb.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

PASSES_ON = """
def call({declared}):
    try:
        return method({given})
    except (AttributeError, TypeError, ValueError) as error:
        raise told(error, dict({named})) from None
"""


def explained(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return an op whose errors over operands that are no tensors are ours, and say which.

    It is written out with the op's own parameters, which costs a call much less than `*args`.
    """
    parameters = list(signature(method).parameters.values())
    if any(p.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) for p in parameters):
        return method

    def told(error: Exception, given: dict[str, Any]) -> Exception:
        why = None if isinstance(error, Error) else _no_tensor(parameters, given)
        return error if why is None else ArgumentError(f"{name}: {why}")

    declared, given, is_named = [], [], False
    for p in parameters:
        if p.kind is Parameter.KEYWORD_ONLY and not is_named:
            declared.append("*")
            is_named = True
        declared.append(p.name if p.default is Parameter.empty else f"{p.name}=defaults[{p.name!r}]")
        given.append(f"{p.name}={p.name}" if is_named else p.name)
    text = PASSES_ON.format(
        declared=", ".join(declared),
        given=", ".join(given),
        named=", ".join(f"{p.name}={p.name}" for p in parameters[1:]),
    )
    defaults = {p.name: p.default for p in parameters}
    names: dict[str, Any] = {"method": method, "told": told, "defaults": defaults}
    exec(text, names)
    call: Callable[..., Any] = update_wrapper(names["call"], method)
    call.__name__, call.__qualname__ = name, f"Context.{name}"
    return call


def _no_tensor(parameters: list[Parameter], given: dict[str, Any]) -> str | None:
    """Say which argument is no tensor where it should be one; `None` if all are."""
    for p in parameters[1:]:
        value, wanted = given[p.name], str(p.annotation)
        is_left_out = value is None and "None" in wanted
        if wanted.startswith("Tensor") and not isinstance(value, Tensor) and not is_left_out:
            return f"{p.name} is {kind_of(value)}; give a tensor, as from_array or new_tensor makes one"
    return None
