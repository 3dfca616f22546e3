"""The LLVM device beside ggml, op by op, in one run.

As `ops.py` does it: two processes that take turns, with the same data and threads; results are compared
before anything is measured. A cell has our time [ms], and in brackets the median of the rounds' ratios of
best calls: of ggml's time to ours. `!` marks what takes longer than is asked: products of plain weights with
one column at most as long as ggml's (1/1.2 for q4_0, q4_1, q8_0, q4_K, q6_K), of 32 and more 1/1.3, repacked
weights 1/1.2 of ggml's CPU_REPACK, attention of one query half. ggml's weights lie in its plain memory, but
where a row says "beside CPU_REPACK", which is to ggml what LLVM_Repacked is here.

ggml is that of llama.cpp built for this processor (`peers.py`). With GGMLB_SIMD=avx2, ggmlb is limited to
AVX2, which has a page of its own, and so is ggml: PyPI's xllamacpp. Parts can be run apart, each in less than
two minutes; the page holds what was last measured of each.

    [GGMLB_SIMD=avx2] python benchmarks/llvm_ops.py [--peer wheel] [--rounds 3] [--threads 2]
        [--parts n1,ops] [--ops add]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from libraries import Case, Ggmlb, OnGgml, recorded
from ops import EVEN, milliseconds
from peers import NAMES, Peer
from report import Table, save
from turns import Players, arguments, best_s

from ggmlb.core.dtypes import DType
from ggmlb.system import env

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Emitter

SIMD = env.text("GGMLB_SIMD")
LIBRARIES = {"ggmlb": Ggmlb, "ggml": OnGgml}

TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS",
)  # fmt: skip
GRIDS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M")
"""Types whose codes are entries of grids; they have no strips."""
ROWS = (1, 2, 4, 8, 32, 128, 512)
SQUARES = (576, 1024, 2048, 4096)
SQUARE_TYPES, SQUARE_ROWS = ("F32", "Q8_0", "Q4_0", "Q4_K", "Q6_K"), (1, 8, 128)
REPACKED = "LLVM_Repacked"
"""The device's own memory for weights."""
CPU_REPACK = ("Q4_0", "Q4_K", "IQ4_NL", "MXFP4")
"""Types that ggml's own memory for weights takes on x86."""
MORE = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
"""Those whose products with one column should take 1/1.2 of ggml's time."""
KEYS = (128, 512, 2048, 8192)

OPS = (
    *EVEN, "rope", "get_rows", "set_rows", "cpy", "flash_attn_ext", "mul_mat_id", "concat", "argmax",
    "argsort", "top_k", "ssm_conv",
)  # fmt: skip
"""Without ssm_scan, rwkv_wkv7 and gated_delta_net: a trial of ggml 0.25, built for a Zen 4, finds other
infinities or NaN than the CPU's, so that `ggml:CPU` refuses them."""
N_NODES = 1000


class Cell(NamedTuple):
    """Where a case stands on the page."""

    section: str
    row: str
    column: str


def tiny(c: Any) -> Any:
    x, y = (c.new_tensor(DType.F32, (64,)) for _ in range(2))
    for _ in range(N_NODES):
        x = c.add(x, y)
    return x


def product(section: str, name: str, k: int, m: int, n: int, storage: str, peer: str) -> tuple[Cell, Case]:
    """A product of `n` columns with a weight of `m` rows."""
    target = 1.3 if n >= 32 else 1.2 if name in MORE else 1.0
    if peer != "CPU":
        target = 1.2
    elif storage != "CPU":
        target = 1.3 if n >= 32 else 1.0
    where = "plain" if storage == "CPU" else "repacked" if peer == "CPU" else f"repacked beside {peer}"
    row = name.lower() if section == "products" else f"{m} x {k}, {name.lower()}"

    def build(c: Any) -> Any:
        return c.mul_mat(c.new_tensor(DType[name], (k, m)), c.new_tensor(DType.F32, (k, n)))

    asked = target if n == 1 or n >= 32 or peer != "CPU" else 1.0
    case = Case("mul_mat", f"{row}, n = {n}, {where}", build, asked, 1e-3, storage, peer=peer)
    return Cell(section, f"{row}, {where}", f"n = {n}"), case


