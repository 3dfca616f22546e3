"""Summaries of GGUF files: for `ggmlb show` and notebooks."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ggmlb.core.errors import ModelError, readable_size, shown
from ggmlb.inspect.html import card, table
from ggmlb.models.gguf.metadata import quoted

if TYPE_CHECKING:
    from ggmlb.models.gguf.metadata import Metadata
    from ggmlb.models.gguf.reader import GgufFile

N_ITEMS: Final = 6
"""Shown elements of an array."""

N_CHARACTERS: Final = 100
"""Shown characters of a text."""


class MetadataRow(NamedTuple):
    """A metadata value for display, with its key and type; arrays are cut to their first elements.

    Attributes:
        key: Its key.
        kind: Its type, with the number of elements of an array.
        value: The value, or the first elements of an array; `None` where it cannot be decoded.
        problem: The reason for that; empty otherwise.
    """

    key: str
    kind: str
    value: Any
    problem: str

    def text(self) -> str:
        """Return the value, or the decoding error, as one line of text, shortened if long."""
        if self.problem:
            return self.problem
        if isinstance(self.value, list):
            rest = ", ..." if self.kind != f"{self.kind.partition('[')[0]}[{len(self.value)}]" else ""
            return f"[{', '.join(_item(item) for item in self.value)}{rest}]"
        return _cut(self.value) if isinstance(self.value, str) else _item(self.value)


def rows(metadata: Metadata, n_items: int = N_ITEMS) -> list[MetadataRow]:
    """Return a row for display of each metadata value; of arrays, only the first `n_items` elements."""
    found = []
    for key in metadata:
        value, problem = None, ""
        try:
            value = metadata.first(key, n_items)
        except ModelError as error:
            problem = str(error).partition(f"{quoted(key)}: ")[2]
        found.append(MetadataRow(key, str(metadata.slot(key)), value, problem))
    return found


def facts(file: GgufFile) -> dict[str, str]:
    """Return version, parts, size and tensor types of a GGUF file as texts by heading."""
    n_elements = sum(tensor.n_elements for tensor in file.values())
    sizes: Counter[str] = Counter()
    counts = Counter(tensor.dtype.name for tensor in file.values())
    for tensor in file.values():
        sizes[tensor.dtype.name] += tensor.nbytes
    return {
        "format": f"GGUF version {file.version}, tensors aligned to {file.alignment} bytes",
        "parts": str(len(file.parts)) if len(file.parts) > 1 else "",
        "tensors": f"{len(file)}, {_parameters(n_elements)}, {readable_size(file.nbytes)}"
        + (f", {8 * file.nbytes / n_elements:.2f} bits per parameter" if n_elements else ""),
        "types": ", ".join(f"{name} {counts[name]} ({readable_size(n)})" for name, n in sizes.most_common()),
    }


def _parameters(n: int) -> str:
    """Return a number of parameters, in millions or billions (10^9) where it is large."""
    for unit, power in (("B", 9), ("M", 6)):
        if n >= 10**power:
            return f"{n / 10**power:.1f} {unit} parameters"
    return f"{n:,} parameters"


def as_dict(file: GgufFile) -> dict[str, Any]:
    """Return metadata and tensor headers of a GGUF file as JSON values; arrays are cut short."""
    return {
        "path": str(file.path),
        "version": file.version,
        "alignment": file.alignment,
        "parts": [str(part.path) for part in file.parts],
        "nbytes": file.nbytes,
        "metadata": {
            row.key: {"type": row.kind, "value": _json(row.value)}
            | ({"error": row.problem} if row.problem else {})
            for row in rows(file.metadata)
        },
        "tensors": [
            {
                "name": name,
                "type": tensor.dtype.name,
                "ne": list(tensor.ne),
                "nbytes": tensor.nbytes,
                "offset": tensor.offset,
                "part": tensor.part,
            }
            for name, tensor in file.items()
        ],
    }


def as_html(file: GgufFile) -> str:
    """Return the summary of a GGUF file as HTML, for notebooks."""
    values = table(("key", "type", "value"), [(r.key, r.kind, r.text()) for r in rows(file.metadata)])
    tensors = table(
        ("tensor", "type", "ne", "size"),
        [(_cut(n), t.dtype.name, list(t.ne), readable_size(t.nbytes)) for n, t in file.items()],
    )
    return card(f"GgufFile {_cut(file.path.name)}", facts(file), values, tensors)


def _cut(text: str) -> str:
    one_line = shown(text[: N_CHARACTERS + 1]).replace("\n", "\\n").replace("\t", "\\t")
    return one_line if len(text) <= N_CHARACTERS else f"{one_line[:N_CHARACTERS]}..."


def _item(value: Any) -> str:
    if isinstance(value, str):
        return _cut(repr(value))
    if isinstance(value, float):
        return f"{value:.7g}"
    return str(value)


def _json(value: Any) -> Any:
    """Return a value that JSON has: numbers that are not finite become text."""
    if isinstance(value, list):
        return [_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
