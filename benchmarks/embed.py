"""Sentences per second: ggmlb on the CPU against sentence-transformers on PyTorch, in one run.

    python benchmarks/embed.py [--rounds 7] [--threads 2] [--devices CPU] [--output FILE]

Each library runs in a process of its own, so that neither's idle threads disturb the other; they take
turns, never run at the same time, and get the same sentences. Every round draws other sentences, as a
service would see; plans and caches are warm from a round that does not count. Batch 1 is one call per
sentence, batch 32 one call for all.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import multiprocessing
import os
import platform
import random
import re
import statistics
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

RESULTS = Path(__file__).parent / "results" / "embed.md"
N_SENTENCES = {1: 64, 32: 256}
"""Sentences per round, by batch."""
TARGETS = {1: 1.5, 32: 1.0}
PACKAGES = ("numpy", "torch", "sentence-transformers", "transformers", "tokenizers")


def english_sentences() -> list[str]:
    """Sentences of the Python language reference, which every Python brings: 4 to 51 words, mean 15."""
    from pydoc_data.topics import topics

    prose = " ".join(" ".join(topic.split()) for topic in topics.values())
    found = re.split(r"(?<=[.!?]) (?=[A-Z])", prose)
    return [s for s in found if re.fullmatch(r"[A-Z][A-Za-z ,;'()-]+[.!?]", s) and len(s.split()) >= 4]


def ggmlb_embed(threads: int, devices: str) -> Callable[[list[str], int], Any]:
    from ggmlb.models import BertEmbedder

    names = devices.split(",")
    embedder = BertEmbedder(devices=names)
    for backend in embedder.backends:
        set_n_threads = backend.device.reg.get_proc_address("set_n_threads")
        if set_n_threads is not None:
            set_n_threads(backend, threads)
    return embedder.embed


def torch_embed(threads: int, devices: str) -> Callable[[list[str], int], Any]:
    import torch
    from sentence_transformers import SentenceTransformer

    from ggmlb.models import default_model_dir

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(default_model_dir()), device="cpu")
    return lambda texts, batch: model.encode(texts, batch_size=batch, show_progress_bar=False)


LIBRARIES = {"ggmlb": ggmlb_embed, "PyTorch": torch_embed}


def worker(name: str, threads: int, devices: str, pipe: Connection) -> None:
    """Embed the sentences that come through the pipe; answer with seconds and embeddings."""
    embed = LIBRARIES[name](threads, devices)
    while (task := pipe.recv()) is not None:
        texts, batch = task
        start = perf_counter()
        if batch == 1:
            embeddings = np.concatenate([embed([text], 1) for text in texts])
        else:
            embeddings = embed(texts, batch)
        pipe.send((perf_counter() - start, embeddings))


def measure(rounds: int, threads: int, devices: str) -> tuple[dict[tuple[str, int], list[float]], float]:
    """Return the rates of each library and batch, round by round, and the least cosine between them."""
    # Read by BLAS and OpenMP when the processes start.
    os.environ.update(
        OMP_NUM_THREADS=str(threads), OPENBLAS_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="true"
    )
    context = multiprocessing.get_context("spawn")
    pipes = {}
    processes = []
    for name in LIBRARIES:
        pipes[name], other = context.Pipe()
        process = context.Process(target=worker, args=(name, threads, devices, other), daemon=True)
        process.start()
        processes.append(process)
    prose = english_sentences()
    draw = random.Random(0)
    rates: dict[tuple[str, int], list[float]] = {(n, b): [] for b in N_SENTENCES for n in LIBRARIES}
    least = 1.0
    for i in range(-1, rounds):
        for batch, n in N_SENTENCES.items():
            texts = draw.sample(prose, n)
            found = {}
            # Whoever goes first in one round goes last in the next.
            for name in list(LIBRARIES)[:: 1 if i % 2 else -1]:
                pipes[name].send((texts, batch))
                seconds, found[name] = pipes[name].recv()
                if i >= 0:
                    rates[name, batch].append(n / seconds)
            cosine = np.einsum("ij,ij->i", *found.values())
            least = min(least, float(cosine.min()))
    for pipe in pipes.values():
        pipe.send(None)
    for process in processes:
        process.join()
    return rates, least


def report(rates: dict[tuple[str, int], list[float]], least: float, args: argparse.Namespace) -> str:
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in PACKAGES)
    lines = [
        "# Sentence embeddings, all-MiniLM-L6-v2",
        "",
        f"{datetime.date.today()}, {cpu_name()}, {args.threads} threads, Python {platform.python_version()}, "
        f"{versions}. Devices of ggmlb: {args.devices}.",
        "",
        f"Sentences per second, median of {args.rounds} interleaved rounds (least and most in brackets); "
        f"`python benchmarks/embed.py`. Sentences of the Python language reference, 4 to 51 words.",
        "",
        "| batch | ggmlb | sentence-transformers on PyTorch | ratio | target |",
        "|---:|---:|---:|---:|---:|",
    ]
    for batch in N_SENTENCES:
        ours, theirs = (rates[name, batch] for name in LIBRARIES)
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        lines.append(f"| {batch} | {spread(ours)} | {spread(theirs)} | {ratio:.2f} | {TARGETS[batch]:.1f} |")
    lines += ["", f"The ratio is the median of the rounds' ratios. Least cosine between both: {least:.7f}."]
    return "\n".join(lines) + "\n"


def spread(rates: list[float]) -> str:
    return f"{statistics.median(rates):.1f} ({min(rates):.1f}-{max(rates):.1f})"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--devices", default="CPU")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    text = report(*measure(args.rounds, args.threads, args.devices), args)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
