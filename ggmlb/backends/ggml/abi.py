"""Functions of a compiled ggml library by ctypes, and a probe of the layout of its structs.

`python abi.py PART... [--load FOLDER] [--tables]` loads a library in a child process and prints the result of
`probe` (and of `tables`) as JSON: an incompatible library may abort that process, not the user's. The file
imports only the standard library, so that the process starts quickly.

Struct layouts are measured: offsets of `ggml_tensor`'s fields by creating tensors with known values, indices
of function pointers in interface structs (`ggml_backend_buffer_i`) by calling the public functions on a
struct of callbacks that record their index.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_KINDS: dict[str, Any] = {
    "v": None, "p": ctypes.c_void_p, "s": ctypes.c_char_p, "z": ctypes.c_size_t, "i": ctypes.c_int,
    "l": ctypes.c_int64, "f": ctypes.c_float, "b": ctypes.c_bool, "B": ctypes.c_uint8,
}  # fmt: skip


Functions = dict[str, Callable[..., Any]]
"""C functions by name, without the prefix `ggml_`."""


class InitParams(ctypes.Structure):
    """`struct ggml_init_params`."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


_KINDS["I"] = InitParams

N_SLOTS = 32
"""Pointers in a `Table`: more than any of ggml's interface structs has."""


class Table(ctypes.Structure):
    """An interface struct of any version, zeroed behind its last field.

    `ggml_backend_buffer_init` takes one by value: a longer one than it reads is passed alike, in memory.
    """

    _fields_ = [("slots", ctypes.c_void_p * N_SLOTS)]


_KINDS["T"] = Table

LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
AbortFunction = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)

SIGNATURES = {
    "version": "s", "op_name": "pi", "op_desc": "pp", "unary_op_name": "pi", "glu_op_name": "pi",
    "type_name": "pi",
    "type_size": "zi", "blck_size": "li", "tensor_overhead": "z", "graph_overhead_custom": "zzb",
    "init": "pI", "free": "vp", "new_tensor_4d": "ppillll", "view_4d": "pppllllzzzz",
    "set_name": "pps", "set_input": "vp", "get_data": "pp", "scale": "pppf", "log_set": "vpp",
    "new_graph_custom": "ppzb", "build_forward_expand": "vpp", "graph_n_nodes": "ip",
    "backend_alloc_ctx_tensors_from_buft": "ppp",
    "backend_load_all_from_path": "vs",
    "backend_dev_count": "z", "backend_dev_get": "pz", "backend_dev_name": "sp",
    "backend_dev_description": "sp", "backend_dev_type": "ip", "backend_dev_memory": "vppp",
    "backend_dev_get_props": "vpp", "backend_dev_backend_reg": "pp", "backend_dev_init": "pps",
    "backend_dev_buffer_type": "pp", "backend_dev_host_buffer_type": "pp",
    "backend_dev_buffer_from_host_ptr": "pppzz", "backend_dev_supports_op": "bpp",
    "backend_dev_supports_buft": "bpp", "backend_dev_offload_op": "bpp",
    "backend_reg_name": "sp", "backend_reg_get_proc_address": "pps",
    "backend_buft_name": "sp", "backend_buft_alloc_buffer": "ppz", "backend_buft_get_alignment": "zp",
    "backend_buft_get_max_size": "zp", "backend_buft_get_alloc_size": "zpp", "backend_buft_is_host": "bp",
    "backend_buffer_free": "vp", "backend_buffer_get_base": "pp", "backend_buffer_init_tensor": "ipp",
    "backend_buffer_clear": "vpB", "backend_buffer_set_usage": "vpi",
    "backend_tensor_set": "vppzz", "backend_tensor_get": "vppzz", "backend_tensor_memset": "vpBzz",
    "backend_tensor_copy": "vpp", "backend_tensor_copy_async": "vpppp",
    "backend_tensor_set_async": "vpppzz", "backend_tensor_get_async": "vpppzz",
    "backend_free": "vp", "backend_guid": "pp", "backend_synchronize": "vp",
    "backend_graph_compute_async": "ipp",
    "backend_event_new": "pp", "backend_event_free": "vp", "backend_event_record": "vpp",
    "backend_event_synchronize": "vp", "backend_event_wait": "vpp",
}  # fmt: skip
"""Functions that this backend needs, without the prefix `ggml_`: result and arguments by `_KINDS`."""

