"""What a caller got wrong, told once an op has failed on it: a right call pays nothing for being checked."""

from __future__ import annotations

from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from ggmlb.errors import ArgumentError, Error, kind_of
from ggmlb.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def explained(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return an op whose errors over arguments of the wrong kind are ours, and say which."""

    @wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return method(*args, **named)
        except (AttributeError, TypeError, ValueError) as error:
            why = None if isinstance(error, Error) else _why(method, args, named)
            if why is None:
                raise
            raise ArgumentError(f"{name}: {why}") from None

    return call


def _why(method: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> str | None:
    """Say which argument is missing, too many, or no tensor where it should be; `None` if it is not that."""
    parameters = signature(method).parameters
    try:
        given = signature(method).bind(*args, **named).arguments
    except TypeError as error:
        return f"{error}; its arguments are ({', '.join(map(_told, [*parameters.values()][1:]))})"
    for parameter, value in given.items():
        wanted = str(parameters[parameter].annotation)
        is_left_out = value is None and "None" in wanted
        if wanted.startswith("Tensor") and not isinstance(value, Tensor) and not is_left_out:
            return f"{parameter} is {kind_of(value)}; give a tensor, as from_array or new_tensor makes one"
    return None


def _told(parameter: Parameter) -> str:
    return parameter.name if parameter.default is Parameter.empty else f"{parameter.name}={parameter.default}"
