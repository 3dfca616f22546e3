"""Generation of test programs: leafs, views that lay them out in memory, and the tested op.

A family is a function that draws such programs (`ggmlb.testing.ops`). A `Choices` object makes its choices:
the kit's covers all alternatives (`cases.py`), hypothesis's draws at random and shrinks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ggmlb.core import dtypes
from ggmlb.core.dtypes import DType
from ggmlb.testing.programs import Case, ProgramStep, Spec

PLAIN: Final = "plain"
"""Contiguous."""
PADDED: Final = "padded"
"""A window of a larger tensor, with gaps between rows, planes and cubes."""
GAPS: Final = "gaps"
"""A window with gaps between rows only."""
OUTER: Final = "outer"
"""Permuted dimensions, except the innermost."""
PERMUTED: Final = "permuted"
"""Permuted dimensions."""

F32, F16, BF16, I32, I64 = DType.F32, DType.F16, DType.BF16, DType.I32, DType.I64
FLOATS: Final = (F32, F16, BF16)

ROWS: Final = (PLAIN, PADDED, OUTER)
ANY: Final = (PLAIN, PADDED, OUTER, PERMUTED)

LOPSIDED: Final[Any] = {"low": -0.2, "high": 1.0}
"""Values whose products do not cancel, because ggml rounds activations to a short type."""
POSITIVE: Final[Any] = {"low": 0.1, "high": 1.0}
"""Values whose sums never cancel."""

NO_WEIGHTS = (DType.Q8_1, DType.Q8_K, DType.Q2_0)
"""Types without products: ggml quantises activations to the first two; ggml-python lacks the last."""

WEIGHTS = tuple(t for t in DType if t.is_quantized and dtypes.can_quantize(t) and t not in NO_WEIGHTS)
"""Quantised types that `quantize` writes and ggml multiplies."""

READ_ONLY = tuple(t for t in DType if t.is_quantized and not dtypes.can_quantize(t))
"""Quantised types that need an importance matrix to be written."""

Extents = tuple[int, ...]

# Inside `Program` the builtin names are methods.
Integer: TypeAlias = int
Number: TypeAlias = float
Truth: TypeAlias = bool

Output = tuple[int, "tuple[int, ...]", bytes]
"""Type, extents and bytes of a result of the reference."""


class Choices(Protocol):
    """Draws the numbers, alternatives, orders and extents of a test program."""

    beyond: bool
    """Whether types and layouts that ggml's CPU backend does not support are allowed."""
    large: bool
    """Whether extents may be those of a model's op, to test edges of tiles."""
    plain: bool
    """Whether the program is the plainest of its family: without repeats, batches, padding or strides."""

    def integer(self, low: int, high: int) -> int:
        """Draw an integer from `low` to `high`."""

    def number(self, low: float, high: float) -> float:
        """Draw a float32 from `low` to `high`."""

    def pick(self, n: int) -> int:
        """Draw one of `n` alternatives; return its index."""

    def order(self, items: Sequence[int]) -> Sequence[int]:
        """Return the items in some order."""

    def extents(self, limits: Sequence[int]) -> Sequence[int]:
        """Draw one extent for each limit, usually up to that limit."""


@dataclass
class Leaf:
    """A leaf and a generator of its values, called on demand because quantising is slow."""

    name: str
    dtype: DType
    ne: tuple[int, ...]
    make: Callable[[], npt.NDArray[Any]]
    _data: bytes | None = None

    @property
    def data(self) -> bytes:
        """The leaf's values as bytes, quantised or random, made on first access."""
        if self._data is None:
            if dtypes.can_quantize(self.dtype):
                self._data = dtypes.quantize(self.make().reshape(self.ne[::-1]), self.dtype).tobytes()
            else:
                self._data = dtypes.random_blocks(self.dtype, math.prod(self.ne)).tobytes()
        return self._data