LATER = {
    "backend_tensor_set_2d": "vppzzzzz", "backend_tensor_get_2d": "vppzzzzz",
    "backend_tensor_set_2d_async": "vpppzzzzz", "backend_tensor_get_2d_async": "vpppzzzzz",
    "log_internal": "vis",
}  # fmt: skip
"""Functions of newer libraries, used if present."""

FOR_TABLES = {
    "nbytes": "zp", "graph_nodes": "pp", "backend_register": "vp",
    "backend_unload": "vp", "backend_buffer_init": "ppTpz", "backend_buffer_get_usage": "ip",
    "backend_buffer_get_type": "pp",
    "backend_buft_get_device": "pp", "backend_name": "sp", "backend_get_device": "pp",
    "backend_reg_dev_count": "zp", "backend_reg_dev_get": "ppz",
}  # fmt: skip
"""Functions needed to register devices with a library, and for `tables`."""

Accessors = Mapping[str, tuple[str, tuple[Any, ...]]]
"""Function pointers of an interface struct: the public function that calls each, and its other arguments."""

SLOTS: dict[str, Accessors] = {
    "buffer_type": {"get_alloc_size": ("backend_buft_get_alloc_size", ("tensor",))},
    "buffer": {"init_tensor": ("backend_buffer_init_tensor", ("tensor",))},
}
"""Optional function pointers, looked up by `GgmlLibrary.has_slot`."""

NEAR = 1 << 27
"""Largest distance between two strings of one library [bytes]; past an array's end, pointers are random."""

CAPS_AT = {40: 36, 48: 36, 56: 48}
"""Where the capabilities are in `struct ggml_backend_dev_props` of each size [bytes]; the last has an id."""
ID_AT = 40


FOLLOWED = "0.26"
"""Version of ggml whose functions, ops and structs ggmlb follows; others are used if they fit."""

API_VERSIONS = (2, 3, 6)
"""Values of `GGML_BACKEND_API_VERSION` whose interface structs are known."""

TABLES: dict[str, dict[str, str]] = {
    "buffer_type": {
        "get_name": "pp backend_buft_name it",
        "alloc_buffer": "ppz backend_buft_alloc_buffer it 64",
        "get_alignment": "zp backend_buft_get_alignment it",
        "get_max_size": "zp backend_buft_get_max_size it",
        "get_alloc_size": "zpp backend_buft_get_alloc_size it tensor",
        "is_host": "bp backend_buft_is_host it",
        "device": "p backend_buft_get_device it",
    },
    "buffer": {
        "get_base": "pp backend_buffer_get_base it",
        "memset_tensor": "vppBzz backend_tensor_memset tensor 1 0 4",
        "set_tensor": "vpppzz backend_tensor_set tensor room 0 4",
        "get_tensor": "vpppzz backend_tensor_get tensor room 0 4",
        "cpy_tensor": "bppp backend_tensor_copy tensor other",
        "clear": "vpB backend_buffer_clear it 1",
        "free_buffer": "vp backend_buffer_free it",
    },
    "stream": {
        "guid": "p backend_guid it",
        "get_name": "pp backend_name it",
        "free": "vp backend_free it",
        "set_tensor_async": "vpppzz backend_tensor_set_async it tensor room 0 4",
        "get_tensor_async": "vpppzz backend_tensor_get_async it tensor room 0 4",
        "cpy_tensor_async": "bpppp backend_tensor_copy_async it it tensor other",
        "synchronize": "vp backend_synchronize it",
        "graph_compute": "ipp backend_graph_compute_async it room",
        "event_record": "vpp backend_event_record event it",
        "event_wait": "vpp backend_event_wait it event",
        "device": "p backend_get_device it",
    },
    "device": {
        "get_name": "pp backend_dev_name it",
        "get_description": "pp backend_dev_description it",
        "get_memory": "vppp backend_dev_memory it room room",
        "get_type": "ip backend_dev_type it",
        "get_props": "vpp backend_dev_get_props it room",
        "init_backend": "pps backend_dev_init it 0",
        "get_buffer_type": "pp backend_dev_buffer_type it",
        "get_host_buffer_type": "pp backend_dev_host_buffer_type it",
        "buffer_from_host_ptr": "pppzz backend_dev_buffer_from_host_ptr it room 64 64",
        "supports_op": "bpp backend_dev_supports_op it tensor",
        "supports_buft": "bpp backend_dev_supports_buft it room",
        "offload_op": "bpp backend_dev_offload_op it tensor",
        "event_new": "pp backend_event_new it",
        "event_free": "vpp backend_event_free event",
        "event_synchronize": "vpp backend_event_synchronize event",
        "registration": "p backend_dev_backend_reg it",
    },
    "registration": {
        "get_name": "pp backend_reg_name it",
        "get_device_count": "zp backend_reg_dev_count it",
        "get_device": "ppz backend_reg_dev_get it 0",
        "get_proc_address": "pps backend_reg_get_proc_address it 0",
    },
}
"""Interface structs by field: result and arguments of the callback by `_KINDS` (`p`: the field is a pointer),
then the public function that calls or returns it, with its arguments."""


