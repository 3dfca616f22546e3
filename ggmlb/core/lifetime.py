"""Base classes for resources that cannot be copied, or that must be freed."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache, cached_property, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, SupportsIndex

from ggmlb.core import arguments
from ggmlb.core.errors import ArgumentError, BackendBroken, FreedError, kind_of

if TYPE_CHECKING:
    from typing_extensions import Self


class Unique:
    """Base class of objects that cannot be copied or pickled: devices, buffers, streams."""

    def __init_subclass__(cls) -> None:
        """Check the arguments of public methods, for classes of ggmlb only."""
        super().__init_subclass__()
        if cls.__module__.startswith("ggmlb."):
            arguments.checked_methods(cls)

    def __new__(cls, *args: object, **options: object) -> Self:
        """Raise BackendBroken if the class of a backend lacks an abstract method."""
        if missing := getattr(cls, "__abstractmethods__", None):
            file = getattr(sys.modules.get(cls.__module__), "__file__", None) or cls.__module__
            raise BackendBroken(
                f"{cls.__qualname__} lacks {', '.join(sorted(missing))}: a backend must define it "
                f"({file}; see docs/backend.md, or what `ggmlb new-backend` writes)"
            )
        return super().__new__(cls)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ArgumentError(
            f"{kind_of(self)} and its tensors belong to this process and its devices, and cannot be "
            "copied or pickled; copy the values by to_numpy() and set_array()"
        )


class Closeable(ABC):
    """A context manager that calls `close` at its end."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources; no effect if already closed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Freeable(Unique, ABC):
    """A resource that `free` releases. A context manager, which frees it on exit.

    `free` changes the class of the object to one whose public methods and properties raise `FreedError`, so
    that calls on a live object need no check. Attributes set by the constructor stay readable.

    Attributes:
        is_freed: Whether it was freed; every later use is an error.
    """

    is_freed = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "free" in vars(cls):
            setattr(cls, "free", _ending(cls.free))  # noqa: B010 - not the method that a subclass inherits

    @abstractmethod
    def free(self) -> None:
        """Release the resource.

        Raises:
            FreedError: It was freed before.
        """

    def check_alive(self, call: str) -> None:
        """Raise if the resource was freed; the error begins with `call`.

        Raises:
            FreedError: It was freed.
        """
        if self.is_freed:
            raise FreedError(f"{call}: {self._title} was freed")

    @property
    def _title(self) -> str:
        """The resource's name in errors."""
        return f"this {type(self).__name__}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_freed:
            self.free()


def _ending(free: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap a method `free` so that it changes the class of what it freed."""

    @wraps(free)
    def wrapper(self: Any) -> None:
        try:
            free(self)
        finally:
            if self.is_freed:
                self.__class__ = _freed(self.__class__)

    return wrapper


_READABLE: Final = ("check_", "is_freed", "name")
"""Prefixes of public methods and properties that still work on freed objects."""

_CALLED: Final = ("__call__", "__contains__", "__enter__", "__getitem__", "__iter__", "__len__")
"""Special methods that raise, besides the public ones."""


@cache
def _freed(kind: Any) -> Any:
    """Return the class whose methods raise FreedError, for freed objects of a class."""
    if "_refuses" in vars(kind):
        return kind
    members: dict[str, Any] = {"_refuses": True, "__slots__": (), "__repr__": _repr}
    members |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    for name in dir(kind):
        member = inspect.getattr_static(kind, name)
        if name.startswith(_READABLE) or (name.startswith("_") and name not in _CALLED):
            continue
        if inspect.isfunction(member):
            members[name] = _refusal(name)
        elif isinstance(member, (property, cached_property)):
            members[name] = property(_refusal(name), _refusal(name))
    return type(kind)(kind.__name__, (kind,), members)


def _repr(self: Freeable) -> str:
    return f"<{type(self).__name__} {getattr(self, 'name', '')}".rstrip() + " (freed)>"


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Freeable, *args: object, **options: object) -> NoReturn:
        raise FreedError(f"{name}: {self._title} was freed")

    return refuse
