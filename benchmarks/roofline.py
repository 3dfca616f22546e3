"""How far the LLVM device's ops are from the machine's limits: a picture and a table.

Operands are larger than the caches. An op can at best reach what its arithmetic per byte allows at the speed
of reading, or the rate of the units: `of the roof` is what it reaches of that. The roofs are measured by
small kernels of the same emitters, over as many threads: `reading` adds up vectors of as many bytes as the op
moves, by turns with it; `float32` multiplies and adds vectors in registers; `bytes` multiplies codes of 4
bits with signed bytes in registers, by the level's own instructions (codes of more bits need more of them on
AVX2). Bytes are those of operands and result, counted once, though a cache reads what is written.

    [GGMLB_SIMD=avx2] python benchmarks/roofline.py [--rounds 2] [--threads 2]
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from libraries import Case, Ggmlb, recorded
from llvm_ops import REPACKED, SIMD, Emitted, Reading, attend, product
from report import RESULTS, Table, save
from turns import arguments, turn

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.testing.perf import flops, moved_nbytes

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Emitter

NBYTES = 128 << 20
"""Of a weight; of keys and values together."""
TYPES, COLUMNS = ("F32", "F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"), (1, 32, 512)
PER_VALUE = {
    "add": 1, "mul": 1, "scale": 1, "norm": 6, "rms_norm": 4, "soft_max_ext": 12, "silu": 14, "gelu": 18,
    "rope": 6,
}  # fmt: skip
"""Operations for each value of ops that are no products, roughly: their roof is memory."""
SCALE = 32
"""Of these ops' recorded sizes, along each edge."""
TURNS, SUMS = 20000, 8
"""Repetitions in the kernels of the units' rates; their independent sums, which hide latency."""


def floats(k: Emitter) -> None:
    """Multiply and add in registers: where to put the sums."""
    from ggmlb.backends.llvm.codegen.emit import F32, vec

    (to,) = k.ints(1)
    x = k.load(vec(F32, k.level.lanes), to)
    sums = [k.variable(x) for _ in range(SUMS)]
    with k.loop(0, TURNS):
        for slot in sums:
            slot.set(k.fma(slot.now, x, x))
    for j, slot in enumerate(sums):
        k.store(slot.now, to + 2048 + (k.chunk * SUMS + j) * 64)


