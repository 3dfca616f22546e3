"""What kernels take of a multiprocessor, as ptxas tells it; kept in a table that `make lint-cuda` compares.

None may spill. The hot ones stand alone, by type and shape; of the others, the table has what the hungriest
variant takes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from ggmlb import Context, DType, Graph, Tensor
from ggmlb.backends.common.fusion import Group, Item, fuse
from ggmlb.backends.cuda.kernels import RULES
from ggmlb.backends.cuda.kernels.products import IN_SUB_BLOCKS
from ggmlb.backends.gpu import Kernel, Launch, PreparedOperand, Target, lower
from ggmlb.backends.gpu.source import PORTABLE

Variant = tuple[Kernel, tuple[tuple[str, str], ...], int]

TABLE = Path(__file__).parents[1] / "docs/cuda-resources.md"


@dataclass(frozen=True)
class Card:
    """What NVIDIA's manuals say of a card.

    Attributes:
        name: The card.
        units: Its multiprocessors, with four schedulers each.
        clock: Of them [Hz].
        bandwidth: Of its memory [bytes/s].
        shared: Memory that the blocks of a multiprocessor share [KB]; a block may have all but one.
        warps: Resident at most on a multiprocessor.
        blocks: Resident at most on a multiprocessor.
        fma: Cycles that an instruction of floats keeps a scheduler's pipe busy.
        imma: The same for an mma of 16x8x32 bytes, at the rate of dense products; of sm_90 and sm_100, whose
            own instructions are faster, about 60 % of that.
        hmma: The same for an mma of 16x8x16 halves summed in f32, or of 16x8x8 TF32.
    """

    name: str
    units: int
    clock: float
    bandwidth: float
    shared: int
    warps: int
    blocks: int
    fma: int
    imma: float
    hmma: float


CARDS = {
    "sm_75": Card("RTX 2080 Ti", 68, 1.55e9, 0.616e12, 64, 32, 16, 2, 16, 32),
    "sm_80": Card("A100", 108, 1.41e9, 2.04e12, 164, 64, 32, 2, 8, 8),
    "sm_86": Card("RTX 3090", 82, 1.70e9, 0.936e12, 100, 48, 16, 1, 16, 32),
    "sm_89": Card("RTX 4090", 128, 2.52e9, 1.01e12, 100, 48, 24, 1, 16, 32),
    "sm_90": Card("H200", 132, 1.76e9, 4.8e12, 228, 64, 32, 1, 6.5, 6.5),
    "sm_100": Card("B200", 148, 1.85e9, 8.0e12, 228, 64, 32, 1, 6.5, 6.5),
    "sm_120": Card("RTX 5090", 170, 2.41e9, 1.79e12, 100, 48, 24, 1, 16, 32),
}
REGISTERS = 65536
"""Words of a multiprocessor."""
ABOUT = """# What the kernels take of a multiprocessor

Registers of a thread and shared memory of a block, as ptxas (`nvidia-cuda-nvcc`) tells them for each
architecture; bytes spilled in brackets, where there are any. Written by `python scripts/lint_cuda.py --write`
with NVRTC {version} and the options that a card's kernels are compiled with; `make lint-cuda` compares what
NVRTC itself tells.
"""


@dataclass(frozen=True, order=True)
class Resources:
    """Registers of a thread, and bytes: shared memory of a block, what a thread spills."""

    registers: int = 0
    shared: int = 0
    spilled: int = 0

    @classmethod
    def read(cls, log: str, defines: Sequence[tuple[str, str]] = ()) -> Resources:
        """Read what ptxas says of a kernel; with its macros, of which SHARED is dynamic shared memory."""

        def number(pattern: str) -> int:
            found = re.search(pattern, log)
            return int(found[1]) if found else 0

        spills = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
        shared = number(r"(\d+) bytes smem") + int(dict(defines).get("SHARED", 0))
        return cls(number(r"Used (\d+) registers"), shared, spills)

    @classmethod
    def parse(cls, cell: str) -> Resources:
        """Read what `str` gives."""
        found = re.fullmatch(r"(\d+)(?:, (\d+) B)?(?: \((\d+) B spilled\))?", cell)
        return cls(*(int(n or 0) for n in found.groups())) if found else cls()

    def blocks(self, card: Card, wg: int) -> int:
        """Return how many blocks of `wg` threads a multiprocessor has room for."""
        warps = wg // 32
        registers = -(-self.registers // 8) * 8 * 32 * warps
        shared = -(-(self.shared + 1024) // 128) * 128
        return min(card.warps // warps, REGISTERS // registers, (card.shared << 10) // shared, card.blocks)

    def most(self, other: Resources) -> Resources:
        """Return the greater of each."""
        return Resources(
            max(self.registers, other.registers),
            max(self.shared, other.shared),
            max(self.spilled, other.spilled),
        )

    def __str__(self) -> str:
        text = f"{self.registers}, {self.shared} B" if self.shared else str(self.registers)
        return f"{text} ({self.spilled} B spilled)" if self.spilled else text


def target_of(architecture: str) -> Target:
    """Return the target of an architecture's card, as `sm_90`."""
    card, capability = CARDS[architecture], int(architecture.removeprefix("sm_"))
    return Target(False, card.units, 128, blas=True, capability=capability, shared=card.shared << 10)


