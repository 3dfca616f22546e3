"""The GPU backend at the card's limit: each figure beside what the card or PyTorch reaches in the same run.

    python benchmarks/gpu.py [--device CUDA0] [--beside ggml:CUDA0] [--only ops,attention] [--ops mul_mat]
        [--smoke] [--folder DIR]

What is in doubt comes first (`gpu_text`): the host's time per token, decoding and prompts, with a verdict.
Kernels are timed in graphs of many nodes of one kind, each with memory of its own, so that no cache has what
they read; the time of a node is the median over rounds of the graph's time divided by its nodes, launches
included. Bandwidth counts each byte that must be read or written once. `--smoke` tries everything with tiny
sizes on any device, and measures nothing worth reading.
"""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from decode import Decoder, Sizes
from embed import english_sentences
from gpu_measure import FILLING, Bench, RawCopies, Torch, machine
from gpu_text import GOOD, HOST_GOAL_S, host_time, speeds, verdict_on_host, verdicts_on
from libraries import recorded
from report import RESULTS, Table, save

from ggmlb import Context, DType, Graph, alloc_ctx_tensors
from ggmlb.core.enums import Op
from ggmlb.core.errors import Error, ModelError
from ggmlb.core.tensor import Tensor
from ggmlb.testing.perf import flops, leaf_data, moved_nbytes, scale_of

BUDGET_S = 420
"""Sections that have not begun by then are left out, and named in the summary [s]."""

BOUND = (
    "add", "mul", "silu", "gelu", "cpy", "rms_norm", "norm", "soft_max_ext", "rope", "get_rows", "mul_mat",
)  # fmt: skip
"""Functions that memory alone should limit; of products those of one column."""
SMOKE_FLOP = 1 << 25
"""With `--smoke`, larger products are left out."""

F32, F16, BF16, I32, I64 = DType.F32, DType.F16, DType.BF16, DType.I32, DType.I64


@dataclass
class Report:
    """Figures as they come, what they mean, and what of them misses its goal."""

    table: Table = field(default_factory=lambda: Table("what", "ggmlb", "limit", "of the limit", "goal"))
    verdicts: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    n_met: int = 0
    has_goals: bool = True
    failed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, what: str, value: float, limit: float | str, unit: str, goal: float | None = None) -> None:
        """Add a figure; `limit` is a reason where there is none to compare with."""
        if isinstance(limit, str):
            self.table.row(what, f"{value:.4g} {unit}", limit, "", "")
            return
        ratio = value / limit
        verdict = ""
        if goal is not None and self.has_goals:
            met = ratio >= goal
            verdict = f"{goal:.0%}" + ("" if met else " (missed)")
            self.n_met += met
            if not met:
                self.missed.append(f"{what}: {ratio:.0%} of the limit, goal {goal:.0%}")
        self.table.row(what, f"{value:.4g} {unit}", f"{limit:.4g} {unit}", f"{ratio:.0%}", verdict)


@dataclass
class Run:
    """What all sections share; `ops` are the functions that section `ops` measures, all by default.

    `beside` is the peer's device, `host_s` the host's time per token, if it was measured.
    """

    bench: Bench
    raw: RawCopies
    torch: Torch
    report: Report
    ops: tuple[str, ...] = ()
    beside: str = ""
    host_s: float = 0.0
    _copy: float = 0.0

    @property
    def device_copy(self) -> float:
        """Bytes read and written per second by a plain copy on the device; measured once."""
        self._copy = self._copy or self.raw.on_device(self.bench.size(1 << 30, 1 << 16))
        return self._copy

    def bandwidth(
        self,
        what: str,
        make: Callable[[Context], Tensor],
        nbytes: int,
        fill: Callable[[Context], None] | None = None,
        goal: float | None = 0.85,
    ) -> None:
        """Time a node, and compare its bandwidth with a copy's."""
        seconds = self.bench.node_seconds(make, nbytes, fill)
        self.report.add(what, nbytes / seconds / 1e9, self.device_copy / 1e9, "GB/s", goal)


def fill_indices(ctx: Context) -> None:
    """Write positions and row numbers, which cannot have any value."""
    for t in ctx.tensors:
        if t.op is Op.NONE and t.dtype in (I32, I64):
            t.set(leaf_data(t.dtype, t.ne))


