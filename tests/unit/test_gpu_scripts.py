"""What runs unattended on a machine with a card runs from end to end on the played CuPy."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.support.processes import python

ROOT = Path(__file__).parents[2]
PLAYED = f"{ROOT / 'tests/support/played'}{os.pathsep}{ROOT}"


def run(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    return python(str(ROOT / script), *args, PYTHONPATH=PLAYED)


def test_the_tests_of_a_card_run_and_what_fails_or_ends_its_process_is_told(tmp_path: Path) -> None:
    program = tmp_path / "test_some.py"
    program.write_text(
        "import os, pytest\npytestmark = pytest.mark.gpu\n"
        "def test_first(): pytest.fail('why' + 9000 * 'x')\n"
        "def test_second(): os._exit(1)\n"
        "def test_third(): pass\n"
    )
    chosen = "test_some or (test_cuda_graphs and not all_other_steps) or test_cuda_reuse or test_gpu_streams"
    chosen += " or direct_copies or is_captured[llama] or graphs_are_updated"
    done = run("scripts/test_gpu.py", "-k", chosen, str(program))
    assert done.returncode == 1
    assert re.search(r"^CUDA0: Host .*, 0000:00:00.0$", done.stdout, re.M)
    assert re.search(r"^FAILED .*test_first$", done.stdout, re.M)
    assert re.search(r"^FAILED .*test_second \(its process ended", done.stdout, re.M)
    assert "why" in done.stdout
    assert "characters ...]" in done.stdout
    told = re.search(r"^(\d+) passed, 2 failed, \d+ skipped in \d+ s$", done.stdout, re.M)
    assert told, done.stdout
    assert int(told[1]) > 25
    answers = done.stdout.partition("The card's answers")[2].splitlines()
    assert answers[1] == "Direct copies: there is one card."
    assert re.fullmatch(
        r"Capture of llama: \d+ steps are replayed in \d CUDA graphs; none was refused\.", answers[2]
    )
    assert re.fullmatch(r"cuGraphExecUpdate: (\d) of \1 updates accepted\.", answers[3])


def test_the_benchmark_of_a_card_runs_every_section(tmp_path: Path) -> None:
    sections = "host,text,copies,ops,matmul,attention,decode"
    chosen = ("--only", sections, "--ops", "add,norm,rope,get_rows,mul_mat_id")
    done = run("benchmarks/gpu.py", "--smoke", *chosen, "--folder", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = done.stdout.partition("== summary\n")[2].splitlines()
    told = r"Host: .* ms of processor time a token \(\d+\.\d calls of CUDA, of them 1\.0 graph launches .*"
    assert re.fullmatch(told, verdicts[0])
    assert re.fullmatch(r"Decoding: .* of what the memory's bandwidth allows: .*", verdicts[1])
    assert re.fullmatch(r"A prompt: .* of what the tensor cores' rate allows: .*", verdicts[2])
    assert re.fullmatch(r"Beside ggml:CUDA0: not compared, there is no device .*", verdicts[3])
    assert "0 sections failed, 0 left out" in verdicts[4]


def test_the_benchmark_runs_every_section_and_writes_its_figures(tmp_path: Path) -> None:
    chosen = ("--smoke", "--device", "CPU", "--beside", "LLVM", "--folder", str(tmp_path))
    done = python(str(ROOT / "benchmarks/gpu.py"), *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 sections failed, 0 left out" in done.stdout
    assert re.search(r"^Beside LLVM: .* times its tokens per second in decoding, ", done.stdout, re.M)
    (page,) = tmp_path.glob("gpu-*.md")
    text = page.read_text()
    assert "these figures mean nothing" in text
    rows = ("copy to device, pageable", "rms_norm", "mul_mat(q6_k,f32;n=1)", "get_rows(q4_0)", "prefill")
    assert all(row in text for row in (*rows, "MiniLM, batch 1", "decode step"))


def test_a_token_is_an_upload_a_launch_a_read_and_a_wait() -> None:
    """By a driver that counts calls; and a prompt in 16 chunks is as many launches, and a single wait."""
    done = python(str(ROOT / "benchmarks/host.py"), "--layers", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    for kind, read in (
        ("logits", "1 copy TO_HOST of 513024 bytes"),
        ("candidates", "2 copy TO_HOST of 256 bytes"),
    ):
        said = re.search(rf"^token: {kind}, sampled .* driver calls: (.*)$", done.stdout, re.M)
        assert said is not None
        calls = re.sub(r"(\d),(\d)", r"\1\2", said[1]).split(", ")
        upload, *names = [name for name in calls if not name.endswith((" on", " is_pinned"))]
        assert upload.startswith("1 copy TO_DEVICE")
        assert names == [read, "1 event_record", "1 event_synchronize", "1 exec_launch"]
    rows = re.findall(r"^chunks of 512: (.*?)  mean.* captures: (\d+)  waits: (\d+)$", done.stdout, re.M)
    assert [name for name, *_ in rows] == ["first", "again", "again, captured", "again, replayed"]
    assert [int(waits) for *_, waits in rows] == [1, 1, 1, 1]
    assert int(rows[-1][1]) == 16


def test_the_benchmark_tells_of_a_missing_card() -> None:
    done = python(str(ROOT / "benchmarks/gpu.py"), "--device", "CUDA77")
    assert done.returncode == 2
    assert "nothing was measured" in done.stdout


REG = """
import numpy as np
from tests.support.played_cupy import HOST
from ggmlb import BackendError, Context, DType, Graph, Scheduler, alloc_ctx_tensors, init_by_name
from ggmlb.backends.cuda import CudaReg

