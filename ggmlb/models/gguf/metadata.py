"""Metadata: the values of a GGUF file by key, decoded on access."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from itertools import islice
from struct import Struct, pack
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ggmlb.core.errors import ModelError, did_you_mean

if TYPE_CHECKING:
    from ggmlb.models.mapped_file import MappedFile

_DTYPES: Final = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "u1", "", "", "<u8", "<i8", "<f8")

Value = bool | int | float | str | npt.NDArray[Any] | list[str]
"""A decoded value: arrays of numbers are read-only NumPy arrays, arrays of strings are lists."""

T = TypeVar("T", bool, int, float, str)

MAX_TEXT: Final = 1 << 27
"""Longest string that is decoded [bytes]; the longest in use are tokenizers as JSON, of some 30 MB."""

MAX_SHOWN: Final = 100
"""Characters of a name that a message shows."""

MAX_COMPARED: Final = 4096
"""Names compared with one that is missing."""

_U64 = Struct("<Q").unpack_from
_NEEDED: Final = object()


class GgufType(IntEnum):
    """Type of a metadata value (enum gguf_type)."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of a number."""
        return np.dtype(_DTYPES[self])


class RawValue(NamedTuple):
    """A metadata value as undecoded bytes, to copy to another GGUF file.

    Attributes:
        kind: Type of the value, or of an array's elements.
        length: Number of elements of an array; `None` for a single value.
        data: Its bytes, read-only.
    """

    kind: GgufType
    length: int | None
    data: memoryview

    def encoded(self) -> bytes:
        """Return the value's type and bytes, as they are in a GGUF file."""
        if self.length is None:
            return pack("<I", self.kind) + self.data
        return pack("<IIQ", GgufType.ARRAY, self.kind, self.length) + self.data

    def value(self) -> int | float | None:
        """Return a single number; `None` for strings and arrays."""
        if self.length is not None or self.kind is GgufType.STRING:
            return None
        found: int | float = np.frombuffer(self.data, self.kind.dtype)[0].item()
        return found


