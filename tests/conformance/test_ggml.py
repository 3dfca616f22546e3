"""The devices of compiled ggml libraries: what is found, trusted and refused, and what streams share."""

from __future__ import annotations

import ast
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Timer
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import (
    BackendError,
    BackendUnavailable,
    Context,
    DType,
    Graph,
    Op,
    Scheduler,
    Status,
    Tensor,
    UnsupportedOpError,
    alloc_ctx_tensors,
)
from ggmlb.backends.ggml import GgmlReg, abi, find, library, trust
from ggmlb.backends.ggml.library import probe
from ggmlb.backends.ggml.trust import Judge, kind, trial_of
from tests.conformance.test_gpu_bad_indices import PROGRAMS, Placed
from tests.support.gpus import GGML, device_fixture

device = device_fixture(GGML)


@pytest.fixture
def stream(device: Any) -> Any:
    with device.init_backend({"n_threads": 1}) as backend:
        yield backend


# -- libraries -------------------------------------------------------------------------------------


def test_a_listing_loads_no_library(device: Any) -> None:
    code = (
        "import ggmlb; print([d.name for d in ggmlb.devices() if d.name.startswith('ggml')]);"
        "print(ggmlb.device_by_name('ggml:CPU').library.is_loaded)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [str([d.name for d in device.reg.devices]), "False"]


def test_features_tell_builds_apart(device: Any) -> None:
    """Each library's build options, and no library loaded for them."""
    code = (
        "import ggmlb; reg = ggmlb.reg_by_name('ggml'); told = reg.get_proc_address('get_features')(reg);"
        "print(dict(told)); print(any(d.library.is_loaded for d in reg.devices))"
    )
    told, loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    features = ast.literal_eval(told)
    assert loaded == "False"
    for one in device.reg.devices:
        own = {name: value for name, value in features.items() if name.startswith(one.library.prefix)}
        assert own == {one.library.prefix + name: value for name, value in one.features}
        parts = abi.load(one.library.found.parts, one.library.found.folder).parts
        has = [f for part in parts if (f := getattr(part, "ggml_cpu_has_avx2", None)) is not None]
        assert [str(f()) for f in has] in ([], [own.get(f"{one.library.prefix}CPU_AVX2", "0")])


def test_files_that_are_no_library_are_told(device: Any, tmp_path: Path, monkeypatch: Any) -> None:
    text, missing = tmp_path / "ggml.txt", tmp_path / "none.so"
    text.write_text("ggml_backend_dev_count\0")
    monkeypatch.setenv("GGMLB_GGML_PATH", f"{text}:{missing}")
    reg = GgmlReg()
    assert [d.name for d in reg.devices] == [d.name for d in device.reg.devices]
    (first, why), (second, also) = reg.unusable
    assert str(text) in first and str(missing) in second
    assert "ggml.txt" in why and "none.so" in also


def test_without_a_library_it_says_what_to_install(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(find, "PACKAGES", ())
    monkeypatch.setattr(find, "_of_system", lambda: ())
    with pytest.raises(BackendUnavailable, match=r"pip install 'ggmlb\[ggml\]'.*GGMLB_GGML_PATH"):
        _ = GgmlReg().devices


def test_a_folder_of_parts_is_a_library(tmp_path: Path) -> None:
    for name in ("libggml-base.so.0", "libggml-cpu-haswell.so", "libggml.vulkan.v0.5.0.so", "libllama.so"):
        (tmp_path / name).touch()
    found = find.at(tmp_path)
    assert found is not None and found.folder == str(tmp_path)
    assert [Path(part).name for part in found.parts] == ["libggml-base.so.0", "libggml.vulkan.v0.5.0.so"]
    assert find.at(tmp_path / "libggml.vulkan.v0.5.0.so", found.origin) == found
    assert find.at(tmp_path / "libllama.so") is None


def test_a_backend_that_cannot_be_loaded_is_told(device: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """As ggml's for CUDA where there is no driver, or its libraries are missing."""
    (tmp_path / "libggml-cuda.so").write_text("no library")
    (tmp_path / "libggml-vulkan.so").touch()
    found = abi.left_out(str(tmp_path), ["CPU", "Vulkan"])
    assert list(found) == ["libggml-cuda.so"] and "libggml-cuda.so" in found["libggml-cuda.so"]
    facts = {**device.library.facts, "left_out": found}
    monkeypatch.setattr("ggmlb.backends.ggml.library.probe", lambda _: facts)
    reg = GgmlReg()
    assert [d.name for d in reg.devices] == [d.name for d in device.reg.devices]
    name, why = reg.unusable[0]
    assert name.startswith("libggml-cuda.so of ") and why == found["libggml-cuda.so"]


def test_a_library_of_the_system_is_found(tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("libggml-base.so.0", "libggml.so.0"):
        (tmp_path / name).touch()
    monkeypatch.setenv("DYLD_LIBRARY_PATH" if sys.platform == "darwin" else "LD_LIBRARY_PATH", str(tmp_path))
    assert f"the system's {tmp_path}" in [found.origin for found in find.libraries()]


def test_another_layout_is_refused_with_the_version(device: Any, monkeypatch: Any) -> None:
    facts = {**device.library.facts, "tensor": {**device.library.facts["tensor"], "view_src": 240}}

    def run(*_: Any, **__: Any) -> Any:
        return subprocess.CompletedProcess([], 0, f"noise\n{abi.json.dumps(facts)}\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(BackendUnavailable, match=rf"ggml {device.library.version} has GGML_MAX_SRC 11"):
        probe(device.library.found)


def test_a_library_that_ends_the_process_is_refused(device: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(abi, "__file__", str(Path(__file__).parents[1] / "support/abort.py"))
    with pytest.raises(BackendUnavailable, match=r"ended the process .* status -6: an assertion"):
        probe(device.library.found)


# -- indices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_index_out_of_range_is_an_error(stream: Any, name: str) -> None:
    """At which ggml ends the process, or reads and writes other memory."""
    placed = Placed(PROGRAMS[name](), stream)
    if why := [why for node in placed.graph.nodes if (why := stream.device.declines(node))]:
        pytest.skip(why[0])
    plan, n = stream.graph_plan_create(placed.graph), placed.n
    for bad in (n, -1, -(1 << 31), (1 << 31) - 1, *((1 << 40,) if placed.ids.dtype is DType.I64 else ())):
        placed.put_ids(bad)
        before = placed.whole.get()
        with pytest.raises(BackendError, match=rf"{placed.y.op}.*row number {bad} for a tensor of {n} rows"):
            stream.graph_plan_compute(plan)
        np.testing.assert_array_equal(placed.whole.get(), before)
    placed.put_ids()
    assert stream.graph_plan_compute(plan) is Status.SUCCESS


def test_indices_that_the_graph_computes_are_not_asked_for_before(stream: Any) -> None:
    ctx = Context()
    scores, rows = ctx.new_tensor("f32", (5,)), ctx.new_tensor("f32", (8, 5))
    y = ctx.get_rows(rows, ctx.argsort(scores))
    with alloc_ctx_tensors(ctx, stream) as buffer:
        buffer.clear(0xFF)
        scores.set_array(np.arange(5))
        rows.set_array(np.arange(40).reshape(5, 8))
        stream.graph_compute(Graph().build_forward_expand(y))
        np.testing.assert_array_equal(y.to_numpy()[:, 0], [0, 8, 16, 24, 32])


@pytest.mark.parametrize("n_bad", [0, 1])
def test_an_index_that_the_graph_computes_is_checked(stream: Any, n_bad: int) -> None:
    """The graph is computed in two parts; what one node reads in each is not fused away."""
    ctx = Context()
    wanted, rows = ctx.new_tensor("f32", (3,)), ctx.new_tensor("f32", (8, 5))
    scaled = ctx.scale(rows, 2.0)
    y = ctx.get_rows(scaled, ctx.cast(ctx.scale(wanted, 1.0), "i32"))
    z = ctx.add(y, ctx.get_rows(scaled, ctx.argsort(wanted)))
    graph = Graph().build_forward_expand(z)
    if why := [why for node in graph.nodes if (why := stream.device.declines(node))]:
        pytest.skip(why[0])
    with alloc_ctx_tensors(ctx, stream):
        wanted.set_array(np.array([4.0, 2.0, 5.0 if n_bad else 0.0]))
        rows.set_array(np.arange(40).reshape(5, 8))
        plan = stream.graph_plan_create(graph)
        assert len(plan.parts) == 2
        if n_bad:
            with pytest.raises(BackendError, match=r"GET_ROWS.*row number 5 for a tensor of 5 rows"):
                stream.graph_plan_compute(plan)
            return
        stream.graph_plan_compute(plan)
        np.testing.assert_array_equal(z.to_numpy()[:, 0], [64 + 32, 32 + 16, 0 + 0])


# -- parameters ------------------------------------------------------------------------------------

WIDE: dict[str, Callable[[Context, Tensor, Tensor], Tensor]] = {
    "freq_scale": lambda c, x, i: c.rope(x, i, 8, 0),
    "freq_base": lambda c, x, i: c.rope(x, i, 8, 0),
    "scale": lambda c, x, i: c.scale(x, 1.0),
    "max": lambda c, x, i: c.clamp(x, -1.0, 1.0),
    "eps": lambda c, x, i: c.norm(x, 1e-5),
}


@pytest.mark.parametrize("name", WIDE)
def test_a_parameter_beyond_32_bits_is_declined_by_name(stream: Any, name: str) -> None:
    ctx = Context()
    y = WIDE[name](ctx, ctx.new_tensor("f32", (8, 2, 3)), ctx.new_tensor("i32", (3,)))
    y.params[name] = 1e300
    assert f"has 32 bits; {name} = " in stream.device.declines(y)
    assert stream.device.offload_op(y) is False
    with alloc_ctx_tensors(ctx, stream), pytest.raises(UnsupportedOpError, match=f"{name} = "):
        stream.graph_compute(Graph().build_forward_expand(y))


# -- trust -----------------------------------------------------------------------------------------


def mixed_add() -> Tensor:
    """ADD of f32 and f16, to which ggml's CPU says yes, and then ends the process."""
    ctx = Context()
    return ctx.add(ctx.new_tensor("f32", (8, 3)), ctx.new_tensor("f16", (8, 3)))


def test_what_ends_the_process_is_declined(device: Any) -> None:
    assert device.ask("backend_dev_supports_op", mixed_add())
    why = device.declines(mixed_add())
    assert why is not None and "ended the process" in why and "unsupported types" in why


def test_other_values_are_declined(device: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Where the library means another op by a number, as after a change of ggml's."""
    monkeypatch.setenv("GGMLB_CACHE_DIR", str(tmp_path))
    ctx = Context()
    node = ctx.sqr(ctx.new_tensor("f32", (8, 3)))
    judge = Judge()
    assert judge.verdict(device, node) is None
    judge.close()
    monkeypatch.setitem(device.library.facts["ops"], "SQR", device.library.ops[Op.SQRT])
    assert judge.verdict(device, node) is None  # it knows that kind
    monkeypatch.setenv("GGMLB_CACHE_DIR", str(tmp_path / "other"))
    judge = Judge()
    why = judge.verdict(device, node)
    judge.close()
    assert why is not None and "other values than the CPU" in why


def test_verdicts_are_kept(device: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("GGMLB_CACHE_DIR", str(tmp_path))
    first, second = Judge(), Judge()
    assert first.verdict(device, mixed_add()) is not None
    first.close()
    monkeypatch.setattr(Judge, "_try", None)
    assert second.verdict(device, mixed_add()) == first.verdict(device, mixed_add())


def endless() -> Tensor:
    """A pool that ggml computes in minutes: it visits all of a window that is nearly nothing but padding."""
    ctx, k = Context(), 1 << 30
    return ctx.pool_2d(ctx.new_tensor("f32", (4, 128)), "avg", k, k, k, k, k // 2, k // 2)


@pytest.mark.skipif(os.name != "posix", reason="limits and signals are POSIX's")
def test_a_trial_that_spins_is_ended_and_its_verdict_kept(
    device: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("GGMLB_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(trust, "CPU_LIMIT_S", 1)
    first, second = Judge(), Judge()
    why = first.verdict(device, endless())
    assert why is not None and "did not end" in why
    assert first.verdict(device, Context().sqr(Context().new_tensor("f32", (8, 3)))) is None  # it goes on
    first.close()
    monkeypatch.setattr(Judge, "_try", None)
    assert second.verdict(device, endless()) == why


@pytest.mark.skipif(os.name != "posix", reason="limits and signals are POSIX's")
def test_the_answer_to_an_interrupted_trial_is_not_taken_for_the_next_ones(
    device: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("GGMLB_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(trust, "CPU_LIMIT_S", 60)  # of all threads; far later than the interrupt
    judge, ctx = Judge(), Context()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
    Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        judge.verdict(device, endless())
    signal.signal(signal.SIGINT, before)
    assert judge.verdict(device, ctx.sqr(ctx.new_tensor("f32", (8, 3)))) is None
    judge.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_no_trial_is_left_when_the_process_is_killed(device: Any, tmp_path: Path) -> None:
    code = "from ggmlb import device_by_name; from tests.conformance.test_ggml import endless\n"
    code += "device_by_name('ggml:CPU').declines(endless())"
    env = {**os.environ, "GGMLB_CACHE_DIR": str(tmp_path)}
    user = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2], env=env)

    def seconds() -> list[float]:
        """The processor time of each process that runs trials for it."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (
                    str(tmp_path).encode() in (process / "environ").read_bytes()
                    and int(process.name) != user.pid
                ):
                    times = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
                    found.append(sum(map(int, times)) / os.sysconf("SC_CLK_TCK"))
        return found

    def until(condition: Callable[[], bool]) -> bool:
        end = monotonic() + 60
        while not (found := condition()) and monotonic() < end:
            sleep(0.05)
        return found

    try:  # one that waits, and one that computes
        assert until(lambda: len(times := seconds()) == 2 and max(times) > 1)
    finally:
        user.kill()
        user.wait()
    assert until(lambda: not seconds())


def test_kinds_are_of_types_and_layouts() -> None:
    def product(k: int, n: int, m: int, dtype: str = "q4_0", transposed: bool = False) -> str:
        ctx = Context()
        w, x = ctx.new_tensor(dtype, (k, n)), ctx.new_tensor("f32", (m, k) if transposed else (k, m))
        return kind(trial_of(ctx.mul_mat(w, ctx.transpose(x) if transposed else x), ""))

    assert product(256, 256, 32) == product(4096, 11008, 512)
    others = {product(256, 256, 1), product(256, 256, 32, "q8_0"), product(256, 256, 32, transposed=True)}
    assert len(others | {product(256, 256, 32)}) == 4


def test_large_nodes_are_tried_smaller_where_their_extents_allow(
    device: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("GGMLB_CACHE_DIR", str(tmp_path))  # which has no verdicts of smaller ones
    ctx = Context()
    x, wide = ctx.new_tensor("f32", (4096, 128)), ctx.new_tensor("f32", (2048, 300))
    judge = Judge()
    for node in (
        ctx.swiglu(x), ctx.cont_2d(x, 2048, 256), ctx.cpy(x, ctx.new_tensor("f16", (1024, 512))),
        ctx.cpy(wide, ctx.new_tensor("f16", (2048, 300))), ctx.rms_norm(wide, 1e-5),
    ):  # fmt: skip
        assert judge.verdict(device, node) is None, node
    judge.close()


def test_strides_of_dimensions_of_one_element_are_tried(device: Any) -> None:
    """Where ggml asserts them, the process would end."""
    ctx = Context()
    column = ctx.permute(ctx.new_tensor("f16", (4, 1, 1, 3)), 1, 0, 3, 2)
    assert column.ne == (1, 4, 3, 1)
    assert column.nb == (8, 2, 8, 8)
    assert "sizeof(dst_t)" in device.declines(ctx.elu_inplace(column))


# -- streams ---------------------------------------------------------------------------------------


def test_nothing_is_copied_between_it_and_the_cpu(stream: Any) -> None:
    """Every other node is one that it declines."""
    ctx = Context()
    x, half = (ctx.set_input(ctx.new_tensor(dtype, (64, 4))) for dtype in ("f32", "f16"))
    steps = [x]
    for i in range(8):
        steps.append(ctx.add(steps[-1], half) if i % 2 else ctx.rms_norm(steps[-1], 1e-5))
    graph = Graph().build_forward_expand(steps[-1])
    with ggmlb.init_by_name("CPU") as cpu, Scheduler([stream, cpu]) as scheduler:
        scheduler.alloc_graph(graph)
        half.set_array(np.full((4, 64), 0.5))
        x.set_array(np.random.default_rng(0).standard_normal((4, 64)))
        scheduler.graph_compute(graph)
        assert scheduler.n_splits == 8
        assert not any(split.inputs for split in scheduler.splits)
        found = steps[-1].to_numpy().copy()
    with ggmlb.init_by_name("CPU") as cpu, Scheduler([cpu]) as scheduler:
        scheduler.alloc_graph(graph)
        half.set_array(np.full((4, 64), 0.5))
        x.set_array(np.random.default_rng(0).standard_normal((4, 64)))
        scheduler.graph_compute(graph)
        np.testing.assert_allclose(found, steps[-1].to_numpy(), rtol=1e-5, atol=1e-6)


def test_an_error_of_an_abort_callback_is_raised(stream: Any) -> None:
    ctx = Context()
    y = ctx.silu(ctx.new_tensor("f32", (8, 3)))
    graph = Graph().build_forward_expand(y)
    with ggmlb.alloc_ctx_tensors(ctx, stream):

        def fail() -> bool:
            raise ZeroDivisionError("in the callback")

        stream.abort_callback = fail
        with pytest.raises(ZeroDivisionError, match="in the callback"):
            stream.graph_compute(graph)
        stream.abort_callback = None
        assert stream.graph_compute(graph) is Status.SUCCESS


def test_threads_are_set(device: Any, stream: Any) -> None:
    assert stream.n_threads == 1
    device.reg.get_proc_address("set_n_threads")(stream, 2)
    assert stream.n_threads == 2
    ctx = Context()
    y = ctx.mul_mat(w := ctx.new_tensor("f32", (64, 96)), x := ctx.new_tensor("f32", (64, 33)))
    with ggmlb.alloc_ctx_tensors(ctx, stream):
        w.set_array(np.full((96, 64), 0.5))
        x.set_array(np.full((33, 64), 2.0))
        stream.graph_compute(Graph().build_forward_expand(y))
        assert (y.to_numpy() == 64).all()


def test_its_log_goes_to_logging(device: Any, caplog: pytest.LogCaptureFixture) -> None:
    """In lines with levels, of which ggml gives pieces."""
    device.library.load()
    with caplog.at_level(logging.DEBUG, "ggmlb.ggml"):
        for level, text in ((3, b"one "), (5, b"line\n"), (4, b"another\n")):
            library._forward_log(level, text, None)
    assert caplog.record_tuples == [
        ("ggmlb.ggml", logging.WARNING, "one line"),
        ("ggmlb.ggml", logging.ERROR, "another"),
    ]


def test_results_that_are_read_elsewhere_are_not_fused_away(stream: Any) -> None:
    """Ggml fuses a norm with the product behind it; the user placed the norm, and reads it."""
    ctx = Context()
    x, w = ctx.new_tensor("f32", (64, 4)), ctx.new_tensor("f32", (64,))
    norm = ctx.rms_norm(x, 1e-5)
    y = ctx.mul(norm, w)
    with ggmlb.alloc_ctx_tensors(ctx, stream) as buffer:
        buffer.clear(0xFF)
        x.set_array(np.ones((4, 64)))
        w.set_array(np.full(64, 2.0))
        stream.graph_compute(Graph().build_forward_expand(y))
        np.testing.assert_allclose(norm.to_numpy(), 1, rtol=1e-4)
        np.testing.assert_allclose(y.to_numpy(), 2, rtol=1e-4)


def test_leafs_among_the_nodes_are_no_work(stream: Any) -> None:
    """Ggml counts parameters among a graph's nodes, and tensors that nothing computes among its leafs."""
    ctx = Context()
    x = ctx.set_param(ctx.new_tensor("f32", (8, 3)))
    unread, y = ctx.new_tensor("f32", (4,)), ctx.sqr(x)
    with ggmlb.alloc_ctx_tensors(ctx, stream):
        x.set_array(np.full((3, 8), 3.0))
        assert stream.graph_compute(Graph([unread, y], [x])) is Status.SUCCESS
        assert (y.to_numpy() == 9).all()