def hot(architecture: str = "sm_90") -> dict[str, Variant]:
    """Return the kernels that a model's speed hangs on, under the names that the table gives them."""
    found: dict[str, Variant] = {}
    target = target_of(architecture)
    common = (DType.Q4_0, DType.Q8_0, DType.Q4_K, DType.Q6_K, DType.F16)
    for dtype in (*sorted(IN_SUB_BLOCKS), DType.F32, DType.F16, DType.BF16):
        for n in (1, 8, 16, 64, 1024) if dtype in common else (1, 64) if dtype in IN_SUB_BLOCKS else (1,):
            ctx = Context()
            w, x = ctx.new_tensor(dtype, (4096, 14336)), ctx.new_tensor(DType.F32, (4096, n))
            for launch in _launches(ctx.mul_mat(w, x), target):
                defines = dict(launch.defines)
                many = f", {defines['COLUMNS']} columns" if int(defines.get("COLUMNS", 1)) > 1 else ""
                _add(found, f"{launch.kernel.name} {defines.get('a_T', '')}{many}".strip(), launch)
        for n in (1, 2, 8) if dtype in common else ():
            for launch in _fused(dtype, n, target):
                _add(found, f"{launch.kernel.name} {dtype.name.lower()}, {_told(launch)}", launch)
        for n in (1, 16, 64, 512) if dtype in common else (512,) if dtype in IN_SUB_BLOCKS else ():
            for launch in _experts(dtype, n, target):
                what = f", {_told(launch)}" if "COLUMNS" in dict(launch.defines) else ""
                _add(
                    found, f"{launch.kernel.name} {dict(launch.defines).get('a_T', '')}{what}".strip(), launch
                )
    ctx = Context()
    w, x = ctx.new_tensor(DType.Q4_0, (8192, 512)), ctx.new_tensor(DType.F32, (8192, 16))
    for launch in _launches(ctx.mul_mat(w, x), target):  # rows that blocks share
        if launch.kernel.name == "add_splits":
            _add(found, launch.kernel.name, launch)
    for launch in _fused(DType.F16, 64, target):
        _add(found, launch.kernel.name, launch)
    for size in (64, 128, 256, 576):
        for n_q, kv in product((1, 512), (DType.F16, DType.BF16, DType.Q8_0)):
            ctx = Context()
            q, mask = ctx.new_tensor(DType.F32, (size, n_q, 32)), ctx.new_tensor(DType.F16, (4096, n_q))
            k, v = (ctx.new_tensor(kv, (size, 4096, 8)) for _ in "kv")
            for launch in _launches(ctx.flash_attn_ext(q, k, v, mask, 0.1), target):
                what = "" if "combine" in launch.kernel.name else f" {kv.name.lower()}, {n_q} queries"
                _add(found, f"{launch.kernel.name} {size}{what}", launch)
    return found


def _fused(dtype: DType, n: int, target: Target) -> list[Launch]:
    """Return the launches of gated units of products with biases, and of one and of three such products."""
    ctx = Context()
    x, y = (ctx.new_tensor(DType.F32, (4096, n)) for _ in "xy")
    biased = [
        ctx.add(ctx.mul_mat(ctx.new_tensor(dtype, (4096, 14336)), t), ctx.new_tensor(DType.F32, (14336,)))
        for t in (x, x, ctx.relu(x), y, y, y)
    ]
    return _of_groups(target, ctx.swiglu_split(*biased[:2]), *biased[2:])


