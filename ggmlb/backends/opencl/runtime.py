"""The border to PyOpenCL: its errors made ours, and a guard against use where it cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pyopencl as cl

from ggmlb.core.errors import BackendError
from ggmlb.interface import BufferType
from ggmlb.system.process import LibraryGuard

guard: Final = LibraryGuard("OpenCL")


@contextmanager
def cl_errors(call: str, buft: BufferType | None = None, nbytes: int = 0) -> Iterator[None]:
    """Turn PyOpenCL's errors into a BackendError, or an AllocationError where memory ran out.

    Args:
        call: What was being done.
        buft: The memory type that is being allocated from.
        nbytes: The bytes asked for.
    """
    guard.enter(call)
    try:
        yield
    except cl.Error as error:
        if buft is not None and is_out_of_memory(error):
            raise buft.out_of_memory(nbytes, str(error)) from None
        raise BackendError(f"{call}: {error}") from None
    finally:
        guard.leave()


def is_out_of_memory(error: cl.Error) -> bool:
    """Whether the runtime says that it has no room."""
    codes = cl.status_code
    return isinstance(error, cl.MemoryError) or error.code in (
        codes.MEM_OBJECT_ALLOCATION_FAILURE,
        codes.OUT_OF_RESOURCES,
        codes.OUT_OF_HOST_MEMORY,
        codes.INVALID_BUFFER_SIZE,
    )


def is_done(event: cl.Event) -> bool:
    """Whether the command has ended, well or badly."""
    return bool(event.command_execution_status <= cl.command_execution_status.COMPLETE)


def check_outcome(event: cl.Event, call: str) -> None:
    """Raise a BackendError if the command, which has ended, failed."""
    status = event.command_execution_status
    if status < 0:
        name = cl.status_code.to_string(status)  # type: ignore[operator]
        raise BackendError(f"{call}: queued work failed with OpenCL status {status} ({name})")
