"""GgufFile: the metadata and tensors of a GGUF file, read from the mapped file.

Source: ggml's docs/gguf.md, versions 2 and 3, which are equal in the parts read here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb.core.dtypes import DType, dequantize
from ggmlb.core.errors import DTypeError, MissingModelError, ModelError, shown
from ggmlb.interface import Backend, BufferType, Device
from ggmlb.models.gguf.loaded import LoadedTensors
from ggmlb.models.gguf.metadata import GgufType, Metadata, MissingError, ValuePosition, nearest, quoted
from ggmlb.models.gguf.summary import as_html
from ggmlb.models.mapped_file import FLOATS, Extent, MappedFile, failing

if TYPE_CHECKING:
    from os import PathLike

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32

MAX_DIMS: Final = 4
MAX_NAME: Final = 1 << 16
"""Longest key or tensor name of the format [bytes]."""

MAX_PARTS: Final = 1 << 10
"""Most files of a split model."""

MAX_VALUES: Final = 1 << 16
MAX_TENSORS: Final = 1 << 18
MAX_STRINGS: Final = 1 << 24
"""Most metadata values, tensors, and strings in arrays of a file: far more than models have, and few enough
to be read in some seconds, whatever the size of the file."""

MAX_STRINGS_NBYTES: Final = 1 << 30
"""Most bytes of an array of strings."""

MAX_ELEMENTS: Final = 1 << 56
"""Most elements of a tensor, extents of 0 counted as 1: NumPy can shape fewer than
2^63 bytes."""

_U32 = Struct("<I").unpack_from
_U64 = Struct("<Q").unpack_from
_HEADER = Struct("<4sIQQ")
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


class GgufTensor(NamedTuple):
    """The header entry of a tensor in a GGUF file.

    Attributes:
        name: Its name.
        dtype: The element or block type.
        ne: Extents in ggml order, innermost first, as many as the file gives.
        offset: Offset of its first byte in the file [bytes].
        nbytes: Its size [bytes].
        part: Index of its file; 0 unless the model is split.
    """

    name: str
    dtype: DType
    ne: tuple[int, ...]
    offset: int
    nbytes: int
    part: int

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.ne)

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's extents in NumPy order."""
        return self.ne[::-1]


