"""The LLVM device beside ggml, op by op, in one run.

As `ops.py` does it: two processes that take turns, with the same data and threads; results are compared
before anything is measured. The column `ratio` is the median of the rounds' ratios of best calls. `GB/s` is
the weight's or cache's bytes over our time, and then what reading as many bytes alone reaches, by a loop of
vector loads over as many threads. ggml's weights lie in its plain memory, but where a row says "beside
CPU_REPACK" or "beside AMX": these kinds of memory are to ggml what LLVM_Repacked is here. Parts can be run
apart, each in less than two minutes; the page holds what was last measured of each. ggml is that of
ggml-python, or else the library that `ggml:CPU` found; with GGMLB_SIMD, ggmlb alone poses as another class of
machine, which has a page of its own.

    [GGMLB_SIMD=avx2] python benchmarks/llvm_ops.py [--rounds 3] [--threads 2] [--parts n1,ops] [--ops add]
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from libraries import Case, Ggml, Ggmlb, OnGgml, recorded
from ops import EVEN, milliseconds, verdict
from report import Table, save
from turns import Players, arguments, best_s

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.ops.matmul import product
from ggmlb.system import env

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Kernel

LIBRARIES = {"ggmlb": Ggmlb, "ggml": Ggml if find_spec("ggml") else OnGgml}

TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS", "MXFP4",
)  # fmt: skip
ROWS = (1, 2, 4, 8, 32, 512)
REPACKED = "LLVM_Repacked"
"""The device's own memory for weights; ggml's lie in plain memory, but in parts that begin with `peer`."""
PEERS = {
    (1, "AMX"): ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"),
    **{(n, "CPU_REPACK"): ("Q4_0", "Q4_K", "IQ4_NL") for n in ROWS},
}
"""ggml's own memory for weights, which llama.cpp uses where it can: columns, its name, types that it takes.
Products of several columns in AMX memory end in an illegal instruction on the machine of the figures."""
FASTER = {(1, "Q4_0"), (1, "Q8_0"), (1, "Q4_K"), *((512, name) for name in TYPES)}
"""Products that should take 1/1.3 of ggml's time; all else at most as long."""

OPS = (*EVEN, "rope", "get_rows", "set_rows", "cpy", "flash_attn_ext", "mul_mat_id")
N_NODES = 1000


def tiny(c: Any) -> Any:
    x, y = (c.new_tensor(DType.F32, (64,)) for _ in range(2))
    for _ in range(N_NODES):
        x = c.add(x, y)
    return x


def products(n: int, names: tuple[str, ...] = TYPES, storage: str = "CPU", peer: str = "CPU") -> list[Case]:
    where = "" if storage == "CPU" else f", {storage}"
    if peer != "CPU":
        where = f"{where} beside {peer}"
    return [
        Case.of(
            product(DType[name], n),
            where,
            target=None if peer != "CPU" else 1.3 if (n, name) in FASTER else 1.0,
            storage=storage,
            peer=peer,
        )
        for name in names
    ]


PARTS: dict[str, list[Case]] = {
    **{f"n{n}": products(n) for n in ROWS},
    **{f"r{n}": products(n, storage=REPACKED) for n in ROWS},
    **{f"peer-{peer}-{n}": products(n, types, REPACKED, peer) for (n, peer), types in PEERS.items()},
    "ops": [Case.of(perf, target=1.0) for perf in recorded(*OPS)],
    "graphs": [Case("add", f"{N_NODES} nodes of 64 elements", tiny, 0.67, 1e-9)],
}
PART_OF, CASES = zip(
    *((name, replace(case, device="LLVM")) for name, part in PARTS.items() for case in part), strict=True
)

SIMD = env.text("GGMLB_SIMD")
MEASURED = Path(tempfile.gettempdir()) / "ggmlb_llvm_ops_{}_{}.json"
"""What was measured so far, by the class of machine and the number of threads."""
COLUMNS = ("op", "what", "ggml [ms]", "ggmlb [ms]", "ratio", "target", "GB/s", "reading", "NMSE")
READ_MIB = (64, 512)
CLOCK = "Times are of the processor, which that work disturbs less."


