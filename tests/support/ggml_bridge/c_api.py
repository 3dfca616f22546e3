"""ggml's structs and functions: version 0.25, `GGML_BACKEND_API_VERSION` 2 (ggml.h, ggml-backend-impl.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, c_bool, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint8, c_void_p
from pathlib import Path
from typing import Any

from ggmlb.backends.ggml import abi
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import GluOp, Op, UnaryOp

API_VERSION = 2
CPU_TYPE, GPU_TYPE = 0, 1  # GGML_BACKEND_DEVICE_TYPE_*
STATUS_SUCCESS, STATUS_FAILED = 0, -1  # GGML_STATUS_*

Get = CFUNCTYPE(c_void_p, c_void_p)
GetSize = CFUNCTYPE(c_size_t, c_void_p)
Drop = CFUNCTYPE(None, c_void_p)
InitBackend = CFUNCTYPE(c_void_p, c_void_p, c_void_p)


class CTensor(ctypes.Structure):
    """`struct ggml_tensor`."""

    _fields_ = [
        ("type", c_int), ("buffer", c_void_p), ("ne", c_int64 * 4), ("nb", c_size_t * 4), ("op", c_int),
        ("op_params", c_int32 * 16), ("flags", c_int32), ("src", c_void_p * 10), ("view_src", c_void_p),
        ("view_offs", c_size_t), ("data", c_void_p), ("name", ctypes.c_char * 64), ("extra", c_void_p),
        ("padding", ctypes.c_char * 8),
    ]  # fmt: skip


class BufferTypeTable(ctypes.Structure):
    """`struct ggml_backend_buffer_type`."""

    _fields_ = [
        ("get_name", Get), ("alloc_buffer", CFUNCTYPE(c_void_p, c_void_p, c_size_t)),
        ("get_alignment", GetSize), ("get_max_size", GetSize),
        ("get_alloc_size", CFUNCTYPE(c_size_t, c_void_p, c_void_p)),
        ("is_host", CFUNCTYPE(c_bool, c_void_p)), ("device", c_void_p), ("context", c_void_p),
    ]  # fmt: skip


Move = CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_size_t, c_size_t)


class BufferTable(ctypes.Structure):
    """`struct ggml_backend_buffer_i`."""

    _fields_ = [
        ("free_buffer", Drop), ("get_base", Get), ("init_tensor", c_void_p),
        ("memset_tensor", CFUNCTYPE(None, c_void_p, c_void_p, c_uint8, c_size_t, c_size_t)),
        ("set_tensor", Move), ("get_tensor", Move), ("set_tensor_2d", c_void_p), ("get_tensor_2d", c_void_p),
        ("cpy_tensor", c_void_p), ("clear", CFUNCTYPE(None, c_void_p, c_uint8)), ("reset", c_void_p),
    ]  # fmt: skip


class BackendTable(ctypes.Structure):
    """`struct ggml_backend`."""

    _fields_ = [
        ("guid", c_void_p), ("get_name", Get), ("free", Drop), ("set_tensor_async", c_void_p),
        ("get_tensor_async", c_void_p), ("set_tensor_2d_async", c_void_p), ("get_tensor_2d_async", c_void_p),
        ("cpy_tensor_async", c_void_p), ("synchronize", Drop), ("graph_plan_create", c_void_p),
        ("graph_plan_free", c_void_p), ("graph_plan_update", c_void_p), ("graph_plan_compute", c_void_p),
        ("graph_compute", CFUNCTYPE(c_int, c_void_p, c_void_p)), ("event_record", c_void_p),
        ("event_wait", c_void_p), ("graph_optimize", c_void_p), ("device", c_void_p), ("context", c_void_p),
    ]  # fmt: skip


class Props(ctypes.Structure):
    """`struct ggml_backend_dev_props`; `caps` are five bools."""

    _fields_ = [
        ("name", c_void_p), ("description", c_void_p), ("memory_free", c_size_t), ("memory_total", c_size_t),
        ("type", c_int), ("device_id", c_void_p), ("caps", c_bool * 5),
    ]  # fmt: skip


class DeviceTable(ctypes.Structure):
    """`struct ggml_backend_device`."""

    _fields_ = [
        ("get_name", Get), ("get_description", Get),
        ("get_memory", CFUNCTYPE(None, c_void_p, POINTER(c_size_t), POINTER(c_size_t))),
        ("get_type", CFUNCTYPE(c_int, c_void_p)), ("get_props", CFUNCTYPE(None, c_void_p, POINTER(Props))),
        ("init_backend", InitBackend), ("get_buffer_type", Get), ("get_host_buffer_type", c_void_p),
        ("buffer_from_host_ptr", c_void_p), ("supports_op", CFUNCTYPE(c_bool, c_void_p, c_void_p)),
        ("supports_buft", CFUNCTYPE(c_bool, c_void_p, c_void_p)), ("offload_op", c_void_p),
        ("event_new", c_void_p), ("event_free", c_void_p), ("event_synchronize", c_void_p),
        ("reg", c_void_p), ("context", c_void_p),
    ]  # fmt: skip


class RegTable(ctypes.Structure):
    """`struct ggml_backend_reg`."""

    _fields_ = [
        ("api_version", c_int), ("get_name", Get), ("get_device_count", GetSize),
        ("get_device", CFUNCTYPE(c_void_p, c_void_p, c_size_t)),
        ("get_proc_address", CFUNCTYPE(c_void_p, c_void_p, c_char_p)), ("context", c_void_p),
    ]  # fmt: skip


FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ggml_nbytes": (c_size_t, [c_void_p]),
    "ggml_graph_n_nodes": (c_int, [c_void_p]),
    "ggml_graph_node": (c_void_p, [c_void_p, c_int]),
    "ggml_backend_register": (None, [c_void_p]),
    "ggml_backend_buffer_init": (c_void_p, [c_void_p, BufferTable, c_void_p, c_size_t]),
    "ggml_backend_dev_by_type": (c_void_p, [c_int]),
    "ggml_backend_cpu_set_n_threads": (None, [c_void_p, c_int]),
}

LIBRARIES = ("libggml-base.so", "libggml-cpu.so", "libggml.so", "libtest-backend-ops.so")


class Ggml:
    """The libraries that `scripts/build_ggml_tests.py` built, loaded into this process.

    Attributes:
        ops: ggmlb's ops by this ggml's numbers; so `unary_ops`, `glu_ops` and `dtypes`.
    """

    def __init__(self, folder: Path) -> None:
        libraries = [ctypes.CDLL(str(folder / name)) for name in LIBRARIES]
        self.c: dict[str, Callable[..., Any]] = {}
        for name, (result, arguments) in FUNCTIONS.items():
            function = next(getattr(lib, name) for lib in libraries if hasattr(lib, name))
            function.restype, function.argtypes = result, arguments
            self.c[name] = function
        self._main = libraries[-1].main
        self._seed = libraries[-1].repeatable_seed
        self._seed.argtypes = [ctypes.c_uint64]
        self._libc = ctypes.CDLL(None)
        self._stdout = c_void_p.in_dll(self._libc, "stdout")
        self._libc.setvbuf(self._stdout, None, 1, 0)  # by lines, so that a crash loses none
        ggml = abi.Ggml([str(folder / name) for name in LIBRARIES[:3]])
        facts = abi.probe(ggml)
        _check_layouts(ggml, facts)
        self.ops = _members(Op, facts["ops"])
        self.unary_ops = _members(UnaryOp, facts["unary_ops"])
        self.glu_ops = _members(GluOp, facts["glu_ops"])
        found = {number: (size, block) for number, size, block in facts["types"].values()}
        self.dtypes = {int(t): t for t in DType if found.get(int(t)) == (t.type_size, t.block_size)}

    def main(self, *arguments: str) -> int:
        """Call the test's `main`, and return its status."""
        argv = [b"test-backend-ops", *(a.encode() for a in arguments)]
        status: int = self._main(len(argv), (c_char_p * (len(argv) + 1))(*argv, None))
        self._libc.fflush(None)
        return status

    def seed(self, seed: int) -> None:
        """Choose the data of the next case (repeatable.h)."""
        self._seed(seed)

    def say(self, text: str) -> None:
        """Write to C's stdout, in order with what the test prints there."""
        self._libc.fputs(text.encode(), self._stdout)
        self._libc.fflush(self._stdout)