class GgufFile(Mapping[str, GgufTensor]):
    """A GGUF model, of one file or split over several: tensors by name, and metadata by key.

    Opening reads only the header. Values are decoded on access, and tensors are read from disk when their
    bytes are used. The file must not be modified while it is in use.

    Args:
        path: The file; of a split model, the first (`...-00001-of-0000N.gguf`).

    Attributes:
        path: The (first) file.
        version: Version of the format, 2 or 3.
        metadata: Values by key, of the first file.
        alignment: Tensors begin at multiples of this in the file [bytes].

    Raises:
        ModelError: The file is missing, truncated or corrupt, or of another format; the message names key
            or tensor, and the offset in the file [bytes].
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        with failing(
            f"cannot open {path}", RuntimeError, cure="give its whole path"
        ):  # the home folder is unknown
            self.path = Path(path).expanduser()
        first = _Part(MappedFile(self.path), 0)
        self.version, self.metadata, self.alignment = first.version, first.metadata, first.alignment
        self._parts = [first.file]
        self._tensors = dict(first.tensors)
        n_parts = self.metadata.integer("split.count", 1, 0, MAX_PARTS)
        if n_parts > 1:
            self._add_parts(n_parts)

    def _add_parts(self, n_parts: int) -> None:
        """Open and check the other files of a split model."""
        found = _SPLIT_NAME.fullmatch(self.path.name)
        if found is None or int(found[3]) != n_parts:
            raise ModelError(
                f"{self.path}: split.count is {n_parts}, so its name must end in "
                f"-00001-of-{n_parts:05}.gguf; keep the names under which the parts were made"
            )
        if int(found[2]) != 1:
            raise ModelError(f"{self.path} is not the first part of its model; open the one with -00001-of-")
        number = self.metadata.integer("split.no", 0, 0, MAX_PARTS)
        if number != 0:
            raise ModelError(f"{self.path}: split.no is {number}, but its name says 0; download it again")
        for i in range(1, n_parts):
            path = self.path.with_name(f"{found[1]}-{i + 1:05}-of-{n_parts:05}.gguf")
            if not path.is_file():
                raise MissingModelError(
                    f"{self.path}: part {i + 1} of {n_parts} is missing: there is no file {path}; put all "
                    "parts into one folder, under the names that they were made with"
                )
            part = _Part(MappedFile(path), i)
            for key, right in (("split.no", i), ("split.count", n_parts)):
                number = part.metadata.integer(key, -1, -1, MAX_PARTS)
                if number != right:
                    raise ModelError(
                        f"{path}: {key} is {number}, but its name says {right}; download it again"
                    )
            twice = next((name for name in part.tensors if name in self._tensors), None)
            if twice is not None:
                raise ModelError(
                    f"{path}: tensor {quoted(twice)} is in an earlier part too; download the parts again"
                )
            self._parts.append(part.file)
            self._tensors |= part.tensors
        n_tensors = self.metadata.integer("split.tensors.count", len(self._tensors), 0, 1 << 40)
        if n_tensors != len(self._tensors):
            raise ModelError(
                f"{self.path}: split.tensors.count is {n_tensors}, but the {n_parts} parts hold "
                f"{len(self._tensors)} tensors; download them again"
            )

    def __getitem__(self, name: str) -> GgufTensor:
        try:
            return self._tensors[name]
        except KeyError:
            message = f"{self.path} has no tensor {quoted(str(name))} among its {len(self)}"
            raise MissingError(message + nearest(str(name), self._tensors)) from None

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def parts(self) -> tuple[MappedFile, ...]:
        """The mapped files, in order; one if the model is not split."""
        return tuple(self._parts)

    @property
    def nbytes(self) -> int:
        """Size of all tensors [bytes]."""
        return sum(tensor.nbytes for tensor in self.values())

    def blocks(self, name: str) -> npt.NDArray[np.uint8]:
        """Return a tensor's bytes in the file: read-only, shape `(..., row_size)`, not copied.

        Raises:
            ModelError: There is no such tensor.
        """
        tensor = self[name]
        raw = self._parts[tensor.part].data[tensor.offset : tensor.offset + tensor.nbytes]
        return raw.reshape(*tensor.ne[:0:-1], tensor.dtype.row_size(tensor.ne[0]))

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return a tensor's values, shape `GgufTensor.shape`; blocks are dequantised to float32.

        Values of a plain type are not copied, and read-only.

        Raises:
            ModelError: There is no such tensor.
        """
        tensor, blocks = self[name], self.blocks(name)
        if tensor.dtype.is_quantized:
            return dequantize(blocks, tensor.dtype)
        return blocks.view(tensor.dtype.numpy)

    def weight(self, name: str, shape: tuple[int, ...]) -> Extent:
        """Return the extent (place in the mapped file) of a weight; raise a ModelError unless it has `shape`.

        Args:
            name: The tensor.
            shape: Required shape, NumPy order; leading ones are ignored.

        Raises:
            ModelError: There is no such tensor, or it has another shape, or holds whole numbers.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(
                f"{self.path} has no tensor {quoted(name)} among its {len(self)}, which its architecture "
                "needs; download or convert the file again"
            )
        if _without_ones(tensor.shape) != _without_ones(shape):
            raise ModelError(
                f"{self.path}: tensor {quoted(name)} has shape {list(tensor.shape)}, but the metadata ask "
                f"for {list(shape)}; convert the file again"
            )
        if not (tensor.dtype.is_quantized or tensor.dtype in FLOATS):
            raise ModelError(
                f"{self.path}: tensor {quoted(name)} has type {tensor.dtype.name}; weights are floating "
                "point or quantised"
            )
        return self.extent(name)._replace(shape=shape)

    def extent(self, name: str) -> Extent:
        """Return the place of a tensor in the mapped file.

        Raises:
            ModelError: There is no such tensor.
        """
        tensor = self[name]
        file = self._parts[tensor.part]
        return Extent(tensor.dtype, tensor.shape, file, file.data, tensor.offset, tensor.nbytes)

    def load(self, where: Device | Backend | BufferType, names: Iterable[str] | None = None) -> LoadedTensors:
        """Place tensors (all, or those in `names`) in the device memory `where`, for graphs that read them.

        They are used inside the mapped file where the device computes in host memory, and copied elsewhere.

        Args:
            where: The device, a stream on it, or one of its buffer types, into which tensors are copied.
            names: The tensors; all by default.

        Returns:
            The tensors by name; a context manager that frees their memory.

        Raises:
            AllocationError: The device lacks room; nothing stays placed.
            ModelError: There is no such tensor, or the file was changed since it was opened.
        """
        chosen = list(self if names is None else names)
        return LoadedTensors({name: (self[name].ne, self.extent(name)) for name in chosen}, where)

    def check_unchanged(self) -> None:
        """Raise a ModelError if a file was truncated, extended or overwritten since it was opened."""
        for part in self._parts:
            part.check_unchanged()

    def _repr_html_(self) -> str:
        return as_html(self)

    def __repr__(self) -> str:
        return (
            f"<GgufFile {shown(self.path.name)}: {self._kind()}, {len(self)} tensors, {self.nbytes:,} bytes>"
        )

    def _kind(self) -> str:
        try:
            return shown(self.metadata.text("general.architecture")[:64])
        except ModelError:
            return "no architecture"


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Leave out the ones that a shape (NumPy order) begins with."""
    first = next((i for i, n in enumerate(shape) if n != 1), len(shape))
    return shape[first:]