def read(k: Kernel) -> None:
    """Add up vectors: address, bytes, where to put the sums."""
    from ggmlb.backends.llvm.codegen.value import I32, vec

    n = k.level.lanes
    address, nbytes, to = k.ints(3)
    sums = [k.variable(k.const(vec(I32, n), 0)) for _ in range(4)]
    first, last = nbytes * k.chunk // k.n_chunks, nbytes * (k.chunk + 1) // k.n_chunks
    with k.loop(first, last, 16 * n) as i:
        for j, slot in enumerate(sums):
            slot.set(slot.now + k.load(vec(I32, n), address + i + 4 * n * j))
    k.store(sums[0].now + sums[1].now + sums[2].now + sums[3].now, to + k.chunk * 64)


def read_speed(threads: int, nbytes: int) -> float:
    """The best speed of reading memory [GB/s]."""
    from ggmlb.backends.llvm.codegen.library import library
    from ggmlb.backends.llvm.pool import Pool

    memory, sums = np.ones(nbytes + 4096, np.uint8), np.zeros(1024, np.uint8)
    args = np.array([memory.ctypes.data, nbytes, sums.ctypes.data], np.int64)
    table = np.array([[library().address(read), args.ctypes.data, 8]], np.int64)
    pool = Pool(threads, library())
    clock = time.thread_time if threads == 1 else time.perf_counter
    best = best_s(lambda: pool.run(table.ctypes.data, 0, 1, True), 20, clock)
    pool.free()
    return nbytes / best / 1e9


def speed(case: Case, seconds: float, threads: int) -> tuple[str, str]:
    """What is read of the weight per second, where that is what takes the time, and by reading alone."""
    node = case.build(Context())
    if node.op is not Op.MUL_MAT or node.ne[1] > 8:
        return "", ""
    nbytes = node.sources[0].nbytes
    return f"{nbytes / seconds / 1e9:.1f}", f"{read_speed(threads, nbytes):.1f}"


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--parts", default=",".join(PARTS))
    args = parser.parse_args()
    path = Path(str(MEASURED).format(SIMD or "best", args.threads))
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    with Players(__file__, args.threads) as players:
        for part in args.parts.split(","):
            table = Table(*COLUMNS)
            numbers = [i for i, name in enumerate(PART_OF) if name == part]
            for case, seconds, nmse in players.measured(args, numbers):
                ours, theirs = seconds["ggmlb"], seconds["ggml"]
                ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
                figures = (milliseconds(theirs), milliseconds(ours), f"{ratio:.2f}")
                speeds = speed(case, min(ours), args.threads)
                table.row(case.op, case.what, *figures, verdict(case, ratio), *speeds, f"{nmse:.0e}")
            known[part] = {"rows": table.rows, "load": players.load[-len(table.rows) - 1 :]}
    if args.ops:
        return
    known["read"] = {str(n): read_speed(args.threads, n << 20) for n in READ_MIB}
    path.write_text(json.dumps(known))
    tables = []
    for part in PARTS:
        if part in known:
            table = Table(*COLUMNS)
            table.rows = [tuple(row) for row in known[part]["rows"]]
            tables.append(table)
    loads = [x for part in known.values() if "load" in part for x in part["load"]]
    reads = ", ".join(f"{known['read'][str(n)]:.0f} GB/s from {n} MiB" for n in READ_MIB)
    about = f"""The LLVM device{f", posing as {SIMD}," if SIMD else ""} beside ggml
Made by `python benchmarks/llvm_ops.py`: {args.rounds} rounds, {args.threads} thread(s) each. Sizes are those
of mode `perf` on a CPU, twice along each edge. Reading alone: {reads}. The machine was shared with other
work: its load, of one minute, both libraries included, was {min(loads):.1f} to {max(loads):.1f}.
{CLOCK if args.threads == 1 else ""}

{__doc__.partition("    python")[0]}"""
    name = "_".join(["llvm", *([SIMD] if SIMD else []), *(["1"] if args.threads == 1 else [])])
    save(name, about, *tables, packages=("numpy", "llvmlite", "ggml-python", "xllamacpp"))


if __name__ == "__main__":
    main()
