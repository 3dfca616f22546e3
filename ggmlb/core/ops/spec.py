"""OpSpec, the properties of an op besides its shape rule; gradient rules shared by several ops.

The allocator, the meta device (several devices as one) and the backward pass read these properties. Backends
have the rules that compute an op; `ggmlb.testing.ops` has its test cases and timings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ggmlb.core.enums import Op
from ggmlb.core.sharding import ShardRule
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.core.context import Context

Backward = Callable[["Context", Tensor, Tensor], "Tensor | None"]
"""Returns the gradient of an operand, given a node and its gradient, both f32 and contiguous.

`None`: the gradient is zero, as of an index or a rounded value.
"""


@dataclass(frozen=True, slots=True)
class OpSpec:
    """Parameters, in-place operands, gradient and sharding rules of an op.

    Attributes:
        op: The op.
        params: Names in `Tensor.params`.
        inplace: How many of the first operands may share their memory with the result; kernels must then
            work in place. The ops are those of ggml_op_can_inplace. ggml allows any operand of the same
            layout; here only those read element by element or row by row: not a mask, a bias or a table.
        also_written: Indices of operands that it writes besides its result.
        backward: Rule for the gradient of each operand, by its place in `src`; where there is none, training
            through that operand is an error. Integers need none.
        shard: Rule that gives the sharding of the result from that of the operands.
        linear: Sets of operands (indices) in which the op is linear while the others are constant: applied to
            the partial sums of devices, it gives partial sums of its result.
    """

    op: Op
    params: tuple[str, ...] = ()
    inplace: int = 0
    also_written: tuple[int, ...] = ()
    backward: Mapping[int, Backward] = field(default_factory=dict)
    shard: ShardRule | None = None
    linear: tuple[tuple[int, ...], ...] = ()


# -- gradients ---


def flat(c: Context, t: Tensor) -> Tensor:
    """Return `t` if it is contiguous, else a node of the context `c` that copies it."""
    return t if t.is_contiguous() else c.cont(t)


def pass_gradient(c: Context, node: Tensor, grad: Tensor) -> Tensor:
    """Backward rule of an op with derivative 1; returns the node's gradient, in the shape of operand 0."""
    a = node.operand(0)
    return grad if grad.ne == a.ne else c.reshape(grad, a)


def zero_gradient(c: Context, node: Tensor, grad: Tensor) -> None:
    """Backward rule of an operand with zero gradient, such as an index or a rounded value."""


def summed(c: Context, grad: Tensor, to: Tensor) -> Tensor:
    """Return the gradient of `to`, an operand broadcast to the shape of `grad`, by adding over repeats."""
    return grad if grad.ne == to.ne else c.repeat_back(grad, to)


def copy_window(c: Context, grad: Tensor, like: Tensor, offset: int, nb: tuple[int, int, int]) -> Tensor:
    """Return a contiguous copy of `grad` from byte `offset` on, of the ne of `like`, byte strides `nb`."""
    return c.cont(c.view_4d(grad, *like.ne, *nb, offset))
