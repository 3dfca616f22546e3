"""Sentences per second: ggmlb on the CPU against sentence-transformers on PyTorch, in one run.

Each library runs in a process of its own, so that neither's idle threads disturb the other; they take
turns, never run at the same time, and get the same sentences. Every round draws other sentences, as a
service would see; two rounds that do not count come first. Batch 1 is one call per sentence, batch 32
one call for all. The sentences are those of the Python language reference: 4 to 51 words, mean 15.
Nothing is written if other processes took more than a twentieth of the processors meanwhile: PyTorch's
threads wait for each other by spinning, and a busy machine makes it look far slower than it is. With one
thread, the time is that of the processor, all threads of a process together, and other work disturbs little.

    python benchmarks/embed.py [--rounds 7] [--threads 2] [--devices CPU] [--weights q8_0]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import resource
import statistics
import sys
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import numpy as np
from report import Table, save

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

N_SENTENCES = {1: 32, 32: 128}
"""Sentences per round, by batch."""
N_WARM_UP = 2
TARGETS = {1: 1.5, 32: 1.0}
NUMBA_TARGETS = {1: 2.0, 32: 1.2}
LEAST_COSINE = 0.999
"""Between the embeddings of both libraries; below it there is nothing to measure."""
PACKAGES = ("numpy", "torch", "sentence-transformers", "transformers", "tokenizers")


def english_sentences() -> list[str]:
    """The sentences, in order; every Python brings them."""
    from pydoc_data.topics import topics

    prose = " ".join(" ".join(topic.split()) for topic in topics.values())
    found = re.split(r"(?<=[.!?]) (?=[A-Z])", prose)
    return [s for s in found if re.fullmatch(r"[A-Z][A-Za-z ,;'()-]+[.!?]", s) and len(s.split()) >= 4]


def ggmlb_embed(threads: int, devices: str, weights: str) -> Callable[[list[str], int], Any]:
    from ggmlb.models import BertEmbedder

    names = devices.split(",")
    embedder = BertEmbedder(devices=names, weight_type=weights or None)
    for backend in embedder.backends:
        set_n_threads = backend.device.reg.get_proc_address("set_n_threads")
        if set_n_threads is not None:
            set_n_threads(backend, threads)
    return embedder.embed


def torch_embed(threads: int, devices: str, weights: str) -> Callable[[list[str], int], Any]:
    import torch
    from sentence_transformers import SentenceTransformer

    from ggmlb.models import default_model_dir

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(default_model_dir()), device="cpu")
    return lambda texts, batch: model.encode(texts, batch_size=batch, show_progress_bar=False)


LIBRARIES = {"ggmlb": ggmlb_embed, "PyTorch": torch_embed}


def worker(name: str, threads: int, devices: str, weights: str, pipe: Connection) -> None:
    """Embed the sentences that come through the pipe; answer with seconds and embeddings."""
    embed = LIBRARIES[name](threads, devices, weights)
    clock = process_time if threads == 1 else perf_counter
    while (task := pipe.recv()) is not None:
        texts, batch = task
        start = clock()
        if batch == 1:
            embeddings = np.concatenate([embed([text], 1) for text in texts])
        else:
            embeddings = embed(texts, batch)
        pipe.send((clock() - start, embeddings))


def measure(
    rounds: int, threads: int, devices: str, weights: str
) -> tuple[dict[tuple[str, int], list[float]], float]:
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
        process = context.Process(target=worker, args=(name, threads, devices, weights, other), daemon=True)
        process.start()
        processes.append(process)
    prose = english_sentences()
    draw = random.Random(0)
    rates: dict[tuple[str, int], list[float]] = {(n, b): [] for b in N_SENTENCES for n in LIBRARIES}
    least = 1.0
    for i in range(-N_WARM_UP, rounds):
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


def busy_s() -> float:
    """Processor time that all processes of the machine have used so far [s]; Linux tells it."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, irq, softirq, steal))) / os.sysconf("SC_CLK_TCK")


def own_s() -> float:
    """Processor time of this process and its children that have ended [s]."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


def spread(rates: list[float]) -> str:
    return f"{statistics.median(rates):.1f} ({min(rates):.1f}-{max(rates):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--devices", default="CPU")
    parser.add_argument("--weights", default="", help="type of the matrices; that of the file by default")
    args = parser.parse_args()
    start, busy, own = perf_counter(), busy_s(), own_s()
    rates, least = measure(args.rounds, args.threads, args.devices, args.weights)
    others = (busy_s() - busy - own_s() + own) / (perf_counter() - start) / (os.cpu_count() or 1)
    if least < LEAST_COSINE:
        sys.exit(f"the libraries' embeddings differ: their least cosine is {least:.7f}; nothing is written")
    table = Table("batch", "ggmlb", "sentence-transformers", "ratio", "target")
    for batch, target in (NUMBA_TARGETS if "Numba" in args.devices else TARGETS).items():
        ours, theirs = (rates[name, batch] for name in LIBRARIES)
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        table.row(batch, spread(ours), spread(theirs), f"{ratio:.2f}", f"{target:.1f}")
    if others > 0.05 and args.threads > 1:
        sys.exit(f"other processes took {others:.0%} of the processors: nothing is written; try again later")
    about = f"""Sentence embeddings, all-MiniLM-L6-v2
Sentences per second by `python benchmarks/embed.py`: median of {args.rounds} rounds, least and most in
brackets; the ratio is the median of the rounds' ratios. {args.threads} threads each; ggmlb runs on
{args.devices}, with {args.weights or "float32"} matrices. Least cosine between the embeddings of both:
{least:.7f}. Other processes took {others:.1%} of the processors meanwhile.

{__doc__.partition("    python")[0]}"""
    suffix = "".join(f"_{part}" for part in (args.devices.lower(), args.weights) if part not in ("cpu", ""))
    save("embed" + suffix.replace(",", "_"), about, table, packages=PACKAGES)


if __name__ == "__main__":
    main()