def quoted(name: str) -> str:
    """Return a key or name for a message: quoted, escaped, long ones cut."""
    return repr(name) if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]!r}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for a message: the name most like `name` among the first of `known` (to bound time)."""
    fit = (k for k in known if len(k) <= MAX_SHOWN and k.isprintable())
    return did_you_mean(name[:MAX_SHOWN], islice(fit, MAX_COMPARED))


class MissingError(ModelError, KeyError):
    """The file has no such key or tensor."""

    __str__ = ModelError.__str__


class ValuePosition(NamedTuple):
    """The position and type of a value in the file.

    Attributes:
        kind: Type of the value, or of an array's elements.
        offset: Offset of its first byte in the file [bytes].
        length: Number of an array's elements; `None` for a single value.
        nbytes: Its size [bytes].
    """

    kind: GgufType
    offset: int
    length: int | None
    nbytes: int

    def __str__(self) -> str:
        name = self.kind.name.lower()
        return name if self.length is None else f"{name}[{self.length}]"


class Metadata(Mapping[str, Value]):
    """The values of a GGUF file by key.

    `integer`, `real`, `flag` and `text` return a single value, or the default if the key is missing; `texts`
    and `numbers` return arrays. A ModelError is raised for a missing key without a default, a value of
    another type or out of range, and a string that is not UTF-8.
    """

    def __init__(self, file: MappedFile, slots: Mapping[str, ValuePosition]) -> None:
        self._file = file
        self._slots = dict(slots)
        self._texts: dict[str, list[str]] = {}

    def __getitem__(self, key: str) -> Value:
        slot = self.slot(key)
        if slot.length is None:
            return self._string(key, slot.offset) if slot.kind is GgufType.STRING else self._number(key, slot)
        if slot.kind is GgufType.STRING:
            return self.texts(key)
        raw = self._file.data[slot.offset : slot.offset + slot.length * slot.kind.dtype.itemsize]
        return raw != 0 if slot.kind is GgufType.BOOL else raw.view(slot.kind.dtype)

    def __or__(self, changed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values with some changed or added, for `save_gguf`; the others keep their types."""
        return {key: self.raw(key) for key in self} | dict(changed)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def slot(self, key: str) -> ValuePosition:
        """Return the type of a key's value, and its position in the file, without decoding it.

        Raises:
            ModelError: There is no such key.
        """
        try:
            return self._slots[key]
        except KeyError:
            message = f"{self._file.path} has no metadata key {quoted(str(key))}"
            raise MissingError(message + nearest(str(key), self._slots)) from None

    def first(self, key: str, n: int) -> bool | int | float | str | list[Any]:
        """Return a key's single value, or at most `n` elements of its array; the others are not decoded.

        Raises:
            ModelError: There is no such key, or a string is not UTF-8.
        """
        slot = self.slot(key)
        if slot.length is not None and slot.kind is GgufType.STRING:
            return self._strings(key, slot.offset, min(n, slot.length))
        found = self[key]
        if isinstance(found, np.ndarray):
            items: list[Any] = found[:n].tolist()
            return items
        return found

    def raw(self, key: str) -> RawValue:
        """Return a key's value as undecoded bytes, with its type.

        Raises:
            ModelError: There is no such key.
        """
        slot = self.slot(key)
        return RawValue(slot.kind, slot.length, self._file.view[slot.offset : slot.offset + slot.nbytes])

    # -- values of a certain type --------------------------------------------------------------

    def integer(self, key: str, default: int | None = None, least: int = 0, most: int = (1 << 31) - 1) -> int:
        """Return an integer, or `default` without the key; raise a ModelError outside `least` to `most`."""
        found = self._typed(key, default, int)
        if not least <= found <= most:
            raise self.error(key, f"it is {found}; it must be {least} to {most}")
        return found

    def real(
        self, key: str, default: float | None = None, least: float = -math.inf, most: float = math.inf
    ) -> float:
        """Return a finite number, or `default` without the key; raise a ModelError outside the limits."""
        found = self._typed(key, default, float)
        if not (math.isfinite(found) and least <= found <= most):
            raise self.error(key, f"it is {found}; it must be {least} to {most}")
        return found

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return a boolean, or `default` without the key; raise a ModelError if it has another type."""
        return self._typed(key, default, bool)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string, or `default` without the key; raise a ModelError if it has another type."""
        return self._typed(key, default, str)

    def texts(self, key: str) -> list[str]:
        """Return an array of strings; raise a ModelError if the key's value has another type."""
        slot = self.slot(key)
        if slot.kind is not GgufType.STRING or slot.length is None:
            raise self.error(key, f"it is {slot}; it must be an array of strings")
        if key not in self._texts:
            self._texts[key] = self._strings(key, slot.offset, slot.length)
        return self._texts[key]

    def numbers(self, key: str) -> npt.NDArray[Any]:
        """Return an array of numbers, read-only; raise a ModelError if the key's value has another type."""
        found = self[key]
        if not isinstance(found, np.ndarray):
            raise self.error(key, f"it is {self.slot(key)}; it must be an array of numbers")
        return found

    def error(self, key: str, found: str) -> ModelError:
        """Return (not raise) a ModelError that names the file and the key, and states the fault `found`."""
        return ModelError(f"{self._file.path}: metadata key {quoted(key)}: {found}")

    # -- decoding ------------------------------------------------------------------------------

    def _typed(self, key: str, default: T | None, kind: type[T]) -> T:
        if key not in self._slots and default is not None:
            return default
        found = self[key]
        is_right = isinstance(found, kind) and (kind is bool or not isinstance(found, bool))
        if kind is float and isinstance(found, int) and not isinstance(found, bool):
            return kind(found)
        if not is_right or not isinstance(found, kind):
            what = {bool: "a bool", int: "a whole number", float: "a number", str: "a string"}[kind]
            raise self.error(key, f"it is {self.slot(key)}; it must be {what}")
        return found

    def _number(self, key: str, slot: ValuePosition) -> bool | int | float:
        dtype = slot.kind.dtype
        found: int | float = self._file.data[slot.offset : slot.offset + dtype.itemsize].view(dtype)[0].item()
        return bool(found) if slot.kind is GgufType.BOOL else found

    def _string(self, key: str, at: int) -> str:
        nbytes = _U64(self._file.view, at)[0]
        if nbytes > MAX_TEXT:
            raise self.error(
                key, f"at byte {at}: a string of {nbytes:,} bytes; at most {MAX_TEXT:,} are read"
            )
        try:
            return str(self._file.view[at + 8 : at + 8 + nbytes], "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(key, f"at byte {at}: the string is not UTF-8: {error}") from None

    def _strings(self, key: str, at: int, count: int) -> list[str]:
        data, read = self._file.view, _U64
        found = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + read(data, at)[0]
                found.append(str(data[start:at], "utf-8"))
        except UnicodeDecodeError as error:
            raise self.error(key, f"at byte {start}: string {len(found)} is not UTF-8: {error}") from None
        return found
