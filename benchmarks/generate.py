"""Text generation on a device (LLVM) beside llama.cpp, by turns in one run.

llama.cpp is built for this processor (`peers.py`), or with `--peer wheel` PyPI's AVX2 build, `xllamacpp`.

Two processes take turns with the same file, the same prompts and as many threads; the idle one sleeps.
`prefill` is a prompt of 512 tokens, `decode` 32 tokens after 32 and after 512. A ratio is our tokens per
second by llama.cpp's: the median of the rounds, with the least and the greatest. `bound` is what share of the
read bandwidth decoding at depth 32 uses: bytes of weights and cached keys and values that a token needs, by
what two threads read per second in the same run, from a float32 matrix. `python` is the share of decoding at
depth 32 spent outside of kernels: the time of the steps less that of their calls of machine code. `first` is
the time of a new process to its first token, after a prompt of 32, ours by llama.cpp's, from installed
bytecode and cached kernels; `peak` the same of resident memory after all rounds. With one thread, times are
processor times, which other work disturbs less.

    python benchmarks/generate.py [--peer wheel] [--rounds 5] [--threads 2]
        [--models FILE,FILE@avx2,random:q4_K_M,...] [--device D] [--save]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from peers import NAMES, Peer
from report import Table, save

# llama.cpp's processes import this file too: what ggmlb needs is imported in functions.

N_CTX = 1024
N_PROMPT, N_TOKENS, DEPTHS = 512, 32, (32, 512)
Figures = dict[str, float]


def prompt_of(n: int) -> list[int]:
    """Token numbers that no text has: speed does not depend on them."""
    return [300 + (i * 37) % 1000 for i in range(n)]


class Speed(NamedTuple):
    """Tokens per second of a prompt and of what follows it, and the share of Python in the latter."""

    prefill: float
    decode: float
    python: float = math.nan


class Ours:
    """ggmlb on a device."""

    def __init__(self, path: str, threads: int, device: str) -> None:
        from ggmlb.models import TextModel

        self._model = TextModel(path, [device, "CPU"], n_ctx=N_CTX, threads=threads)
        self._in_kernels: list[float] = []
        for backend in self._model.backends:
            if hasattr(backend, "pool"):  # LLVM's, of which each step is one call
                backend.pool._run = self._timed(backend.pool._run)

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        """Keep the times of calls [s]."""

        def timed(*args: int) -> None:
            start = time.perf_counter()
            call(*args)
            self._in_kernels.append(time.perf_counter() - start)

        return timed

    def run(self, n_prompt: int, n_tokens: int) -> Speed:
        """Return the speed of a prompt and of what follows it."""
        self._in_kernels.clear()
        found = self._model.generate(prompt_of(n_prompt), max_tokens=n_tokens, temperature=0, ignore_eos=True)
        steps = self._in_kernels[1 - n_tokens :] if n_tokens > 1 else []
        python = 1 - sum(steps) / found.seconds if steps else math.nan
        return Speed(found.prompt_tokens_per_second, found.tokens_per_second, python)


class Native:
    """llama.cpp, built for this processor, with flash attention."""

    def __init__(self, path: str, threads: int, device: str = "") -> None:
        from peers import llama_cpp

        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)
        self._lib = lib = llama_cpp()
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = N_CTX, threads, threads
        params.flash_attn_type = 1
        self._context = lib.llama_init_from_model(self._model, params)
        self._n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))

    def _next(self, tokens: list[int]) -> int:
        """Continue by tokens; return the likeliest after them."""
        import numpy as np

        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        if self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(ids, len(tokens))):
            raise SystemExit("llama.cpp cannot compute a batch")
        return int(
            np.ctypeslib.as_array(self._lib.llama_get_logits(self._context), (self._n_vocab,)).argmax()
        )

    def run(self, n_prompt: int, n_tokens: int) -> Speed:
        """Return the speed of a prompt and of what follows it."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        start = time.perf_counter()
        token = self._next(prompt_of(n_prompt))
        after = time.perf_counter()
        for _ in range(n_tokens):
            token = self._next([token])
        decode_s = time.perf_counter() - after
        return Speed(n_prompt / (after - start), n_tokens / decode_s)


class Wheel:
    """llama.cpp, as PyPI ships it."""

    def __init__(self, path: str, threads: int, device: str = "") -> None:
        import xllamacpp

        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx = N_CTX
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.n_parallel = 1
        self._server = xllamacpp.Server(params)

    def run(self, n_prompt: int, n_tokens: int) -> Speed:
        """Return the speed of a prompt and of what follows it."""
        asked = {
            "prompt": prompt_of(n_prompt), "n_predict": n_tokens, "temperature": 0, "ignore_eos": True,
            "cache_prompt": False,
        }  # fmt: skip
        found: Any = self._server.handle_completions(asked)
        timings = (json.loads(found) if isinstance(found, str) else found)["timings"]
        return Speed(timings["prompt_per_second"], timings["predicted_per_second"])


