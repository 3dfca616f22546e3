"""The record of an op: all that is known of it besides its shape rule, and the words in which it draws cases.

The allocator, the meta device, the conformance kit, `ggmlb ops` and the benchmarks read these records. How an
op is computed stands with each backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ggmlb.core import dtypes
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.errors import DTypeError
from ggmlb.core.sharding import ShardRule
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.core.context import Context
    from ggmlb.testing.draw import Program

Sample = Callable[["Context", DType], Tensor]
"""Makes a small node whose main operand has that type.

The main operand is the one whose type users choose: the weight of a product, the tensor that is copied or
looked up, the KV cache of an attention. The others have the types that models give them.
"""

Family = Callable[["Program"], None]
"""Draws the tensors and steps of a program."""


@dataclass(frozen=True, slots=True)
class Perf:
    """A size at which an op is timed: of a language model's layer.

    Attributes:
        fn: The method of `Context`.
        text: Types, and what sets it apart.
        build: Makes the node, at a scale: 4 on GPUs, 1 on CPUs.
    """

    fn: str
    text: str
    build: Callable[[Context, int], Tensor]


@dataclass(frozen=True, slots=True)
class OpSpec:
    """The record of an op.

    Attributes:
        op: The op.
        params: Names in `Tensor.params`.
        inplace: How many of its first operands may lend their memory to its result; kernels must work when
            the result lies exactly where one of those lies. The ops are those of ggml_op_can_inplace. ggml
            may take any operand of the same layout; here only those that a kernel naturally reads element by
            element or row by row: not a mask, a bias or a table.
        also_written: Operands, by their numbers, that it writes besides its result.
        shard: How its result is sharded over devices, given how its operands are.
        samples: A small node for each type of its main operand, by the name that `ggmlb ops` shows.
        cases: What draws programs of it, by the name of the family.
        of_ggml: Whether ggml can compute the cases; not where the function is Python's.
        perf: Sizes to time.
    """

    op: Op
    params: tuple[str, ...] = ()
    inplace: int = 0
    also_written: tuple[int, ...] = ()
    shard: ShardRule | None = None
    samples: Mapping[str, Sample] = field(default_factory=dict)
    cases: Mapping[str, Family] = field(default_factory=dict)
    of_ggml: bool = True
    perf: tuple[Perf, ...] = ()


# -- layouts and values ---


PLAIN: Final = "plain"
"""Contiguous."""
PADDED: Final = "padded"
"""A window on a larger tensor: gaps between rows, planes and cubes."""
GAPS: Final = "gaps"
"""The same, with gaps between rows only."""
OUTER: Final = "outer"
"""Dimensions permuted, but rows left as they are."""
PERMUTED: Final = "permuted"
"""Dimensions permuted in any way."""

ROWS: Final = (PLAIN, PADDED, OUTER)
ANY: Final = (PLAIN, PADDED, OUTER, PERMUTED)

LOPSIDED: Final[Any] = {"low": -0.2, "high": 1.0}
"""Values whose products do not cancel: ggml rounds activations to the type that goes with the weight's."""

F32, F16, BF16, I32, I64 = DType.F32, DType.F16, DType.BF16, DType.I32, DType.I64
FLOATS: Final = (F32, F16, BF16)

Extents = tuple[int, ...]


def tolerance(*dtypes: DType) -> float:
    """What rounding to a short type may cost."""
    if BF16 in dtypes:
        return 1e-4
    return 1e-6 if F16 in dtypes else 1e-7


def window(p: Program, dtype: DType) -> tuple[str, str, tuple[int, ...], int]:
    """A tensor, one that fits in it, the strides of the window and its offset."""
    size = dtype.type_size
    small = p.ne(20, 4, 3, 2)
    more = [p.int(0, 4), p.int(0, 2), p.int(0, 2), p.int(0, 1)]
    start = [p.int(0, m) for m in more]
    large = tuple(n + m for n, m in zip(small, more, strict=True))
    nb = (size, size * large[0], size * large[0] * large[1], size * large[0] * large[1] * large[2])
    offset = sum(s * b for s, b in zip(start, nb, strict=True))
    return p.leaf(dtype, large), p.operand(dtype, small, *ROWS), nb[1:], offset


POSITIVE: Any = {"low": 0.1, "high": 1.0}
"""Values of which no result can cancel, however few it is the sum of."""


def conv_values(kernel: DType) -> Any:
    """Values for a convolution: ggml rounds the data to the kernel's type."""
    return LOPSIDED if kernel is F32 else POSITIVE


def geometry(p: Program, rank: int) -> tuple[Extents, Extents, Extents, Extents, Extents]:
    """Extents of data and kernel, strides, paddings and dilations, so that the kernel has a place."""
    kernel = tuple(p.int(1, 4) for _ in range(rank))
    dilation = tuple(p.extra(1, 2) for _ in range(rank))
    padding = tuple(p.extra(0, 2) for _ in range(rank))
    stride = tuple(p.extra(1, 3) for _ in range(rank))
    least = [max(1, (k - 1) * d + 1 - 2 * q) for k, d, q in zip(kernel, dilation, padding, strict=True)]
    data = tuple(n + p.int(0, 9) for n in least)
    return data, kernel, stride, padding, dilation


def window_places(n: Extents, k: Extents, s: Extents, q: Extents, d: Extents) -> Extents:
    """Extents of the result of a window that moves over data."""
    return tuple((n + 2 * q - d * (k - 1) - 1) // s + 1 for n, k, s, q, d in zip(n, k, s, q, d, strict=True))


NO_WEIGHTS = (DType.Q8_1, DType.Q8_K, DType.Q2_0)
"""ggml quantises activations to the first two; the last is newer than the ggml of ggml-python."""

WEIGHTS = tuple(t for t in DType if t.is_quantized and dtypes.can_quantize(t) and t not in NO_WEIGHTS)
"""Quantised types whose blocks can be made here, and which ggml multiplies."""

READ_ONLY = tuple(t for t in DType if t.is_quantized and not dtypes.can_quantize(t))
"""Quantised types whose blocks are made elsewhere, with the help of a model's statistics."""


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
    """A leaf for timings: rows as long as a layer is wide."""
    return c.new_tensor(dtype, (1024 * scale, n))


def no_such_node(dtype: DType) -> Tensor:
    """Raise what an op raises that takes no main operand of the type."""
    raise DTypeError(f"there is no such node of type {dtype.name}")
