"""The errors: one tree, builtin parents, attributes that survive pickling, no hold on memory."""

from __future__ import annotations

import gc
import inspect
import pickle
import re
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ggmlb
import ggmlb.models
from ggmlb.core import errors
from ggmlb.optimize import checkpoint

PARENTS = {
    "AllocationError": MemoryError,
    "ArgumentError": ValueError,
    "BackendBroken": errors.BackendError,
    "BackendError": RuntimeError,
    "BackendUnavailable": errors.BackendError,
    "BoundsError": IndexError,
    "DTypeError": ValueError,
    "DeviceLostError": errors.BackendError,
    "FreedError": RuntimeError,
    "GraphError": RuntimeError,
    "MissingBackendError": FileNotFoundError,
    "MissingModelError": FileNotFoundError,
    "ModelError": ValueError,
    "NotAllocatedError": RuntimeError,
    "RegistryError": LookupError,
    "SanitizerError": RuntimeError,
    "ShapeError": ValueError,
    "UnknownOpError": AttributeError,
    "UnsupportedOpError": RuntimeError,
}

CLASSES = {
    name: cls for name, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.Error)
}


def test_the_tree_is_as_drawn() -> None:
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")
    assert sorted(drawn) == sorted(set(CLASSES) - {"Error"}) == sorted(PARENTS)


@pytest.mark.parametrize("name", PARENTS)
def test_each_is_ours_and_a_builtin(name: str) -> None:
    assert issubclass(CLASSES[name], errors.Error)
    assert issubclass(CLASSES[name], PARENTS[name])
    assert getattr(ggmlb, name) is CLASSES[name]


@pytest.mark.parametrize("name", CLASSES)
def test_each_survives_pickling(name: str) -> None:
    error = CLASSES[name]("what was asked; what to do", asked=3, reasons={"CPU": "no"})
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is CLASSES[name]
    assert str(again) == "what was asked; what to do"
    assert (again.asked, again.reasons) == (3, {"CPU": "no"})


@pytest.mark.parametrize(
    "read",
    [
        ggmlb.load,
        ggmlb.load_all_from_path,
        ggmlb.models.TextModel,
        ggmlb.models.BertEmbedder,
        lambda path: checkpoint.read(path, "adamw", {}),
        lambda path: checkpoint.read(path.with_suffix(".safetensors"), "adamw", {}),
    ],
)
def test_a_missing_file_is_also_the_builtin_error(tmp_path: Path, read: Callable[[Path], object]) -> None:
    with pytest.raises(FileNotFoundError, match="nope") as told:
        read(tmp_path / "nope.gguf")
    assert isinstance(told.value, errors.Error)


@pytest.mark.parametrize("huge", [1 << 50, 1 << 60, 1 << 62, (1 << 63) - 1])
def test_an_allocation_error_has_its_numbers(huge: int) -> None:
    with pytest.raises(MemoryError, match=f"CPU: no room for {huge:,} bytes") as told:
        ggmlb.cpu_buffer_type().alloc_buffer(huge)
    assert isinstance(told.value, ggmlb.AllocationError)
    assert told.value.asked == huge
    assert 0 < told.value.free <= told.value.total


def test_a_kept_error_does_not_keep_memory() -> None:
    """An error whose traceback is dropped must hold no buffer or array by its facts."""
    ctx = ggmlb.Context()
    t = ctx.new_tensor(ggmlb.DType.F32, (8,))
    buffer = ggmlb.alloc_ctx_tensors(ctx, ggmlb.cpu_buffer_type())
    alive = weakref.ref(buffer)
    with pytest.raises(ggmlb.BoundsError) as told:
        t.set(np.zeros(9, np.float32))
    error = told.value.with_traceback(None)
    del told, buffer, t, ctx
    gc.collect()
    assert alive() is None
    assert "the tensor has 32" in str(error)


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("q4_o", ["q4_0", "f32"], "; did you mean 'q4_0'?"),
        ("CPU", ["cpu"], "; did you mean 'cpu'?"),
        ("zzz", ["cpu", "gpu"], "; known: cpu, gpu"),
        ("zzz", [], "; none are known"),
    ],
)
def test_did_you_mean(name: str, known: list[str], said: str) -> None:
    assert errors.did_you_mean(name, known) == said