class Unfit(Exception):
    """Raised for an incompatible ggml library, with the reason."""


class Ggml:
    """A loaded ggml library: its functions by name without the prefix `ggml_`.

    Args:
        parts: The library's files, each after those that it needs.
        needed: The functions that it must have.

    Raises:
        OSError: A file cannot be loaded.
        Unfit: A function is missing.
    """

    def __init__(self, parts: Sequence[str], needed: Mapping[str, str] = SIGNATURES) -> None:
        mode = _mode(parts)
        self.parts = [ctypes.CDLL(part, mode) for part in parts]
        self.c: Functions = {}
        missing = []
        for name, kinds in {**FOR_TABLES, **SIGNATURES, **LATER}.items():
            for part in reversed(self.parts):
                function = getattr(part, f"ggml_{name}", None)
                if function is not None:
                    function.restype, function.argtypes = _KINDS[kinds[0]], [_KINDS[k] for k in kinds[1:]]
                    self.c[name] = function
                    break
            else:
                if name in needed:
                    missing.append(f"ggml_{name}")
        if missing:
            few = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            found = self.c["version"]().decode() if "version" in self.c else "of an unknown version"
            raise Unfit(
                f"ggml {found} lacks {few}; install one from 2025-10 or later: ggmlb follows {FOLLOWED}"
            )


def file_of(function: Any) -> str | None:
    """Return the file that a C function was loaded from; `None` if unknown."""

    class Info(ctypes.Structure):
        _fields_ = [
            ("file", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("name", ctypes.c_char_p),
            ("at", ctypes.c_void_p),
        ]

    info = Info()
    try:
        found = ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info))
    except (OSError, TypeError, AttributeError):  # Windows
        return None
    return os.fsdecode(info.file) if found else None


def _mode(parts: Sequence[str]) -> int:
    """Return the mode to load a library in, so that its calls of its own functions do not reach another ggml.

    ggml-python loads `libggml-base` for the whole process: the loader then resolves calls within a library
    that is loaded later to that one, unless `RTLD_DEEPBIND` is given.
    """
    try:
        other = file_of(ctypes.CDLL(None).ggml_backend_buffer_init)
    except (AttributeError, TypeError, OSError):  # no such global function, or Windows
        return 0
    mine = other is None or os.path.realpath(other) in map(os.path.realpath, parts)
    return 0 if mine else getattr(os, "RTLD_DEEPBIND", 0)


def load(parts: Sequence[str], folder: str = "") -> Ggml:
    """Load a ggml library from its files (`parts`), and the plugins in `folder` if no backend is built in.

    Raises:
        OSError, Unfit: As `Ggml`.
    """
    ggml = Ggml(parts)
    if folder and not ggml.c["backend_dev_count"]():
        ggml.c["backend_load_all_from_path"](os.fsencode(folder))
    return ggml


# -- probe -----------------------------------------------------------------------------------------


def probe(ggml: Ggml) -> dict[str, Any]:
    """Return version, struct layouts, enum values of ops and types, and devices of a library.

    Raises:
        Unfit: A struct's layout is unknown.
    """
    return {
        "version": ggml.c["version"]().decode(),
        "ops": _names(ggml.c["op_name"]),
        "unary_ops": _names(ggml.c["unary_op_name"]),
        "glu_ops": _names(ggml.c["glu_op_name"]),
        "types": _types(ggml),
        "tensor": _tensor_layout(ggml),
        "slots": {table: slots(ggml, accessors) for table, accessors in SLOTS.items()},
        "props_size": _props_size(ggml),
        "devices": [_device(ggml, i) for i in range(ggml.c["backend_dev_count"]())],
    }


