"""Count what the machine code of kernels asks of a multiprocessor, loop by loop; nothing is timed.

    python scripts/sass.py "mul_mat_q8 q4_0" [--arch sm_89] [--bytes 18] [--portable] [--dump] [--cubin FILE]

A line is a loop, from a label to the branch back: its instructions (`issue`), how long each pipe is busy
with a warp's turn [cycles of one of the four schedulers], and the bytes that its loads and stores move; of
loops with tensor cores, the part of the instructions that are theirs.
Beside it is the time in which the memory of the architecture's card (`CARDS`) gives the bytes that a turn
streams (`--bytes`, of a thread; else those of its copies to shared memory and of loads that pass the first
cache by, or, where there are none, of all global accesses). `busy` is the fullest pipe's part of that: above
1, the loop cannot keep up with the memory; from 0.7 on it hardly will. `in flight` is what all resident warps
ask for in one turn [bytes of a multiprocessor]: 25,000 cover the memory's latency, twice that is comfortable.
Bank conflicts, and what an access beyond the caches costs, are not counted. `--cubin` reads kernels of
another compiler's, such as llama.cpp's, whose names the pattern is matched with.

Needs nvdisasm: pip install nvidia-cuda-nvdisasm, or a CUDA toolkit's on PATH.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from cuda_resources import CARDS, Card, Resources, Variant, hot
from lint_cuda import OF_CUPY, variants
from nvrtc import Nvrtc

from ggmlb.backends.cuda.driver import OPTIONS, text

PIPES = {
    "int": (
        2,
        "LOP3|IADD3|VIADD|VIMNMX|SHF|PRMT|LEA|ISETP|PLOP3|SEL|FSEL|FSETP|FMNMX|I2FP|F2FP|IABS|SGXT|BMSK|MOV|VOTE",
    ),
    "imad": (2, "IMAD|IDP"),
    "fma": (0, "FFMA|FMUL|FADD|HADD2|HFMA2|HMUL2"),
    "xu": (8, "MUFU|I2F(?!P)|F2I|F2F(?!P)|FRND|POPC|FLO|BREV"),
    "tensor": (0, "IMMA|HMMA"),
    "memory": (4, "LDG|STG|LDS|STS|LDGSTS|SHFL|LDL|STL|LDSM|ATOM|RED|BAR"),
}
"""What a warp's instruction keeps busy, and for how long (0: as `CARDS` says). The `memory` pipe is one
for all four schedulers; loads and stores take as many turns as they have 128 bytes."""

HALVED = "IMMA.16816|HMMA.1688.F32$"
"""Products of matrices that take half as long as those whose times `CARDS` has."""


@dataclass
class Loop:
    """What lies from a label to the branch back to it, inner loops too.

    Attributes:
        begin: Its first instruction.
        card: What runs it.
        busy: Instructions (`issue`), and cycles by pipe.
        moved: Bytes of a thread by kind of access.
        n_tensor: Instructions of tensor cores.
    """

    begin: int
    card: Card
    busy: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    n_tensor: int = 0

    def add(self, opcode: str) -> None:
        """Count an instruction, named with all that follows dots."""
        name, *parts = opcode.split(".")
        widths = {"64": 8, "128": 16, "U8": 1, "S8": 1, "U16": 2, "S16": 2}
        width = next((widths[p] for p in parts if p in widths), 4)
        if name == "LDSM" and parts[-1] == "4":
            width = 16
        self.busy["issue"] += 1
        for pipe, (cycles, names) in PIPES.items():
            if re.match(f"({names})", name):
                is_wide = pipe == "memory" and name[:2] in ("LD", "ST")
                if pipe == "fma":
                    cycles = self.card.fma
                elif pipe == "tensor":
                    self.n_tensor += 1
                    cycles = self.card.imma if name == "IMMA" else self.card.hmma
                    cycles /= 2 if re.match(HALVED, opcode) else 1
                self.busy[pipe] += cycles * max(1, width // 4) if is_wide else cycles
        if name in ("LDG", "STG", "LDGSTS"):
            once = name == "LDGSTS" or "NA" in parts
            self.moved[f"{name} {width}{' once' if once else ''}"] += width

    def streamed(self) -> int:
        """Bytes of a thread that come from memory, and not from a cache."""
        return sum(n for kind, n in self.moved.items() if "once" in kind) or sum(self.moved.values())


def loops(listing: str, card: Card) -> tuple[list[Loop], int]:
    """Return the loops of a listing by nvdisasm, and how many instructions it has in all."""
    labels: dict[str, int] = {}
    code: list[tuple[str, str]] = []
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)(.*);", line):
            code.append((found[1], found[2]))
    result = []
    for at, (opcode, rest) in enumerate(code):
        target = re.search(r"\.L_x_\d+", rest)
        if opcode.startswith("BRA") and target and labels.get(target[0], at) < at:
            loop = Loop(labels[target[0]], card)
            for inside, _ in code[loop.begin : at + 1]:
                loop.add(inside)
            result.append(loop)
    return result, sum(opcode not in ("NOP", "BRA") for opcode, _ in code)


def tool() -> str:
    """Return the path of nvdisasm."""
    wheel = (Path(p) / "nvidia/cu13/bin/nvdisasm" for p in sys.path)
    path = shutil.which("nvdisasm") or next((str(p) for p in wheel if p.exists()), None)
    if path is None:
        raise SystemExit("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    return path


def disassembled(nvrtc: Nvrtc, variant: Variant, architecture: str) -> tuple[str, Resources]:
    """Return the listing of a variant's code, and what it takes of a card."""
    kernel, defines, wg = variant
    options = [*OPTIONS, *OF_CUPY, f"-arch={architecture}"]
    source = text(kernel, defines, wg)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(nvrtc.code(source, options))
        file.flush()
        listing = listed(file.name)
    return listing, Resources.read(nvrtc.compile(source, [*options, "--ptxas-options=-v"])[1], defines)


