"""`register_with_ggml`: what it refuses, what a program gets where something fails, and how it ends.

Each test is a process of its own, as ggml cannot be unloaded. Models are small and random.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import Context, DType
from ggmlb.backends.ggml import abi
from ggmlb.backends.ggml.find import libraries
from ggmlb.backends.ggml.library import GgmlLibrary, operands, probe
from ggmlb.backends.ggml.reader import CTensor, KnownGraphs, NodeRun, Reader
from ggmlb.core.tensor import Tensor
from ggmlb.runtime.alloc import alloc_ctx_tensors
from tests.support.foreign_models import write_foreign_model
from tests.support.processes import python
from tests.support.text_models import write_text_model

if find_spec("xllamacpp") is None:
    pytest.skip("xllamacpp is not installed", allow_module_level=True)

HEAD = """
import sys
from pathlib import Path
import ggmlb
from tests.support.llama_c_api import Llama
path, prompt = Path(sys.argv[1]), [1, 40, 41, 42, 43]
def refused(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except ggmlb.Error as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, whose file is named in the processes' arguments."""
    return write_text_model(tmp_path_factory.mktemp("model") / "llama.gguf", dtype="q8_0")


def run(code: str, *arguments: object, **variables: str) -> list[str]:
    """Return the lines that code prints, run behind `HEAD` in a process of its own."""
    done = python("-c", HEAD + code, *map(str, arguments), cwd=None, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_it_is_listed_computes_and_is_unregistered(model: Path) -> None:
    lines = run(
        """
alone = Llama(path, n_gpu_layers=0)
expected = alone.generate(prompt, 8)[0]
alone.close()
made = ggmlb.register_with_ggml("LLVM")
print(made)
with_device = Llama(path)
assert with_device.generate(prompt, 8)[0] == expected
assert made.n_graphs == 8
assert any("ggmlb-LLVM" in line for line in with_device.log)
print(refused(ggmlb.register_with_ggml, "LLVM", "xllamacpp"))
print(refused(made.unregister))
assert with_device.generate([5], 1, start=12)[0]  # nothing was freed
with_device.close()
made.unregister()
made.unregister()  # has no effect
print(made)
again = Llama(path)
assert again.generate(prompt, 8)[0] == expected and made.n_graphs == 9
again.close()
""",
        model,
        GGMLB_GGML_PATH="",
    )
    assert lines[0].startswith("<GgmlRegistration ggmlb-LLVM with ggml 0.")
    assert lines[1].startswith("RegistryError: register_with_ggml: LLVM is registered with ggml 0.")
    assert "buffers and 1 streams of it; free the models and contexts" in lines[2]
    assert lines[3].endswith("unregistered>")


def test_what_holds_no_library_is_refused(tmp_path: Path) -> None:
    for library in ("numpy", "/nowhere/libggml.so", tmp_path, __file__):
        with pytest.raises(ggmlb.BackendUnavailable, match=r"holds no ggml library; give.*xllamacpp"):
            ggmlb.register_with_ggml("CPU", library)
    with pytest.raises(ggmlb.ArgumentError, match="library"):
        ggmlb.register_with_ggml("CPU", 3)  # type: ignore[arg-type]
    with pytest.raises(ggmlb.RegistryError, match="CPUU"):
        ggmlb.register_with_ggml("CPUU", "xllamacpp")


def test_an_unknown_interface_version_is_refused_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    found = next(each for each in libraries() if each.origin.startswith("xllamacpp"))
    version = probe(found, "--tables")["tables"]["api_version"]
    assert version in abi.API_VERSIONS
    monkeypatch.setattr(abi, "API_VERSIONS", ())
    refused = (
        rf"has version {version} of the backend interface, which ggmlb .* ggml {abi.FOLLOWED}, which this"
    )
    with pytest.raises(abi.Unfit, match=refused):
        abi.tables(abi.Ggml(found.parts))


def test_an_error_is_a_failed_status_with_the_reason_in_the_log(model: Path) -> None:
    run(
        """
made = ggmlb.register_with_ggml("LLVM", "xllamacpp")
llama = Llama(path)
expected = llama.generate(prompt, 4)[0]
stream = next(iter(made._streams.values())).backend
kind, compute = type(stream), type(stream)._compute
def fails(self, plan):
    raise ggmlb.DeviceLostError("the card fell off the bus at 100%s")
kind._compute = fails
llama.clear()
assert llama.decode([prompt]) < 0
log = "".join(llama.log)
assert "ggmlb-LLVM: graph_compute failed: DeviceLostError: the card fell off the bus at 100%s" in log
kind._compute = compute
llama.clear()
assert llama.generate(prompt, 4)[0] == expected
llama.close()
made.unregister()
""",
        model,
    )


def test_where_memory_is_short_the_program_loads_nothing(model: Path) -> None:
    run(
        """
made = ggmlb.register_with_ggml("CPU", "xllamacpp", repack=False)
buft = type(made.device.buffer_type)
def alloc(self, nbytes):
    raise self.out_of_memory(nbytes)
kept, buft._alloc_buffer = buft._alloc_buffer, alloc
try:
    Llama(path, load_mode=0)
except RuntimeError as error:
    assert "unable to allocate" in str(error), error
else:
    raise AssertionError("it loaded")
assert not made._memories
buft._alloc_buffer = kept
Llama(path).close()
made.unregister()
""",
        model,
    )


@pytest.mark.parametrize(
    ("device", "of", "hook"),
    [
        ("LLVM", "device.buffer_type.alloc_buffer(1)", "_set_tensor"),
        ("LLVM", "device.buffer_type.alloc_buffer(1)", "_memset_tensor"),
        ("OpenCL0", "device.init_backend()", "_set_tensor_async"),
    ],
)
def test_a_failed_write_fails_what_would_read_it(model: Path, device: str, of: str, hook: str) -> None:
    if device not in [each.name for each in ggmlb.devices()]:
        pytest.skip(f"{device} is missing")
    run(
        f"""
device = ggmlb.register_with_ggml("{device}", "xllamacpp").device
kind = type({of})
def fails(*arguments):
    raise ggmlb.BackendError("no transfer")
kept, kind.{hook} = kind.{hook}, fails
llama = Llama(path, load_mode=0)
kind.{hook} = kept
assert llama.decode([prompt]) < 0
assert "graph_compute failed: a write to its memory failed: no transfer" in "".join(llama.log)
llama.close()
llama = Llama(path, load_mode=0)
assert llama.decode([prompt]) == 0
llama.close()
""",
        model,
    )


def test_weights_are_repacked_or_used_where_the_file_is_mapped(model: Path) -> None:
    run(
        """
tokens = []
for repack in (True, False):
    made = ggmlb.register_with_ggml("LLVM", "xllamacpp", repack=repack)
    llama = Llama(path, load_mode=1)
    held = [tensor.buffer for memory in made._memories.values() for tensor in memory.held.values()]
    assert any(buffer.buft in made.device.extra_bufts for buffer in held) == repack
    assert any(buffer.is_read_only for buffer in held) != repack  # the mapped file
    tokens.append(llama.generate(prompt, 8)[0])
    llama.close()
    assert not made._memories and all(buffer.is_freed for buffer in held)
    made.unregister()
assert tokens[0] == tokens[1]
""",
        model,
    )


def test_all_of_a_recurrent_model_is_computed_by_the_device(tmp_path: Path) -> None:
    """Convolutions' kernels stay plain, and states are copied from rows to lines."""
    run(
        """
made = ggmlb.register_with_ggml("LLVM", "xllamacpp")
for path in map(Path, sys.argv[1:]):
    llama = Llama(path)
    llama.generate(prompt, 3)
    runs = [run for stream in made._streams.values()
            for same in stream.known._graphs.values() for known in same for run in known.runs]
    assert runs and not any(run.by_cpu for run in runs)
    llama.close()
""",
        *(write_foreign_model(tmp_path / f"{arch}.gguf", arch, "q8_0") for arch in ("lfm2", "mamba2")),
    )


READERS: dict[str, tuple[tuple[int, ...], Callable[[Context, Tensor, Tensor, Tensor], Tensor]]] = {
    "mul_mat": ((32, 3), lambda c, w, x, ids: c.mul_mat(w, x)),
    "get_rows": ((1,), lambda c, w, x, ids: c.get_rows(w, c.reshape_1d(ids, 6))),
    "add": ((32, 32), lambda c, w, x, ids: c.add(x, w)),
    "add_id": ((32, 2, 3), lambda c, w, x, ids: c.add_id(x, w, ids)),
    "ssm_conv": ((35, 32, 2), lambda c, w, x, ids: c.ssm_conv(x, w)),
    "concat": ((32, 5), lambda c, w, x, ids: c.concat(x, w, 1)),
    "cpy": ((32, 32), lambda c, w, x, ids: c.cpy(x, w)),
}
"""Ne of `x`, and an op that reads or writes a weight `w`, of ne `[32, 32]`."""


@pytest.mark.parametrize(
    ("device", "dtype", "op"),
    [*(("LLVM", DType.F32, op) for op in READERS), ("OpenCL0", DType.Q8_0, "cpy")],
)
def test_the_cpu_computes_nodes_that_cannot_use_a_packed_weight(
    device: str, dtype: DType, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device not in [each.name for each in ggmlb.devices()]:
        pytest.skip(f"{device} is missing")
    owner: Any = ggmlb.device_by_name(device)
    packed = owner.extra_bufts[0] if owner.extra_bufts else owner.packed_buffer_type
    monkeypatch.setattr(type(owner), "extra_bufts", (packed,))  # OpenCL lists none on processors
    found = next(each for each in libraries() if each.origin.startswith("xllamacpp"))
    library, rng = GgmlLibrary(found, "ggml:", probe(found)), np.random.default_rng(0)
    shape, make = READERS[op]
    weights, ctx = Context(), Context()
    w, x = weights.new_tensor(dtype, (32, 32)), ctx.new_tensor(dtype, shape)
    ids = ctx.new_tensor(DType.I32, (2, 3))
    node = make(ctx, w, x, ids)
    values = {
        w: rng.standard_normal(w.shape),
        x: rng.standard_normal(x.shape),
        ids: rng.integers(0, 32, (3, 2)),
    }
    read = {s.view_src or s for s in node.sources}
    expected = ggmlb.evaluate(node, {t: array for t, array in values.items() if t in read}, "CPU")
    tensors = [w, x, ids, *(s for s in node.sources if s.view_src), node]
    memory = library.room(len(tensors))
    base, size = ctypes.addressof(memory), library.tensor_size
    address: dict[Tensor | None, int] = {t: base + i * size for i, t in enumerate(tensors)}
    for i, t in enumerate(tensors):
        links = (address.get(t.view_src, 0), t.view_offs, operands(t, address))
        library.pack(memory, i, t, (0, 0, 0), links)

    def place(c: CTensor, tensor: Tensor) -> None:
        placed = tensors[(c.address - base) // size]
        tensor.buffer, tensor.offset = placed.buffer, placed.offset

    with (
        alloc_ctx_tensors(weights, packed), alloc_ctx_tensors(ctx, owner.buffer_type),
        owner.init_backend() as stream, ggmlb.device_by_name("CPU").init_backend() as cpu,
    ):  # fmt: skip
        for tensor, array in values.items():
            tensor.set_array(array.astype(np.int32 if tensor is ids else np.float32))
        (run,), _ = Reader(library, owner, place).graph([address[node]])
        assert run.by_cpu == (op != "mul_mat")
        assert run.compute(stream, cpu if run.by_cpu else None) == ggmlb.Status.SUCCESS
        stream.synchronize()
        np.testing.assert_allclose(node.to_numpy(), expected, rtol=1e-5, atol=1e-5)


def test_a_graph_that_changes_each_time_displaces_no_other() -> None:
    counters = {0: ctypes.c_int64(), 1: ctypes.c_int64()}  # for C tensors
    n_read = 0

    def graph(addresses: list[int]) -> tuple[list[NodeRun], tuple[list[Any], ...]]:
        nonlocal n_read
        n_read += 1
        counter = counters[addresses[0]]
        return [], ([SimpleNamespace(address=ctypes.addressof(counter), raw=bytes(counter))],)

    known = KnownGraphs(SimpleNamespace(graph=graph))  # type: ignore[arg-type]
    steady, changing = (n.to_bytes(8, sys.byteorder) * 1000 for n in (0, 1))
    known.find(steady)
    for _ in range(200):
        counters[1].value += 1
        known.find(changing)
    known.find(changing)
    known.find(steady)
    assert n_read == 1 + 200


def test_programs_set_threads_and_abort(model: Path) -> None:
    run(
        """
import ctypes
made = ggmlb.register_with_ggml("LLVM", "xllamacpp")
llama = Llama(path, n_threads=1)
llama.generate(prompt, 2)
stream = next(iter(made._streams.values())).backend
assert stream.n_threads == 1
library = ctypes.CDLL(str(__import__("tests.support.llama_c_api", fromlist=["x"]).library_path()))
set_abort = library.llama_set_abort_callback
set_abort.argtypes = [ctypes.c_void_p] * 3
callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda data: data == 7)
set_abort(llama._context, ctypes.cast(callback, ctypes.c_void_p), 7)
llama.clear()
assert llama.decode([prompt]) == 2  # aborted
set_abort(llama._context, None, None)
llama.clear()
assert llama.decode([prompt]) == 0
llama.close()
""",
        model,
    )


def test_a_device_that_lacks_ops_computes_what_it_can(model: Path, tmp_path: Path) -> None:
    """A node whose result is in the device's memory is computed by the CPU, if the device declines it."""
    run(
        """
alone = Llama(path, n_gpu_layers=0)
expected = alone.generate(prompt, 6)[0]
alone.close()
device = ggmlb.device_by_name("OpenCL0" if "OpenCL0" in [d.name for d in ggmlb.devices()] else "LLVM")
kind, declines = type(device), type(device).declines
kind.declines = lambda self, op: declines(self, op) if op.op in self.few else "it has few ops"
device.few = {ggmlb.Op.MUL_MAT, ggmlb.Op.MUL, ggmlb.Op.VIEW, ggmlb.Op.RESHAPE, ggmlb.Op.NONE}
made = ggmlb.register_with_ggml(device, "xllamacpp")
llama = Llama(path)
assert llama.generate(prompt, 6)[0] == expected
runs = [run for stream in made._streams.values()
        for same in stream.known._graphs.values() for known in same for run in known.runs]
assert any(run.by_cpu for run in runs) and not all(run.by_cpu for run in runs)
llama.close()
made.unregister()
""",
        model,
    )


def test_other_threads_run_while_a_device_computes(model: Path) -> None:
    run(
        """
import sys, threading
sys.setswitchinterval(1000.0)  # a thread gets the GIL only where another one gives it up by itself
ggmlb.register_with_ggml("LLVM", "xllamacpp")
llama = Llama(path)
llama.generate(prompt, 2)
n, ends = 0, threading.Event()
def count():
    global n
    while not ends.wait(0.0001):
        n += 1
thread = threading.Thread(target=count)
thread.start()
try:
    for _ in range(50):  # on a busy machine the thread may get no core for a while
        llama.clear()
        llama.generate(prompt, 50)
        if n > 20:
            break
finally:
    ends.set()
    thread.join()
assert n > 20, n
llama.close()
""",
        model,
    )


def test_a_model_that_is_open_when_python_ends_is_left_alone(model: Path) -> None:
    lines = run(
        """
import builtins, os
ggmlb.register_with_ggml("LLVM", "xllamacpp")
llama = Llama(path)
llama.generate(prompt, 2)
class Late:
    def __del__(self, llama=llama, write=os.write):
        llama.close()
        write(1, b"closed late\\n")
builtins.late = Late()
print("end", flush=True)
""",
        model,
    )
    assert lines == ["end", "closed late"]


def test_an_environment_variable_registers_devices_at_import(model: Path) -> None:
    run(
        """
from ggmlb.backends.ggml import registration
assert [made.name for made in registration._registrations] == ["ggmlb-CPU", "ggmlb-LLVM"]
assert Llama(path).generate(prompt, 2)
assert [made.n_graphs for made in registration._registrations] == [2, 2]
""",
        model,
        GGMLB_REGISTER_WITH_GGML="CPU, LLVM",
        GGMLB_GGML_PATH=str(next(f.parts[0] for f in libraries() if f.origin.startswith("xllamacpp"))),
    )
    done = python("-c", "import ggmlb", GGMLB_REGISTER_WITH_GGML="Nothing0")
    assert "RegistryError" in done.stderr
    assert "Nothing0" in done.stderr


@pytest.mark.skipif(find_spec("ggml") is None, reason="ggml-python is not installed")
@pytest.mark.parametrize(
    ("imports", "works"), [("ggml", True), ("xllamacpp, ggml", True), ("ggml, xllamacpp", False)]
)
def test_two_libraries_of_one_process_keep_apart(model: Path, imports: str, works: bool) -> None:
    """ggml-python loads its functions for the whole process, also for libraries that are loaded later."""
    code = f"""
import {imports}
if {works}:
    ggmlb.register_with_ggml("LLVM", "xllamacpp")
    llama = Llama(path)
    llama.generate(prompt, 2)
    llama.close()
    ggmlb.device_by_name("ggml:CPU").init_backend().free()
else:
    said = refused(ggmlb.register_with_ggml, "LLVM", "xllamacpp")
    assert said.startswith("BackendBroken") and "another ggml was loaded for the whole process" in said, said
    assert "another ggml" in refused(ggmlb.device_by_name("ggml:CPU").init_backend)
"""
    run(code, model)
