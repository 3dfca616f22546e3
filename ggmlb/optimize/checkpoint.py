"""Checkpoints of training as files: arrays by name, and a state as JSON, in safetensors or GGUF."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ggmlb import open_gguf, save_gguf
from ggmlb.core.errors import ArgumentError, ModelError

Arrays = Mapping[str, npt.NDArray[Any]]

KEY = "ggmlb.checkpoint"
"""Of the state in the file's metadata."""


def write(path: str | os.PathLike[str], state: Mapping[str, Any], arrays: Arrays) -> None:
    """Write a checkpoint; on an error, an earlier file of that name stays.

    Raises:
        ArgumentError: The name ends neither in `.safetensors` nor in `.gguf`.
        ModelError: The file cannot be written, or `safetensors` is not installed.
    """
    path = Path(path)
    _formats(path)[0](path, json.dumps(state), arrays)


def read(
    path: str | os.PathLike[str], optimizer: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Any], Arrays]:
    """Return the state and the arrays of a checkpoint.

    Args:
        path: The file.
        optimizer: That which must have written it.
        shapes: Of the arrays that it must have.

    Raises:
        ArgumentError: The name has another end.
        ModelError: The file is missing, damaged or of another model.
    """
    path = Path(path)
    text, arrays = _formats(path)[1](path)
    try:
        state = json.loads(text or "")
        found = state["optimizer"]
    except (ValueError, KeyError, TypeError):
        raise ModelError(f"{path} is no checkpoint of ggmlb.optimize") from None
    if found != optimizer:
        raise ModelError(f"{path} is of the optimizer {found}, not of {optimizer}")
    for name, shape in shapes.items():
        if name not in arrays or arrays[name].shape != shape:
            there = list(arrays[name].shape) if name in arrays else "missing"
            raise ModelError(f"{path}: {name!r} is {there}; the parameters ask for {list(shape)}")
    return state, arrays


def _write_gguf(path: Path, state: str, arrays: Arrays) -> None:
    save_gguf(path, {"general.type": "checkpoint", KEY: state}, arrays)


def _read_gguf(path: Path) -> tuple[str, Arrays]:
    file = open_gguf(path)
    return file.metadata.text(KEY, ""), {name: np.array(file.array(name)) for name in file}


def _write_safetensors(path: Path, state: str, arrays: Arrays) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file({name: np.ascontiguousarray(a) for name, a in arrays.items()}, beside, {KEY: state})
        os.replace(beside, path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot write {path}: {error}") from None
    finally:
        beside.unlink(missing_ok=True)


def _read_safetensors(path: Path) -> tuple[str, Arrays]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return (file.metadata() or {}).get(KEY, ""), {
                name: file.get_tensor(name) for name in file.offset_keys()
            }
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read {path}: {error}") from None


Format = tuple[Callable[[Path, str, Arrays], None], Callable[[Path], tuple[str, Arrays]]]

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