def host(run: Run) -> None:
    if not run.bench.is_cuda:
        return  # it counts CUDA's calls
    found = host_time(run.bench)
    run.host_s = found.seconds
    run.report.add("host alone, tokens", 1 / found.seconds, 1 / HOST_GOAL_S, "per s", 1.0)
    run.report.verdicts.append(verdict_on_host(found))


def text(run: Run) -> None:
    found = speeds(run.bench, run.beside, run.device_copy, square_rate(run, F16, run.bench.size(8192, 64)))
    for i, what in enumerate(("prompt", "decoding")):
        run.report.add(f"{what}, tokens", found.ours[i], found.limits[i], "per s", GOOD)
        peer = found.peer if isinstance(found.peer, str) else found.peer[i]
        run.report.add(f"{what}, tokens, beside {run.beside}", found.ours[i], peer, "per s", 1.0)
    run.report.verdicts += verdicts_on(found, run.beside, run.host_s)


def copies(run: Run) -> None:
    bench, backend = run.bench, run.bench.backend
    nbytes = bench.size(256 << 20, 1 << 16)
    ctx = Context()
    tensor = ctx.new_tensor(DType.I8, (nbytes,))
    pinned_type = bench.device.host_buffer_type
    with alloc_ctx_tensors(ctx, backend):
        for pinned in (True, False):
            if pinned and pinned_type is None:
                continue
            if pinned:
                home = Context()
                held = home.new_tensor(DType.I8, (nbytes,))
                memory = alloc_ctx_tensors(home, pinned_type)
                host = memory.base[held.offset : held.offset + nbytes]
            else:
                host = np.empty(nbytes, np.uint8)
            host[:] = FILLING
            kind = "pinned" if pinned else "pageable"
            set_s = bench.seconds(lambda host=host: backend.set_tensor_async(tensor, host))
            get_s = bench.seconds(lambda host=host: backend.get_tensor_async(tensor, host))
            for way, seconds in (("to device", set_s), ("to host", get_s)):
                limit = run.raw.host(nbytes, way == "to device", pinned) / 1e9
                run.report.add(f"copy {way}, {kind}", nbytes / seconds / 1e9, limit, "GB/s", 0.95)
            if pinned:
                memory.free()
    n = bench.size(1 << 26, 1 << 12)
    run.bandwidth("copy on the device", lambda c: c.dup(c.new_tensor(F32, (n,))), 8 * n, goal=0.95)


def ops(run: Run) -> None:
    """The sizes of the ops' records, as `ggmlb test --mode perf` has them."""
    scale = run.bench.size(scale_of(run.bench.device), 1)
    for perf in recorded(*run.ops):
        node = perf.build(Context(), scale)
        work = flops(node)
        if run.bench.smoke and work > SMOKE_FLOP:
            continue
        is_bound = perf.fn in BOUND and node.sources[0].dtype is not BF16 and (not work or node.ne[1] == 1)
        goal = 0.85 if is_bound else None
        run.bandwidth(perf.id, lambda c, p=perf: p.build(c, scale), moved_nbytes(node), fill_indices, goal)


def square_rate(run: Run, dtype: DType, n: int) -> float:
    """Operations per second of a large product of random numbers; equal numbers would take less power."""
    data = np.random.default_rng(0).standard_normal((n, n), np.float32).astype(dtype.numpy)

    def fill(ctx: Context) -> None:
        for t in ctx.tensors:
            if t.op is Op.NONE:
                t.set(data)

    seconds = run.bench.node_seconds(
        lambda c: c.mul_mat(c.new_tensor(dtype, (n, n)), c.new_tensor(dtype, (n, n))),
        max(2 * n * n * dtype.type_size, 1 << 28),
        fill,
    )
    return 2.0 * n**3 / seconds


