"""What a caller got wrong, told once an op has failed on it: a right call pays only for being passed on."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Final

from ggmlb.core.errors import ArgumentError, Error, kind_of
from ggmlb.core.tensor import Tensor

OPERANDS: Final[dict[str, tuple[type, ...]]] = {"Tensor": (Tensor,), "Tensor | None": (Tensor, type(None))}
"""What may be given for a parameter, by its annotation."""


def explained(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of `Context` whose errors over operands that are no tensors are ours, and say which."""

    @wraps(op)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return op(*args, **kwargs)
        except (AttributeError, TypeError, ValueError) as error:
            told = None if isinstance(error, Error) else _misuse(op, args, kwargs)
            if told is None:
                raise
        raise told

    return call


def _misuse(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """Return an error about the first argument that is missing, unknown or no tensor; `None` if none is."""
    takes = signature(op)
    try:
        given = takes.bind(*args, **kwargs).arguments
    except TypeError as wrong:
        _, *plain = (p.replace(annotation=Parameter.empty) for p in takes.parameters.values())
        return TypeError(f"{op.__name__}({', '.join(map(str, plain))}): {wrong}")
    for name, value in given.items():
        allowed = OPERANDS.get(takes.parameters[name].annotation)
        if allowed and not isinstance(value, allowed):
            kind = kind_of(value)
            return ArgumentError(
                f"{op.__name__}: {name} is {kind}; give a tensor, as from_array or new_tensor makes one"
            )
    return None