LIBRARIES: dict[str, Any] = {"ours": Ours, "native": Native, "wheel": Wheel}


def play(name: str, path: str, threads: int, device: str, pipe: Connection) -> None:
    """Answer `(n_prompt, n_tokens)` with the speed and the peak of memory [bytes]."""
    if threads == 1:
        time.perf_counter = time.process_time
    model = LIBRARIES[name](path, threads, device)
    pipe.send(None)
    while (task := pipe.recv()) is not None:
        pipe.send((model.run(*task), peak_nbytes()))
    os._exit(0)  # llama.cpp may wait for its threads


def peak_nbytes() -> float:
    """The greatest resident memory of this process; `getrusage` would tell the parent's, if that was more."""
    status = Path("/proc/self/status").read_text()
    return 1024.0 * int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0])


def read_bandwidth(device: str, threads: int) -> float:
    """Bytes per second that a device's threads read from memory: the best product with a float32 matrix."""
    from ggmlb import Context, Graph, alloc_ctx_tensors, init_by_name

    clock = time.process_time if threads == 1 else time.perf_counter
    with init_by_name(device) as backend:
        if (set_n_threads := backend.device.reg.get_proc_address("set_n_threads")) is not None:
            set_n_threads(backend, threads)
        ctx = Context()
        matrix, vector = ctx.new_tensor("f32", (1024, 1 << 17)), ctx.new_tensor("f32", (1024,))
        product = ctx.mul_mat(matrix, vector)
        with alloc_ctx_tensors(ctx, backend) as memory:
            memory.clear(0)
            graph = Graph().build_forward_expand(product)
            best = 0.0
            for _ in range(12):
                start = clock()
                backend.graph_compute(graph)
                best = max(best, matrix.nbytes / (clock() - start))
    return best


def token_nbytes(path: str, depth: int) -> int:
    """Bytes of weights and of keys and values that a token reads."""
    from ggmlb import open_gguf

    file = open_gguf(path)
    arch = file.metadata.text("general.architecture")
    embedding = file["token_embd.weight"]
    is_tied = "output.weight" not in file
    weights = file.nbytes - (0 if is_tied else embedding.nbytes)
    key = file["blk.0.attn_k.weight"].ne[1]
    n_layer = file.metadata.integer(f"{arch}.block_count")
    return weights + 2 * 2 * key * n_layer * depth


FIRST = {
    "ours": "import sys; from ggmlb.cli import main; main(['generate', '-m', sys.argv[1], '--prompt-tokens', "
    "sys.argv[3], '-n', '1', '-t', sys.argv[2], '-d', f'{sys.argv[4]},CPU', '--ctx', '1024', '--json'])",
    **{
        name: "import os, sys; sys.path.insert(0, 'benchmarks'); import generate; "
        f"m = generate.{name.title()}(sys.argv[1], int(sys.argv[2])); m.run(32, 0); os._exit(0)"
        for name in NAMES
    },
}


def first_token_s(name: str, path: str, threads: int, device: str) -> float:
    """Time of a new process until it has ended after one token [s]; with one thread, processor time."""
    ids = ",".join(map(str, prompt_of(32)))
    as_installed = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    start, used = time.perf_counter(), children_s()
    subprocess.run(
        [sys.executable, "-c", FIRST[name], path, str(threads), ids, device],
        check=True,
        env=as_installed,
        stdout=subprocess.DEVNULL,
    )
    return children_s() - used if threads == 1 else time.perf_counter() - start


def children_s() -> float:
    """Processor time of the processes that have ended [s]."""
    times = os.times()
    return times.children_user + times.children_system