def matmul(run: Run) -> None:
    n = run.bench.size(8192, 64)
    flops = 2.0 * n**3
    torch = run.torch.torch
    for dtype, name in ((F16, "float16"), (BF16, "bfloat16"), (F32, "float32")):
        rate = square_rate(run, dtype, n) / 1e12
        limit: float | str = run.torch.why
        if torch is not None:
            kind, where = getattr(torch, name), run.torch.device
            a, b = (torch.randn((n, n), dtype=kind, device=where) for _ in "ab")
            limit = flops / run.torch.seconds(lambda a=a, b=b: b @ a.T) / 1e12
        goal = 0.95 if dtype is not F32 else None
        run.report.add(f"mul_mat {dtype.name.lower()} {n}^3", rate, limit, "TFLOP/s", goal)
    k, m, columns = run.bench.size(4096, 256), run.bench.size(14336, 64), run.bench.size(512, 40)
    for dtype in (DType.Q8_0, DType.Q4_K):
        seconds = run.bench.node_seconds(
            lambda c, t=dtype: c.mul_mat(c.new_tensor(t, (k, m)), c.new_tensor(F32, (k, columns))), 1 << 27
        )
        limit = run.torch.why
        if torch is not None:
            w = torch.full((m, k), 0.05, dtype=torch.float16, device=run.torch.device)
            x = torch.full((columns, k), 0.05, dtype=torch.float16, device=run.torch.device)
            limit = 2.0 * k * m * columns / run.torch.seconds(lambda w=w, x=x: x @ w.T) / 1e12
        rate = 2.0 * k * m * columns / seconds / 1e12
        what = f"mul_mat {dtype.name.lower()}, n = {columns} (f16 in PyTorch)"
        run.report.add(what, rate, limit, "TFLOP/s")


def attention(run: Run) -> None:
    size, torch = run.bench.size, run.torch.torch
    heads, kv_heads = size(32, 4), size(8, 2)
    shapes = [
        ("prefill", 128, size(4096, 24), size(4096, 48), F16),
        ("prefill", 64, size(4096, 24), size(4096, 48), F16),
        ("decode", 128, 1, size(32768, 100), F16),
        ("decode", 64, 1, size(32768, 100), F16),
        ("decode", 128, 1, size(32768, 100), DType.Q8_0),
    ]
    for phase, head, n_q, n_kv, kv in shapes:

        def make(c: Context, h: int = head, q: int = n_q, n: int = n_kv, t: DType = kv) -> Tensor:
            keys, values = (c.new_tensor(t, (h, n, kv_heads)) for _ in "kv")
            return c.flash_attn_ext(c.new_tensor(F32, (h, q, heads)), keys, values, None, h**-0.5)

        nbytes = 2 * kv_heads * n_kv * kv.row_size(head) + 2 * 4 * heads * n_q * head
        seconds = run.bench.node_seconds(make, max(nbytes, 1 << 26))
        limit: float | str = run.torch.why
        if torch is not None:

            def some(n: int, h: int, d: int = head) -> object:
                return torch.full((1, h, n, d), 0.05, dtype=torch.float16, device=run.torch.device)

            q, k, v = some(n_q, heads), some(n_kv, kv_heads), some(n_kv, kv_heads)
            attend = torch.nn.functional.scaled_dot_product_attention

            def peer(q: object = q, k: object = k, v: object = v, attend: Any = attend) -> object:
                return attend(q, k, v, enable_gqa=True)

            limit = 1 / run.torch.seconds(peer)
        shape = f"{head} x {heads} heads ({kv_heads} of keys), {n_q} on {n_kv}, {kv.name.lower()}"
        what = f"attention, {phase}: {shape}"
        run.report.add(what, 1 / seconds, limit, "per s")
        if phase == "decode":
            run.report.add(what + ", reads", nbytes / seconds / 1e9, run.device_copy / 1e9, "GB/s")


def sentences(run: Run) -> None:
    from ggmlb.models import BertEmbedder, default_model_dir

    texts = english_sentences()
    names = [run.bench.device.name]
    with BertEmbedder(devices=[*names, "CPU"] if names != ["CPU"] else names) as embedder:
        for batch, n in ((1, run.bench.size(128, 2)), (run.bench.size(256, 4), run.bench.size(2048, 4))):
            calls = [
                [texts[i % len(texts)] for i in range(start, start + batch)] for start in range(0, n, batch)
            ]
            n_texts = len(calls) * batch

            def ours(calls: list[list[str]] = calls, batch: int = batch) -> None:
                for call in calls:
                    embedder.embed(call, batch)

            seconds = run.bench.seconds(ours, lambda: None)
            limit: float | str = run.torch.why
            if run.torch.torch is not None:
                try:
                    from sentence_transformers import SentenceTransformer
                except ImportError:
                    limit = "sentence-transformers is not installed"
                else:
                    peer = SentenceTransformer(str(default_model_dir()), device=run.torch.device)

                    def theirs(calls: list[list[str]] = calls, batch: int = batch, peer: Any = peer) -> None:
                        for call in calls:
                            peer.encode(call, batch_size=batch, show_progress_bar=False)

                    limit = n_texts / run.torch.seconds(theirs)
            run.report.add(f"MiniLM, batch {batch}", n_texts / seconds, limit, "sentences/s", 1.0)


