"""Checks the arguments of public functions against their annotations.

Types that passed are remembered, so that a call with arguments of known types costs one look-up. The
function itself checks values: ranges, shapes and whether operands fit each other.

`Any`, arrays and enums (which have their own parsers) are not checked. Classes are compared by name, so
that the core imports no other room.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, wraps
from numbers import Real
from os import PathLike
from types import CodeType, FunctionType
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ggmlb.core.enums import whole_number
from ggmlb.core.errors import ArgumentError, DTypeError, ShapeError, kind_of

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)

WORDS: Final = {
    "AdamW": "AdamW(...)",
    "Backend": "a backend, as init_by_name(name) or device.init_backend() opens one",
    "BackendReg": "a BackendReg, as reg_by_name(name) finds one",
    "Buffer": "a buffer, as alloc_ctx_tensors makes one",
    "BufferType": "a buffer type, as device.buffer_type",
    "Context": "a Context, which holds tensors",
    "Dataset": "a Dataset, as Dataset(data, labels=labels)",
    "Device": "a device, as device_by_name(name) finds one",
    "Event": "an event, as device.event_new() makes one",
    "Graph": "a graph, as Graph().build_forward_expand(tensor) makes one",
    "GraphPlan": "a plan, as graph_plan_create(graph) makes one",
    "SGD": "SGD(...)",
    "Scheduler": "a Scheduler, as Scheduler([backend]) makes one",
    "SplitState": "a SplitState",
    "Tensor": "a tensor, as from_array or new_tensor makes one",
    "bool": "True or False",
    "float": "a number",
    "int": "a whole number",
    "os.PathLike[str]": "a path",
    "str": "text",
}
"""Description of the expected value, by annotation."""

ALIASES: Final = {
    "AbortCallback": "Callable",
    "BufferIds": "Sequence[int]",
    "Callback": "Callable",
    "Custom": "Callable",
    "Devices": "str | Backend | Sequence[str | Backend] | None",
    "EvalCallback": "Callable",
    "GetSplitState": "Callable",
    "Ne": "Sequence[int]",
    "Optimizer": "AdamW | SGD",
    "Path": "os.PathLike[str]",
    "Schedule": "Callable",
}

_ARRAYS: Final = {"int": "iu", "float": "iuf"}
_PLURALS: Final = {"int": " of whole numbers", "float": " of numbers"}

_CONTAINERS: Final[dict[str, type]] = {
    "Collection": Collection, "Iterable": Iterable, "Mapping": Mapping, "Sequence": Sequence,
    "dict": Mapping, "list": Sequence, "tuple": Sequence,
}  # fmt: skip


class Kind(NamedTuple):
    """The values that an annotation allows.

    Attributes:
        words: The expected value, for messages.
        fits: Whether a value is allowed.
        item: The kind of each item, where a value has items.
        is_of_type: Whether all values of a type fit if one does.
    """

    words: str
    fits: Callable[[Any], bool]
    item: Kind | None = None
    is_of_type: bool = True


def checked(function: Function) -> Function:
    """Wrap a function so that arguments its annotations do not allow raise an ArgumentError.

    The wrapper has the same named parameters: a wrapper with `*args` would double the cost of a call. It is
    written at the first call, since a program calls few of the functions that it imports.
    """
    if not hasattr(function, "__signature__") and function.__annotations__.keys() <= {"return"}:
        return function
    scope: dict[str, Any] = {"_function": function, "_write": _write, "_type": type}
    wrapper = scope["_wrapper"] = FunctionType(_FIRST_CALL, scope)
    return cast("Function", wraps(function)(wrapper))


def _write(wrapper: FunctionType) -> None:
    """Give a wrapper its parameters and its code."""
    scope = wrapper.__globals__
    parameters = inspect.signature(scope["_function"]).parameters.values()
    kinds = {p.name: k for p in parameters if p.kind in _BY_NAME and (k := _kind(str(p.annotation)))}
    takes, gives = [], []
    is_by_name = False
    for p in parameters:
        star = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        if p.kind is p.KEYWORD_ONLY and not is_by_name:
            takes.append("*")
        is_by_name = is_by_name or star == "*" or p.kind is p.KEYWORD_ONLY
        takes.append(star + p.name)
        gives.append(f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else star + p.name)
    check = scope["_check"] = _Check(scope["_function"], kinds)
    scope["_known"] = check.known
    given = [p for p in parameters if p.default is not p.empty]
    wrapper.__defaults__ = tuple(p.default for p in given if p.kind is not p.KEYWORD_ONLY)
    wrapper.__kwdefaults__ = {p.name: p.default for p in given if p.kind is p.KEYWORD_ONLY}
    checks = (
        f"if ({''.join(f'_type({name}), ' for name in kinds)}) not in _known:",
        f"    _check({', '.join(kinds)})",
    )
    code = _code(
        f"def wrapper({', '.join(takes)}):",
        *(checks if kinds else ()),
        f"return _function({', '.join(gives)})",
    )
    file = f"{__file__} <{wrapper.__qualname__}>"
    wrapper.__code__ = code.replace(co_name=wrapper.__name__, co_filename=file)


@cache
def _code(*lines: str) -> CodeType:
    """The code of a function `wrapper`."""
    scope: dict[str, Any] = {}
    # The name of the file is in this package: warnings and reports look for the first caller outside of it.
    exec(compile("\n    ".join(lines), __file__, "exec"), scope)
    code: CodeType = scope["wrapper"].__code__
    return code


_FIRST_CALL: Final = _code(
    "def wrapper(*args, **kwargs):", "_write(_wrapper)", "return _wrapper(*args, **kwargs)"
)


def checked_methods(cls: Class) -> Class:
    """Class decorator that checks the arguments of public methods and of the constructor."""
    for name, member in list(vars(cls).items()):
        if name == "__init__" or not name.startswith("_"):
            if inspect.isfunction(member) and not hasattr(member, "__isabstractmethod__"):
                setattr(cls, name, checked(member))
            elif isinstance(member, classmethod):
                setattr(cls, name, classmethod(checked(member.__func__)))
    return cls


_BY_NAME: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class _Check:
    """The check of a function's arguments.

    Attributes:
        known: Types that passed, where no values of these types can fail.
    """

    def __init__(self, function: Callable[..., Any], kinds: Mapping[str, Kind]) -> None:
        self.known: set[tuple[type, ...]] = set()
        self._function = function
        self._kinds = kinds

    def __call__(self, *values: Any) -> None:
        for (name, kind), value in zip(self._kinds.items(), values, strict=True):
            if not kind.fits(value):
                raise ArgumentError(f"{self._call()}: {_fault(name, kind, value)}")
        if all(kind.is_of_type for kind in self._kinds.values()):
            self.known.add(tuple(map(type, values)))

    def _call(self) -> str:
        names = self._function.__qualname__.split(".")
        return names[-2] if names[-1] == "__init__" else names[-1]


def _fault(name: str, kind: Kind, value: Any) -> str:
    if kind.item is not None and isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            if not kind.item.fits(item):
                return f"{name}[{i}] is {kind_of(item)}; give {kind.item.words}"
    return f"{name} is {kind_of(value)}; give {kind.words}"


@cache
def _kind(annotation: str) -> Kind | None:
    """Return the kind of an annotation; `None` if it allows anything."""
    parts = [_one(part) for part in _split(annotation, "|")]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or len(known) == 1:
        return known[0] if len(known) == len(parts) else None
    words = " or ".join(sorted({part.words for part in known} - {"None"}, key=len))
    fits = [part.fits for part in known]
    item = next((part.item for part in known if part.item), None)
    is_of_type = all(part.is_of_type for part in known)
    return Kind(words, lambda value: any(fit(value) for fit in fits), item, is_of_type)


def _one(annotation: str) -> Kind | None:
    if annotation in ALIASES:
        return _kind(ALIASES[annotation])
    name, _, inside = annotation.partition("[")
    if name in _CONTAINERS:
        return _container(name, inside.removesuffix("]"))
    if name == "Callable":
        return Kind("a function", callable)
    if annotation == "None":
        return Kind("None", lambda value: value is None)
    if annotation in _SCALARS:
        return Kind(WORDS[annotation], _SCALARS[annotation])
    if annotation in WORDS:
        return Kind(WORDS[annotation], lambda value: annotation in _class_names(type(value)))
    return None


def _container(name: str, inside: str) -> Kind:
    container = _CONTAINERS[name]
    is_mapping = container is Mapping
    item = None if is_mapping or not inside else _kind(_split(inside, ",")[0])
    words = "a mapping" if is_mapping else f"a list{_PLURALS.get(inside, '')}"

    def fits(value: Any) -> bool:
        if isinstance(value, np.ndarray):
            return value.ndim == 1 and value.dtype.kind in _ARRAYS.get(inside, "")
        if isinstance(value, (str, bytes)) or not isinstance(value, container):
            return False
        if item is None or not isinstance(value, Collection):  # an iterator is read once, by the function
            return True
        return all(map(item.fits, {type(v): v for v in value}.values() if item.is_of_type else value))

    return Kind(words, fits, item, is_of_type=False)


def _split(annotation: str, at: str) -> list[str]:
    """Split an annotation at a separator outside brackets."""
    return [part.strip() for part in re.split(rf"\{at}(?![^\[]*\])", annotation)]


def _class_names(kind: type) -> set[str]:
    """Return the names of a class and its bases that ggmlb defines."""
    return {c.__name__ for c in kind.__mro__ if c.__module__.partition(".")[0] == "ggmlb"}


def _is_whole(value: Any) -> bool:
    return type(value) is int or (whole_number(value) is not None and not isinstance(value, np.ndarray))


_SCALARS: Final[dict[str, Callable[[Any], bool]]] = {
    "bool": lambda value: isinstance(value, (bool, np.bool_, int)),
    "float": lambda value: isinstance(value, Real) or _is_whole(value),
    "int": _is_whole,
    "os.PathLike[str]": lambda value: isinstance(value, PathLike),
    "str": lambda value: isinstance(value, str),
}


def answer(callback: str, value: Any) -> bool:
    """Return what a user's callback answered, as `bool` reads it.

    Raises:
        ArgumentError: It is neither true nor false, as an array.
    """
    try:
        return bool(value)
    except Exception:
        raise ArgumentError(f"{callback} returned {kind_of(value)}; return True or False") from None


def real_numbers(values: npt.ArrayLike, call: str) -> npt.NDArray[Any]:
    """Convert a caller's values to an array of real numbers.

    Raises:
        ShapeError: The values form no array.
        ArgumentError: The array has a mask.
        DTypeError: The array holds no real numbers.
    """
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ShapeError(f"{call}: {error}") from None
    if isinstance(values, np.ma.MaskedArray):
        raise ArgumentError(f"{call}: the array has a mask; tensors have none, so fill it first")
    kind = array.dtype.kind
    is_extension = kind == "V" and not issubclass(array.dtype.type, np.void)  # bfloat16; records are void
    if kind not in "biuf" and not is_extension:
        raise DTypeError(f"{call}: the array holds {array.dtype}; give real numbers")
    return array


def generator(seed: int, call: str) -> np.random.Generator:
    """Return random numbers that a caller's seed begins.

    Raises:
        ArgumentError: It is negative.
    """
    if seed < 0:
        raise ArgumentError(f"{call}: seed is {seed}; give 0 or more")
    return np.random.default_rng(seed)