def _names(name_of: Callable[[int], int]) -> dict[str, int]:
    """Return the numbers of an enum by name, read from ggml's array of names, whose length is unknown."""
    first = name_of(0)
    found: dict[str, int] = {}
    for number in range(256):
        address = name_of(number)
        if not address or abs(address - first) > NEAR:
            break
        name = ctypes.string_at(address, 40).partition(b"\0")[0]
        if not re.fullmatch(rb"[A-Z0-9_]+", name) or name.decode() in found:
            break
        found[name.decode()] = number
    return found


def _types(ggml: Ggml) -> dict[str, tuple[int, int, int]]:
    """Return number, bytes and elements of a block of each type, by its name in lower case."""
    first = ggml.c["type_name"](0)
    found: dict[str, tuple[int, int, int]] = {}
    for number in range(64):
        address = ggml.c["type_name"](number)
        if address and abs(address - first) < NEAR:
            name = ctypes.string_at(address, 16).partition(b"\0")[0].decode(errors="replace").lower()
            found.setdefault(
                name, (number, int(ggml.c["type_size"](number)), int(ggml.c["blck_size"](number)))
            )
    return found


def _tensor_layout(ggml: Ggml) -> dict[str, int]:
    """Return the offset of each field of `ggml_tensor`, the capacity of its name, and its size [bytes]."""
    c = ggml.c
    size = c["tensor_overhead"]() - 32  # a `ggml_object` precedes each tensor
    ctx, owner = c["init"](InitParams(1 << 20, None, True)), c["init"](InitParams(1 << 20, None, True))
    ne = (1009, 13, 7, 5)
    made = c["new_tensor_4d"](ctx, 1, *ne)
    before = ctypes.string_at(made, size)
    c["set_input"](made)
    flagged = ctypes.string_at(made, size)
    c["set_name"](made, b"M" * 400)
    named = ctypes.string_at(made, size)
    scaled = c["scale"](ctx, c["new_tensor_4d"](ctx, 0, *ne), 3.5)
    view = c["view_4d"](ctx, made, 11, 3, 2, 1, 2018, 26234, 183638, 123456)
    placed = c["new_tensor_4d"](owner, 0, 8, 1, 1, 1)
    buffer = c["backend_alloc_ctx_tensors_from_buft"](
        owner, c["backend_dev_buffer_type"](c["backend_dev_get"](0))
    )
    s, v, p = (ctypes.string_at(t, size) for t in (scaled, view, placed))
    room = named.count(b"M") + 1
    at = {
        "type": before.find(struct.pack("i", 1)),
        "buffer": p.find(struct.pack("P", buffer)),
        "ne": before.find(struct.pack("4q", *ne)),
        "nb": before.find(struct.pack("4Q", 2, 2018, 26234, 183638)),
        "op": s.find(struct.pack("i", _names(c["op_name"])["SCALE"])),
        "op_params": s.find(struct.pack("f", 3.5)),
        "flags": next((i for i in range(0, size, 4) if before[i : i + 4] != flagged[i : i + 4]), -1),
        "src": v.find(struct.pack("P", made)),
        "view_src": v.rfind(struct.pack("P", made)),
        "view_offs": v.rfind(struct.pack("Q", 123456)),
        "data": p.rfind(struct.pack("P", c["get_data"](placed))),
        "name": named.find(b"MM"),
    }
    at["extra"] = -(-(at["name"] + room) // 8) * 8
    c["backend_buffer_free"](buffer)
    c["free"](ctx)
    c["free"](owner)
    if list(at.values()) != sorted({*at.values()}) or at["type"] or at["extra"] + 8 > size:
        raise Unfit(
            f"unknown layout of ggml_tensor ({size} bytes; offsets found: {at}); install another ggml"
        )
    return {**at, "room": room, "size": size}


_Slot = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p)


