"""Checkpoint files: arrays by name and a state in JSON, as safetensors or GGUF."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ggmlb import open_gguf, save_gguf
from ggmlb.core.errors import ArgumentError, MissingModelError, ModelError
from ggmlb.system.replaced_file import replaced

Arrays = Mapping[str, npt.NDArray[Any]]

KEY = "ggmlb.checkpoint"
"""Metadata key of the state."""


def write(path: str | os.PathLike[str], state: Mapping[str, Any], arrays: Arrays) -> None:
    """Write a checkpoint of `arrays` by name and a JSON `state`; on an error, an earlier file stays.

    Raises:
        ArgumentError: The name ends neither in `.safetensors` nor in `.gguf`.
        ModelError: The file cannot be written, or `safetensors` is not installed.
    """
    path = Path(path)
    _formats(path)[0](path, json.dumps(state), arrays)


def read(
    path: str | os.PathLike[str], optimizer: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Any], Arrays]:
    """Return state and arrays of a checkpoint; raise if its `optimizer` or its arrays' `shapes` differ.

    Args:
        path: The file.
        optimizer: Name of the optimizer that must have written it.
        shapes: Required arrays of float32, by name.

    Raises:
        ArgumentError: The name ends neither in `.safetensors` nor in `.gguf`.
        ModelError: The file is missing, damaged or of another model.
    """
    path = Path(path)
    text, found, array = _formats(path)[1](path)
    try:
        state = json.loads(text)
        made_by = state["optimizer"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ModelError(f"{path} is no checkpoint of ggmlb.optimize") from None
    if made_by != optimizer:
        raise ModelError(f"{path} is of the optimizer {made_by}, not of {optimizer}; use {made_by}")
    for name, shape in shapes.items():
        if found.get(name) != ("F32", shape):
            there = "{} {}".format(*found[name]) if name in found else "missing"
            raise ModelError(f"{path}: {name!r} is {there}; the parameters ask for F32 {shape}")
    return state, {name: array(name) for name in shapes}


def _write_gguf(path: Path, state: str, arrays: Arrays) -> None:
    save_gguf(path, {"general.type": "checkpoint", KEY: state}, arrays)


def _read_gguf(path: Path) -> Found:
    file = open_gguf(path)
    kinds = {name: (tensor.dtype.name, tensor.shape) for name, tensor in file.items()}
    return file.metadata.text(KEY, ""), kinds, file.array


def _write_safetensors(path: Path, state: str, arrays: Arrays) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        with replaced(path) as file:
            save_file({name: np.ascontiguousarray(a) for name, a in arrays.items()}, file.name, {KEY: state})
    except SafetensorError as error:
        raise ModelError(f"cannot write {path}: {error}") from None


def _read_safetensors(path: Path) -> Found:
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, framework="numpy")
        slices = {name: file.get_slice(name) for name in file.offset_keys()}
    except (OSError, SafetensorError) as error:
        kind = MissingModelError if isinstance(error, FileNotFoundError) else ModelError
        raise kind(f"cannot read {path}: {error}") from None
    kinds = {name: (some.get_dtype(), tuple(some.get_shape())) for name, some in slices.items()}
    return (file.metadata() or {}).get(KEY, ""), kinds, file.get_tensor


Kinds = Mapping[str, tuple[str, tuple[int, ...]]]
Found = tuple[str, Kinds, Callable[[str], npt.NDArray[Any]]]
"""A file's state, the types and shapes of its arrays, and a function that reads an array."""

Format = tuple[Callable[[Path, str, Arrays], None], Callable[[Path], Found]]

FORMATS: dict[str, Format] = {
    ".gguf": (_write_gguf, _read_gguf),
    ".safetensors": (_write_safetensors, _read_safetensors),
}


def _formats(path: Path) -> Format:
    if path.suffix not in FORMATS:
        raise ArgumentError(f"{path}: a checkpoint's name ends in .safetensors or .gguf")
    if path.suffix == ".safetensors":
        try:
            import safetensors  # noqa: F401
        except ImportError:
            raise ModelError(f"{path} needs safetensors: pip install 'ggmlb[models]'") from None
    return FORMATS[path.suffix]
