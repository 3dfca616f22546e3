"""Drawing programs: a few leafs, the steps that lay them out in memory, and the op in question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ggmlb import dtypes
from ggmlb.dtypes import DType
from ggmlb.testing.programs import Case, Spec, Step

PLAIN = "plain"
"""Contiguous."""
PADDED = "padded"
"""A window on a larger tensor: gaps between rows, planes and cubes."""
GAPS = "gaps"
"""The same, with gaps between rows only."""
OUTER = "outer"
"""Dimensions permuted, but rows left as they are."""
PERMUTED = "permuted"
"""Dimensions permuted in any way."""

ROWS = (PLAIN, PADDED, OUTER)
ANY = (PLAIN, PADDED, OUTER, PERMUTED)

F32, F16, BF16, I32, I64 = DType.F32, DType.F16, DType.BF16, DType.I32, DType.I64


@dataclass
class Program:
    """A program under construction; tensors are named `"$name"`.

    Attributes:
        draw: What hypothesis gives to a composite strategy.
        nmse: The error that is allowed; 0 asks for equality.
        rule: How to compare, as in golden programs.
        outputs: Names of the tensors to compare.
    """

    draw: Callable[..., Any]
    nmse: float = 1e-7
    rule: str = ""
    leafs: list[tuple[str, DType, tuple[int, ...], bytes]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.draw(st.integers(0, 2**32 - 1)))

    # -- numbers -------------------------------------------------------------------------------

    def int(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def float(self, low: float, high: float) -> float:
        return self.draw(st.floats(np.float32(low).item(), np.float32(high).item(), width=32))

    def bool(self) -> bool:
        return self.draw(st.booleans())

    def one_of(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def ne(self, *highest: int) -> tuple[int, ...]:
        """Four extents, each up to the number given; 1 where none is given; now and then some more."""
        limits = highest or (70, 6, 4, 3)
        if self.int(0, 19) == 19:
            limits = (30 * limits[0], *limits[1:])
        return (*(self.int(1, n) for n in limits), 1, 1, 1)[:4]

    # -- tensors -------------------------------------------------------------------------------

    def leaf(
        self, dtype: DType, ne: tuple[int, ...], data: Any = None, low: float = -1, high: float = 1
    ) -> str:
        """A leaf with given or random values."""
        ne = (*ne, 1, 1, 1)[:4]
        if data is None:
            data = self.random.uniform(low, high, ne[::-1]).astype(np.float32)
        blocks = dtypes.quantize(np.asarray(data).reshape(ne[::-1]), dtype)
        name = f"x{len(self.leafs)}"
        self.leafs.append((name, dtype, ne, blocks.tobytes()))
        return f"${name}"

    def operand(self, dtype: DType, ne: tuple[int, ...], *layouts: str, **values: Any) -> str:
        """A tensor of that type and shape, in one of the ways to lie in memory."""
        ne = (*ne, 1, 1, 1)[:4]
        layout = self.one_of(*layouts) if layouts else PLAIN
        if layout in (PADDED, GAPS):
            return self._window(dtype, ne, 4 if layout == PADDED else 1, values)
        if layout in (OUTER, PERMUTED):
            first = 1 if layout == OUTER else 0
            axes = (*range(first), *self.draw(st.permutations(range(first, 4))))
            return self.step("permute", self.leaf(dtype, tuple(ne[a] for a in axes), **values), *axes)
        return self.leaf(dtype, ne, **values)

    def _window(self, dtype: DType, ne: tuple[int, ...], n_dims: int, values: Any) -> str:
        """A window on a tensor that is larger along the first dimensions."""
        block = dtype.block_size
        more = [self.int(0, 2) * block, *(self.int(0, 2) for _ in range(n_dims - 1)), 0, 0, 0][:4]
        start = [self.int(0, m // block) * block if i == 0 else self.int(0, m) for i, m in enumerate(more)]
        large = tuple(n + m for n, m in zip(ne, more, strict=True))
        nb1 = dtype.row_size(large[0])
        nb = (nb1, nb1 * large[1], nb1 * large[1] * large[2])
        offset = dtype.row_size(start[0]) + sum(s * b for s, b in zip(start[1:], nb, strict=True))
        return self.step("view_4d", self.leaf(dtype, large, **values), *ne, *nb, offset)

    def step(self, fn: str, *args: Any) -> str:
        """Call a function that returns a tensor."""
        name = f"y{len(self.steps)}"
        self.steps.append(Step(name, fn, args))
        return f"${name}"

    def void(self, fn: str, *args: Any) -> None:
        """Call a function that changes its first argument."""
        self.steps.append(Step(None, fn, args))

    def out(self, fn: str, *args: Any) -> str:
        """Call a function and compare its result."""
        result = self.step(fn, *args)
        self.compare(result)
        return result

    def compare(self, *tensors: str) -> None:
        """Compare tensors too."""
        self.outputs += [t[1:] for t in tensors]

    # -- uses ----------------------------------------------------------------------------------

    def request(self) -> tuple[Any, ...]:
        """What `GgmlProcess.compute` takes."""
        return (
            [(name, int(dtype), ne, data) for name, dtype, ne, data in self.leafs],
            [(s.out, s.fn, tuple(_c_value(a) for a in s.args)) for s in self.steps],
            self.outputs,
        )

    def case(self, label: str, expected: list[tuple[int, tuple[int, ...], bytes]]) -> Case:
        """The program with the outputs that ggml gave."""
        outputs = [
            (name, DType.parse(dtype), ne, data)
            for name, (dtype, ne, data) in zip(self.outputs, expected, strict=True)
        ]
        memory = {f"leaf.{x[0]}": x[3] for x in self.leafs} | {f"out.{x[0]}": x[3] for x in outputs}
        archive: Any = SimpleNamespace(members={k: np.frombuffer(v, np.uint8) for k, v in memory.items()})
        return Case(
            id=label,
            family=label,
            op=label,
            leafs=tuple(Spec(n, t, ne, f"leaf.{n}", archive) for n, t, ne, _ in self.leafs),
            steps=tuple(self.steps),
            outputs=tuple(Spec(n, t, ne, f"out.{n}", archive) for n, t, ne, _ in outputs),
            nmse=self.nmse,
            rule=self.rule,
        )

    def __repr__(self) -> str:
        leafs = [f"{name} = {dtype.name.lower()}{list(ne)}" for name, dtype, ne, _ in self.leafs]
        calls = [f"{s.out} = {s.fn}({', '.join(map(str, s.args))})" for s in self.steps]
        return "\n".join(["", *leafs, *calls])


def _c_value(arg: Any) -> Any:
    if arg is None or isinstance(arg, str | bool | float):
        return arg
    return [int(a) for a in arg] if isinstance(arg, list | tuple) else int(arg)


Family = Callable[[Program], None]

FAMILIES: dict[str, Family] = {}
"""What draws the rest of a program, by the name of the op or of a group of them."""


def family(name: str) -> Callable[[Family], Family]:
    """Register a function that draws a program's tensors and steps."""

    def register(fn: Family) -> Family:
        assert name not in FAMILIES, name
        FAMILIES[name] = fn
        return fn

    return register


@st.composite
def programs(draw: Callable[..., Any], name: str) -> Program:
    """Programs of a family."""
    program = Program(draw)
    FAMILIES[name](program)
    return program