def slots(ggml: Ggml, accessors: Accessors) -> dict[str, int]:
    """Find the index of each function pointer in an interface struct by calling its accessor; -1: unknown."""
    called: list[int] = []
    room = ctypes.create_string_buffer(1024)
    recorders = _recorders(called, ctypes.addressof(room))
    fake = _table(recorders)
    found = {}
    for name, (accessor, arguments) in accessors.items():
        called.clear()
        given = [ctypes.addressof(room) if a in ("tensor", "room") else a for a in arguments]
        ggml.c[accessor](ctypes.addressof(fake), *given)
        found[name] = called[0] if called else -1
    return found


def callback(kinds: str, function: Callable[..., Any]) -> Any:
    """Return a C function pointer that calls a function; `kinds`: result and arguments by `_KINDS`."""
    return ctypes.CFUNCTYPE(_KINDS[kinds[0]], *(_KINDS[kind] for kind in kinds[1:]))(function)


def tables(ggml: Ggml) -> dict[str, Any]:
    """Return the position of each function pointer in the structs that `TABLES` names, and the API version.

    Raises:
        Unfit: The API version is not in `API_VERSIONS`, or a field is not found.
    """
    c = ggml.c
    reg = c["backend_dev_backend_reg"](c["backend_dev_get"](0))
    version = ctypes.c_int.from_address(reg).value
    if version not in API_VERSIONS:
        raise Unfit(
            f"ggml {c['version']().decode()} has version {version} of the backend interface, which ggmlb "
            f"does not know (it knows {', '.join(map(str, API_VERSIONS))}); install a newer ggmlb, or ggml "
            f"{FOLLOWED}, which this one follows"
        )
    called: list[int] = []
    room = ctypes.create_string_buffer(1024)
    zero = _Slot(lambda _: 0)
    recorders = _recorders(called, ctypes.addressof(room))
    fake, plain = _table(recorders), _table([zero] * N_SLOTS)
    values = list(fake.slots)
    buffer = c["backend_buffer_init"](ctypes.addressof(plain), fake, None, 64)
    layout = _tensor_layout(ggml)
    both = [_placed_tensor(layout, buffer, ctypes.addressof(room) + 64 * i) for i in range(2)]
    event = (ctypes.c_void_p * 2)(ctypes.addressof(fake), 0)
    words = {
        "room": ctypes.addressof(room), "tensor": ctypes.addressof(both[0]),
        "other": ctypes.addressof(both[1]), "event": ctypes.addressof(event),
    }  # fmt: skip
    found: dict[str, dict[str, int]] = {}
    for table, fields in TABLES.items():
        words["it"] = buffer if table == "buffer" else ctypes.addressof(fake)
        found[table] = {}
        for field, text in fields.items():
            _, accessor, *arguments = text.split()
            called.clear()
            kinds = FOR_TABLES.get(accessor) or SIGNATURES[accessor]
            given = [words[a] if a in words else int(a) for a in arguments]
            result = c[accessor](
                *(g or None if k in "ps" else g for g, k in zip(given, kinds[1:], strict=True))
            )
            index = called[0] if called else values.index(result) if result in values else -1
            if index < 0:
                raise Unfit(
                    f"ggml {c['version']().decode()}: {table}.{field} was not found; install another ggml"
                )
            found[table][field] = index
    return {"api_version": version, **found}


def _placed_tensor(layout: Mapping[str, int], buffer: int, data: int) -> Any:
    """Return a `ggml_tensor` of four float32 at the address `data` in a C buffer."""
    tensor = ctypes.create_string_buffer(layout["size"])
    values = {"buffer": (buffer,), "ne": (4, 1, 1, 1), "nb": (4, 16, 16, 16), "data": (data,)}
    for field, numbers in values.items():
        struct.pack_into(f"{len(numbers)}Q", tensor, layout[field], *numbers)
    return tensor


def _table(callbacks: Sequence[Any]) -> Table:
    """Return an interface struct of callbacks, which must outlive it."""
    return Table(tuple(ctypes.cast(callback, ctypes.c_void_p).value for callback in callbacks))


def _recorders(called: list[int], answer: int) -> list[Any]:
    """Return a callback for each slot, which notes its index, and returns `answer` (any pointer)."""

    def recorder(i: int) -> Any:
        def note(_: int) -> int:
            called.append(i)
            return answer

        return _Slot(note)

    return [recorder(i) for i in range(N_SLOTS)]


