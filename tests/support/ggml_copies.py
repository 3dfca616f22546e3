"""How often ggml's own scheduler copies in the programs of `split_programs`: ggml-python with fake backends.

The CPU backends of ggml share one type of memory, so between them nothing is ever copied. These backends
are made here, of ggml's structs of functions (ggml-backend-impl.h, version 0.15): each device has memory
of its own, runs what its recipe says, computes nothing, and notes each tensor that is copied to it.

    python -m tests.support.ggml_copies --write    the recorded table, anew

It needs ggml-python (`pip install 'ggmlb[oracle]'`). A request on a view is not passed on to ggml, which
would have the view read on the asked device, without the copy that it needs; in ggmlb a view lies where its
source does. Of programs that write into earlier results it also notes how many writes ggml loses: those of
nodes that it gives to a backend which cannot use the memory of the backend that holds what they write to.
(Where its allocator lets that result share memory of the host, such a write may arrive all the same.)
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, c_bool, c_int, c_size_t, c_uint8, c_void_p
from pathlib import Path
from typing import Any

from ggml import ggml

from tests.support.split_programs import N_ROWS, WIDTH, Recipe, build, recipe

TABLE = Path(__file__).parents[1] / "sched" / "ggml_copies.json"
N_PROGRAMS, N_WRITING = 200, 300

VIEWS = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")
TYPE_CPU, TYPE_GPU = 0, 1
USAGE_ANY, USAGE_WEIGHTS = 0, 1
CONTEXT_NBYTES = 1 << 20
GRAPH_SIZE = 1024

Tensor = POINTER(ggml.ggml_tensor)
Get = CFUNCTYPE(c_void_p, c_void_p)
Transfer = CFUNCTYPE(None, c_void_p, Tensor, c_void_p, c_size_t, c_size_t)


def slots(*fields: tuple[str, Any]) -> type[ctypes.Structure]:
    """A struct of functions; those that no one calls are plain pointers, and stay null."""

    class Slots(ctypes.Structure):
        _fields_ = fields

    return Slots


def unused(*names: str) -> list[tuple[str, Any]]:
    return [(name, c_void_p) for name in names]


BufferTypeStruct = slots(
    ("get_name", Get),
    ("alloc_buffer", CFUNCTYPE(c_void_p, c_void_p, c_size_t)),
    ("get_alignment", CFUNCTYPE(c_size_t, c_void_p)),
    *unused("get_max_size", "get_alloc_size"),
    ("is_host", CFUNCTYPE(c_bool, c_void_p)),
    *unused("device", "context"),
)
BufferFunctions = slots(
    ("free_buffer", CFUNCTYPE(None, c_void_p)),
    ("get_base", Get),
    *unused("init_tensor", "memset_tensor"),
    ("set_tensor", Transfer),
    ("get_tensor", Transfer),
    *unused("set_tensor_2d", "get_tensor_2d"),
    ("cpy_tensor", CFUNCTYPE(c_bool, c_void_p, Tensor, Tensor)),
    ("clear", CFUNCTYPE(None, c_void_p, c_uint8)),
    *unused("reset"),
)
BackendStruct = slots(
    *unused("guid"),
    ("get_name", Get),
    ("free", CFUNCTYPE(None, c_void_p)),
    *unused("set_tensor_async", "get_tensor_async", "set_tensor_2d_async", "get_tensor_2d_async"),
    ("cpy_tensor_async", CFUNCTYPE(c_bool, c_void_p, c_void_p, Tensor, Tensor)),
    *unused("synchronize", "plan_create", "plan_free", "plan_update", "plan_compute"),
    ("graph_compute", CFUNCTYPE(c_int, c_void_p, c_void_p)),
    *unused("event_record", "event_wait", "graph_optimize", "device", "context"),
)
DeviceStruct = slots(
    ("get_name", Get),
    *unused("get_description", "get_memory"),
    ("get_type", CFUNCTYPE(c_int, c_void_p)),
    *unused("get_props", "init_backend"),
    ("get_buffer_type", Get),
    *unused("get_host_buffer_type", "buffer_from_host_ptr"),
    ("supports_op", CFUNCTYPE(c_bool, c_void_p, Tensor)),
    ("supports_buft", CFUNCTYPE(c_bool, c_void_p, c_void_p)),
    ("offload_op", CFUNCTYPE(c_bool, c_void_p, Tensor)),
    *unused("event_new", "event_free", "event_synchronize", "reg", "context"),
)

# Declared anew: the package's own answer is cut to 32 bits.
get_backend = ggml.lib.ggml_backend_sched_get_tensor_backend
get_backend.restype = c_void_p
get_backend.argtypes = [c_void_p, Tensor]
buffer_init = ggml.lib.ggml_backend_buffer_init
buffer_init.restype = c_void_p
buffer_init.argtypes = [c_void_p, BufferFunctions, c_void_p, c_size_t]


class Copies(list[str]):
    """The names of the tensors that were copied, while `counting`."""

    counting = False

    def note(self, tensor: Any) -> None:
        if self.counting:
            self.append(tensor.contents.name.decode())


class FakeDevice:
    """A device of ggml's, with memory of its own.

    Args:
        name: Its name.
        copies: Where it notes what is copied.
        declined: The ops that it does not run.
        bufts: The addresses of other buffer types that it uses in place.
        is_host: Whether its memory is the host's, as a CPU's.

    Attributes:
        buft: The address of its buffer type.
    """

    def __init__(
        self,
        name: str,
        copies: Copies,
        *,
        declined: Sequence[str] = (),
        bufts: Sequence[int] = (),
        is_host: bool = False,
    ) -> None:
        self._name, self._copies = ctypes.create_string_buffer(name.encode()), copies
        self._memory: dict[int, Any] = {}
        self._backends: list[Any] = []
        self._buft = BufferTypeStruct()
        self._device = DeviceStruct()
        self._functions = BufferFunctions()
        self.buft, self.address = ctypes.addressof(self._buft), ctypes.addressof(self._device)
        _fill(
            self._buft,
            get_name=lambda _: ctypes.addressof(self._name),
            alloc_buffer=self._alloc,
            get_alignment=lambda _: 256,
            is_host=lambda _: is_host,
            device=self.address,
        )
        _fill(
            self._functions,
            free_buffer=lambda _: None,
            get_base=lambda buffer: self._memory[buffer][1],
            set_tensor=lambda _, tensor, data, offset, size: copies.note(tensor),
            get_tensor=lambda _, tensor, data, offset, size: copies.note(tensor),
            cpy_tensor=self._copy,
            clear=lambda buffer, value: None,
        )
        _fill(
            self._device,
            get_name=lambda _: ctypes.addressof(self._name),
            get_type=lambda _: TYPE_CPU if is_host else TYPE_GPU,
            get_buffer_type=lambda _: self.buft,
            supports_op=lambda _, op: _op(op) not in declined,
            supports_buft=lambda _, buft: buft == self.buft or buft in bufts,
            offload_op=lambda _, op: _op(op) == "MUL_MAT",
        )

    def backend(self) -> int:
        """Open a stream; its address."""
        struct = BackendStruct()
        _fill(
            struct,
            get_name=lambda _: ctypes.addressof(self._name),
            free=lambda _: None,
            cpy_tensor_async=lambda a, b, src, dst: self._copy(b, src, dst),
            graph_compute=lambda backend, graph: 0,
            device=self.address,
        )
        self._backends.append(struct)
        return ctypes.addressof(struct)

    def _copy(self, _: int, src: Any, dst: Any) -> bool:
        self._copies.note(src)
        return True

    def _alloc(self, buft: int, nbytes: int) -> int:
        memory = ctypes.create_string_buffer(nbytes + 256)
        buffer: int = buffer_init(buft, self._functions, None, nbytes)
        self._memory[buffer] = memory, (ctypes.addressof(memory) + 255) & ~255
        return buffer


def _fill(struct: ctypes.Structure, **values: Any) -> None:
    kinds: dict[str, Any] = {field[0]: field[1] for field in struct._fields_}
    for name, value in values.items():
        setattr(struct, name, kinds[name](value))


def _op(tensor: Any) -> str:
    name: bytes = ggml.ggml_op_name(tensor.contents.op)
    return name.decode()


class Context:
    """ggml's functions as methods, like those of ggmlb's contexts."""

    def __init__(self) -> None:
        params = ggml.ggml_init_params(mem_size=CONTEXT_NBYTES, mem_buffer=None, no_alloc=True)
        self.address = ggml.ggml_init(params)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(ggml, f"ggml_{name}")
        return lambda *args: function(self.address, *args)


def count(recipe: Recipe) -> tuple[int, list[str], int]:
    """Return ggml's number of splits of a program, the tensors that it copies, and its lost writes."""
    copies = Copies()
    host = FakeDevice("CPU", copies, is_host=True)
    devices = [
        FakeDevice(f"Fake{i}", copies, declined=ops, bufts=[host.buft] if i in recipe.reads_host else ())
        for i, ops in enumerate(recipe.declined)
    ]
    devices_of = [*(devices[d] for d in recipe.streams), host]
    backends = [device.backend() for device in devices_of]

    weights = []
    contexts = [Context()]
    for i, (on, as_weight) in enumerate(recipe.weights):
        own = Context()
        contexts.append(own)
        pair = (
            own.new_tensor_2d(ggml.GGML_TYPE_F32, WIDTH, WIDTH),
            own.new_tensor_1d(ggml.GGML_TYPE_F32, WIDTH),
        )
        for tensor, letter in zip(pair, "wv", strict=True):
            ggml.ggml_set_name(tensor, f"{letter}{i}".encode())
        buffer = ggml.ggml_backend_alloc_ctx_tensors_from_buft(own.address, devices_of[on].buft)
        ggml.ggml_backend_buffer_set_usage(buffer, USAGE_WEIGHTS if as_weight else USAGE_ANY)
        weights.append(pair)
    c = contexts[0]
    inputs = [c.new_tensor_2d(ggml.GGML_TYPE_F32, WIDTH, N_ROWS) for _ in range(recipe.n_inputs)]
    ids = c.new_tensor_1d(ggml.GGML_TYPE_I32, N_ROWS)
    for tensor in (*inputs, ids):
        ggml.ggml_set_input(tensor)
    made, roots = build(recipe, c, weights, inputs, ids)
    graph = ggml.ggml_new_graph_custom(c.address, GRAPH_SIZE, False)
    for i, tensor in enumerate(made):
        ggml.ggml_set_name(tensor, f"n{i}".encode())
    for tensor in roots:
        ggml.ggml_build_forward_expand(graph, tensor)
    array = (c_void_p * len(backends))(*backends)
    sched = ggml.ggml_backend_sched_new(array, None, len(backends), GRAPH_SIZE, False, recipe.op_offload)
    for i, backend in recipe.requests:
        if _op(made[i]) in VIEWS:
            continue
        ggml.ggml_backend_sched_set_tensor_backend(sched, made[i], backends[backend])
    if not ggml.ggml_backend_sched_alloc_graph(sched, graph):
        raise RuntimeError("ggml could not allocate the program")
    copies.counting = True
    ggml.ggml_backend_sched_graph_compute(sched, graph)
    copies.counting = False
    n_splits = ggml.ggml_backend_sched_get_n_splits(sched)
    n_lost = sum(
        _is_lost(sched, ggml.ggml_graph_node(graph, i)) for i in range(ggml.ggml_graph_n_nodes(graph))
    )
    ggml.ggml_backend_sched_free(sched)
    for context in contexts:
        ggml.ggml_free(context.address)
    return n_splits, copies, n_lost


