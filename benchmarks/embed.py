"""Sentences per second on the CPU, against sentence-transformers (PyTorch) and ONNX Runtime, in one run.

Each library runs in a process of its own, so that neither's idle threads disturb the other; they take
turns, never run at the same time, and get the same sentences. Every round draws other sentences, as a
service would see; two rounds that do not count come first. Batch 1 is one call per sentence. The sentences
are those of the Python language reference: 4 to 51 words, mean 15. ONNX Runtime runs what its optimizer for
transformers makes of PyTorch's model, with its own dynamic int8 quantisation where ggmlb's matrices are
quantised. With GGMLB_SIMD, ggmlb alone is limited to another instruction set; the others are not.
Nothing is written if other processes took more than a twentieth of the processors meanwhile: threads of the
others wait for each other by spinning, and a busy machine makes them look far slower than they are. With one
thread, the time is that of the processor, all threads of a process together.

    [GGMLB_SIMD=avx2] python benchmarks/embed.py [--rounds 7] [--threads 2] [--devices CPU] [--weights q8_0]
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
import tempfile
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
from libraries import use_threads
from report import Table, save

from ggmlb.models import default_model_dir
from ggmlb.system import env

Embed = Callable[[list[str], int], Any]

N_HEADS, N_EMBD, MAX_TOKENS = 12, 384, 256
"""Of all-MiniLM-L6-v2; longer texts are cut, as sentence-transformers does."""


def ggmlb_embed(threads: int, devices: str, weights: str) -> Embed:
    from ggmlb.models import BertEmbedder

    embedder = BertEmbedder(devices=devices.split(","), weight_type=weights or None)
    for backend in embedder.backends:
        use_threads(backend, threads)
    return embedder.embed


def torch_embed(threads: int, devices: str, weights: str) -> Embed:
    """PyTorch, in float32 whatever the weights are to be."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(default_model_dir()), device="cpu")
    return lambda texts, batch: model.encode(texts, batch_size=batch, show_progress_bar=False)


