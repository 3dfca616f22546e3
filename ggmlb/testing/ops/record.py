"""The kit's record of each op: test programs, sample nodes for `ggmlb ops`, and timed cases.

`ggmlb test`, `ggmlb ops` and the benchmarks read `RECORDS`. The op itself (parameters, shape, gradient) is
recorded in `ggmlb.core.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.errors import DTypeError
from ggmlb.core.tensor import Tensor
from ggmlb.testing.draw import F32, I32, Program

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
        """Name of the case in mode `perf`."""
        return f"{self.fn}({self.text})"


@dataclass(slots=True)
class OpRecord:
    """Test programs, sample nodes and timed cases of an op.

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
    """Register sample nodes and timed cases of an op; as a decorator, also a function that draws programs.

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


# -- nodes for samples and timed cases ---


ROW: Final = 256
"""Elements in a row: a whole number of blocks of every type."""


def main(c: Context, dtype: DType, *ne: int) -> Tensor:
    """Create an op's main operand, of the tested type, for a sample node in context `c`."""
    return c.new_tensor(dtype, ne or (ROW, 4))


def f32(c: Context, *ne: int) -> Tensor:
    """Create an f32 leaf of extents `ne` in context `c`."""
    return c.new_tensor(F32, ne)


def i32(c: Context, *ne: int) -> Tensor:
    """Create an i32 leaf of extents `ne` in context `c`."""
    return c.new_tensor(I32, ne)


def rows(c: Context, scale: int, dtype: DType = F32, n: int = 512) -> Tensor:
    """Create a leaf of `n` rows of `1024 * scale` elements (a model layer's width) in context `c`."""
    return c.new_tensor(dtype, (1024 * scale, n))


def on_main(fn: str, *args: Any) -> Sample:
    """Return a function that makes a sample node by `Context` method `fn` on a main operand and `args`."""

    def build(c: Context, dtype: DType) -> Tensor:
        node: Tensor = getattr(c, fn)(main(c, dtype), *args)
        return node

    return build


def on_rows(fn: str, *args: Any) -> Perf:
    """Return a function that makes a node to time by `Context` method `fn` on f32 `rows` and `args`."""

    def build(c: Context, scale: int) -> Tensor:
        node: Tensor = getattr(c, fn)(rows(c, scale), *args)
        return node

    return Perf(fn, "f32", build)


def no_such_node(dtype: DType) -> Tensor:
    """Raise the error of an op that does not take the type as main operand."""
    raise DTypeError(f"the op takes no main operand of type {dtype.name}; choose another type")