def products(n: int, names: Iterable[str] = TYPES) -> list[tuple[Cell, Case]]:
    made = []
    for name in names:
        memories = [
            ("CPU", "CPU"),
            *([(REPACKED, "CPU")] if name not in GRIDS else []),
            *([(REPACKED, "CPU_REPACK")] if name in CPU_REPACK else []),
        ]
        made += [product("products", name, 14336, 4096, n, *memory) for memory in memories]
    return made


def square(size: int) -> list[tuple[Cell, Case]]:
    return [
        product("squares", name, size, size, n, storage, "CPU")
        for name in SQUARE_TYPES
        if size % DType[name].block_size == 0
        for storage in ("CPU", REPACKED)
        for n in SQUARE_ROWS
    ]


def attend(name: str, head: int, group: int, kv: int) -> tuple[Cell, Case]:
    """Attention of one token: 8 heads of keys and values, each for `group` of queries."""

    def build(c: Any) -> Any:
        q = c.new_tensor(DType.F32, (head, 1, 8 * group))
        k, v = (c.new_tensor(DType[name], (head, kv, 8)) for _ in range(2))
        return c.flash_attn_ext(q, k, v, c.new_tensor(DType.F16, (kv, 1)), head**-0.5, 0.0, 0.0)

    row = f"{name.lower()}, 8 heads of {head}{f', each for {group} of queries' if group > 1 else ''}"
    # ggml adds up values in halves: with 8192 of them, by hundredths.
    return Cell("attention", row, f"{kv} keys"), Case("flash_attn_ext", f"{row}, {kv} keys", build, 2.0, 2e-2)


def attention(name: str, head: int) -> list[tuple[Cell, Case]]:
    return [attend(name, head, group, kv) for group in (1, 4) for kv in KEYS]


def others() -> list[tuple[Cell, Case]]:
    cases = [Case.of(perf, target=1.0) for perf in recorded(*OPS)]
    cases.append(Case("add", f"{N_NODES} nodes of 64 elements", tiny, 0.67, 1e-9))
    return [(Cell("ops", f"{case.op}: {case.what}", "LLVM"), case) for case in cases]


PARTS: dict[str, list[tuple[Cell, Case]]] = {
    **{f"n{n}": products(n) for n in ROWS[:-1]},
    **{f"n512{part}": products(512, TYPES[i::2]) for i, part in enumerate("ab")},
    **{f"g{n}": products(n, ("MXFP4", *GRIDS)) for n in ROWS},
    **{f"s{size}": square(size) for size in SQUARES},
    **{
        f"a{head}-{name.lower()}": attention(name, head)
        for head in (64, 128, 256)
        for name in ("F16", "Q8_0")
    },
    "ops": others(),
}
PART_OF, CELLS, CASES = zip(
    *((name, cell, replace(case, device="LLVM")) for name, part in PARTS.items() for cell, case in part),
    strict=True,
)

MEASURED = Path(tempfile.gettempdir()) / "ggmlb_llvm_ops_{}_{}_{}.json"
"""What was measured so far, by the class of machine, the number of threads and the peer."""
CLOCK = "Times are processor times, which other work disturbs less."
READ_MIB = (64, 512)
TITLES = {
    "products": "weight of 4096 x 14336",
    "squares": "weight",
    "attention": "keys and values",
    "ops": "op",
}


def read(k: Emitter) -> None:
    """Add up vectors: address, bytes, where to put the sums."""
    from ggmlb.backends.llvm.codegen.emit import I32, vec

    n = k.level.lanes
    address, nbytes, to = k.ints(3)
    sums = [k.variable(k.const(vec(I32, n), 0)) for _ in range(4)]
    first, last = nbytes * k.chunk // k.n_chunks, nbytes * (k.chunk + 1) // k.n_chunks
    with k.loop(first, last, 16 * n) as i:
        for j, slot in enumerate(sums):
            slot.set(slot.now + k.load(vec(I32, n), address + i + 4 * n * j))
    k.store(sums[0].now + sums[1].now + sums[2].now + sums[3].now, to + k.chunk * 64)


class Emitted:
    """A kernel alone, in 8 chunks for each thread, with integers as arguments.

    Args:
        emit: Makes it.
        threads: That run it.
        args: Its arguments.
    """

    def __init__(self, emit: Any, threads: int, *args: int) -> None:
        from ggmlb.backends.llvm.codegen import loader
        from ggmlb.backends.llvm.codegen.library import library
        from ggmlb.backends.llvm.pool import Pool

        # Those on disk are named by the sources of the package alone.
        address = loader.load(library().compile(emit, (), emit.__name__), emit.__name__)
        self._args = np.array(args, np.int64)
        self._table = np.array([[address, self._args.ctypes.data, 8 * threads]], np.int64)
        self._pool = Pool(threads, library())
        self._span = self._pool.span(self._table.ctypes.data, 0, 1)

    def run(self) -> None:
        self._pool.run(self._span, True)

    def close(self) -> None:
        self._pool.free()


