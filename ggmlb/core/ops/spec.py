"""OpSpec, the record of an op besides its shape rule, and helpers to draw its test cases.

The allocator, the meta device, the conformance kit, `ggmlb ops` and the benchmarks read these records. The
backends hold the rules that compute an op.
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
"""Builds a small node whose main operand has the given type.

Users choose the type of the main operand: the weight of a product, the tensor that is copied or looked up,
the KV cache of attention. The others have the types usual in models.
"""

Backward = Callable[["Context", Tensor, Tensor], "Tensor | None"]
"""Returns the gradient of an operand, given a node and its gradient, both f32 and contiguous.

`None`: the node does not change with the operand, or only in steps.
"""

Family = Callable[["Program"], None]
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


@dataclass(frozen=True, slots=True)
class OpSpec:
    """The record of an op.

    Attributes:
        op: The op.
        params: Names in `Tensor.params`.
        inplace: How many of the first operands may share their memory with the result; kernels must then
            work in place. The ops are those of ggml_op_can_inplace. ggml allows any operand of the same
            layout; here only those read element by element or row by row: not a mask, a bias or a table.
        also_written: Indices of operands that it writes besides its result.
        backward: Rule for the gradient of each operand, by its place in `src`; where there is none, training
            through that operand is an error. Gradients are not asked of integers.
        shard: Rule that gives the sharding of the result from that of the operands.
        samples: A small node for each type of its main operand, by the name that `ggmlb ops` shows.
        cases: Functions that draw programs of it, by the name of the family.
        of_ggml: Whether ggml can compute the cases; false for Python functions.
        perf: Timed cases.
    """

    op: Op
    params: tuple[str, ...] = ()
    inplace: int = 0
    also_written: tuple[int, ...] = ()
    backward: Mapping[int, Backward] = field(default_factory=dict)
    shard: ShardRule | None = None
    samples: Mapping[str, Sample] = field(default_factory=dict)
    cases: Mapping[str, Family] = field(default_factory=dict)
    of_ggml: bool = True
    perf: tuple[Perf, ...] = ()


# -- layouts and values ---


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

ROWS: Final = (PLAIN, PADDED, OUTER)
ANY: Final = (PLAIN, PADDED, OUTER, PERMUTED)

LOPSIDED: Final[Any] = {"low": -0.2, "high": 1.0}
"""Values whose products do not cancel, because ggml rounds activations to a short type."""

F32, F16, BF16, I32, I64 = DType.F32, DType.F16, DType.BF16, DType.I32, DType.I64
FLOATS: Final = (F32, F16, BF16)

Extents = tuple[int, ...]


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


POSITIVE: Any = {"low": 0.1, "high": 1.0}
"""Values whose sums never cancel."""


def conv_values(kernel: DType) -> Any:
    """Values for a convolution, where ggml rounds the data to the kernel's type."""
    return LOPSIDED if kernel is F32 else POSITIVE


def geometry(p: Program, rank: int) -> tuple[Extents, Extents, Extents, Extents, Extents]:
    """Draw extents of data and kernel, strides, paddings and dilations such that the kernel fits."""
    kernel = tuple(p.int(1, 4) for _ in range(rank))
    dilation = tuple(p.extra(1, 2) for _ in range(rank))
    padding = tuple(p.extra(0, 2) for _ in range(rank))
    stride = tuple(p.extra(1, 3) for _ in range(rank))
    least = [max(1, (k - 1) * d + 1 - 2 * q) for k, d, q in zip(kernel, dilation, padding, strict=True)]
    data = tuple(n + p.int(0, 9) for n in least)
    return data, kernel, stride, padding, dilation


def window_places(n: Extents, k: Extents, s: Extents, q: Extents, d: Extents) -> Extents:
    """Return the result's extents of a window sliding over data."""
    return tuple((n + 2 * q - d * (k - 1) - 1) // s + 1 for n, k, s, q, d in zip(n, k, s, q, d, strict=True))


NO_WEIGHTS = (DType.Q8_1, DType.Q8_K, DType.Q2_0)
"""Types without products: ggml quantises activations to the first two; ggml-python lacks the last."""

WEIGHTS = tuple(t for t in DType if t.is_quantized and dtypes.can_quantize(t) and t not in NO_WEIGHTS)
"""Quantised types that `quantize` writes and ggml multiplies."""

READ_ONLY = tuple(t for t in DType if t.is_quantized and not dtypes.can_quantize(t))
"""Quantised types that need an importance matrix to be written."""


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


def no_such_node(dtype: DType) -> Tensor:
    """Raise the error of an op that does not take the type as main operand."""
    raise DTypeError(f"the op takes no main operand of type {dtype.name}")


# -- gradients ---


def flat(c: Context, t: Tensor) -> Tensor:
    """Return `t`, or a contiguous copy."""
    return t if t.is_contiguous() else c.cont(t)


def passed_on(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    """Backward rule: the gradient itself, in the shape of the first operand."""
    a = node.operand(0)
    return grad if grad.ne == a.ne else c.reshape(grad, a)


def unchanged(c: Context, node: Tensor, grad: Tensor) -> None:
    """Backward rule of an operand that the node does not depend on, or only in steps."""


def summed(c: Context, grad: Tensor, to: Tensor) -> Tensor:
    """Return the gradient of an operand that was broadcast to the shape of `grad`."""
    return grad if grad.ne == to.ne else c.repeat_back(grad, to)


def cut_out(c: Context, grad: Tensor, like: Tensor, offset: int, nb: tuple[int, int, int]) -> Tensor:
    """Return a copy of a window of `grad`, of the shape of `like`, with strides in bytes."""
    return c.cont(c.view_4d(grad, *like.ne, *nb, offset))