def _is_lost(sched: Any, node: Any) -> bool:
    base = node.contents.view_src
    if not base or _op(node) in VIEWS:
        return False
    memory = ggml.ggml_backend_get_default_buffer_type(get_backend(sched, base))
    return not ggml.ggml_backend_supports_buft(get_backend(sched, node), memory)


def table() -> dict[str, Any]:
    """Count over the first programs of each kind."""
    return {
        "note": "What ggml's scheduler makes of the programs of tests/support/split_programs.py. "
        "By seed: the recipe's digest, splits, copies, lost writes. "
        "Made by tests/support/ggml_copies.py --write.",
        "ggml": ggml.ggml_version().decode(),
        "programs": {str(seed): _row(recipe(seed)) for seed in range(N_PROGRAMS)},
        "writing": {str(seed): _row(recipe(seed, writes=True)) for seed in range(N_WRITING)},
    }


def _row(drawn: Recipe) -> list[str | int]:
    n_splits, copies, n_lost = count(drawn)
    return [drawn.digest, n_splits, len(copies), n_lost]


def _text(value: Any, indent: str = "") -> str:
    """JSON with a line for each program."""
    if not isinstance(value, dict):
        return json.dumps(value)
    lines = ",\n".join(f"{indent}  {json.dumps(k)}: {_text(v, indent + '  ')}" for k, v in value.items())
    return f"{{\n{lines}\n{indent}}}"


def main() -> None:
    """Print the table, or write it where the tests read it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    text = _text(table()) + "\n"
    if parser.parse_args().write:
        TABLE.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