def codes(k: Emitter) -> None:
    """Multiply codes of 4 bits with signed bytes in registers, in groups of 8: where to put the sums."""
    from ggmlb.backends.llvm.codegen.emit import I8, I32, vec
    from ggmlb.backends.llvm.codegen.simd import Dot, add_words

    n, (to,) = max(8, k.level.lanes), k.ints(1)
    xs = [k.load(vec(I8, 4 * n), to + 4 * n * i) for i in range(SUMS // 2)]
    sums = [k.variable(k.const(vec(I32, n), 0)) for _ in range(SUMS)]
    with k.loop(0, TURNS // 8) as i:
        groups = [Dot(k, n).group(0, 15, start=slot.now) for slot in sums]
        # Two rows with four columns, as registers have room for; other codes each time, or it is one product.
        rows = groups[: SUMS // 2], groups[SUMS // 2 :]
        add_words(
            rows, 8, lambda j: ([k.load(vec(I8, 4 * n), to + (i + j + r) % 16 * 64) for r in (0, 1)], xs)
        )
        for slot, group in zip(sums, groups, strict=True):
            slot.set(group.total())
    for j, slot in enumerate(sums):
        k.store(slot.now, to + 2048 + (k.chunk * SUMS + j) * 64)


def rates(threads: int) -> tuple[float, float]:
    """What the units reach in float32 and with bytes [GFLOP/s]."""
    from ggmlb.backends.llvm.codegen.library import library

    data = np.zeros(2048 + 8 * threads * SUMS * 64, np.uint8)
    data[:64].view(np.float32)[:] = 1e-3
    found = []
    for emit, lanes in (
        (floats, library().target.level.lanes),
        (codes, 4 * max(8, library().target.level.lanes)),
    ):
        (seconds,) = best([Emitted(emit, threads, data.ctypes.data)], 1)
        found.append(2 * SUMS * TURNS * lanes * 8 * threads / seconds / 1e9)
    return found[0], found[1]


def best(programs: list[Any], rounds: int) -> list[float]:
    """The least times of programs by turns [s]."""
    seconds = [math.inf] * len(programs)
    for _ in range(rounds):
        for i, program in enumerate(programs):
            seconds[i] = min(seconds[i], *turn(program.run))
    for program in programs:
        program.close()
    return seconds


class Point(NamedTuple):
    """An op as it was measured.

    Attributes:
        kind: What its mark tells.
        case: What it is.
        seconds: Its time.
        intensity: Operations per byte.
        rate: What it reaches [GFLOP/s].
        reading: The speed of reading [GB/s].
        roof: The most that it could reach [GFLOP/s].
    """

    kind: str
    case: Case
    seconds: float
    intensity: float
    rate: float
    reading: float
    roof: float


def cases() -> list[tuple[str, Case]]:
    found = []
    for storage in ("CPU", REPACKED):
        for name in TYPES:
            m = NBYTES // DType[name].row_size(4096) // 64 * 64
            for n in COLUMNS:
                _, case = product("products", name, 4096, m, n, storage, "CPU")
                found.append((f"products, {'plain' if storage == 'CPU' else 'repacked'}", case))
    for name in ("F16", "Q8_0"):
        keys = NBYTES // DType[name].row_size(128) // 16 // 64 * 64
        found += [("attention", attend(name, 128, group, keys)[1]) for group in (1, 4)]
    return found + [("others", Case.of(perf, scale=SCALE)) for perf in recorded(*PER_VALUE)]


def measure(kind: str, case: Case, units: tuple[float, float], rounds: int, threads: int) -> Point:
    node = case.build(Context())
    work, nbytes = flops(node) or PER_VALUE[case.op] * node.n_elements, moved_nbytes(node)
    program = Ggmlb(replace(case, device="LLVM"), threads)
    program.run()
    seconds, reading = best([program, Reading(threads, nbytes)], rounds)
    unit = units[node.op is Op.MUL_MAT and node.operand(0).dtype.is_quantized]
    roof = min(work / reading, unit * 1e9)
    return Point(kind, case, seconds, work / nbytes, work / seconds / 1e9, nbytes / reading / 1e9, roof / 1e9)


COLOURS = {
    "products, plain": "#0072b2",
    "products, repacked": "#d55e00",
    "attention": "#009e73",
    "others": "#777777",
}
LEFT, RIGHT, TOP, BOTTOM = 70, 870, 50, 500


def picture(points: list[Point], units: tuple[float, float], reading: float, title: str) -> str:
    """The points below the roofs, as SVG: both axes in powers of two."""
    least, most = -4, math.ceil(math.log2(max(p.intensity for p in points)))
    low, high = 1, math.ceil(math.log2(max(units)))
    parts = [f'<text x="{LEFT}" y="28" font-size="17">{title}</text>']

    def at(intensity: float, rate: float) -> tuple[float, float]:
        x, y = (math.log2(intensity) - least) / (most - least), (math.log2(rate) - low) / (high - low)
        return round(LEFT + x * (RIGHT - LEFT), 1), round(BOTTOM - y * (BOTTOM - TOP), 1)

    def line(start: tuple[float, float], end: tuple[float, float], colour: str = "black") -> None:
        (x, y), (to_x, to_y) = at(*start), at(*end)
        parts.append(f'<path d="M{x} {y}L{to_x} {to_y}" stroke="{colour}"/>')

    def text(x: float, y: float, what: str, anchor: str = "middle", turned: float = 0) -> None:
        turn = f' transform="rotate({turned} {x} {y})"' if turned else ""
        parts.append(f'<text x="{x}" y="{y}" font-size="13" text-anchor="{anchor}"{turn}>{what}</text>')

    for i in range(least, most + 1, 2):
        line((2.0**i, 2.0**low), (2.0**i, 2.0**high), "#ddd")
        text(at(2.0**i, 1)[0], BOTTOM + 18, f"{2**i}" if i >= 0 else f"1/{2**-i}")
    for i in range(low, high + 1):
        line((2.0**least, 2.0**i), (2.0**most, 2.0**i), "#ddd")
        text(LEFT - 8, at(1, 2.0**i)[1] + 4, f"{2**i}", "end")
    for name, rate in zip(("float32", "bytes"), units, strict=True):
        line((rate / reading, rate), (2.0**most, rate))
        x, y = at(rate / reading, rate)
        text(x + 8, y - 6, f"{name}: {rate:.0f} GFLOP/s", "start")
    line((2.0**least, reading * 2.0**least), (max(units) / reading, max(units)))
    slope = math.degrees(math.atan2((BOTTOM - TOP) / (high - low), (RIGHT - LEFT) / (most - least)))
    x, y = at(1, reading)
    text(x, y - 8, f"reading: {reading:.0f} GB/s", turned=-round(slope, 1))
    for p in points:
        x, y = at(p.intensity, p.rate)
        what = f"{p.case.op} {p.case.what}: {p.rate:.0f} GFLOP/s, {p.rate / p.roof:.0%} of the roof"
        parts.append(
            f'<circle cx="{x}" cy="{y}" r="4" fill="{COLOURS[p.kind]}"><title>{what}</title></circle>'
        )
    for i, (kind, colour) in enumerate(COLOURS.items()):
        parts.append(f'<circle cx="{RIGHT - 150}" cy="{BOTTOM - 90 + 20 * i}" r="4" fill="{colour}"/>')
        text(RIGHT - 138, BOTTOM - 86 + 20 * i, kind, "start")
    text((LEFT + RIGHT) / 2, BOTTOM + 44, "operations per byte")
    text(20, (TOP + BOTTOM) / 2, "GFLOP/s", turned=-90)
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 560" font-family="sans-serif">'
    return "\n".join([head, '<rect width="900" height="560" fill="white"/>', *parts, "</svg>\n"])


def main() -> None:
    args = arguments(__doc__, rounds=2).parse_args()
    units = rates(args.threads)
    table = Table("op", "what", "ms", "operations per byte", "GB/s", "reading", "GFLOP/s", "of the roof")
    points = []
    for kind, case in cases():
        if not args.ops or case.op in args.ops.split(","):
            p = measure(kind, case, units, args.rounds, args.threads)
            points.append(p)
            rest = *(f"{x:.3g}" for x in (p.rate / p.intensity, p.reading, p.rate)), f"{p.rate / p.roof:.0%}"
            table.row(case.op, case.what, f"{1e3 * p.seconds:.3g}", f"{p.intensity:.2g}", *rest)
    if args.ops:
        return
    reading = max(p.reading for p in points)
    name = "_".join(["roofline", *([SIMD] if SIMD else [])])
    title = f"The LLVM device{f', limited to {SIMD.upper()},' if SIMD else ''} below the roofs of the machine"
    (RESULTS / f"{name}.svg").write_text(picture(points, units, reading, title))
    about = f"""{title}
![The ops of the table below their roofs]({name}.svg)

Made by `python benchmarks/roofline.py`: {args.rounds} rounds, {args.threads} thread(s). float32 reaches
{units[0]:.0f} GFLOP/s, bytes {units[1]:.0f}; the picture's speed of reading is the greatest of the table's.
Weights have rows of 4096, and 128 MiB, as keys and values have together.

{__doc__.partition("    [GGMLB")[0]}"""
    save(name, about, table, packages=("numpy", "llvmlite"))


if __name__ == "__main__":
    main()
