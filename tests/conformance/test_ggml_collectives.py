"""Sums and split rows by a ggml library's own functions, found by name.

No library here has them (CUDA, SYCL and RPC do): C functions that use the C structs stand in their place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from ctypes import c_bool, c_float, c_int, c_size_t, c_void_p
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import ArgumentError, Context, Graph, GraphAllocator, SplitState
from ggmlb.backends.ggml.device import GgmlDevice
from ggmlb.core.enums import TensorFlag
from ggmlb.models.devices import split_rows
from ggmlb.parallel.meta import MIRRORED
from tests.support.gpus import GGML, device_fixture

device = device_fixture(GGML)


class Library:
    """Collective functions in C, and what they were called with.

    Attributes:
        groups: The streams of each group, by its handle.
        sums: Extents and flags of the tensors of each sum.
        declines: Whether no sum is computed.
    """

    def __init__(self, device: GgmlDevice) -> None:
        self.device, self.declines = device, False
        self.groups: dict[int, list[int]] = {}
        self.sums: list[list[tuple[int, ...]]] = []
        self.shares: list[float] = []
        kinds: dict[str, tuple[Callable[..., Any], Any]] = {
            "comm_init": (self._init, ctypes.CFUNCTYPE(c_void_p, c_void_p, c_size_t)),
            "comm_free": (self._free, ctypes.CFUNCTYPE(None, c_void_p)),
            "comm_allreduce_tensor": (self._sum, ctypes.CFUNCTYPE(c_bool, c_void_p, c_void_p)),
            "split_buffer_type": (self._split, ctypes.CFUNCTYPE(c_void_p, c_int, c_void_p)),
        }
        self.made = {f"ggml_backend_{name}": kind(function) for name, (function, kind) in kinds.items()}

    def _init(self, backends: int, n: int) -> int:
        handle = 1 + len(self.groups)
        self.groups[handle] = list((c_void_p * n).from_address(backends))
        return handle

    def _free(self, handle: int) -> None:
        del self.groups[handle]

    def _sum(self, handle: int, tensors: int) -> bool:
        if self.declines:
            return False
        library, parts = self.device.library, []
        for start in (c_void_p * len(self.groups[handle])).from_address(tensors):
            fields = library.unpack(ctypes.string_at(start, library.tensor_size))
            ne, flags, address = fields[2:6], fields[12], fields[25]
            self.sums.append([*ne, flags])
            parts.append(np.frombuffer((c_float * int(np.prod(ne))).from_address(address), "f4"))
        total = sum(part.copy() for part in parts)
        for part in parts:
            part[:] = total
        return True

    def _split(self, main: int, shares: int) -> Any:
        self.shares = list((c_float * 4).from_address(shares))
        return (
            self.device.library.load()["backend_dev_buffer_type"](self.device.handle) if main == 0 else None
        )


@pytest.fixture
def library(device: GgmlDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    library, plain = Library(device), GgmlDevice.proc

    def proc(self: GgmlDevice, name: str, *types: Any) -> Any:
        found = library.made.get(name)
        if found is None:
            return plain(self, name, *types)
        return ctypes.CFUNCTYPE(*types)(ctypes.cast(found, c_void_p).value or 0)

    monkeypatch.setattr(GgmlDevice, "proc", proc)
    yield library
    assert not library.groups, "each group is freed"


def error_of_product(device: GgmlDevice) -> float:
    """Multiply on two streams, each with a part of each row of the weight, and return the largest error."""
    meta = ggmlb.meta_device(
        [device] * 2, lambda t: SplitState(0, ((16, 48),)) if t.name == "w" else MIRRORED
    )
    ctx, rng = Context(), np.random.default_rng(0)
    w, x = ctx.new_tensor("f32", (64, 6), "w"), ctx.new_tensor("f32", (64, 3))
    with meta.init_backend({"n_threads": 1}) as stream, ggmlb.alloc_ctx_tensors(ctx, stream):
        for leaf in (w, x):
            leaf.set_array(rng.standard_normal(leaf.shape))
        y = Context().mul_mat(w, x)
        graph = Graph().build_forward_expand(y)
        with GraphAllocator(meta.buffer_type) as allocator:
            allocator.alloc_graph(graph)
            stream.graph_compute(graph)
            return float(np.abs(y.to_numpy() - x.to_numpy() @ w.to_numpy().T).max())


def test_sums_are_the_library_s(device: GgmlDevice, library: Library) -> None:
    assert error_of_product(device) < 1e-5
    assert library.sums == [[6, 3, 1, 1, int(TensorFlag.COMPUTE)]] * 2


def test_sums_that_the_library_declines_are_exchanged(device: GgmlDevice, library: Library) -> None:
    library.declines = True
    assert error_of_product(device) < 1e-5
    assert not library.sums


def test_tensors_of_two_shapes_are_not_summed(device: GgmlDevice, library: Library) -> None:
    init, add, free = (
        device.reg.get_proc_address(f"comm_{name}") for name in ("init", "allreduce_tensor", "free")
    )
    ctx = Context()
    tensors = [ctx.new_tensor("f32", (n,)) for n in (3, 4)]
    with device.init_backend() as one, device.init_backend() as two, ggmlb.alloc_ctx_tensors(ctx, one):
        comm = init([one, two])
        assert not add(comm, tensors)
        free(comm)
    assert not library.sums


def test_a_library_without_collectives(device: GgmlDevice) -> None:
    reg = device.reg
    cpu = ggmlb.device_by_name("CPU")
    with device.init_backend() as one, device.init_backend() as two, cpu.init_backend() as other:
        assert reg.get_proc_address("comm_init")([one, two]) is None
        assert reg.get_proc_address("comm_init")([one, other]) is None
    assert reg.get_proc_address("split_buffer_type")(list(reg.devices).index(device)) is None
    with pytest.raises(ArgumentError, match="ggml cannot split rows"):
        split_rows(device)


def test_rows_are_split_by_the_library(device: GgmlDevice, library: Library) -> None:
    split, index = device.reg.get_proc_address("split_buffer_type"), list(device.reg.devices).index(device)
    buft = split(index, [0.0] * index + [3.0])
    assert library.shares == [3, 0, 0, 0]
    assert buft.device is device
    with buft.alloc_buffer(64) as buffer:
        tensor = Context().new_tensor("f32", (4,))
        ggmlb.tensor_alloc(buffer, tensor, 0)
        tensor.set_array([1, 2, 3, 4])
        assert tensor.to_numpy().tolist() == [1, 2, 3, 4]
    for wrong in ([0.0] * len(device.reg.devices) + [1.0], [-1.0], [float("nan")]):
        with pytest.raises(ArgumentError, match="give a share, 0 or more, for each"):
            split(index, wrong)
    with pytest.raises(ArgumentError, match="there is no device 99"):
        split(99)