def measure(
    path: str, peer: str, rounds: int, threads: int, device: str
) -> dict[str, dict[str, list[float]]]:
    """Return figures of each library, by rounds."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Any] = {}
    processes = {}

    def start(name: str) -> None:
        pipes[name], other = context.Pipe()
        processes[name] = context.Process(target=play, args=(name, path, threads, device, other), daemon=True)
        processes[name].start()
        pipes[name].recv()

    def end(name: str) -> None:
        pipes[name].send(None)
        processes[name].join()

    tasks = {"prefill": (N_PROMPT, 1)} | {f"decode {depth}": (depth, N_TOKENS) for depth in DEPTHS}
    start("ours")  # compiles kernels, in memory that is not to count
    for sizes in tasks.values():
        pipes["ours"].send(sizes)
        pipes["ours"].recv()
    end("ours")
    players = ["ours", peer]
    for name in players:
        start(name)
    found: dict[str, dict[str, list[float]]] = {name: {task: [] for task in tasks} for name in players}
    for i in range(rounds + 1):
        for task, sizes in tasks.items():
            for name in players[:: 1 if i % 2 else -1]:
                time.sleep(0.02)
                pipes[name].send(sizes)
                speed, peak = pipes[name].recv()
                if i:  # the first round makes graphs
                    found[name][task].append(speed.prefill if task == "prefill" else speed.decode)
                    found[name].setdefault(f"python in {task}", []).append(speed.python)
                found[name]["peak"] = [peak]
    for name in players:
        end(name)
    for i in range(rounds + 1):
        for name in players:
            first_s = first_token_s(name, path, threads, device)
            if i:  # the first writes bytecode
                found[name].setdefault("first", []).append(first_s)
    return found


def file_of(model: str) -> str:
    """The file of a model; of `random:q4_K_M`, one of 1.1 billion random weights in that type."""
    kind, _, dtype = model.partition(":")
    if kind != "random":
        return model
    from random_model import random_model

    return str(random_model(dtype))


def ratio(ours: list[float], theirs: list[float]) -> str:
    """The median, least and greatest of ratios by rounds."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return f"**{statistics.median(ratios):.2f}** ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def share(found: list[float]) -> str:
    """The median of shares; a dash where none was measured."""
    median = statistics.median(found)
    return "-" if math.isnan(median) else f"{median:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", choices=NAMES, default="native")
    parser.add_argument(
        "--models",
        default="",
        help="GGUF files, random:TYPE, either with @SIMD for other kernels; the installed SmolLM2 by default",
    )
    parser.add_argument("--device", default="LLVM", help="ours")
    parser.add_argument(
        "--save", action="store_true", help="write results/generate.md, generate_1.md, or generate_DEVICE.md"
    )
    args = parser.parse_args()
    peer = Peer(args.peer)
    if args.threads == 1 and args.peer == "wheel":
        parser.error("one thread, by processor time, needs --peer native")
    bandwidth = read_bandwidth(args.device, args.threads)
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s")
    table = Table(
        "model", "SIMD", "prefill [tokens/s]", "decode at 32 [tokens/s]", "decode at 512 [tokens/s]",
        "prefill",
        "decode at 32", "decode at 512", "bound", "python", "first", "peak",
    )  # fmt: skip
    if not args.models:
        from ggmlb.models import default_text_model

        args.models = str(default_text_model())
    default = os.environ.pop("GGMLB_SIMD", "")
    for asked in args.models.split(","):
        model, _, simd = asked.partition("@")
        path = file_of(model)
        if level := simd or default:
            os.environ["GGMLB_SIMD"] = level
        found = measure(path, args.peer, args.rounds, args.threads, args.device)
        os.environ.pop("GGMLB_SIMD", None)
        ours, theirs = found["ours"], found[args.peer]
        tasks = ["prefill", *(f"decode {depth}" for depth in DEPTHS)]
        speeds = [f"{statistics.median(ours[t]):.0f}, {statistics.median(theirs[t]):.0f}" for t in tasks]
        used = token_nbytes(path, DEPTHS[0]) * statistics.median(ours[tasks[1]]) / bandwidth
        first = statistics.median(ours["first"]) / statistics.median(theirs["first"])
        table.row(
            Path(path).stem, level or "best", *speeds,
            *(ratio(ours[t], theirs[t]) for t in tasks), f"{used:.0%}", share(ours[f"python in {tasks[1]}"]),
            f"{first:.2f}",
            f"{ours['peak'][0] / theirs['peak'][0]:.2f}",
        )  # fmt: skip
    if args.save:
        is_llvm = args.device == "LLVM"
        name = "generate" if is_llvm else f"generate_{args.device.lower().replace(':', '_')}"
        name += "_1" if args.threads == 1 else ""
        command = "python benchmarks/generate.py" + ("" if is_llvm else f" --device {args.device}")
        about = f"""Text generation on {args.device} beside llama.cpp
Made by `{command}`: {args.rounds} rounds, {args.threads} thread(s) each; columns of tokens
per second are ours, llama.cpp's: {peer.about}. Read bandwidth {bandwidth / 1e9:.1f} GB/s.

{__doc__.partition("    python")[0]}"""
        save(name, about, table, packages=("numpy", "llvmlite"))


if __name__ == "__main__":
    main()