class Reading(Emitted):
    """Reading of so many bytes, as fast as it goes."""

    def __init__(self, threads: int, nbytes: int) -> None:
        self._memory, self._sums = np.ones(nbytes + 4096, np.uint8), np.zeros(4096, np.uint8)
        super().__init__(read, threads, self._memory.ctypes.data, nbytes, self._sums.ctypes.data)


def read_speed(threads: int, nbytes: int) -> float:
    """The best speed of reading memory [GB/s]."""
    reading = Reading(threads, nbytes)
    best = best_s(reading.run, 20, time.thread_time if threads == 1 else time.perf_counter)
    reading.close()
    return nbytes / best / 1e9


def peer_arguments(doc: str, rounds: int) -> argparse.ArgumentParser:
    """Return the arguments of a script whose peer is one of `peers.py`."""
    parser = arguments(doc, rounds)
    parser.add_argument("--peer", choices=NAMES, default="wheel" if SIMD == "avx2" else "native")
    return parser


def use_peer(name: str) -> Peer:
    """Let the players' `ggml:CPU` be that of a peer."""
    peer = Peer(name)
    os.environ["GGMLB_GGML_PATH"] = str(peer.folder)
    return peer


def main() -> None:
    parser = peer_arguments(__doc__, rounds=3)
    parser.add_argument("--parts", default=",".join(PARTS))
    args = parser.parse_args()
    peer = use_peer(args.peer)
    path = Path(str(MEASURED).format(SIMD or "best", args.threads, args.peer))
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    with Players(__file__, args.threads) as players:
        for part in args.parts.split(","):
            cells = []
            numbers = [
                i
                for i, (name, case) in enumerate(zip(PART_OF, CASES, strict=True))
                if name == part and (not args.ops or case.op in args.ops.split(","))
            ]
            for number, (case, seconds, nmse) in zip(numbers, players.measured(args, numbers), strict=True):
                ours, theirs = seconds["ggmlb"], seconds["ggml"]
                ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
                missed = " !" if ratio < case.target else ""
                cells.append((*CELLS[number], f"{milliseconds(ours)} ({ratio:.2f}){missed}", nmse))
                print(*cells[-1], flush=True)
            known[part] = {"cells": cells, "load": players.load[-len(cells) - 1 :]}
            if not args.ops:
                path.write_text(json.dumps(known))
    if args.ops:
        return
    known["read"] = {str(n): read_speed(args.threads, n << 20) for n in READ_MIB}
    path.write_text(json.dumps(known))
    write(known, args, peer)


def write(known: dict[str, Any], args: Any, peer: Peer) -> None:
    """Write the page of all parts that were measured."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for part in PARTS:
        for section, row, column, cell, _ in known.get(part, {"cells": ()})["cells"]:
            found.setdefault(section, {}).setdefault(row, {})[column] = cell
    tables = []
    for section, rows in found.items():
        columns = list(dict.fromkeys(cell.column for cell in CELLS if cell.section == section))
        table = Table(TITLES[section], *columns)
        table.rows = [(row, *(cells.get(c, "") for c in columns)) for row, cells in rows.items()]
        tables.append(table)
    loads = [x for part in PARTS if part in known for x in known[part]["load"]]
    reads = ", ".join(f"{known['read'][str(n)]:.0f} GB/s from {n} MiB" for n in READ_MIB)
    load = f"{min(loads):.1f} to {max(loads):.1f}"
    about = f"""The LLVM device{f", limited to {SIMD.upper()}," if SIMD else ""} beside ggml
Made by `python benchmarks/llvm_ops.py`: {args.rounds} rounds, {args.threads} thread(s) each. ggml is that of
{peer.about}. Reading alone: {reads}. The load of the machine, of one minute, both
libraries included, was {load}. {CLOCK if args.threads == 1 else ""}

{__doc__.partition("    [GGMLB")[0]}"""
    name = "_".join(["llvm", *([SIMD] if SIMD else []), *(["1"] if args.threads == 1 else [])])
    save(name, about, *tables, packages=("numpy", "llvmlite"))


if __name__ == "__main__":
    main()
