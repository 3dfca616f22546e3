"""Training on the CPU beside PyTorch: the time of a step and the peak of memory, in one run.

MiniLM: all weights, of 16 pairs of texts of 64 tokens, by the cross entropy of their scores with each other
(sentence-transformers' MultipleNegativesRankingLoss). SmolLM2: LoRA of rank 8 on the four projections of
attention, 4 sequences of 128 tokens; ggmlb keeps the file's q4_1, PyTorch has its values in float32. Both
take steps of AdamW, from the same values, with the same data, and must have the same losses. PyTorch's models
are written by hand with its fused functions (attention, norms, activations), without autocast.

Each library runs in a process of its own; they take turns and never run at the same time. Steps that do not
count come first.

    python benchmarks/train.py [--rounds 7] [--threads 2] [--devices LLVM,CPU] [--save]
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import re
import statistics
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from libraries import use_threads
from report import Table, save

from ggmlb.models import BertConfig, ModelFolder, default_model_dir, default_text_model

Step = Callable[[np.ndarray], float]
"""Takes a step with token numbers, and returns the loss before it."""

N_PAIRS, N_TOKENS = 16, 64
N_CTX, N_SEQUENCES, RANK = 128, 4, 8
RATES = {"MiniLM": 1e-5, "SmolLM2": 1e-4}
SCALE = 20.0
"""Of cosines, before the soft max."""


def bert_weights() -> tuple[BertConfig, dict[str, np.ndarray]]:
    """MiniLM's configuration and weights, by the names of our graph."""
    from ggmlb.models.tensor_file import TensorFile

    folder = ModelFolder(default_model_dir())
    config = BertConfig.from_folder(folder)
    file = TensorFile(folder.path / "model.safetensors")
    prefix = config.check_file(file)
    sources = config.embedding_sources(prefix)
    for layer in range(config.n_layer):
        sources |= config.layer_sources(prefix, layer)
    return config, {
        name: np.concatenate([np.asarray(file.array(part), np.float32) for part in source.names])
        for name, source in sources.items()
    }


def our_bert(threads: int, devices: str) -> Step:
    import ggmlb
    from ggmlb import Context, Scheduler
    from ggmlb.models import BertGraph
    from ggmlb.optimize import AdamW, OptContext, Result

    config, arrays = bert_weights()
    backends = [ggmlb.init_by_name(name) for name in devices.split(",")]
    for backend in backends:
        use_threads(backend, threads)
    ctx, leafs = Context(), Context()
    weights = {n: leafs.set_param(leafs.new_tensor("f32", a.shape[::-1], n)) for n, a in arrays.items()}
    ggmlb.alloc_ctx_tensors(leafs, backends[0])
    for name, array in arrays.items():
        weights[name].set_array(array)
    graph = BertGraph(config, weights, N_TOKENS, 2 * N_PAIRS)
    y = graph.embeddings
    first, second = (ctx.view_2d(y, y.ne[0], N_PAIRS, y.nb[1], i * N_PAIRS * y.nb[1]) for i in (0, 1))
    scores = ctx.scale(ctx.mul_mat(second, first), SCALE)
    loss = ctx.cross_entropy_loss(scores, ctx.from_array(np.eye(N_PAIRS, dtype=np.float32)))
    inputs = (graph.ids, graph.mask, graph.pool)
    opt = OptContext(Scheduler(backends), inputs, loss, "mean", AdamW(RATES["MiniLM"]))
    opt.alloc()

    def step(tokens: np.ndarray) -> float:
        graph.set_inputs(list(tokens))
        result = Result()
        opt.eval(result)
        return result.loss

    return step


