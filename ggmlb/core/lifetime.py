"""What stands for a piece of a device: there is one of it, and some of it is held until it is freed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, SupportsIndex

from ggmlb.core import arguments
from ggmlb.core.errors import ArgumentError, FreedError, kind_of

if TYPE_CHECKING:
    from typing_extensions import Self


class Unique:
    """Something of this process and its devices: a copy would be another that only looks the same."""

    def __init_subclass__(cls) -> None:
        """Check the arguments of our public methods; other packages' classes are theirs to check."""
        super().__init_subclass__()
        if cls.__module__.startswith("ggmlb."):
            arguments.checked_methods(cls)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ArgumentError(
            f"{kind_of(self)} belongs to this process and its devices; neither it nor tensors that lie there "
            "can be copied or pickled; to_numpy() gives values that can, set_array() takes them"
        )


class Freeable(Unique, ABC):
    """Something that holds what `free` gives back. A context manager: leaving it frees it.

    Attributes:
        is_freed: Whether it was freed; every use after that is an error.
    """

    is_freed = False

    @abstractmethod
    def free(self) -> None:
        """Give back what it holds.

        Raises:
            FreedError: It was freed before.
        """

    def check_alive(self, call: str) -> None:
        """Refuse a call on what was freed.

        Raises:
            FreedError: It was freed.
        """
        if self.is_freed:
            raise FreedError(f"{call}: {self._title} was freed")

    @property
    def _title(self) -> str:
        """What an error calls it."""
        return f"this {type(self).__name__}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_freed:
            self.free()