def decode(run: Run) -> None:
    tiny = run.bench.smoke
    sizes = Sizes(2, 256, 512, 4, 2, 64, 64) if tiny else Sizes(47, 2048, 5632, 32, 8, 64, 1024)
    backend = run.bench.backend
    whole = Decoder(sizes, DType.Q4_0, apart=False)
    graph = Graph().build_forward_expand(whole.result)
    with alloc_ctx_tensors(whole.ctx, backend) as buffer:
        buffer.clear(FILLING)
        whole.fill()
        step = run.bench.seconds(lambda: backend.graph_compute_async(graph))
    apart = Decoder(sizes, DType.Q4_0, apart=True)
    kernels = 0.0
    with alloc_ctx_tensors(apart.ctx, backend) as buffer:
        buffer.clear(FILLING)
        apart.fill()
        for nodes in apart.kinds.values():
            alone = Graph().build_forward_expand(*nodes)
            kernels += run.bench.seconds(lambda g=alone: backend.graph_compute_async(g))
    n_nodes = sum(map(len, apart.kinds.values()))
    what = f"decode step of {n_nodes} kernels' nodes ({len(graph.nodes)} in the graph)"
    run.report.add(what, 1 / step, 1 / kernels, "per s", 1 / 1.05)


SECTIONS: dict[str, Callable[[Run], None]] = {
    f.__name__: f for f in (host, text, copies, ops, matmul, attention, sentences, decode)
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--beside", default="ggml:CUDA0", help="a device to compare text models with")
    parser.add_argument("--only", default="", help="names of sections: " + ", ".join(SECTIONS))
    parser.add_argument("--ops", default="", help="functions of section `ops`; all by default")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: try the script on any device")
    parser.add_argument("--folder", type=Path, help="where the results go; by default benchmarks/results")
    args = parser.parse_args(argv)
    begin = perf_counter()
    try:
        bench = Bench(args.device, args.smoke)
    except Error as error:
        print(f"nothing was measured: {error}")
        return 2
    report = Report(has_goals=not args.smoke)
    ops = tuple(filter(None, args.ops.split(",")))
    run = Run(bench, RawCopies(bench), Torch(bench), report, ops, args.beside)
    chosen = args.only.split(",") if args.only else list(SECTIONS)
    for name in chosen:
        if perf_counter() - begin > BUDGET_S:
            report.left_out.append(f"{name}: {BUDGET_S} s had passed")
            continue
        print(f"-- {name}", flush=True)
        try:
            SECTIONS[name](run)
        except ModelError as error:
            report.left_out.append(f"{name}: {error}")
        except Exception as error:  # one section must not cost the others their figures
            traceback.print_exc()
            report.failed.append(f"{name}: {type(error).__name__}: {error}")
    total = perf_counter() - begin
    where = machine(bench)
    bench.close()
    lines = [
        *report.verdicts,
        f"{report.n_met} goals met, {len(report.missed)} missed, {len(report.failed)} sections failed, "
        f"{len(report.left_out)} left out; {total:.0f} s.",
        *(f"missed: {text}" for text in report.missed),
        *(f"failed: {text.splitlines()[0]}" for text in report.failed),
        *(f"left out: {text}" for text in report.left_out),
    ]
    if not args.only or args.folder:
        slug = re.sub(r"[^a-z0-9]+", "-", bench.device.description.lower()).strip("-") or "device"
        summary = "\n".join(f"- {line}" for line in lines)
        tried = "\n\n**Tried with tiny sizes: these figures mean nothing.**" if args.smoke else ""
        about = f"""{bench.device.description} under ggmlb
{where}.{tried}

{summary}

{__doc__.partition("    python")[0]}{__doc__.partition("DIR]")[2].strip()}"""
        folder = args.folder or (None if args.smoke else RESULTS)
        if folder is not None:
            save(
                f"gpu-{slug}", about, report.table, packages=("numpy", "cupy-cuda13x", "torch"), folder=folder
            )
    print("\n== summary\n" + "\n".join(lines))
    return 1 if report.failed or report.left_out else 0


if __name__ == "__main__":
    sys.exit(main())
