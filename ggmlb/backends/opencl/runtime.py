"""Interface to PyOpenCL: conversion of its errors, and a guard against use after fork or at exit."""

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
    """Context manager that turns PyOpenCL's errors into a BackendError or AllocationError.

    Args:
        call: The operation, for the message.
        buft: The buffer type of the allocation.
        nbytes: The requested bytes.
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
    """Whether the runtime reports a lack of memory."""
    codes = cl.status_code
    return isinstance(error, cl.MemoryError) or error.code in (
        codes.MEM_OBJECT_ALLOCATION_FAILURE,
        codes.OUT_OF_RESOURCES,
        codes.OUT_OF_HOST_MEMORY,
        codes.INVALID_BUFFER_SIZE,
    )


def is_done(event: cl.Event) -> bool:
    """Whether the command has ended, successfully or not."""
    return bool(event.command_execution_status <= cl.command_execution_status.COMPLETE)


def check_outcome(event: cl.Event, call: str) -> None:
    """Raise a BackendError if the finished command failed."""
    status = event.command_execution_status
    if status < 0:
        name = cl.status_code.to_string(status)  # type: ignore[operator]
        raise BackendError(f"{call}: queued work failed with OpenCL status {status} ({name})")
