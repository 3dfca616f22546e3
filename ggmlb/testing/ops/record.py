"""The kit's record of each op: programs that test it, a small node of it for the table, nodes to time.

`ggmlb test`, `ggmlb ops` and the benchmarks read `RECORDS`. The op itself (parameters, shape, gradient) is
recorded in `ggmlb.core.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ggmlb.core import dtypes
from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.errors import DTypeError
from ggmlb.core.tensor import Tensor
from ggmlb.testing.draw import OUTER, PADDED, PERMUTED, PLAIN, Program

Sample = Callable[[Context, DType], Tensor]
"""Builds a small node whose main operand has the given type.

Users choose the type of the main operand: the weight of a product, the tensor that is copied or looked up,
the KV cache of attention. The others have the types usual in models.
"""

Family = Callable[[Program], None]
"""Draws the tensors and nodes of a program."""


@dataclass(frozen=True, slots=True)
class Perf:
    """A timed case of an op, sized as in a language model's layer.

    Attributes:
        fn: The method of `Context`.
        text: Types and distinguishing parameters.
        build: Builds the node, at a scale: 4 on GPUs, 1 on CPUs.
    """

    fn: str
    text: str
    build: Callable[[Context, int], Tensor]

    @property
    def id(self) -> str:
        """As mode `perf` names it."""
        return f"{self.fn}({self.text})"


@dataclass(slots=True)
class OpRecord:
    """What the kit knows of an op.

    Attributes:
        samples: A small node for each type of its main operand, by the name that `ggmlb ops` shows.
        families: Functions that draw programs of it, by the name of the family.
        perf: Timed cases.
        of_ggml: Whether ggml can compute the programs; false for Python functions.
    """

    samples: dict[str, Sample] = field(default_factory=dict)
    families: dict[str, Family] = field(default_factory=dict)
    perf: tuple[Perf, ...] = ()
    of_ggml: bool = True


RECORDS: Final = {op: OpRecord() for op in Op}
"""The record of each op, in ggml's order; complete once `ggmlb.testing.ops` is imported."""


def cases(
    op: Op,
    sample: Sample | Mapping[str, Sample] | None = None,
    *perf: Perf,
    name: str = "",
    of_ggml: bool = True,
) -> Callable[[Family], Family]:
    """Record samples and timings of an op, and, as a decorator, a family of programs.

    Args:
        op: The op.
        sample: A small node of it, shown under the op's name; or several, by their names.
        perf: Timed cases.
        name: The family's name, by default the function's.
        of_ggml: Whether ggml can compute the programs.
    """
    record = RECORDS[op]
    if sample is not None:
        record.samples |= sample if isinstance(sample, Mapping) else {op.value.lower(): sample}
    record.perf += perf
    record.of_ggml &= of_ggml

    def add(draw: Family) -> Family:
        record.families[name or draw.__name__] = draw
        return draw

    return add


# -- types, layouts and values ---


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


def tolerance(*dtypes: DType) -> float:
    """Error tolerance for rounding to a short type."""
    if BF16 in dtypes:
        return 1e-4
    return 1e-6 if F16 in dtypes else 1e-7


def window(p: Program, dtype: DType) -> tuple[str, str, tuple[int, ...], int]:
    """Draw a tensor, a smaller one, and the strides and offset of the window it fits."""
    size = dtype.type_size
    small = p.ne(20, 4, 3, 2)
    more = [p.int(0, 4), p.int(0, 2), p.int(0, 2), p.int(0, 1)]
    start = [p.int(0, m) for m in more]
    large = tuple(n + m for n, m in zip(small, more, strict=True))
    nb = (size, size * large[0], size * large[0] * large[1], size * large[0] * large[1] * large[2])
    offset = sum(s * b for s, b in zip(start, nb, strict=True))
    return p.leaf(dtype, large), p.operand(dtype, small, *ROWS), nb[1:], offset


# -- nodes for samples and timings ---


ROW: Final = 256
"""Elements in a row: a whole number of blocks of every type."""


def main(c: Context, dtype: DType, *ne: int) -> Tensor:
    """A sample's main operand."""
    return c.new_tensor(dtype, ne or (ROW, 4))


def f32(c: Context, *ne: int) -> Tensor:
    """An f32 leaf."""
    return c.new_tensor(F32, ne)


def i32(c: Context, *ne: int) -> Tensor:
    """An i32 leaf."""
    return c.new_tensor(I32, ne)


def rows(c: Context, scale: int, dtype: DType = F32, n: int = 512) -> Tensor:
    """A leaf for timings, with rows as long as a layer is wide."""
    return c.new_tensor(dtype, (1024 * scale, n))


def on_main(fn: str, *args: Any) -> Sample:
    """A sample: a method of `Context`, on the main operand and other arguments."""

    def build(c: Context, dtype: DType) -> Tensor:
        node: Tensor = getattr(c, fn)(main(c, dtype), *args)
        return node

    return build


def on_rows(fn: str, *args: Any) -> Perf:
    """A timing: a method of `Context`, on f32 rows as long as a layer is wide and other arguments."""

    def build(c: Context, scale: int) -> Tensor:
        node: Tensor = getattr(c, fn)(rows(c, scale), *args)
        return node

    return Perf(fn, "f32", build)


def no_such_node(dtype: DType) -> Tensor:
    """Raise the error of an op that does not take the type as main operand."""
    raise DTypeError(f"the op takes no main operand of type {dtype.name}")
