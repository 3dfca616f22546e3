"""Base of the op families: creation of nodes and views, and argument errors.

A model builds thousands of nodes, so a check that passes must be cheap: callers test first and call a
`fail_*` function, which builds the message, only where the test fails.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any, Concatenate, Final, NoReturn, ParamSpec, TypeVar
from weakref import ref

from ggmlb.core import arguments
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.errors import ArgumentError, DTypeError, ShapeError
from ggmlb.core.tensor import Ne, Tensor, can_repeat

F = TypeVar("F", bound=Callable[..., Tensor])
S = TypeVar("S", bound="OpBase")
R = TypeVar("R")
P = ParamSpec("P")

F32_MAX: Final = 3.4028234663852886e38
"""The largest number of float32."""
F32_TINY: Final = 1.1754943508222875e-38
"""The smallest normal number of float32."""


class OpBase:
    """Creates the tensors of a context; base class of the op families.

    Attributes:
        tensors: All tensors made here, in order (ggml_get_first_tensor, ggml_get_next_tensor).
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._self: ref[Any] = ref(self)  # weak, since a reference cycle would free memory late

    def __init_subclass__(cls) -> None:
        """Check the arguments of every op of a family, as methods of `Context`."""
        super().__init_subclass__()
        for name, op in vars(cls).items():
            if inspect.isfunction(op) and not name.startswith("_"):
                op.__qualname__ = f"Context.{name}"
                op.__module__ = cls.__module__  # also for generated methods
        arguments.checked_methods(cls)

    def _op(
        self,
        op: Op,
        dtype: DType,
        ne: Ne,
        src: tuple[Tensor | None, ...],
        params: Mapping[str, Any] | None = None,
        name: str = "",
        nb: Ne | None = None,
    ) -> Tensor:
        """Return a new node, contiguous unless strides are given.

        Raises:
            ArgumentError: A parameter is beyond float32, in which ggml keeps them.
        """
        for key, value in (params or {}).items():
            if type(value) is float and F32_MAX < abs(value) < math.inf:
                raise ArgumentError(f"{op.name.lower()}: {key} is {value}; give one in the range of float32")
        tensor = Tensor(dtype, ne, nb, op=op, src=src, params=params, name=name)
        return self._take(tensor)

    def _take(self, tensor: Tensor) -> Tensor:
        """Add a tensor to the context; return it."""
        self.tensors.append(tensor)
        tensor.maker = self._self
        return tensor

    def _op_into(
        self,
        op: Op,
        dst: Tensor,
        src: tuple[Tensor | None, ...],
        params: Mapping[str, Any] | None = None,
        suffix: str = "view",
    ) -> Tensor:
        """Return a node that writes into the memory of `dst`: in-place ops, `cpy`, `set_rows`."""
        return self._view(dst, dst.ne, dst.nb, 0, op, src, params, suffix)

    def _like(
        self,
        inplace: bool,
        op: Op,
        a: Tensor,
        src: tuple[Tensor | None, ...],
        params: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Return a node with the type and shape of `a`, in the memory of `a` if `inplace`."""
        if inplace:
            return self._view(a, a.ne, a.nb, 0, op, src, params)
        return self._op(op, a.dtype, a.ne, src, params)

    def _view(
        self,
        a: Tensor,
        ne: Ne,
        nb: Ne | None,
        offset: int,
        op: Op = Op.VIEW,
        src: tuple[Tensor | None, ...] | None = None,
        params: Mapping[str, Any] | None = None,
        suffix: str = "view",
    ) -> Tensor:
        """Return a tensor over the memory of `a`, `offset` bytes into it; contiguous if `nb` is None."""
        tensor = Tensor(
            a.dtype,
            ne,
            nb,
            op=op,
            src=(a,) if src is None else src,
            params=params,
            view_src=a,
            view_offs=offset,
            name=f"{a.name} ({suffix})" if a.name else "",
        )
        return self._take(tensor)


def checked(
    check: Callable[Concatenate[str, P], R], make: Callable[[S, R], Tensor], name: str, doc: str
) -> Callable[Concatenate[S, P], Tensor]:
    """Return a method `name` with docstring `doc` that returns `make(self, check(name, *arguments))`.

    For methods that differ only in their node. `check` receives the method's name, for its errors.
    """

    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        return make(self, check(name, *args, **kwargs))

    signature = inspect.signature(check)
    first, *others = signature.parameters.values()
    this = first.replace(name="self", annotation=first.empty)
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[this, *others], return_annotation="Tensor"
    )
    return method(call, name, doc)


def method(fn: F, name: str, doc: str) -> F:
    """Set the name and docstring of a generated method, for help and tracebacks."""
    fn.__name__ = name
    fn.__doc__ = f"{doc} (ggml_{name})."
    return fn


def fail_shape(fn: str, why: str, *tensors: Tensor) -> NoReturn:
    """Raise a ShapeError that names the function `fn`, its operands, and `why` they do not fit."""
    raise ShapeError(f"{fn}({', '.join(t.describe() for t in tensors)}): {why}")


def fail_dtype(fn: str, arg: str, tensor: Tensor, *allowed: DType) -> NoReturn:
    """Raise a DTypeError that names the operand `arg` of function `fn` and the types it may have."""
    names = " or ".join(d.name.lower() for d in allowed)
    raise DTypeError(f"{fn}: {arg} is {tensor.describe()}; it must be {names}")


def fail_arg(fn: str, why: str) -> NoReturn:
    """Raise an ArgumentError that names the function `fn` and says `why`."""
    raise ArgumentError(f"{fn}: {why}")


def fail_contiguous(fn: str, arg: str, tensor: Tensor, what: str = "contiguous") -> NoReturn:
    """Raise a ShapeError that says that the strides of operand `arg` must be `what`, such as contiguous."""
    fail_shape(fn, f"{arg} has strides nb {list(tensor.nb)}; it must be {what}: apply cont first", tensor)


def divides(a: int, b: int) -> bool:
    """Whether an extent `a` divides `b`; 0 divides none."""
    return a > 0 and b % a == 0


def require_repeat(fn: str, a: Tensor, b: Tensor) -> None:
    """Raise a ShapeError unless `b` tiles `a` (ggml's broadcasting: b's extents divide a's)."""
    if a.ne != b.ne and not can_repeat(b, a):
        fail_shape(fn, f"every extent of b, ne {list(b.ne)}, must divide that of a, ne {list(a.ne)}", a, b)


def require_same_shape(fn: str, a: Tensor, b: Tensor) -> None:
    """Raise a ShapeError unless both have the same extents."""
    if a.ne != b.ne:
        fail_shape(fn, f"ne {list(b.ne)} must equal ne {list(a.ne)}", a, b)


def require_type(fn: str, arg: str, tensor: Tensor, *allowed: DType) -> None:
    """Raise a DTypeError about operand `arg` of function `fn` unless the tensor has one of the types."""
    if tensor.dtype not in allowed:
        fail_dtype(fn, arg, tensor, *allowed)


def require_contiguous(fn: str, arg: str, tensor: Tensor) -> None:
    """Raise a ShapeError about operand `arg` of function `fn` unless the tensor is contiguous."""
    if not tensor.is_contiguous():
        fail_contiguous(fn, arg, tensor)


def require_int32(fn: str, **numbers: float) -> None:
    """Raise an ArgumentError unless each number fits in 32 bits, as ggml's parameters must."""
    for name, n in numbers.items():
        if not -(1 << 31) <= n < 1 << 31:
            fail_arg(fn, f"{name} is {n}; give a number of 32 bits")


def require_finite(fn: str, least: float = -F32_MAX, **numbers: float) -> None:
    """Raise an ArgumentError unless each number is finite as float32 and at least `least`."""
    for name, n in numbers.items():
        if not least <= n <= F32_MAX:
            why = "a finite float32 number" if least < 0 else f"a finite number, {least:g} or more"
            fail_arg(fn, f"{name} is {n}; give {why}")


def full_ne(ne: Sequence[int] | int, fn: str) -> Ne:
    """Return the extents `ne` padded with ones to four; errors name the function `fn`.

    Raises:
        ShapeError: There are none, more than four, or a negative one.
    """
    try:
        extents = tuple(map(index, (ne,) if isinstance(ne, int) else ne))
    except TypeError:
        extents = ()
    if not 1 <= len(extents) <= 4 or min(extents) < 0:
        raise ShapeError(
            f"{fn}: ne is {ne}; give one to four extents, whole numbers, none negative, innermost first"
        )
    a, b, c, d = (*extents, 1, 1, 1)[:4]
    return (a, b, c, d)