class _Part:
    """The header of one file."""

    def __init__(self, file: MappedFile, number: int) -> None:
        self.file = file
        self._data = file.view
        self._size = len(self._data)
        self._at = 0
        self._where = "the header"
        if self._size < _HEADER.size or bytes(self._data[:4]) != MAGIC:
            kind = "it is too short" if self._size < _HEADER.size else "it does not begin with 'GGUF'"
            raise ModelError(f"{file.path} is no GGUF file: {kind}")
        _, self.version, n_tensors, n_values = _HEADER.unpack_from(self._data)
        self._at = _HEADER.size
        if self.version not in VERSIONS:
            is_swapped = int.from_bytes(self.version.to_bytes(4, "little"), "big") in VERSIONS
            cure = "it is big-endian" if is_swapped else "versions 2 and 3 are read"
            raise ModelError(f"{file.path} is GGUF of version {self.version}: {cure}; convert it again")
        # Least bytes: 13 of a value (length of its key, type, one byte), 24 of a tensor.
        self._check_count("n_kv", n_values, 13, MAX_VALUES)
        self._check_count("n_tensors", n_tensors, 24, MAX_TENSORS)
        self._n_strings = 0
        self.metadata = Metadata(file, self._slots(n_values))
        self.alignment = self.metadata.integer("general.alignment", DEFAULT_ALIGNMENT, 1, 1 << 30)
        if self.alignment & (self.alignment - 1):
            raise self._error(f"general.alignment is {self.alignment}, which is not a power of two")
        self.tensors = self._read_tensors(n_tensors, number)

    # -- primitives ----------------------------------------------------------------------------

    def _error(self, found: str) -> ModelError:
        return ModelError(
            f"{self.file.path}: {self._where}, at byte {self._at}: {found}; copy or download the file again"
        )

    def _check_count(self, name: str, count: int, least: int, most: int) -> None:
        if count > (self._size - self._at) // least:
            raise self._error(f"{name} is {count:,}, more than {self._size:,} bytes can hold")
        if count > most:
            raise self._error(f"{name} is {count:,}; at most {most:,} are read")

    def _take(self, nbytes: int) -> int:
        """Skip some bytes; return their offset."""
        at = self._at
        if nbytes > self._size - at:
            raise self._error(f"{nbytes:,} bytes are needed, but the file ends at {self._size:,}")
        self._at = at + nbytes
        return at

    def _u32(self) -> int:
        value: int = _U32(self._data, self._take(4))[0]
        return value

    def _u64(self) -> int:
        value: int = _U64(self._data, self._take(8))[0]
        return value

    def _name(self, least: int = 0) -> str:
        nbytes = self._u64()
        if not least <= nbytes < MAX_NAME:
            raise self._error(
                f"a name has {nbytes:,} bytes; at least {least} and fewer than {MAX_NAME:,} are allowed"
            )
        at = self._take(nbytes)
        try:
            return str(self._data[at : at + nbytes], "utf-8")
        except UnicodeDecodeError as error:
            raise self._error(f"a name is not UTF-8: {error}") from None

    # -- metadata ------------------------------------------------------------------------------

    def _slots(self, n_values: int) -> dict[str, ValuePosition]:
        slots: dict[str, ValuePosition] = {}
        for i in range(n_values):
            self._where = f"metadata value {i}"
            key = self._name(1)
            self._where = f"metadata key {quoted(key)}"
            if key in slots:
                raise self._error("duplicate key")
            kind, count = self._kind(), None
            if kind is GgufType.ARRAY:
                kind, count = self._kind(), self._u64()
                if kind is GgufType.ARRAY:
                    raise self._error("its elements are arrays, which GGUF does not allow")
            start = self._at
            if kind is not GgufType.STRING:
                self._take((1 if count is None else count) * kind.dtype.itemsize)
            elif count is None:
                self._take(self._u64())
            else:
                self._take_strings(count)
            slots[key] = ValuePosition(kind, start, count, self._at - start)
        return slots

    def _kind(self) -> GgufType:
        number = self._u32()
        if number >= len(GgufType):
            raise self._error(f"a value has the type {number}; types are 0 to {len(GgufType) - 1}")
        return GgufType(number)

    def _take_strings(self, count: int) -> None:
        """Skip the strings of an array."""
        self._check_count("the number of strings", count, 8, MAX_STRINGS - self._n_strings)
        self._n_strings += count
        start = at = self._at
        data, size, read = self._data, self._size - 8, _U64
        for _ in range(count):  # minimal: vocabularies have hundreds of thousands
            if at > size:
                break
            at += 8 + read(data, at)[0]
        else:
            if at <= self._size:
                self._at = at
                if at - start > MAX_STRINGS_NBYTES:
                    raise self._error(f"the strings take more than {MAX_STRINGS_NBYTES:,} bytes")
                return
        self._at = min(at, self._size)
        raise self._error(f"a string ends beyond the file, at byte {at:,} of {self._size:,}")

    # -- tensors -------------------------------------------------------------------------------

    def _read_tensors(self, n_tensors: int, number: int) -> dict[str, GgufTensor]:
        found: dict[str, GgufTensor] = {}
        for i in range(n_tensors):
            self._where = f"tensor {i}"
            name = self._name()
            self._where = f"tensor {quoted(name)}"
            if name in found:
                raise self._error("duplicate name")
            found[name] = self._read_tensor(name, number)
        start = self._at + -self._at % self.alignment
        end = 0
        for tensor in sorted(found.values(), key=lambda t: (t.offset, t.nbytes)):
            self._where, self._at = f"tensor {quoted(tensor.name)}", start + tensor.offset
            if tensor.offset % self.alignment:
                raise self._error(
                    f"offset {tensor.offset:,} is no multiple of the alignment, {self.alignment}"
                )
            if tensor.offset < end:
                raise self._error(f"it overlaps the tensor before it, which ends at {start + end:,}")
            end = tensor.offset + tensor.nbytes
            if start + end > self._size:
                raise self._error(f"it ends at byte {start + end:,}, beyond the file's end at {self._size:,}")
            found[tensor.name] = tensor._replace(offset=start + tensor.offset)
        return found

    def _read_tensor(self, name: str, number: int) -> GgufTensor:
        """Read the entry of a tensor; its offset is from the start of the data."""
        n_dims = self._u32()
        if n_dims > MAX_DIMS:
            raise self._error(f"it has {n_dims} dimensions; at most {MAX_DIMS} are allowed")
        ne = tuple(self._u64() for _ in range(n_dims)) or (1,)
        if math.prod(max(n, 1) for n in ne) > MAX_ELEMENTS:
            raise self._error(f"extents {list(ne)} have more than {MAX_ELEMENTS:,} elements")
        type_number = self._u32()
        try:
            dtype = DType.parse(type_number)
        except DTypeError:
            raise self._error(f"type {type_number} is unknown, or was removed from ggml") from None
        if ne[0] % dtype.block_size:
            raise self._error(
                f"rows of {ne[0]} elements are not whole {dtype.name} blocks of {dtype.block_size}"
            )
        nbytes = math.prod(ne) // dtype.block_size * dtype.type_size
        return GgufTensor(name, dtype, ne, self._u64(), nbytes, number)