reg = CudaReg()
"""

CARDS = """
streams = [device.init_backend() for device in reg.devices]
tensors = []
for stream in streams:
    ctx = Context()
    tensors.append(ctx.new_tensor(DType.F32, (100,)))
    alloc_ctx_tensors(ctx, stream)

def fill():
    for i, t in enumerate(tensors, 1):
        t.set_array(np.full(100, i))
"""


def on_two_cards(text: str, **environment: str) -> str:
    done = python("-c", REG + text, PYTHONPATH=PLAYED, PLAYED_CARDS="2", **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cards_that_cannot_reach_each_other_copy_by_way_of_the_host() -> None:
    """Whatever CUDA's reason: too many peers, no memory for the mapping."""
    told = on_two_cards(
        CARDS + "import warnings\n"
        "HOST.fail.add('peer')\n"
        "fill()\n"
        "with warnings.catch_warnings(record=True) as told:\n"
        "    print(streams[1].cpy_tensor_async(streams[0], *tensors), told[0].message)\n"
        "streams[1].synchronize()\n"
        "print(tensors[1].to_numpy()[0], HOST.enabled)\n",
        GGMLB_CUDA_P2P="1",
    )
    assert told.startswith("True GGMLB_CUDA_P2P=1, but between CUDA0 and CUDA1 CUDA offers no direct copies")
    assert told.endswith("1.0 set()\n")


def test_a_program_that_uses_one_card_makes_a_context_on_no_other() -> None:
    """Not even where it stops using it; and the other may be another process's for itself."""
    told = on_two_cards(
        """
HOST.exclusive.add(0)
device = reg.devices[1]
with device.init_backend() as stream, init_by_name("CPU") as cpu, Scheduler([stream, cpu]) as scheduler:
    ctx = Context()
    x = ctx.set_input(ctx.new_tensor(DType.F32, (64, 3)))
    y = ctx.relu(ctx.scale(x, 2.0))
    z = ctx.scale(y, 3.0)
    scheduler.set_tensor_backend(z, cpu)
    graph = Graph().build_forward_expand(z)
    scheduler.alloc_graph(graph)
    for i in range(4):
        x.set_array(np.full((3, 64), i))
        scheduler.graph_compute(graph)
        assert (z.to_numpy() == 6 * i).all()
    event = device.event_new()
    stream.event_record(event)
    event.synchronize()
    assert y.as_array() is not None
    assert reg.get_proc_address("register_host_buffer")(np.zeros(4096, np.uint8))
    del ctx, x, y, z, graph
import gc
gc.collect()
print([d.description for d in reg.devices], device.memory, HOST.contexts)
try:
    reg.devices[0].init_backend()
except BackendError as error:
    print(error)
"""
    )
    assert "{1}\n" in told
    assert "open a stream on CUDA0: " in told