def _props_size(ggml: Ggml) -> int:
    """Return the size of `ggml_backend_dev_props`: the bytes that its getter clears."""
    nothing = _Slot(lambda _: 0)
    fake = _table([nothing] * N_SLOTS)
    room = ctypes.create_string_buffer(b"\xff" * 256, 256)
    ggml.c["backend_dev_get_props"](ctypes.addressof(fake), ctypes.addressof(room))
    size = len(room.raw) - len(room.raw.lstrip(b"\0"))
    if size not in CAPS_AT:
        raise Unfit(
            f"unknown layout of ggml_backend_dev_props ({size} bytes); install ggml {FOLLOWED}, "
            "which ggmlb follows"
        )
    return size


_LOADABLE = re.compile(r"(?:lib)?ggml-(?!base|cpu)(\w+)(?:\.so|\.dylib|\.dll)")


def left_out(folder: str, backends: Sequence[str]) -> dict[str, str]:
    """Return, for each backend plugin in a folder that has no device, the file name and the reason.

    Args:
        folder: The folder.
        backends: Names of the backends that have devices.
    """
    found = {}
    for name in sorted(os.listdir(folder)):
        kind = _LOADABLE.fullmatch(name)
        if kind is None or kind[1].lower() in map(str.lower, backends):
            continue
        try:
            ctypes.CDLL(os.path.join(folder, name))
            found[name] = "it finds no device here"
        except OSError as error:
            found[name] = str(error)
    return found


def memory_of(c: Functions, device: int) -> tuple[int, int]:
    """Return free and total memory of a device [bytes], by the functions `c` of its library."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    c["backend_dev_memory"](device, ctypes.addressof(free), ctypes.addressof(total))
    return free.value, total.value


def _device(ggml: Ggml, index: int) -> dict[str, Any]:
    c, device = ggml.c, ggml.c["backend_dev_get"](index)
    room = ctypes.create_string_buffer(256)
    c["backend_dev_get_props"](device, ctypes.addressof(room))
    at = CAPS_AT[_props_size(ggml)]
    ident = struct.unpack_from("P", room, ID_AT)[0] if at > ID_AT else 0
    reg = c["backend_dev_backend_reg"](device)
    return {
        "name": c["backend_dev_name"](device).decode(errors="replace"),
        "description": c["backend_dev_description"](device).decode(errors="replace").strip(),
        "type": c["backend_dev_type"](device),
        "memory": memory_of(c, device),
        "id": ctypes.string_at(ident).decode(errors="replace") if ident else None,
        "caps": [b == 1 for b in room.raw[at : at + 5]],
        "is_host": bool(c["backend_buft_is_host"](c["backend_dev_buffer_type"](device))),
        "backend": c["backend_reg_name"](reg).decode(errors="replace"),
        "features": _features(ggml, reg),
    }


class Feature(ctypes.Structure):
    """`struct ggml_backend_feature`."""

    _fields_ = [("name", ctypes.c_char_p), ("value", ctypes.c_char_p)]


def _features(ggml: Ggml, reg: int) -> list[tuple[str, str]]:
    """Return the build options of a backend, such as the vector extensions that its CPU kernels use."""
    address = ggml.c["backend_reg_get_proc_address"](reg, b"ggml_backend_get_features")
    if not address:
        return []
    getter = ctypes.CFUNCTYPE(ctypes.POINTER(Feature), ctypes.c_void_p)(address)
    listed = getter(reg)
    texts = ((f.name.decode(), f.value.decode()) for f in itertools.takewhile(lambda f: f.name, listed))
    return list(texts)


def main(arguments: Sequence[str]) -> None:
    """Print the result of `probe` as JSON, or the reason why the library is incompatible."""
    parts, folder = [a for a in arguments if a != "--tables"], ""
    if "--load" in parts:
        folder = parts.pop()
        parts.remove("--load")
    try:
        ggml = load(parts, folder)
        answer = probe(ggml)
        if "--tables" in arguments:
            answer["tables"] = tables(ggml)
        if folder:
            answer["left_out"] = left_out(folder, [device["backend"] for device in answer["devices"]])
    except (OSError, Unfit) as error:
        answer = {"unfit": str(error)}
    print("\n" + json.dumps(answer), flush=True)
    os._exit(0)  # skips the library's destructors, which may hang or crash


if __name__ == "__main__":
    main(sys.argv[1:])