def torch_bert(threads: int, devices: str) -> Step:
    import torch
    import torch.nn.functional as fn

    torch.set_num_threads(threads)
    config, arrays = bert_weights()
    w = {name: torch.nn.Parameter(torch.from_numpy(array)) for name, array in arrays.items()}
    n, heads = config.n_embd, config.n_head
    labels = torch.arange(N_PAIRS)

    def linear(name: str, x: Any) -> Any:
        return fn.linear(x, w[name + ".weight"], w[name + ".bias"])

    def norm(name: str, x: Any) -> Any:
        return fn.layer_norm(x, (n,), w[name + ".weight"], w[name + ".bias"], config.norm_eps)

    def embed(ids: Any) -> Any:
        batch, length = ids.shape
        places = w["positions"][:length] + w["types"][0]
        x = norm("norm", fn.embedding(ids, w["tokens"]) + places)
        for i in range(config.n_layer):
            at = f"layer.{i}."
            q, k, v = linear(at + "qkv", x).view(batch, length, 3, heads, n // heads).permute(2, 0, 3, 1, 4)
            mixed = fn.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, n)
            x = norm(at + "attn_norm", linear(at + "attn_out", mixed) + x)
            x = norm(at + "ff_norm", linear(at + "ff_down", fn.gelu(linear(at + "ff_up", x))) + x)
        return fn.normalize(x.mean(dim=1))

    optimizer = torch.optim.AdamW(w.values(), RATES["MiniLM"], weight_decay=0)

    def step(tokens: np.ndarray) -> float:
        optimizer.zero_grad()
        first, second = embed(torch.from_numpy(tokens).long()).split(N_PAIRS)
        loss = fn.cross_entropy(first @ second.T * SCALE, labels)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def factors(shapes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The factors that both begin with, by the names of weights and their shapes, NumPy order."""
    rng = np.random.default_rng(1)
    return {
        name: (
            (rng.standard_normal((RANK, n_in)) / math.sqrt(n_in)).astype(np.float32),
            (0.01 * rng.standard_normal((n_out, RANK))).astype(np.float32),
        )
        for name, (n_out, n_in) in sorted(shapes.items())
    }


def our_llama(threads: int, devices: str) -> Step:
    from ggmlb.models import TextModel
    from ggmlb.optimize import AdamW, Result

    model = TextModel(default_text_model(), devices.split(","), n_ctx=64, threads=threads)
    adapter = model.new_adapter(rank=RANK)
    shapes = {name: (f.b.ne[1], f.a.ne[0]) for name, f in adapter.factors.items()}
    for name, pair in factors(shapes).items():
        for tensor, array in zip(adapter.factors[name], pair, strict=True):
            tensor.set_array(array)
    training = model.training(adapter, AdamW(RATES["SmolLM2"]), n_ctx=N_CTX, n_batch=N_SEQUENCES)
    training.opt.alloc()

    def step(tokens: np.ndarray) -> float:
        result = Result()
        training.opt.set_batch([tokens[:, :-1]], tokens[:, 1:])
        training.opt.eval(result)
        return result.loss

    return step


def torch_llama(threads: int, devices: str) -> Step:
    import torch
    import torch.nn.functional as fn

    import ggmlb
    from ggmlb.models.text.architectures import read_config

    torch.set_num_threads(threads)
    file = ggmlb.open_gguf(default_text_model())
    c = read_config(file)
    a = c.attentions[0]
    assert a is not None and a.rope is not None
    w = {name: torch.from_numpy(np.array(file.array(name), np.float32)) for name in file}
    head = w.get("output.weight", w["token_embd.weight"])
    names = [n for n in w if re.search(r"attn_[qkv]\.weight|attn_output\.weight", n)]
    lora = {
        name: tuple(torch.nn.Parameter(torch.from_numpy(array)) for array in pair)
        for name, pair in factors({n: tuple(w[n].shape) for n in names}).items()
    }
    half = torch.arange(0, a.n_key, 2, dtype=torch.float32) / a.n_key
    angles = torch.arange(N_CTX, dtype=torch.float32)[:, None] * a.rope.freq_base**-half
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]

    def product(name: str, x: Any) -> Any:
        y = fn.linear(x, w[name + ".weight"])
        if name + ".weight" in lora:
            a, b = lora[name + ".weight"]
            y = y + 2.0 * fn.linear(fn.linear(x, a), b)
        return y

    def rotated(x: Any) -> Any:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    def logits(ids: Any) -> Any:
        x = fn.embedding(ids, w["token_embd.weight"])
        for i in range(c.n_layer):
            at = f"blk.{i}."
            h = fn.rms_norm(x, (c.n_embd,), w[at + "attn_norm.weight"], c.eps)
            q, k, v = (
                product(f"{at}attn_{part}", h).view(*ids.shape, heads, size)
                for part, heads, size in
                (("q", a.n_head, a.n_key), ("k", a.n_head_kv, a.n_key), ("v", a.n_head_kv, a.n_value))
            )  # fmt: skip
            seen = fn.scaled_dot_product_attention(
                rotated(q).transpose(1, 2), rotated(k).transpose(1, 2), v.transpose(1, 2),
                is_causal=True, scale=a.scale, enable_gqa=True,
            )  # fmt: skip
            x = x + product(at + "attn_output", seen.transpose(1, 2).flatten(2))
            h = fn.rms_norm(x, (c.n_embd,), w[at + "ffn_norm.weight"], c.eps)
            x = x + product(at + "ffn_down", fn.silu(product(at + "ffn_gate", h)) * product(at + "ffn_up", h))
        return fn.linear(fn.rms_norm(x, (c.n_embd,), w["output_norm.weight"], c.eps), head)

    optimizer = torch.optim.AdamW(
        [p for pair in lora.values() for p in pair], RATES["SmolLM2"], weight_decay=0
    )

    def step(tokens: np.ndarray) -> float:
        optimizer.zero_grad()
        ids = torch.from_numpy(tokens).long()
        loss = fn.cross_entropy(logits(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


MODELS: dict[str, dict[str, Callable[[int, str], Step]]] = {
    "MiniLM": {"ggmlb": our_bert, "PyTorch": torch_bert},
    "SmolLM2, LoRA": {"ggmlb": our_llama, "PyTorch": torch_llama},
}
SHAPES = {"MiniLM": (2 * N_PAIRS, N_TOKENS), "SmolLM2, LoRA": (N_SEQUENCES, N_CTX + 1)}
N_WORDS = 20000
"""Token numbers are below this; both vocabularies are larger."""


def peak_nbytes() -> float:
    """The greatest resident memory of this process [bytes]."""
    status = Path("/proc/self/status").read_text()
    return 1024.0 * int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0])


def worker(model: str, name: str, threads: int, devices: str, pipe: Connection) -> None:
    """Answer tokens with the seconds of a step, its loss, and the peak of memory."""
    step = MODELS[model][name](threads, devices)
    pipe.send(None)
    while (tokens := pipe.recv()) is not None:
        start = perf_counter()
        loss = step(tokens)
        pipe.send((perf_counter() - start, loss, peak_nbytes()))
    os._exit(0)


Found = dict[str, list[tuple[float, float, float]]]


def measure(model: str, rounds: int, threads: int, devices: str, warm_up: int = 2) -> Found:
    """Return seconds, loss and peak of memory of each step, by library."""
    os.environ.update(OMP_NUM_THREADS=str(threads), OPENBLAS_NUM_THREADS=str(threads))
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Any] = {}
    for name in MODELS[model]:
        pipes[name], other = context.Pipe()
        args = (model, name, threads, devices, other)
        context.Process(target=worker, args=args, daemon=True).start()
        other.close()
        pipes[name].recv()
    rng, found = np.random.default_rng(0), {name: [] for name in pipes}
    for i in range(-warm_up, rounds):
        tokens = rng.integers(1, N_WORDS, SHAPES[model]).astype(np.int32)
        for name in list(pipes)[:: 1 if i % 2 else -1]:
            pipes[name].send(tokens)
            answer = pipes[name].recv()
            if i >= 0:
                found[name].append(answer)
    for pipe in pipes.values():
        pipe.send(None)
    return found


def check(model: str, found: Found) -> float:
    """Return the greatest difference of the losses; end the program if it is large."""
    losses = [[loss for _, loss, _ in found[name]] for name in ("ggmlb", "PyTorch")]
    far = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
    if not far < 0.02:
        raise SystemExit(f"{model}: the losses differ by {far:.1%}: {losses}; there is nothing to compare")
    return far


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--devices", default="LLVM,CPU")
    parser.add_argument("--models", default="", help="part of a model's name; all by default")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/train.md")
    args = parser.parse_args()
    table = Table(
        "model", "ggmlb [s]", "PyTorch [s]", "speed", "ggmlb [MB]", "PyTorch [MB]", "memory", "losses"
    )
    for model in MODELS:
        if args.models.lower() not in model.lower():
            continue
        found = measure(model, args.rounds, args.threads, args.devices)
        far = check(model, found)
        ours, theirs = ([s for s, _, _ in found[name]] for name in ("ggmlb", "PyTorch"))
        ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
        peaks = [found[name][-1][2] / 1e6 for name in ("ggmlb", "PyTorch")]
        table.row(
            model, f"{statistics.median(ours):.3f}", f"{statistics.median(theirs):.3f}",
            f"**{statistics.median(ratios):.2f}** ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            f"{peaks[0]:.0f}", f"{peaks[1]:.0f}", f"**{peaks[0] / peaks[1]:.2f}**", f"within {far:.2%}",
        )  # fmt: skip
    about = (
        "Training beside PyTorch\n\nSeconds of a step by `python benchmarks/train.py`: median of "
        f"{args.rounds}, {args.threads} threads each, ggmlb on {args.devices}. `speed` is PyTorch's time "
        "over ours, the median of the steps' ratios, least and most in brackets (asked: 1.0); `memory` is "
        f"our peak of the process over PyTorch's (asked: at most 1.0).\n\n{__doc__}"
    )
    if args.save:
        save("train", about, table, packages=("numpy", "torch"))


if __name__ == "__main__":
    main()