def onnx_embed(threads: int, devices: str, weights: str) -> Embed:
    """ONNX Runtime with its fused attention; where ggmlb's weights are quantised, in int8 (its way)."""
    import onnxruntime
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(default_model_dir() / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as folder:
        path = _export(Path(folder), quantise=bool(weights))
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def embed(texts: list[str], batch: int) -> Any:
        order = np.argsort([-len(text) for text in texts], kind="stable")  # alike lengths pad little
        out = np.empty((len(texts), N_EMBD), np.float32)
        for start in range(0, len(texts), batch):
            these = order[start : start + batch]
            found = tokenizer.encode_batch([texts[i] for i in these])
            ids, mask = (np.array([getattr(f, k) for f in found]) for k in ("ids", "attention_mask"))
            hidden = session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
            mean = np.einsum("bsd,bs->bd", hidden, mask.astype(np.float32))
            out[these] = mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return out

    return embed


def _export(folder: Path, *, quantise: bool) -> str:
    """Write the model for ONNX Runtime, by the steps that its documentation gives; return the file."""
    import onnx
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers.optimizer import optimize_model
    from transformers import AutoModel

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(str(default_model_dir()), attn_implementation="eager")

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    names = ["input_ids", "attention_mask"]
    ids = torch.ones(2, 8, dtype=torch.long)
    plain, fused, small = (str(folder / f"{name}.onnx") for name in ("plain", "fused", "small"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Hidden().eval(),
            (ids, ids),
            plain,
            input_names=names,
            output_names=["hidden"],
            dynamic_axes={name: {0: "batch", 1: "tokens"} for name in names},
            opset_version=17,
            dynamo=False,  # of the new exporter's graph the optimizer recognises no attention
        )
    model = optimize_model(plain, model_type="bert", num_heads=N_HEADS, hidden_size=N_EMBD)
    model.save_model_to_file(fused)
    if not quantise:
        return fused
    # The shapes behind the fused attention, an op of its own, cannot be inferred.
    types = {"DefaultTensorType": onnx.TensorProto.FLOAT}
    quantize_dynamic(fused, small, per_channel=True, weight_type=QuantType.QInt8, extra_options=types)
    return small


LIBRARIES = {"ggmlb": ggmlb_embed, "PyTorch": torch_embed, "ONNX Runtime": onnx_embed}
"""Each gives `embed`, of threads, devices and the type of weights; it imports its library itself."""

N_SENTENCES = {1: 64, 8: 64, 32: 64}
"""Sentences per round, by batch."""
N_WARM_UP = 2
TARGETS = {1: "1.5 of PyTorch", 8: "1.0 of PyTorch", 32: "1.0 of PyTorch"}
LLVM_TARGET = "1.2 of ONNX Runtime"
LEAST_COSINE = {"ggmlb": 0.999, "ONNX Runtime": 0.95}
"""Of their embeddings to PyTorch's; below it there is nothing to measure. Weights of int8 cost some."""
PACKAGES = ("numpy", "torch", "sentence-transformers", "transformers", "tokenizers", "onnxruntime")


def english_sentences() -> list[str]:
    """The sentences, in order; every Python brings them."""
    from pydoc_data.topics import topics

    prose = " ".join(" ".join(topic.split()) for topic in topics.values())
    found = re.split(r"(?<=[.!?]) (?=[A-Z])", prose)
    return [s for s in found if re.fullmatch(r"[A-Z][A-Za-z ,;'()-]+[.!?]", s) and len(s.split()) >= 4]


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
) -> tuple[dict[tuple[str, int], list[float]], dict[str, float]]:
    """Return the rates of each library and batch, round by round, and their least cosines to PyTorch's."""
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
        other.close()  # so that its end is seen
        processes.append(process)
    prose = english_sentences()
    draw = random.Random(0)
    rates: dict[tuple[str, int], list[float]] = {(n, b): [] for b in N_SENTENCES for n in LIBRARIES}
    least = dict.fromkeys(LEAST_COSINE, 1.0)
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
            for name in least:
                cosines = np.einsum("ij,ij->i", found[name], found["PyTorch"])
                least[name] = min(least[name], float(cosines.min()))
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


def ratio(rates: dict[tuple[str, int], list[float]], peer: str, batch: int) -> str:
    """Our rate over a peer's: the median of the rounds' ratios."""
    pairs = zip(rates["ggmlb", batch], rates[peer, batch], strict=True)
    return f"{statistics.median(a / b for a, b in pairs):.2f}"


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
    for name, cosine in least.items():
        if cosine < LEAST_COSINE[name]:
            sys.exit(f"{name}: the least cosine to PyTorch's embeddings is {cosine:.7f}; nothing is written")
    ours, *peers = LIBRARIES
    table = Table("batch", ours, "target", *(cell for name in peers for cell in (name, f"ggmlb to {name}")))
    for batch, target in TARGETS.items():
        cells = [cell for name in peers for cell in (spread(rates[name, batch]), ratio(rates, name, batch))]
        table.row(
            batch, spread(rates[ours, batch]), LLVM_TARGET if "LLVM" in args.devices else target, *cells
        )
    if others > 0.05 and args.threads > 1:
        sys.exit(f"other processes took {others:.0%} of the processors: nothing is written; try again later")
    simd = env.text("GGMLB_SIMD")
    about = f"""Sentence embeddings, all-MiniLM-L6-v2
Sentences per second by `python benchmarks/embed.py`: median of {args.rounds} rounds, least and most in
brackets; "ggmlb to" another is the median of the rounds' ratios. {args.threads} threads each; ggmlb runs on
{args.devices}{f", limited to {simd.upper()}," if simd else ""} with {args.weights or "float32"} matrices.
Least cosine to PyTorch's embeddings: ggmlb {least["ggmlb"]:.7f}, ONNX Runtime
{least["ONNX Runtime"]:.7f}. Other processes took {others:.1%} of the processors meanwhile.

{__doc__.partition("    [GGMLB")[0]}"""
    parts = args.devices.lower(), args.weights, simd or ""
    suffix = "".join(f"_{part}" for part in parts if part not in ("cpu", ""))
    save("embed" + suffix.replace(",", "_"), about, table, packages=PACKAGES)


if __name__ == "__main__":
    main()