def listed(file: str) -> str:
    """Return what nvdisasm says of a file of machine code."""
    return subprocess.run([tool(), "-c", file], check=True, capture_output=True, text=True).stdout


def told(loop: Loop, n_bytes: float | None, warps: int) -> str:
    """Return a loop's lines."""
    pipes = ", ".join(f"{pipe} {n:g}" for pipe, n in loop.busy.items())
    moved = ", ".join(f"{kind}: {n} B" for kind, n in loop.moved.items())
    line = f"  loop at {16 * loop.begin:#06x}: {pipes}; {moved or 'no global access'}"
    if loop.n_tensor:
        line += f"; {loop.n_tensor / loop.busy['issue']:.2%} of tensor cores"
    streamed = n_bytes or loop.streamed()
    if not streamed:
        return line
    card = loop.card
    time = 32 * streamed / (0.9 * card.bandwidth / card.units / 4 / card.clock)
    busy, flying = max(loop.busy.values()) / time, 32 * streamed * warps
    return f"{line}\n    memory {time:.0f} for {streamed:g} B: busy {busy:.2f}, in flight {flying:,.0f}"


def main() -> None:
    """Print what the chosen kernels' loops ask."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pattern", help="a regular expression for names as in docs/cuda-resources.md")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--bytes", type=float, help="that a thread streams in a turn of the loop")
    parser.add_argument("--portable", action="store_true", help="portable kernels, named 'name {macros}'")
    parser.add_argument("--dump", action="store_true", help="print the listings, too")
    parser.add_argument("--cubin", help="a file with machine code of kernels, instead of ours")
    args = parser.parse_args()
    card = CARDS[args.arch]
    if args.cubin:
        for section in re.split(r"\n\s*\.section\s+\.text\.", listed(args.cubin))[1:]:
            if re.search(args.pattern, name := section.partition(",")[0]):
                show(name, section, card, args.bytes, 0)
        return
    nvrtc = Nvrtc()
    named = {f"{v[0].name} {dict(v[1])}": v for v in variants()} if args.portable else hot(args.arch)
    for name, variant in named.items():
        if not re.search(args.pattern, name):
            continue
        listing, taken = disassembled(nvrtc, variant, args.arch)
        print(listing if args.dump else "", end="")
        warps = taken.blocks(card, variant[2]) * variant[2] // 32
        what = f"{name}: {taken.registers} registers, {taken.shared} B shared, {warps} warps"
        show(what, listing, card, args.bytes, warps)


def show(name: str, listing: str, card: Card, n_bytes: float | None, warps: int) -> None:
    """Print the loops of a kernel."""
    found, n = loops(listing, card)
    print(f"{name}, {n} instructions")
    for loop in found:
        print(told(loop, n_bytes, warps))


if __name__ == "__main__":
    main()
