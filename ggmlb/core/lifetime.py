"""Base classes for resources that cannot be copied and, some of them, must be freed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, SupportsIndex

from ggmlb.core import arguments
from ggmlb.core.errors import ArgumentError, FreedError, kind_of

if TYPE_CHECKING:
    from typing_extensions import Self


class Unique:
    """A resource of this process or its devices, which cannot be copied or pickled."""

    def __init_subclass__(cls) -> None:
        """Check the arguments of public methods, for classes of ggmlb only."""
        super().__init_subclass__()
        if cls.__module__.startswith("ggmlb."):
            arguments.checked_methods(cls)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ArgumentError(
            f"{kind_of(self)} belongs to this process and its devices; neither it nor its tensors can be "
            "copied or pickled; use the values: to_numpy() returns them, set_array() writes them"
        )


class Closeable(ABC):
    """A context manager that `close` ends."""

    @abstractmethod
    def close(self) -> None:
        """Release what it holds; has no effect if already closed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Freeable(Unique, ABC):
    """A resource that `free` releases. A context manager, which frees it on exit.

    Attributes:
        is_freed: Whether it was freed; every later use is an error.
    """

    is_freed = False

    @abstractmethod
    def free(self) -> None:
        """Release the resource.

        Raises:
            FreedError: It was freed before.
        """

    def check_alive(self, call: str) -> None:
        """Raise if the resource was freed.

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
