"""Interface to PyOpenCL: conversion of its errors, and a guard against use after fork or at exit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pyopencl as cl

from ggmlb.core.errors import BackendError, DeviceLostError
from ggmlb.interface import BufferType
from ggmlb.system.process import LibraryGuard

guard: Final = LibraryGuard("OpenCL")

LOST: Final = frozenset({-2, -34, -36, -9999})
"""Status codes for a lost device: CL_DEVICE_NOT_AVAILABLE, CL_INVALID_CONTEXT,
CL_INVALID_COMMAND_QUEUE, and NVIDIA's for a kernel with an illegal address."""


@contextmanager
def cl_errors(call: str, buft: BufferType | None = None, nbytes: int = 0, *, device: str) -> Iterator[None]:
    """Context manager that turns PyOpenCL's errors into BackendError, DeviceLostError or AllocationError.

    Args:
        call: The operation, for the message.
        buft: The buffer type of the allocation.
        nbytes: The requested bytes.
        device: The name of the device that runs the command.
    """
    guard.enter(call)
    try:
        yield
    except cl.Error as error:
        if buft is not None and is_out_of_memory(error):
            raise buft.out_of_memory(nbytes, str(error)) from None
        raise _failure(call, str(error), error.code, device) from None
    finally:
        guard.leave()


def is_out_of_memory(error: cl.Error) -> bool:
    """Whether an OpenCL error reports a lack of memory."""
    codes = cl.status_code
    return isinstance(error, cl.MemoryError) or error.code in (
        codes.MEM_OBJECT_ALLOCATION_FAILURE,
        codes.OUT_OF_RESOURCES,
        codes.OUT_OF_HOST_MEMORY,
        codes.INVALID_BUFFER_SIZE,
    )


def is_done(event: cl.Event) -> bool:
    """Whether an event's command has ended, successfully or not."""
    return bool(event.command_execution_status <= cl.command_execution_status.COMPLETE)


def check_outcome(event: cl.Event, call: str, device: str) -> None:
    """Raise a BackendError, or DeviceLostError, if the event's finished command failed."""
    status = event.command_execution_status
    if status < 0:
        name = cl.status_code.to_string(status)  # type: ignore[operator]
        raise _failure(call, f"queued work failed with OpenCL status {status} ({name})", status, device)


def _failure(call: str, why: str, code: int, device: str) -> BackendError:
    """Return the error for a status code."""
    if code not in LOST:
        return BackendError(f"{call}: {why}")
    return DeviceLostError(
        f"{call}: {why}. {device} is lost, with all that it held: go on by Scheduler.without({device!r}), "
        "or start the process again",
        node="this process",
        devices=(device,),
    )