def test_kernels_with_much_shared_memory_are_given_all_of_it() -> None:
    told = on_two_cards(
        CARDS + "from tests.support.played_cupy import ATTRIBUTES, cu\n"
        "ctx = Context()\n"
        "w, x = ctx.new_tensor(DType.Q4_0, (256, 8)), ctx.new_tensor(DType.F32, (256, 1))\n"
        "y, z = ctx.sqr(ctx.mul_mat(w, x)), ctx.mul_mat(w, ctx.new_tensor(DType.F32, (256, 9)))\n"
        "alloc_ctx_tensors(ctx, streams[0])\n"
        "streams[0].graph_compute(Graph().build_forward_expand(y, z))\n"
        "carve_out = cu.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT\n"
        "most = cu.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES\n"
        "names = {carve_out: 'carve-out', most: 'most'}\n"
        "for (name, a), value in sorted(ATTRIBUTES.items()):\n"
        "    print(name, names[a], value if a == carve_out else value > 40_000)\n"
    )
    mma, q8 = "mul_mat_mma", "mul_mat_q8"
    assert told.splitlines() == [f"{mma} most True", f"{mma} carve-out 100", f"{q8} carve-out 100"]


def test_as_many_groups_are_launched_as_the_driver_says_run_at_once() -> None:
    """Two multiprocessors with room for four blocks of this kernel each, where rows would make 32."""
    told = on_two_cards(
        CARDS + "from tests.support.played_cupy import cu\n"
        "seen, launch = [], cu.launchKernel\n"
        "cu.launchKernel = lambda f, x, *rest: (seen.append(x), launch(f, x, *rest))\n"
        "ctx = Context()\n"
        "w, x = ctx.new_tensor(DType.Q4_0, (256, 512)), ctx.new_tensor(DType.F32, (256, 1))\n"
        "y = ctx.mul_mat(w, x)\n"
        "alloc_ctx_tensors(ctx, streams[0])\n"
        "streams[0].graph_compute(Graph().build_forward_expand(y))\n"
        "print(seen)\n"
    )
    assert told == "[8]\n"


def test_graphs_and_a_lost_card_at_the_c_interface() -> None:
    """Capture, instantiation, replay and what a wait for a lost card tells, through libcuda's symbols."""
    told = on_two_cards(
        CARDS + "ctx = Context()\n"
        "x = ctx.new_tensor(DType.F32, (64,))\n"
        "y = ctx.scale(ctx.relu(x), 2.0)\n"
        "alloc_ctx_tensors(ctx, streams[0])\n"
        "graph = Graph().build_forward_expand(y)\n"
        "for i in range(5):\n"
        "    x.set_array(np.full(64, i))\n"
        "    streams[0].graph_compute(graph)\n"
        "    assert (y.to_numpy() == 2 * i).all()\n"
        "print(HOST.counts['replay'] > 0)\n"
        "HOST.fail.add('synchronize')\n"
        "try:\n"
        "    streams[0].graph_compute(graph)\n"
        "except BackendError as error:\n"
        "    print(error)\n"
        "HOST.fail.clear()\n"
    ).splitlines()
    assert told[0] == "True"
    assert "cudaErrorIllegalAddress" in told[1]


def test_a_missing_library_of_the_driver_is_told_as_our_error() -> None:
    told = on_two_cards(
        "HOST.fail.add('libcuda')\n"
        "try:\n"
        "    reg.devices[0].init_backend()\n"
        "except BackendError as error:\n"
        "    print(error)\n"
    )
    assert "open a stream on CUDA0: cudaErrorInsufficientDriver" in told


def test_after_an_error_of_nccl_the_next_sum_works() -> None:
    """The group of the calls that failed is closed: it would take in all that come later."""
    told = on_two_cards(
        CARDS + "get = reg.get_proc_address\n"
        "comm = get('comm_init')(streams)\n"
        "fill()\n"
        "HOST.fail.add('sum')\n"
        "try:\n"
        "    get('comm_allreduce_tensor')(comm, tensors)\n"
        "except BackendError as error:\n"
        "    print(error)\n"
        "HOST.fail.clear()\n"
        "fill()\n"
        "get('comm_allreduce_tensor')(comm, tensors)\n"
        "for stream in streams:\n"
        "    stream.synchronize()\n"
        "print([t.to_numpy()[0].item() for t in tensors])\n"
    )
    assert told.splitlines() == [
        "NCCL's all-reduce of 100 f32 elements failed: unhandled system error",
        "[3.0, 3.0]",
    ]
