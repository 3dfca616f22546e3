"""What all op families share: making nodes and views, and checking arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ggmlb.enums import Op
from ggmlb.errors import ArgumentError, DTypeError, ShapeError
from ggmlb.tensor import Ne, Tensor, can_repeat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ggmlb.dtypes import DType


class OpBase:
    """Makes the tensors of a context; the op families build on these few methods.

    Attributes:
        tensors: All tensors made here, in order (ggml_get_first_tensor, ggml_get_next_tensor).
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def _op(
        self,
        op: Op,
        dtype: DType,
        ne: Ne,
        src: tuple[Tensor | None, ...],
        params: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Return a new contiguous node."""
        tensor = Tensor(dtype, ne, op=op, src=src, params=params)
        self.tensors.append(tensor)
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

    def _view(
        self,
        a: Tensor,
        ne: Ne,
        nb: Ne,
        offset: int,
        op: Op = Op.VIEW,
        src: tuple[Tensor | None, ...] | None = None,
        params: Mapping[str, Any] | None = None,
        suffix: str = "view",
    ) -> Tensor:
        """Return a tensor over the memory of `a`, `offset` bytes into it."""
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
        self.tensors.append(tensor)
        return tensor


def fail_shape(fn: str, why: str, *tensors: Tensor) -> NoReturn:
    """Raise a ShapeError that names the function, its operands and what would be right."""
    raise ShapeError(f"{fn}({', '.join(t.describe() for t in tensors)}): {why}")


def require_shape(ok: bool, fn: str, why: str, *tensors: Tensor) -> None:
    """Raise a ShapeError unless `ok`. Build `why` outside only where it is cheap."""
    if not ok:
        fail_shape(fn, why, *tensors)


def require_type(fn: str, arg: str, tensor: Tensor, *allowed: DType) -> None:
    """Raise a DTypeError unless the tensor has one of the types."""
    if tensor.dtype not in allowed:
        names = " or ".join(d.name.lower() for d in allowed)
        raise DTypeError(f"{fn}: {arg} is {tensor.describe()}; it must be {names}")


def require_arg(ok: bool, fn: str, why: str) -> None:
    """Raise an ArgumentError unless `ok`."""
    if not ok:
        raise ArgumentError(f"{fn}: {why}")


def require_repeat(fn: str, a: Tensor, b: Tensor) -> None:
    """Raise a ShapeError unless `b` tiles `a` (ggml's broadcasting: b's extents divide a's)."""
    if not can_repeat(b, a):
        fail_shape(fn, f"every extent of b, ne {list(b.ne)}, must divide that of a, ne {list(a.ne)}", a, b)


def require_contiguous(fn: str, arg: str, tensor: Tensor, from_dim: int = 0) -> None:
    """Raise a ShapeError unless the tensor is contiguous (see `Tensor.is_contiguous`)."""
    if not tensor.is_contiguous(from_dim):
        fail_shape(fn, f"{arg} has strides nb {list(tensor.nb)}; make it contiguous with cont", tensor)


def full_ne(ne: tuple[int, ...] | list[int], fn: str) -> Ne:
    """Return four extents, ones appended.

    Raises:
        ShapeError: There are none, more than four, or a negative one.
    """
    extents = tuple(int(n) for n in ne)
    if not 1 <= len(extents) <= 4 or min(extents) < 0:
        raise ShapeError(f"{fn}: ne is {list(ne)}; give one to four extents, none negative, innermost first")
    a, b, c, d = (*extents, 1, 1, 1)[:4]
    return (a, b, c, d)