TABLES: dict[str, type[ctypes.Structure]] = {
    "buffer_type": BufferTypeTable, "buffer": BufferTable, "backend": BackendTable, "device": DeviceTable,
    "registration": RegTable,
}  # fmt: skip


ACCESSORS: dict[str, abi.Accessors] = {
    "buffer_type": {
        "get_name": ("backend_buft_name", ()),
        "alloc_buffer": ("backend_buft_alloc_buffer", (64,)),
        "get_alignment": ("backend_buft_get_alignment", ()),
        "get_max_size": ("backend_buft_get_max_size", ()),
        "get_alloc_size": ("backend_buft_get_alloc_size", ("tensor",)),
        "is_host": ("backend_buft_is_host", ()),
    },
    "buffer": {
        "get_base": ("backend_buffer_get_base", ()),
        "init_tensor": ("backend_buffer_init_tensor", ("tensor",)),
        "clear": ("backend_buffer_clear", (0,)),
    },
    "backend": {
        "free": ("backend_free", ()),
        "synchronize": ("backend_synchronize", ()),
        "graph_compute": ("backend_graph_compute_async", ("tensor",)),
    },
    "device": {
        "get_name": ("backend_dev_name", ()),
        "get_description": ("backend_dev_description", ()),
        "get_memory": ("backend_dev_memory", ("room", "room")),
        "get_type": ("backend_dev_type", ()),
        "get_props": ("backend_dev_get_props", ("room",)),
        "init_backend": ("backend_dev_init", (None,)),
        "get_buffer_type": ("backend_dev_buffer_type", ()),
        "get_host_buffer_type": ("backend_dev_host_buffer_type", ()),
        "buffer_from_host_ptr": ("backend_dev_buffer_from_host_ptr", ("room", 64, 64)),
        "supports_op": ("backend_dev_supports_op", ("tensor",)),
        "supports_buft": ("backend_dev_supports_buft", ("room",)),
        "offload_op": ("backend_dev_offload_op", ("tensor",)),
        "event_new": ("backend_event_new", ()),
    },
    "registration": {
        "get_name": ("backend_reg_name", ()),
        "get_proc_address": ("backend_reg_get_proc_address", (b"",)),
    },
}
"""Slots of each table that have a public accessor."""


def _check_layouts(ggml: abi.Ggml, facts: dict[str, Any]) -> None:
    """Raise a RuntimeError unless fields and slots are where the structs here have them."""
    wrong = [
        f"ggml_tensor.{name}"
        for name, offset in facts["tensor"].items()
        if hasattr(CTensor, name) and getattr(CTensor, name).offset != offset
    ]
    for table, struct in TABLES.items():
        for slot, index in abi.slots(ggml, ACCESSORS[table]).items():
            if getattr(struct, slot).offset != 8 * index:
                wrong.append(f"{table}.{slot}")
    if wrong:
        raise RuntimeError(f"ggml {facts['version']} has other structs than ggml_bridge.c_api: {wrong}")


def _members(enum: Any, numbers: dict[str, int]) -> dict[int, Any]:
    """Return an enum's members by the numbers that ggml gives their names."""
    return {number: enum[name] for name, number in numbers.items() if name in enum.__members__}
