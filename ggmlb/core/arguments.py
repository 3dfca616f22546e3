"""Type checks of the arguments of public functions, from their annotations.

Combinations of types that passed are cached, so that a later call costs one look-up. The function itself
checks values: ranges, shapes and whether operands fit each other.

Annotations are parsed as text at the first call. Builtin types, containers, and names registered by `named`
or `alias` are checked; `Any`, arrays and enums (parsed by `as_enum`) are not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, wraps
from numbers import Real
from os import PathLike
from types import FunctionType
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ggmlb.core.enums import whole_number
from ggmlb.core.errors import ArgumentError, DTypeError, ShapeError, kind_of

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)

_STARRED: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Kind(NamedTuple):
    """What an annotation allows, as a predicate, and the words for it in error messages.

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
    """Wrap a function so that arguments its annotations do not allow raise an ArgumentError."""
    if not hasattr(function, "__signature__") and function.__annotations__.keys() <= {"return"}:
        return function
    wrapper = _wrapper(_Check(function))
    wrapper.__code__ = wrapper.__code__.replace(co_name=function.__name__)
    return cast("Function", wraps(function)(wrapper))


def checked_methods(cls: Class) -> Class:
    """Class decorator that checks the arguments of public methods and of the constructor."""
    for name, member in list(vars(cls).items()):
        if name == "__init__" or not name.startswith("_"):
            if inspect.isfunction(member) and not hasattr(member, "__isabstractmethod__"):
                setattr(cls, name, checked(member))
            elif isinstance(member, classmethod):
                setattr(cls, name, classmethod(checked(member.__func__)))
    return cls


class _Check:
    """A call of a function with its arguments checked.

    Attributes:
        function: The function.
        known: Types of arguments that passed, where no values of these types can fail.
    """

    def __init__(self, function: Any) -> None:
        self.known: set[tuple[Any, ...]] = set()
        self.function = function
        self._kinds: dict[str, Kind | None] = {}
        self._n_places = 0
        self._is_of_types = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = (*map(type, args), *kwargs, *map(type, kwargs.values()))
        if key not in self.known:
            self._check(args, kwargs)
            if self._is_of_types:
                self.known.add(key)
        return self.function(*args, **kwargs)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._kinds:
            parameters = inspect.signature(self.function).parameters.values()
            self._kinds = {p.name: _kind(str(p.annotation)) for p in parameters if p.kind not in _STARRED}
            self._n_places = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
            self._is_of_types = all(kind is None or kind.is_of_type for kind in self._kinds.values())
        places = zip(self._kinds, args[: self._n_places], strict=False)
        for name, value in (*places, *kwargs.items()):
            kind = self._kinds.get(name)
            if kind is not None and not kind.fits(value):
                names = self.function.__qualname__.split(".")
                call = names[-2] if names[-1] == "__init__" else names[-1]
                raise ArgumentError(f"{call}: {_fault(name, kind, value)}")


def _wrapper(check: _Check) -> FunctionType:
    """Return a function with the parameters of the checked one, because `*args` take three times as long."""
    t, known, f = type, check.known, check.function
    wrappers: tuple[Any, ...] = (
        lambda: f(),
        lambda a: f(a) if (t(a),) in known else check(a),
        lambda a, b: f(a, b) if (t(a), t(b)) in known else check(a, b),
        lambda a, b, c: f(a, b, c) if (t(a), t(b), t(c)) in known else check(a, b, c),
        lambda a, b, c, d: f(a, b, c, d) if (t(a), t(b), t(c), t(d)) in known else check(a, b, c, d),
        lambda a, b, c, d, e: f(a, b, c, d, e)
        if (t(a), t(b), t(c), t(d), t(e)) in known else check(a, b, c, d, e),
        lambda a, b, c, d, e, g: f(a, b, c, d, e, g)
        if (t(a), t(b), t(c), t(d), t(e), t(g)) in known else check(a, b, c, d, e, g),
        lambda a, b, c, d, e, g, h: f(a, b, c, d, e, g, h)
        if (t(a), t(b), t(c), t(d), t(e), t(g), t(h)) in known else check(a, b, c, d, e, g, h),
        lambda a, b, c, d, e, g, h, i: f(a, b, c, d, e, g, h, i)
        if (t(a), t(b), t(c), t(d), t(e), t(g), t(h), t(i)) in known else check(a, b, c, d, e, g, h, i),
        lambda *args, **kwargs: check(*args, **kwargs),
    )  # fmt: skip
    code, signature = f.__code__, getattr(f, "__signature__", None)
    names, defaults = code.co_varnames[: code.co_argcount], f.__defaults__
    has_more = code.co_kwonlyargcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    if signature is not None:
        names, has_more = tuple(signature.parameters), False
        defaults = tuple(p.default for p in signature.parameters.values() if p.default is not p.empty)
    if has_more or len(names) >= len(wrappers) - 1:
        return cast("FunctionType", wrappers[-1])
    wrapper: FunctionType = wrappers[len(names)]
    wrapper.__code__ = wrapper.__code__.replace(co_varnames=names)
    wrapper.__defaults__ = defaults
    return wrapper


