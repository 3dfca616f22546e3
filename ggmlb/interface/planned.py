"""PlannedBuffer: a buffer with a size but no memory, for a dry run of allocation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

from ggmlb.core.errors import BackendError
from ggmlb.core.tensor import Tensor
from ggmlb.interface.buffer import Buffer

if TYPE_CHECKING:
    from ggmlb.interface.data import Bytes

_is_planning: ContextVar[bool] = ContextVar("planned_memory", default=False)


@contextmanager
def planned_memory() -> Iterator[None]:
    """Context manager for a dry run: buffers that this thread allocates have a size but no memory.

    Allocators work as usual, with the same errors except for a lack of memory, so the sizes are exact.
    Tensors in such buffers are neither read nor written.

    Example: `with planned_memory(), alloc_ctx_tensors(ctx, backend) as buffer: print(buffer.size)`
    """
    before = _is_planning.set(True)
    try:
        yield
    finally:
        _is_planning.reset(before)


def is_planning() -> bool:
    """Whether this thread is in a `planned_memory` block, a dry run of allocation."""
    return _is_planning.get()


class PlannedBuffer(Buffer):
    """A buffer with a size but no memory."""

    @property
    def is_planned(self) -> bool:
        """True, because the buffer was made for a dry run (`planned_memory`)."""
        return True

    @property
    def base(self) -> NoReturn:
        """Raise an error: there is no memory.

        Raises:
            BackendError: Always.
        """
        self._fail("base")

    def _fail(self, call: str) -> NoReturn:
        raise BackendError(
            f"{call}: {self!r} was allocated within planned_memory, and has no memory; allocate it outside "
            "of that context"
        )

    def _set_tensor(self, tensor: Tensor, data: Bytes, offset: int) -> None:
        self._fail("set_tensor")

    def _get_tensor(self, tensor: Tensor, out: Bytes, offset: int) -> None:
        self._fail("get_tensor")

    def _memset_tensor(self, tensor: Tensor, value: int, offset: int, size: int) -> None:
        self._fail("memset_tensor")

    def _as_array(self, tensor: Tensor, dtype: Any, shape: Any, strides: Any) -> Any:
        self._fail("as_array")

    def _clear(self, value: int) -> None:
        """Do nothing, as allocators may clear new buffers."""