@dataclass
class Program:
    """A program under construction; steps refer to its tensors by `"$"` and the name, such as `"$y0"`.

    Attributes:
        choices: Makes the choices.
        nmse: The allowed error; 0 demands equality.
        rule: Rule of comparison, as in golden programs.
        outputs: Names of the tensors to compare.
        texts: Description of each tensor: `"f16[40, 3].padded"`.
    """

    choices: Choices
    nmse: float = 1e-7
    rule: str = ""
    leafs: list[Leaf] = field(default_factory=list)
    steps: list[ProgramStep] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seed = self.choices.integer(0, 2**32 - 1)
        self.random = np.random.default_rng(self.seed)

    # -- numbers -------------------------------------------------------------------------------

    def int(self, low: Integer, high: Integer) -> Integer:
        """Draw an integer from `low` to `high` for the generated program."""
        return self.choices.integer(low, high)

    def extra(self, low: Integer, high: Integer) -> Integer:
        """Draw an integer for repeats, batches, strides or paddings; `low` in plain (simplest) programs."""
        return low if self.choices.plain else self.int(low, high)

    def float(self, low: Number, high: Number) -> Number:
        """Draw a float32 from `low` to `high` for the generated program."""
        return self.choices.number(np.float32(low).item(), np.float32(high).item())

    def bool(self) -> Truth:
        """Return a drawn truth value; False is the first alternative, which plain programs take."""
        return Truth(self.choices.pick(2))

    def one_of(self, *choices: Any, beyond: tuple[Any, ...] = ()) -> Any:
        """Draw one of `choices`, or of `beyond`: alternatives that ggml's own CPU backend lacks."""
        if self.choices.beyond:
            choices += beyond
        return choices[self.choices.pick(len(choices))] if len(choices) > 1 else choices[0]

    def extent(self, high: Integer, large: Integer) -> Integer:
        """Draw an extent from 1 to `high`, or to `large` if the program is of the large size class."""
        return self.int(1, large if self.choices.large else high)

    def ne(self, *highest: Integer) -> Extents:
        """Draw four extents, usually up to the given limits (by default 70, 6, 4, 3); without a limit, 1."""
        return (*self.choices.extents(highest or (70, 6, 4, 3)), 1, 1, 1)[:4]

    # -- tensors -------------------------------------------------------------------------------

    def leaf(self, dtype: DType, ne: Extents, data: Any = None, low: Number = -1, high: Number = 1) -> str:
        """Create a leaf with values `data`, or random ones from `low` to `high`; return its name."""
        ne = (*ne, 1, 1, 1)[:4]
        number = len(self.leafs)

        def values() -> npt.NDArray[Any]:
            if data is not None:
                return np.asarray(data)
            random = np.random.default_rng((self.seed, number))
            return random.uniform(low, high, ne[::-1]).astype(np.float32)

        self.leafs.append(Leaf(f"x{number}", dtype, ne, values))
        self.texts[f"x{number}"] = shape_text(dtype, ne)
        return f"$x{number}"

    def operand(
        self, dtype: DType, ne: Extents, *layouts: str, beyond: tuple[str, ...] = (), **values: Any
    ) -> str:
        """Add a tensor in a drawn memory layout; `beyond` are layouts that ggml's CPU backend lacks."""
        ne = (*ne, 1, 1, 1)[:4]
        if dtype.block_size > 1:
            beyond = tuple(x for x in beyond if x != PERMUTED)  # a row of blocks stays contiguous
        layout = self.one_of(*layouts or (PLAIN,), beyond=tuple(x for x in beyond if x not in layouts))
        if layout in (PADDED, GAPS):
            tensor = self._window(dtype, ne, 4 if layout == PADDED else 1, values)
        elif layout in (OUTER, PERMUTED):
            first = 1 if layout == OUTER else 0
            axes = (*range(first), *self.choices.order(range(first, 4)))
            tensor = self.step("permute", self.leaf(dtype, tuple(ne[a] for a in axes), **values), *axes)
        else:
            return self.leaf(dtype, ne, **values)
        self.texts[tensor[1:]] = f"{shape_text(dtype, ne)}.{layout}"
        return tensor

    def mask(self, dtype: DType, ne: Extents) -> str:
        """Create a mask of random values; half of the masks have -inf, but never at the start of a row."""
        ne = (*ne, 1, 1, 1)[:4]
        values = self.random.uniform(-1, 1, ne[::-1]).astype(np.float32)
        if self.bool():
            values[..., 1:][self.random.random(values[..., 1:].shape) < 0.3] = -np.inf
        return self.leaf(dtype, ne, values)

    def _window(self, dtype: DType, ne: Extents, n_dims: Integer, values: Any) -> str:
        """Create a window of a tensor that is larger along the first dimensions."""
        block = dtype.block_size
        more = [self.int(0, 2) * block, *(self.int(0, 2) for _ in range(n_dims - 1)), 0, 0, 0][:4]
        start = [self.int(0, m // block) * block if i == 0 else self.int(0, m) for i, m in enumerate(more)]
        large = tuple(n + m for n, m in zip(ne, more, strict=True))
        nb1 = dtype.row_size(large[0])
        nb = (nb1, nb1 * large[1], nb1 * large[1] * large[2])
        offset = dtype.row_size(start[0]) + sum(s * b for s, b in zip(start[1:], nb, strict=True))
        return self.step("view_4d", self.leaf(dtype, large, **values), *ne, *nb, offset)

    def step(self, fn: str, *args: Any) -> str:
        """Add a call of the `Context` method `fn`, which returns a tensor; return this tensor's name."""
        name = f"y{len(self.steps)}"
        self.steps.append(ProgramStep(name, fn, args))
        self.texts[name] = f"{fn}({','.join(map(self._text, args))})"
        return f"${name}"

    def void(self, fn: str, *args: Any) -> None:
        """Add a call of the `Context` method `fn`, which changes its first argument and returns nothing."""
        self.steps.append(ProgramStep(None, fn, args))
        self.texts[args[0][1:]] += f"+{fn}({','.join(map(self._text, args[1:]))})"

    def out(self, fn: str, *args: Any) -> str:
        """Add a call of the `Context` method `fn`; compare its result in the test, and return its name."""
        result = self.step(fn, *args)
        self.compare(result)
        return result

    def compare(self, *tensors: str) -> None:
        """Add tensors to the compared outputs."""
        self.outputs += [t[1:] for t in tensors]

    # -- uses ----------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """Return a short text of the program: op, types, shapes and layouts."""
        return self.texts[self.outputs[0]]

    @property
    def fn(self) -> str:
        """Name of the `Context` method that computes the first output."""
        return next(step.fn for step in self.steps if step.out == self.outputs[0])

    def request(self) -> tuple[Any, ...]:
        """Return the program as plain tuples (leafs, steps, outputs), for ggml to compute elsewhere."""
        return (
            [(x.name, int(x.dtype), x.ne, x.data) for x in self.leafs],
            [(s.out, s.fn, tuple(_c_value(a) for a in s.args)) for s in self.steps],
            self.outputs,
        )

    def case(self, label: str = "", expected: Sequence[Output] = ()) -> Case:
        """Return the program as a case named `label`, with expected outputs if given."""
        results = dict(zip(self.outputs, expected, strict=bool(expected)))
        archive: Any = SimpleNamespace(members=_Members(self.leafs, results))
        return Case(
            id=label,
            family=label,
            op=self.fn,
            leafs=tuple(Spec(x.name, x.dtype, _four(x.ne), f"leaf.{x.name}", archive) for x in self.leafs),
            steps=tuple(self.steps),
            outputs=tuple(
                Spec(name, DType.parse(dtype), _four(ne), f"out.{name}", archive)
                for name, (dtype, ne, _) in results.items()
            ),
            nmse=self.nmse,
            rule=self.rule,
        )

    def _text(self, arg: Any) -> str:
        if isinstance(arg, str) and arg.startswith("$"):
            return self.texts[arg[1:]]
        if isinstance(arg, Enum):
            return arg.name.lower()
        if isinstance(arg, Number):
            return f"{arg:.3g}"
        if callable(arg):
            return str(arg.__name__)
        if isinstance(arg, (tuple, list)):
            return f"[{','.join(map(self._text, arg))}]"
        return str(arg)

    def __repr__(self) -> str:
        leafs = [f"{x.name} = {x.dtype.name.lower()}{list(x.ne)}" for x in self.leafs]
        calls = [f"{s.out} = {s.fn}({', '.join(map(str, s.args))})" for s in self.steps]
        return "\n".join(["", *leafs, *calls])


class _Members:
    """The bytes of leafs and outputs by name; leafs are generated on demand."""

    def __init__(self, leafs: Sequence[Leaf], outputs: dict[str, Output]) -> None:
        self._leafs = {f"leaf.{leaf.name}": leaf for leaf in leafs}
        self._outputs = {f"out.{name}": data for name, (_, _, data) in outputs.items()}

    def __getitem__(self, name: str) -> npt.NDArray[np.uint8]:
        data = self._leafs[name].data if name in self._leafs else self._outputs[name]
        return np.frombuffer(data, np.uint8)


def shape_text(dtype: DType, ne: Sequence[int]) -> str:
    """Return type and extents as text without trailing ones, such as `"f16[40,3]"`."""
    n = max((i for i, extent in enumerate(ne) if extent != 1), default=0)
    return f"{dtype.name.lower()}[{','.join(str(e) for e in ne[: n + 1])}]"


def _four(ne: tuple[int, ...]) -> tuple[int, int, int, int]:
    a, b, c, d = ne
    return a, b, c, d


def _c_value(arg: Any) -> Any:
    if arg is None or isinstance(arg, str | bool | float):
        return arg
    return [int(a) for a in arg] if isinstance(arg, list | tuple) else int(arg)


def tolerance(*dtypes: DType) -> float:
    """Return the error (NMSE) to allow for rounding to the least precise of the types."""
    if BF16 in dtypes:
        return 1e-4
    return 1e-6 if F16 in dtypes else 1e-7


def window(p: Program, dtype: DType) -> tuple[str, str, tuple[int, ...], int]:
    """Draw a tensor, a smaller one, and the strides and offset of a window of the smaller one's size."""
    size = dtype.type_size
    small = p.ne(20, 4, 3, 2)
    more = [p.int(0, 4), p.int(0, 2), p.int(0, 2), p.int(0, 1)]
    start = [p.int(0, m) for m in more]
    large = tuple(n + m for n, m in zip(small, more, strict=True))
    nb = (size, size * large[0], size * large[0] * large[1], size * large[0] * large[1] * large[2])
    offset = sum(s * b for s, b in zip(start, nb, strict=True))
    return p.leaf(dtype, large), p.operand(dtype, small, *ROWS), nb[1:], offset
