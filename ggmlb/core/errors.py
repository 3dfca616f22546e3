"""The errors that ggmlb raises.

    ggmlb.Error
    ├── ShapeError          (ValueError)    operands whose shapes or strides do not match
    ├── DTypeError          (ValueError)    an unknown tensor type, or one the op does not take
    ├── ArgumentError       (ValueError)    any other argument out of its range
    ├── UnknownOpError      (AttributeError) a `Context` method that ggml.h has no function for
    ├── BoundsError         (IndexError)    a read or write beyond a tensor's or buffer's end
    ├── AllocationError     (MemoryError)   no room; carries `asked`, `free`, `total` [bytes]
    ├── NotAllocatedError   (RuntimeError)  data of a tensor that is in no buffer yet
    ├── FreedError          (RuntimeError)  a buffer, backend or scheduler used after `free`
    ├── UnsupportedOpError  (RuntimeError)  an op that no candidate device runs, with each one's reason
    ├── GraphError          (RuntimeError)  a graph, plan or scheduler in the wrong state for the call
    ├── BackendError        (RuntimeError)  the array library or the device reported a failure
    │   ├── BackendUnavailable              library, driver or card is missing: automatic choice skips it
    │   ├── BackendBroken                   installed, but failing or of the wrong API version
    │   └── DeviceLostError                 a device no longer answers; its memory is lost
    ├── SanitizerError      (RuntimeError)  a data race or an invalid memory access; carries `kind`
    ├── RegistryError       (LookupError)   an unknown device or backend name, or a duplicate one
    │   └── MissingBackendError (FileNotFoundError) no backend at a path
    └── ModelError          (ValueError)    a model folder or file that is missing, cut short or wrong
        └── MissingModelError (FileNotFoundError) no model at a path

Each class also inherits the builtin that a caller would expect. An error keeps the numbers in its message
as attributes and can be pickled. It never holds tensors or arrays, because a traceback would keep their
device memory alive.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final


class Error(Exception):
    """Base of all errors raised by ggmlb; keyword arguments become attributes.

    Args:
        message: The request, the finding, and the remedy. Control characters (from names of tensors and
            files) are escaped, because a terminal would act on them.
        **facts: Numbers and names (never tensors or arrays) to keep as attributes.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        message = shown(message)
        super().__init__(message)
        self.message = message
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.facts)


def _rebuild(cls: type[Error], message: str, facts: dict[str, Any]) -> Error:
    return cls(message, **facts)


class ShapeError(Error, ValueError):
    """Operands whose shapes or strides do not fit the op; the message names both shapes."""


class DTypeError(Error, ValueError):
    """An unknown tensor type, or a type that the op does not take."""


class ArgumentError(Error, ValueError):
    """An argument, other than a shape or a type, that is out of its range."""


class UnknownOpError(Error, AttributeError):
    """A `Context` method that ggml.h has no function for."""


class BoundsError(Error, IndexError):
    """A read or write that ends beyond the tensor or the buffer."""


class AllocationError(Error, MemoryError):
    """A device lacks room; `asked`, `free` and `total` are in bytes (0 where unknown)."""

    asked: int = 0
    free: int = 0
    total: int = 0


class NotAllocatedError(Error, RuntimeError):
    """The data of a tensor was used before the tensor was placed in a buffer."""


class FreedError(Error, RuntimeError):
    """A buffer, event, backend or scheduler was used, or freed again, after `free`."""


class UnsupportedOpError(Error, RuntimeError):
    """No candidate device runs the op; `reasons` maps each device's name to its reason."""

    reasons: dict[str, str]


class GraphError(Error, RuntimeError):
    """A graph, plan or scheduler is in the wrong state for the call."""


class BackendError(Error, RuntimeError):
    """The array library or the device reported a failure."""


class BackendUnavailable(BackendError):
    """The backend's library, driver or device is missing; the message says how to get it."""


class BackendBroken(BackendError):
    """The backend is installed but fails to load, or has another API version."""


class DeviceLostError(BackendError):
    """A device no longer answers: its memory is lost, other devices are unaffected.

    `node` is the machine or process that had it, `devices` the names of all devices there
    (`Scheduler.without`), `nbytes` the memory that was allocated there.
    """

    node: str = ""
    devices: tuple[str, ...] = ()
    nbytes: int = 0


class SanitizerError(Error, RuntimeError):
    """The sanitizer found a data race or an invalid memory access.

    `kind` is `race` (unordered with another access), `freed` (the memory was freed), `unrecorded` (wait
    for an event that was never recorded), `changed` (host memory changed during a transfer) or
    `unwritten` (memory read before it was written).
    """

    kind: str


class RegistryError(Error, LookupError):
    """An unknown device or backend name, or a name that is already taken."""


class MissingBackendError(RegistryError, FileNotFoundError):
    """There is no file, package or folder at a path that should hold backends."""


class ModelError(Error, ValueError):
    """A model folder or file that is missing, truncated or invalid."""


class MissingModelError(ModelError, FileNotFoundError):
    """There is no file or folder at the path of a model."""


def kind_of(value: object) -> str:
    """Describe a value for a message, such as `"'CPU'"`, `"None"`, `"a float"` or `"a numpy.ndarray"`."""
    if value is None or isinstance(value, str):
        return repr(value)
    kind = type(value)
    is_known = kind.__module__.partition(".")[0] in ("builtins", "ggmlb")
    name = kind.__qualname__ if is_known else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def shown(text: str) -> str:
    r"""Replace control characters of a text by escapes such as `\x1b`, so that a terminal shows them.

    Line ends and tabs stay. Bidirectional controls and unencodable characters are escaped too.
    """
    return text if text.isprintable() else _CONTROLS.sub(_code, text)


_CONTROLS: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def _code(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def one_line(error: BaseException) -> str:
    """Return an error as one line, such as `"ValueError: message"`."""
    try:
        text = str(error)
    except Exception as why:  # third-party classes may fail here
        text = f"(its text cannot be read: {type(why).__name__})"
    return shown(f"{type(error).__name__}: {' '.join(text.split())}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest known name, or the list of names if it is short."""
    known = list(known)
    from difflib import get_close_matches  # slow to import, rarely needed

    near = get_close_matches(name, known, n=1)
    if not near:
        near = [k for k in known if k.lower() == name.lower()]
    if near:
        return f"; did you mean {near[0]!r}?"
    if len(known) > 60:
        return ""
    return f"; known: {', '.join(known)}" if known else "; none are known"


def readable_size(nbytes: int) -> str:
    """Format a size in bytes with a unit, such as `"15.6 GiB"`."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