def _experts(dtype: DType, n: int, target: Target) -> list[Launch]:
    """Return the launches of a gated unit of experts with biases, and of one product with them."""
    ctx = Context()
    x, ids = ctx.new_tensor(DType.F32, (4096, 1, n)), ctx.new_tensor(DType.I32, (2, n))
    gate, up = (ctx.mul_mat_id(ctx.new_tensor(dtype, (4096, 1024, 8)), x, ids) for _ in range(2))
    biased = [ctx.add_id(y, ctx.new_tensor(DType.F32, (1024, 8)), ids) for y in (gate, up)]
    return [*_of_groups(target, ctx.swiglu_split(*biased)), *_launches(gate, target)]


def _of_groups(target: Target, *results: Tensor) -> list[Launch]:
    graph, found = Graph().build_forward_expand(*results), list[Launch]()
    for item in fuse(graph, lambda group: RULES.find(group, target) is not None):
        found += _launches(item, target) if isinstance(item, Group) else []
    return [launch for launch in found if launch.kernel.name != "quantize_q8"]


def _told(launch: Launch) -> str:
    defines = dict(launch.defines)
    what = "gated unit" if "GLU" in defines else "bias" if "ADDED" in defines else "product"
    return f"{what}, {defines['COLUMNS']} columns" if int(defines["COLUMNS"]) > 1 else what


def _launches(item: Item, target: Target) -> list[Launch]:
    found = lower(item, target, RULES)
    found += [launch for x in found if isinstance(x, PreparedOperand) for launch in x.made_by]
    return [step for step in found if isinstance(step, Launch)]


def _add(found: dict[str, Variant], name: str, launch: Launch) -> None:
    if launch.kernel.package != PORTABLE:
        found.setdefault(name, (launch.kernel, launch.defines, launch.wg))


def page(version: str, architectures: Sequence[str], *tables: Mapping[str, Mapping[str, Resources]]) -> str:
    """Return the page: for each table, rows by name of what each architecture's code takes."""
    parts = [ABOUT.format(version=version)]
    for title, rows in zip(
        ("CUDA's own kernels", "Portable kernels, hungriest variant"), tables, strict=True
    ):
        lines = [f"## {title}", "", "| kernel | " + " | ".join(architectures) + " |"]
        lines.append("|---" * (1 + len(architectures)) + "|")
        for name in sorted(rows):
            cells = (str(rows[name].get(a, "")) for a in architectures)
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def complaints(version: str, *tables: Mapping[str, Mapping[str, Resources]]) -> list[str]:
    """Return what is wrong: kernels that spill, and hot ones that differ from the table of the same NVRTC."""
    hot_rows, _ = tables
    bad = [
        f"{name} spills {r.spilled} bytes on {architecture}"
        for rows in tables
        for name, by_architecture in rows.items()
        for architecture, r in by_architecture.items()
        if r.spilled
    ]
    old = _recorded()
    if old is None or old[0] != version:
        return bad
    stale = []
    for name, by_architecture in hot_rows.items():
        for architecture, now in by_architecture.items():
            then = old[1].get((name, architecture))
            if now != then:
                stale.append(f"{name} on {architecture}: {now}; in {TABLE.name}: {then}")
    return [*bad, *stale, *(["where that is meant: python scripts/lint_cuda.py --write"] if stale else [])]


def _recorded() -> tuple[str, dict[tuple[str, str], Resources]] | None:
    """Return the table's version of NVRTC, and its figures by name and architecture."""
    if not TABLE.exists():
        return None
    recorded = TABLE.read_text(encoding="utf-8")
    figures = {}
    heads: list[str] = []
    for line in recorded.splitlines():
        first, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if first == "kernel":
            heads = cells
        elif line.startswith("| "):
            for architecture, cell in zip(heads, cells, strict=True):
                figures[first, architecture] = Resources.parse(cell)
    version = re.search(r"NVRTC (\d+\.\d+)", recorded)
    return (version[1] if version else ""), figures