def _fault(name: str, kind: Kind, value: Any) -> str:
    if kind.item is not None and isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            if not kind.item.fits(item):
                return f"{name}[{i}] is {kind_of(item)}; give {kind.item.words}"
    return f"{name} is {kind_of(value)}; give {kind.words}"


# -- annotations -----------------------------------------------------------------------------------


def named(words: str) -> Callable[[Class], Class]:
    """Return a class decorator; arguments annotated with it must be instances, or errors ask for `words`."""

    def register(cls: Class) -> Class:
        _NAMED[cls.__name__] = Kind(words, lambda value: isinstance(value, cls))
        _kind.cache_clear()
        return cls

    return register


def alias(name: str, annotation: str) -> None:
    """Register a type alias: arguments annotated `name` are checked as `annotation`."""
    kind = _kind(annotation)
    assert kind is not None, annotation
    _NAMED[name] = kind
    _kind.cache_clear()


def _is_whole(value: Any) -> bool:
    return type(value) is int or (whole_number(value) is not None and not isinstance(value, np.ndarray))


_NAMED: Final = {
    "None": Kind("None", lambda value: value is None),
    "bool": Kind("True or False", lambda value: isinstance(value, (bool, np.bool_, int))),
    "float": Kind("a number", lambda value: isinstance(value, Real) or _is_whole(value)),
    "int": Kind("a whole number", _is_whole),
    "np.random.Generator": Kind(
        "a generator, as np.random.default_rng(seed) makes one",
        lambda value: isinstance(value, np.random.Generator),
    ),
    **dict.fromkeys(
        ("Path", "PathLike[str]", "os.PathLike[str]"),
        Kind("a path", lambda value: isinstance(value, PathLike)),
    ),
    "str": Kind("text", lambda value: isinstance(value, str)),
}
_ARRAYS: Final = {"int": "iu", "float": "iuf"}
_PLURALS: Final = {"int": " of whole numbers", "float": " of numbers"}
_CONTAINERS: Final[dict[str, type]] = {
    "Collection": Collection, "Iterable": Iterable, "Mapping": Mapping, "Sequence": Sequence,
    "dict": Mapping, "list": Sequence, "tuple": Sequence,
}  # fmt: skip


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
    name, _, inside = annotation.partition("[")
    if name == "tuple" and not inside.endswith("...]"):
        return _tuple(_split(inside.removesuffix("]"), ","))
    if name in _CONTAINERS:
        return _container(name, inside.removesuffix("]"))
    return Kind("a function", callable) if name == "Callable" else _NAMED.get(annotation)


def _tuple(inside: Sequence[str]) -> Kind:
    kinds = [_kind(part) for part in inside]

    def fits(value: Any) -> bool:
        return (
            isinstance(value, (tuple, list))
            and len(value) == len(kinds)
            and all(kind is None or kind.fits(item) for kind, item in zip(kinds, value, strict=True))
        )

    words = ", ".join("anything" if kind is None else kind.words for kind in kinds)
    return Kind(f"a tuple of {words}", fits, is_of_type=False)


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
    parts, depth = [""], 0
    for character in annotation:
        depth += (character == "[") - (character == "]")
        if character == at and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def answer(callback: str, value: Any) -> bool:
    """Convert the value that a callback returned to a bool; errors begin with the name `callback`.

    Raises:
        ArgumentError: It is neither true nor false, as an array.
    """
    try:
        return bool(value)
    except Exception:
        raise ArgumentError(f"{callback} returned {kind_of(value)}; return True or False") from None


def real_numbers(values: npt.ArrayLike, call: str) -> npt.NDArray[Any]:
    """Convert a caller's values to an array of real numbers; errors begin with `call`.

    Raises:
        ShapeError: The values form no array.
        ArgumentError: The array is masked.
        DTypeError: The array holds no real numbers.
    """
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ShapeError(f"{call}: {error}") from None
    if isinstance(values, np.ma.MaskedArray):
        raise ArgumentError(f"{call}: the array is masked; fill it first: array.filled(value)")
    kind = array.dtype.kind
    is_extension = kind == "V" and not issubclass(array.dtype.type, np.void)  # bfloat16; records are void
    if kind not in "biuf" and not is_extension:
        raise DTypeError(f"{call}: the array holds {array.dtype}; give real numbers")
    return array


def generator(seed: int, call: str) -> np.random.Generator:
    """Return `numpy.random.default_rng(seed)`; errors begin with `call`.

    Raises:
        ArgumentError: The seed is negative.
    """
    if seed < 0:
        raise ArgumentError(f"{call}: seed is {seed}; give 0 or more")
    return np.random.default_rng(seed)
